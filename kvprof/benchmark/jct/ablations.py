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

from kvprof.benchmark.methods import Method, parse_method
from kvprof.benchmark.plans import low_rank_plan, make_methods, method_widths, stored_plan
from kvprof.benchmark.ranks import Widths
from kvprof.benchmark.shapes import Shape
from kvprof.errors import UsageError
from kvprof.methods.plan import Plan

__all__ = ["ABLATIONS", "Variant", "make_variants", "parse_variant"]

#: What ``fdc`` may do without.
ABLATIONS = ("no-post-rope", "no-adaptive-rates", "no-balancing")


@dataclass(frozen=True)
class Variant:
    """A method as a composed run measures it.

    Attributes
    ----------
    name : str
        As written.
    method : Method
        Whose widths it has.
    without : tuple of str
        Of `ABLATIONS`.
    strawman : bool
    """

    name: str
    method: Method
    without: tuple[str, ...] = ()
    strawman: bool = False

    @property
    def family(self) -> str:
        """How it is stored: full, segments, ragged, latents (Palu, before RoPE) or strawman."""
        if self.strawman:
            return "strawman"
        if "no-post-rope" in self.without:
            return "latents"
        return self.method.family

    @property
    def own(self) -> bool:
        """Whether it is of composed runs only, and no method that ``bench`` times."""
        return self.strawman or bool(self.without)

    @property
    def balanced(self) -> bool:
        """Whether the work is cut by cost."""
        return "no-balancing" not in self.without

    def family_for(self, shape: Shape) -> str:
        """Return `family` for a shape: without RoPE nothing is rebuilt (Palu eq. 7)."""
        if self.family == "latents" and shape.rope.kind == "none":
            return "ragged"
        return self.family

    def folded_for(self, shape: Shape) -> bool:
        """Whether projections make latents themselves: no RoPE stands between (Palu eq. 7)."""
        return shape.rope.kind == "none" or self.method.folded

    def widths(self, shape: Shape, rate: float, ranks: str | None = None) -> Widths | None:
        """Return the widths of its stored heads; None for FP8 and full width.

        Raises
        ------
        UsageError
            For a rate out of reach, or ranks of another shape.
        """
        method = self.method
        if "no-adaptive-rates" in self.without:
            method = replace(method, kind="uniform")
            ranks = None
        return method_widths(method, shape, rate, ranks)

    def plan(self, shape: Shape, widths: Widths | None) -> Plan:
        """Return the plan that it is on a shape, whose bytes are counted.

        Parameters
        ----------
        shape : Shape
        widths : Widths or None
            From `widths`.
        """
        if widths is not None and (self.strawman or "no-post-rope" in self.without):
            return low_rank_plan(
                self.name, shape, widths, pre_rope=not self.strawman, online=self.strawman
            )
        return stored_plan(self.method, shape, widths)

    def refuse_on(self, kind: str) -> None:
        """Refuse what would change nothing on a device.

        Raises
        ------
        UsageError
        """
        if not self.balanced and kind == "cpu":
            raise UsageError(
                f"{self.name} changes nothing on a CPU, whose threads share work in another way; "
                "measure it on a GPU"
            )


def parse_variant(text: str) -> Variant:
    """Read a method's name: those of ``bench``, ``strawman``, ``fdc:no-post-rope`` and its like.

    Raises
    ------
    UsageError
        For a name or an option that there is not, and for options that exclude each other.
    """
    if text == "strawman":
        return Variant(text, parse_method("uniform"), strawman=True)
    name, *options = text.split(":")
    without = tuple(option for option in options if option.startswith("no-"))
    if not without:
        if name == "fdc" and any(f"no-{option}" in ABLATIONS for option in options):
            raise UsageError(f"{text}: fdc without a part of it is fdc:{', fdc:'.join(ABLATIONS)}")
        return Variant(text, parse_method(text))
    unknown = [option for option in options if option not in ABLATIONS]
    if unknown or name != "fdc":
        raise UsageError(
            f"{text}: fdc alone can be measured without a part of it, as "
            f"fdc:{', fdc:'.join(ABLATIONS)}"
        )
    without = tuple(dict.fromkeys(without))
    if {"no-post-rope", "no-balancing"} <= set(without):
        raise UsageError(
            f"{text}: a kernel that rebuilds keys cuts its work in one way only; measure "
            "no-post-rope and no-balancing apart"
        )
    return Variant(text, parse_method("fdc"), without)


def make_variants(
    names: Sequence[str],
    shape: Shape,
    *,
    device: torch.device,
    plans: Mapping[str, str],
    **given: Any,
) -> list[tuple[Variant, Widths | None]]:
    """Return every method of a composed run with its widths on a shape, each once.

    Parameters
    ----------
    names : sequence of str
        See `parse_variant`, or of `plans`.
    shape, device, plans, **given
        As `kvprof.benchmark.plans.make_methods` takes them.

    Raises
    ------
    UsageError
        As `kvprof.benchmark.plans.make_methods`, and for what changes nothing on the device.
    CalibrationInterrupted
    """
    names = list(dict.fromkeys(names))
    ablated = {}
    for name in names:
        if name not in plans and (variant := parse_variant(name)).own:
            variant.refuse_on(device.type)
            ablated[name] = variant, variant.widths(shape, given["rate"], given["ranks"])
    others = [name for name in names if name not in ablated]
    made = make_methods(others, shape, device=device, plans=plans, **given)
    found = ablated | {
        name: (Variant(name, one[0]), one[1]) for name, one in zip(others, made, strict=True)
    }
    return [found[name] for name in names]
