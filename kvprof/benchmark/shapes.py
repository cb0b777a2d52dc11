"""Attention shapes: those that ship as data, and those of a local ``config.json``. No weights."""

from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from kvprof.errors import FailedError, UsageError
from kvprof.models.gguf import GgufFile, is_gguf
from kvprof.models.layout import LayerLayout, ModelLayout
from kvprof.models.load import blaming, read_config
from kvprof.models.locate import (
    check_config_sizes,
    locate,
    read_json,
    shape_named,
    shipped_shapes,
)
from kvprof.models.noise import quiet
from kvprof.models.probe import inspect_config

__all__ = [
    "Rope",
    "Shape",
    "has_weights",
    "layout_of",
    "load_shape",
    "shape_of_config",
]


@dataclass(frozen=True)
class Rope:
    """How positions turn Q and K."""

    #: `default`, or how it was stretched: `llama3`, `yarn`, `longrope`, `linear`; `none` for a
    #: model without RoPE.
    kind: str
    #: Base of the frequencies; of the layers with full attention, where there are two.
    theta: float | None


@dataclass(frozen=True)
class Shape:
    """What a model's attention looks like to a kernel."""

    name: str  # what it is called, and where its figures come from (a hub id or a folder)
    source: str
    layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    context: int | None  # longest context the model states, in tokens
    scaling: float  # factor of `q · k`
    sliding_window: int | None = None  # in tokens, of the layers that have one
    window_pattern: str = "F"  # repeats over the layers: `W` has the window, `F` full attention
    sinks: bool = False  # learned attention sinks
    softcap: float = 0.0  # cap of the scores; 0 for none
    qk_norm: bool = False
    #: What a result says of the GGUF file that it was read from (`GgufFile.described`).
    gguf: dict[str, str] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        whole = (self.layers, self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)
        if min(whole) < 1 or self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{self.name} has an invalid shape: {self.num_heads} query heads, "
                f"{self.num_kv_heads} KV heads of {self.head_dim} dimensions, {self.layers} layers"
            )
        if set(self.window_pattern) - {"W", "F"} or not self.window_pattern:
            raise UsageError(f"{self.name}: window_pattern {self.window_pattern!r}: use W and F")
        if ("W" in self.window_pattern) != (self.sliding_window is not None):
            raise UsageError(
                f"{self.name}: a sliding window requires a size and at least one layer"
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
            "one layer"
            if self.full_layers == self.layers
            else f"one of the {self.full_layers} layers (of {self.layers}) with full attention"
            if self.full_layers
            else f"one layer, its sliding window {self.sliding_window:,} tokens"
        )
        return {
            **asdict(self),
            "group": self.group,
            "full_layers": self.full_layers,
            "measured": which,
        }


def load_shape(name: str | Path) -> Shape:
    """Return a shape that ships, or read one from a model's folder or its ``config.json``."""
    given = str(name)
    if (found := shape_named(given)) is not None:
        return _from_data(*found)
    path = Path(given).expanduser()
    if given not in ("reference", "smollm2") and not path.exists():
        raise UsageError(
            f"no shape {given!r}; use {', '.join(shipped_shapes())}, or a local folder with a "
            "config.json or a GGUF file"
        )
    return shape_of_config(given)


def has_weights(model: str) -> bool:
    """Whether a name is a model with weights (a folder or a hub id), not a shape."""
    if shape_named(model) is not None:
        return False
    path = Path(model).expanduser()
    folder = path.parent if path.is_file() else path
    if model == "reference" or not path.exists():
        return True
    return is_gguf(model) or any(folder.glob("*.safetensors"))


@cache
def layout_of(shape: Shape) -> ModelLayout:
    """Return a shape as the layout of a model, whose projections are plain and can be folded."""
    turned = shape.rope.kind != "none"
    layers = tuple(
        LayerLayout(
            index=index,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            qk_head_dim=shape.head_dim,
            v_head_dim=shape.head_dim,
            position="rope" if turned else "none",
            rotary_dim=shape.head_dim if turned else 0,
            qk_norm=shape.qk_norm,
            fused_qkv=False,
            sliding_window=shape.sliding_window
            if shape.window_pattern[index % len(shape.window_pattern)] == "W"
            else None,
            softcap=shape.softcap or None,
            sinks=shape.sinks,
            mla=False,
            scaling=shape.scaling,
            output_projection="o_proj",
            value_projection="v_proj",
            rotary_offset=0 if turned else None,
        )
        for index in range(shape.layers)
    )
    return ModelLayout(layers, shape.hidden_size, shape.name)


def _from_data(name: str, entry: dict[str, Any]) -> Shape:
    facts = {one.name: entry[one.name] for one in fields(Shape) if one.name in entry}
    rope = Rope(**facts.pop("rope"))
    scaling = facts.pop("scaling", facts["head_dim"] ** -0.5)
    return Shape(name=name, rope=rope, scaling=float(scaling), **facts)


