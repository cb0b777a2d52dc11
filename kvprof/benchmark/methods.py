"""The methods that are measured: what their names mean, and what runs each.

Names are those of ``kvprof plan``, and a few of the benchmark's own (`kvprof.benchmark.plans`).
"""

from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

from kvprof.benchmark.ranks import measured_layer
from kvprof.errors import UsageError
from kvprof.methods.named import (
    ENTRY_POINTS,
    KINDS,
    Modifier,
    method_entries,
    method_names,
    options_in,
    parts_of,
    unknown_method,
)
from kvprof.methods.plan import LayerPlan, Plan
from kvprof.methods.quantisers import QUANTISERS
from kvprof.methods.registry import METHODS, typed_options
from kvprof.runtime.backends.layer import KernelLayer

__all__ = ["KINDS", "LOW_RANK", "PLANNED", "Method", "parse_method"]

#: The kind of every method whose plan is made from a model's weights, or read.
PLANNED = "plan"
#: Kinds whose KV heads have widths of their own.
LOW_RANK = ("fdc", "kq", "uniform")
# What a kind may be told after a colon where no plan is made for it. Values are listed, or
# numbers (nothing listed), as the method's own options declare them.
_OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "fdc": {"kinds": ()},
    "kq": {"kinds": ()},
    "tale": {"bits": ("none", "published")},
    "palu": {"heads": ()},
    "palu-folded": {"heads": ()},
    "fp8": {"scale": ("head", "none")},
}


@dataclass(frozen=True)
class Method:
    """One method as it was asked for.

    Attributes
    ----------
    name : str
        As written, for example ``fdc-4bit`` or ``tale:bits=none``; of a saved plan its file's.
    kind : str
        One of `KINDS`; ``plan`` for every other, whose plan is made from a model's weights or read.
    modifiers : tuple of Modifier
        What comes on top of a kind.
    heads : int
        KV heads that share a latent (Palu); 0 for all of a layer's.
    quantised_levels : bool
        Whether TALE's levels are quantised as published.
    kinds : int
        Distinct pairs of widths that drawn ranks may have (``fdc:kinds=4``); 0 for no limit.
    registered : str
        Name in `kvprof.methods.registry`; empty for what has none there.
    options : tuple of (str, value)
        Of the registered method.
    plan : Plan or None
        Of the kind ``plan``, once it is made.
    storage : class of KernelLayer, or None
        What stores the measured layer of that plan.
    """

    name: str
    kind: str
    modifiers: tuple[Modifier, ...] = ()
    heads: int = 4
    quantised_levels: bool = True
    kinds: int = 0
    registered: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    plan: Plan | None = field(default=None, repr=False)
    storage: type[KernelLayer] | None = field(default=None, repr=False)

    @property
    def family(self) -> str:
        """How it is stored: full, segments, ragged or latents (rebuilt before RoPE)."""
        if self.kind == PLANNED:
            assert self._made
            assert self.storage is not None  # known with the plan
            return self.storage.form
        if self.kind in ("fp8", "tale") or any(one.name in QUANTISERS for one in self.modifiers):
            return "segments"
        if self.kind == "full":
            return "full"
        return "latents" if self.kind == "palu" else "ragged"

    @property
    def cut(self) -> bool:
        """Whether the ragged kernels run it, whose work can be cut in several ways."""
        return self.low_rank and self.family == "ragged"

    @property
    def low_rank(self) -> bool:
        """Whether every KV head has widths of its own."""
        if self.kind != PLANNED:
            return self.kind in LOW_RANK
        layer = self._layer
        return all(group.heads == 1 for group in layer.keys.groups)

    @property
    def folded(self) -> bool:
        """Whether projections make the keys' latents themselves, in spite of RoPE."""
        if self.kind != PLANNED:
            return self.kind == "palu-folded"
        return self.family != "latents" and self._layer.keys.fold_down

    @cached_property
    def _layer(self) -> LayerPlan:
        return measured_layer(self._made)

    @property
    def _made(self) -> Plan:
        if self.plan is None:
            raise UsageError(
                f"{self.name} is made from a model's weights: name a model that has them"
            )
        return self.plan

    def lacks(self, phase: str) -> str | None:
        """Return why a phase has no row of this method; None where it has one."""
        if phase == "decode" or self.family in ("ragged", "full"):
            if phase == "prefill" and self.kind == "palu-folded":
                return "its prefill attends to rebuilt K and V: it is full width's and a product"
            return None
        if self.kind == "tale" or (self.plan is not None and self.plan.lazy):
            return "its prefill attends to exact K and V (lazily compressed): it is full width's"
        if self.family == "latents" or self.kind == "palu-folded":
            return "its prefill attends to rebuilt K and V: it is full width's and a product"
        what = {"fp8": "full width", "full": "full width", PLANNED: "the ranks alone"}.get(
            self.kind
        )
        return (
            "a prefill attends to its own tokens before they are quantised: it is "
            f"{what or self.kind}'s"
        )


def parse_method(text: str) -> Method:
    """Read a method as ``kvprof plan`` does: ``fdc``, ``fdc-4bit``, ``kq:grid=32``, ``palu+kivi``.

    The benchmark's own are ``uniform``, ``palu-folded`` and ``tale:bits=none``.

    Raises
    ------
    UsageError
        For a name or an option that there is not.
    """
    entries = method_entries(text)
    if len(entries) > 1:
        raise UsageError(f"{text!r} names {len(entries)} methods, and one is measured at a time")
    ((_, name, written),) = entries
    installed = [point.name for point in entry_points(group=ENTRY_POINTS)]
    found = parts_of(name, (*KINDS, *METHODS, *installed))
    if found is None:
        raise unknown_method(name, dict.fromkeys((*KINDS, *method_names())))
    kind, modifiers = found
    own = _OPTIONS.get(kind, {})
    given = options_in(written)
    has = ", ".join(f"{key}={'|'.join(values) or 'N'}" for key, values in own.items())
    if kind in KINDS and all(key in own for key in given):
        declared = "palu" if kind == "palu-folded" else kind
        counts = {key: value for key, value in given.items() if not own[key]}
        numbers = typed_options(declared, counts) if counts else {}
        if wrong := [key for key in given if own[key] and given[key] not in own[key]]:
            raise UsageError(f"{text}: {kind} takes {has}, not {wrong[0]}={given[wrong[0]]}")
        return Method(
            text,
            kind,
            tuple(modifiers),
            heads=numbers.get("heads", 4),
            quantised_levels=given.get("bits") != "none" and not modifiers,
            kinds=numbers.get("kinds", 0),
        )
    if kind in KINDS and kind not in METHODS:
        raise UsageError(f"{text}: {kind} " + (f"takes {has}" if has else "has no options"))
    options = typed_options(name, given)
    return Method(text, PLANNED, registered=name, options=tuple(options.items()))
