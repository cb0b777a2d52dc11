"""Attention shapes: those that ship as data, and those of a local ``config.json``. No weights."""

from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from kvprof.errors import UsageError

__all__ = ["DEFAULT_SHAPE", "Rope", "Shape", "load_shape", "shape_names"]

DEFAULT_SHAPE = "Llama-3.1-8B"


@dataclass(frozen=True)
class Rope:
    """How positions turn Q and K.

    Attributes
    ----------
    kind : str
        ``default``, or how it was stretched: ``llama3``, ``yarn``, ``longrope``, ``linear``;
        ``none`` for a model without RoPE.
    theta : float or None
        Base of the frequencies; of the layers with full attention, where there are two.
    """

    kind: str
    theta: float | None


@dataclass(frozen=True)
class Shape:
    """What a model's attention looks like to a kernel.

    Attributes
    ----------
    name, source : str
        What it is called, and where its figures come from (a hub id or a folder).
    layers, hidden_size, num_heads, num_kv_heads, head_dim : int
    rope : Rope
    context : int or None
        Longest context the model states, in tokens.
    scaling : float
        Factor of ``q · k``.
    sliding_window : int or None
        In tokens, of the layers that have one.
    window_pattern : str
        Repeats over the layers: ``W`` has the window, ``F`` full attention.
    sinks : bool
        Learned attention sinks.
    softcap : float
        Cap of the scores; 0 for none.
    qk_norm : bool
    """

    name: str
    source: str
    layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    context: int | None
    scaling: float
    sliding_window: int | None = None
    window_pattern: str = "F"
    sinks: bool = False
    softcap: float = 0.0
    qk_norm: bool = False

    def __post_init__(self) -> None:
        whole = (self.layers, self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)
        if min(whole) < 1 or self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{self.name}: {self.num_heads} query heads and {self.num_kv_heads} KV heads of "
                f"{self.head_dim} dimensions in {self.layers} layers are no attention"
            )
        if set(self.window_pattern) - {"W", "F"} or not self.window_pattern:
            raise UsageError(f"{self.name}: {self.window_pattern!r} is no pattern of W and F")
        if ("W" in self.window_pattern) != (self.sliding_window is not None):
            raise UsageError(
                f"{self.name}: a sliding window needs layers that have it, and they need its size"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head, G."""
        return self.num_heads // self.num_kv_heads

    @property
    def full_layers(self) -> int:
        """Layers whose attention sees the whole context."""
        pattern = self.window_pattern
        return sum(pattern[layer % len(pattern)] == "F" for layer in range(self.layers))

    @property
    def measured_window(self) -> int | None:
        """The window of the layer that is measured: none where any layer has full attention."""
        return None if self.full_layers else self.sliding_window

    def described(self) -> dict[str, Any]:
        """Return the shape as JSON values, with the layer that is measured in words."""
        which = (
            "one layer" if self.full_layers == self.layers
            else f"one of the {self.full_layers} layers (of {self.layers}) with full attention"
            if self.full_layers else f"one layer, its sliding window {self.sliding_window:,} tokens"
        )  # fmt: skip
        return {
            **asdict(self), "group": self.group, "full_layers": self.full_layers,
            "measured": which,
        }  # fmt: skip


@cache
def _shipped() -> dict[str, Any]:
    text = (files("kvprof") / "assets" / "shapes" / "models.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def shape_names() -> list[str]:
    """Return the names of the shapes that ship."""
    return list(_shipped())


def load_shape(name: str | Path) -> Shape:
    """Return a shape that ships, or read one from a model's folder or its ``config.json``.

    Parameters
    ----------
    name : str or Path
        A name of `shape_names` (in any case), ``reference``, a folder with a ``config.json``, or
        that file.

    Raises
    ------
    UsageError
        For an unknown name, and for a config that names no decoder whose attention can be read.
    FailedError
        When a config is damaged.
    """
    given = str(name)
    known = {one.lower(): one for one in shape_names()}
    if (found := known.get(given.lower())) is not None:
        return _from_data(found, _shipped()[found])
    path = Path(given).expanduser()
    if given != "reference" and not path.exists():
        raise UsageError(
            f"no shape {given!r}: name one of {', '.join(shape_names())}, or a local folder with a "
            "config.json"
        )
    from kvprof.benchmark.config_shapes import shape_of_config  # transformers only when needed

    return shape_of_config(given)


def _from_data(name: str, entry: dict[str, Any]) -> Shape:
    facts = dict(entry)
    rope = Rope(**facts.pop("rope"))
    scaling = facts.pop("scaling", facts["head_dim"] ** -0.5)
    return Shape(name=name, rope=rope, scaling=float(scaling), **facts)