# --- A shape from a local config: a small random model of its kind is built and looked at.
#
# No weights are read, and no code that a model brings along is run.


def shape_of_config(given: str) -> Shape:
    """Return the shape that a model's folder or its ``config.json`` describes."""
    gguf = locate(given).gguf if is_gguf(given) else None
    path = gguf.path if gguf is not None else _folder(given)
    if gguf is None:
        check_config_sizes(given, read_json(given, path / "config.json"))
    with blaming(f"{given}: {path.name if gguf is not None else 'config.json'} cannot be used"):
        return _described(given, path, gguf)


def decoder_config(shape: Shape) -> Any:
    """Return the config of a shape that was read from one."""
    source = Path(shape.source)
    gguf = locate(shape.source).gguf if shape.gguf is not None else None
    return _decoder_config(shape.name, source, gguf)


def _decoder_config(given: str, path: Path, gguf: GgufFile | None) -> Any:
    folder = path if gguf is None else path.parent
    with quiet():
        return read_config(given, folder, False, gguf).get_text_config(decoder=True)


def _described(given: str, path: Path, gguf: GgufFile | None) -> Shape:
    config = _decoder_config(given, path, gguf)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise UsageError(f"{given}: {type(config).__name__} has no attention heads")
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    layout = _layout(given, config, width)
    first = layout.layers[0]
    if (reason := layout.unstorable) is not None:
        raise UsageError(f"{given} cannot run with a compressed cache: {reason}")
    if any(layer.mla or layer.qk_head_dim != layer.v_head_dim for layer in layout.layers):
        raise UsageError(
            f"{given}: bench has no kernel for multi-head latent attention or K and V of "
            "different widths"
        )
    context = getattr(config, "max_position_embeddings", None)
    pattern, window = _windows(given, config, layout.layers, context)
    return Shape(
        name=_name(given, path, gguf),
        source=str(path),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.qk_head_dim,
        rope=_rope(config, first),
        context=context,
        scaling=first.scaling,
        sliding_window=window,
        window_pattern=pattern,
        sinks=any(layer.sinks for layer in layout.layers),
        softcap=float(first.softcap or 0.0),
        qk_norm=first.qk_norm,
        gguf=gguf.described if gguf is not None else None,
    )


def _name(given: str, path: Path, gguf: GgufFile | None) -> str:
    if gguf is not None:
        return given if given == "smollm2" else path.name
    return given if path != Path(given) else path.resolve().name


def _folder(given: str) -> Path:
    if given == "reference":
        return Path(__file__).parent.parent / "assets" / "reference"
    path = Path(given).expanduser()
    if path.is_file() and path.name == "config.json":
        return path.parent
    if not (path / "config.json").is_file():
        raise UsageError(f"{given} has no config.json; name a model's folder or its config.json")
    return path


def _layout(given: str, config: Any, width: int) -> ModelLayout:
    """Probe a small model; where a narrow hidden state does not fit the kind, keep the model's."""
    problem: Exception | None = None
    for narrow in (True, False):
        try:
            layout = inspect_config(config, width, narrow=narrow)
        except UsageError:
            raise
        except Exception as error:  # of whatever kind: the config is a stranger's
            problem = error
            continue
        if layout.layers[0].qk_head_dim == width:
            return layout
    raise FailedError(
        f"{given}: cannot build a model from its config.json"
        + (f": {' '.join(str(problem).split())}" if problem is not None else "")
    )


def _windows(
    given: str, config: Any, layers: tuple[LayerLayout, ...], context: int | None
) -> tuple[str, int | None]:
    """Return the pattern of windows over all layers, and the window."""
    # A window as long as the context hides nothing.
    found = [
        layer.sliding_window
        if layer.sliding_window and (context is None or layer.sliding_window < context)
        else None
        for layer in layers
    ]
    sizes = {window for window in found if window is not None}
    if len(sizes) > 1:
        raise UsageError(f"{given}: bench does not support several sliding windows")
    if not sizes:
        return "F", None
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        if None in found:
            raise UsageError(f"{given}: config.json does not say which layers have a window")
        return "W", sizes.pop()
    by_kind = dict(zip(kinds[: len(found)], found, strict=True))
    return "".join("F" if by_kind[kind] is None else "W" for kind in kinds), sizes.pop()


def _rope(config: Any, layer: LayerLayout) -> Rope:
    if layer.position not in ("rope", "partial_rope"):
        return Rope("none", None)
    stated = getattr(config, "rope_parameters", None) or {}
    stated = stated.get("full_attention", stated)
    theta = stated.get("rope_theta", getattr(config, "rope_theta", None))
    return Rope(str(stated.get("rope_type", "default")), float(theta) if theta else None)
