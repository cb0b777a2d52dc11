"""Methods of a composed run: those of ``bench``, the strawman, and FDC without one of its parts.

FDC §6.6 leaves out one thing at a time; ZACK §6.5's ``/OE`` is the strawman of its §3.2:

- ``fdc:no-post-rope`` (FDC/PRC): the same widths, but K is compressed before RoPE and rebuilt at
  every step, as Palu does.
- ``fdc:no-adaptive-rates`` (FDC/AC): every head has the same width. The paper holds the accuracy
  and lowers the rate; here the rate is the one asked for, because a shape without weights has no
  accuracy: give ``--rate`` the lower one to follow the paper.
- ``fdc:no-balancing`` (FDC/KE): decode cuts every head into as many pieces whatever its width,
  prefill into blocks of as many rows.
- ``strawman`` (ZACK/OE): bases found per request, K and V rebuilt whole at every step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvprof.benchmark.methods import Method, laid_method, make_methods, stored_method
from kvprof.benchmark.shape_plans import Asked, ShapePlan, parse_method, plan_of_widths
from kvprof.benchmark.shapes import Shape, layout_of
from kvprof.errors import UsageError
from kvprof.methods.family import MethodInputs
from kvprof.methods.strawman import strawman

__all__ = ["ABLATIONS", "Variant", "composed_method", "make_variants", "parse_variant"]

#: What ``fdc`` may do without.
ABLATIONS = ("no-post-rope", "no-adaptive-rates", "no-balancing")
_STRAWMAN = "strawman"


@dataclass(frozen=True)
class Variant:
    """A method of a composed run by its name."""

    name: str  # as written
    asked: Asked  # whose widths it has
    without: tuple[str, ...] = ()  # of `ABLATIONS`

    @property
    def own(self) -> bool:
        """Whether it is of composed runs only, and no method that ``bench`` times."""
        return self.name == _STRAWMAN or bool(self.without)

    def refuse_on(self, kind: str) -> None:
        """Refuse what would change nothing on a device."""
        if "no-balancing" in self.without and kind == "cpu":
            raise UsageError(f"{self.name} changes nothing on a CPU; measure it on a GPU")


def parse_variant(text: str) -> Variant:
    """Read a method's name: those of ``bench``, ``strawman``, ``fdc:no-post-rope`` and its like."""
    name, *options = text.split(":")
    without = tuple(option for option in options if option.startswith("no-"))
    if not without:
        if name == "fdc" and any(f"no-{option}" in ABLATIONS for option in options):
            raise UsageError(f"{text}: unknown ablation; use fdc:{', fdc:'.join(ABLATIONS)}")
        return Variant(text, parse_method(text))
    unknown = [option for option in options if option not in ABLATIONS]
    if unknown or name != "fdc":
        raise UsageError(f"{text}: only fdc has ablations: fdc:{', fdc:'.join(ABLATIONS)}")
    without = tuple(dict.fromkeys(without))
    if {"no-post-rope", "no-balancing"} <= set(without):
        raise UsageError(
            f"{text}: cannot combine the two for a kernel that rebuilds keys; measure "
            "no-post-rope and no-balancing separately"
        )
    return Variant(text, parse_method("fdc"), without)


def composed_method(variant: Variant, shape: Shape, rate: float, **given: Any) -> Method:
    """Return a method of a composed run on a shape without weights."""
    if not variant.own:
        return laid_method(variant.asked, shape, rate, **given)
    if "no-adaptive-rates" in variant.without or variant.name == _STRAWMAN:
        method = laid_method(parse_method("uniform"), shape, rate, **given)
    else:
        method = laid_method(variant.asked, shape, rate, **given)
    widths = method.kept
    if variant.name == _STRAWMAN:
        family = strawman(MethodInputs(layout_of(shape), shape.name))
        plan = family.build(1 - widths.keys[0] / shape.head_dim)
        return replace(method, name=variant.name, plan=plan, form=_STRAWMAN)
    if "no-post-rope" in variant.without:
        found = ShapePlan(plan_of_widths("palu", shape, [widths]), widths.source)
        on = {key: given[key] for key in ("device", "dtype") if key in given}
        method = stored_method(variant.name, "palu", found, shape, **on)
    return replace(method, name=variant.name, balanced="no-balancing" not in variant.without)


def make_variants(
    names: Sequence[str],
    shape: Shape,
    *,
    rate: float,
    ranks: str | None,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    plans: Mapping[str, str],
    **given: Any,
) -> list[Method]:
    """Return every method of a composed run on a shape, each once."""
    names = list(dict.fromkeys(names))
    placed: dict[str, Any] = {
        "tokens": tokens,
        "ranks": ranks,
        "device": device,
        "dtype": dtype,
    }
    found = {}
    for name in names:
        if name not in plans and (variant := parse_variant(name)).own:
            variant.refuse_on(device.type)
            found[name] = composed_method(variant, shape, rate, **placed)
    others = [name for name in names if name not in found]
    made = make_methods(others, shape, rate=rate, plans=plans, **placed, **given)
    found |= dict(zip(others, made, strict=True))
    return [found[name] for name in names]
