"""The plans that methods make on a shape without weights.

What a kernel does follows from widths, bits and levels, not from what bases hold. So a method plans
here as it does anywhere, on moments that are the same for every head
(`kvprof.moments.uncalibrated.stand_in_family`). Those whose ranks are known are given them: ``fdc``
and ``kq`` the recorded ones (`kvprof.benchmark.ranks`), ``zack`` those of ``fdc``, whose rule it
shares, ``palu`` equal ones, ``tale`` its published setting. The benchmark's own are ``uniform``,
which is ``fdc`` with equal widths, and ``palu-folded``, which is ``palu`` on the shape as it were
without RoPE (Palu eq. 7).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from kvprof.analysis.width_clusters import KINDS
from kvprof.benchmark.plans import Widths, layer_words, of_shape
from kvprof.benchmark.ranks import ranks_from, resampled_layers
from kvprof.benchmark.shapes import Rope, Shape, layout_of
from kvprof.errors import UsageError
from kvprof.kernels.planes import STEP, widened
from kvprof.methods.accounting import compression_ratio, paper_rate
from kvprof.methods.family import MethodInputs, PlanFamily, plan_for_rate
from kvprof.methods.named import (
    BENCHED,
    Wrapper,
    installed_points,
    method_entries,
    method_names,
    options_in,
    own_rate,
    parts_of,
    unknown_method,
)
from kvprof.methods.plan import Plan
from kvprof.methods.quantisers import per_token
from kvprof.methods.registry import METHODS, calibration_needs, compose, plan_family, typed_options
from kvprof.methods.tale import PUBLISHED_BITS, PUBLISHED_SHARE
from kvprof.models.layout import ModelLayout
from kvprof.moments.uncalibrated import Laid, stand_in_family

__all__ = [
    "Asked",
    "Bare",
    "ShapePlan",
    "parse_method",
    "plan_of_widths",
    "shape_plan",
]

#: What stands behind the benchmark's own names.
_BEHIND = {"uniform": "fdc", "palu-folded": "palu"}
#: What a latent may be wide at most.
_WIDEST = 512
#: Methods whose ranks are known without calibration, and the options that they may have then; where
#: such an option is not the method's own, the texts that it takes.
_KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "full": {},
    "fp8": {"scale": ()},
    "fdc": {"kinds": ()},
    "zack": {"kinds": ()},
    "kq": {"kinds": ()},
    "uniform": {},
    "palu": {"heads": ()},
    "palu-folded": {"heads": ()},
    "tale": {"bits": ("none", "published")},
}


@dataclass(frozen=True)
class Asked:
    """A method by its name."""

    name: str  # as written, for example `fdc-4bit` or `tale:bits=none`
    base: str  # the method, without what comes on top and without options
    registered: str  # what `kvprof plan` calls it
    wrappers: tuple[Wrapper, ...] = ()  # what comes on top
    options: tuple[tuple[str, Any], ...] = ()
    rate: float | None = None  # its own, whatever is asked of the others

    @property
    def known(self) -> bool:
        """Whether its ranks are known without calibration."""
        return self.base in _KNOWN and all(key in _KNOWN[self.base] for key, _ in self.options)

    @property
    def needs_weights(self) -> bool:
        """Whether it is calibrated on a model where that has weights."""
        given = dict(self.options)
        return not self.known and calibration_needs(self.registered, **given) is not None


@dataclass(frozen=True, eq=False)
class ShapePlan:
    """A plan on a shape, and what is to be said of it."""

    plan: Plan
    source: str = ""  # where its ranks come from
    #: What had to be changed to run them, or makes them another method's.
    warnings: tuple[str, ...] = ()


def parse_method(text: str) -> Asked:
    """Read a method as ``kvprof plan`` does, or one of the benchmark's own."""
    entries = method_entries(text)
    if len(entries) > 1:
        raise UsageError(f"{text!r} names {len(entries)} methods; give one at a time")
    ((_, name, written),) = entries
    installed = installed_points()
    found = parts_of(name, (*BENCHED, *METHODS, *installed))
    if found is None:
        raise unknown_method(name, dict.fromkeys((*BENCHED, *method_names())))
    base, wrappers = found
    registered = _BEHIND.get(base, base) + name.removeprefix(base)
    given = options_in(written)
    rate = own_rate(text, given)
    own = _KNOWN.get(base, {})
    if base in BENCHED and (wrong := [key for key in given if key not in own]):
        has = ", ".join(f"{key}=N" for key in own)
        raise UsageError(f"{text}: {base} " + (f"takes {has}" if has else "has no options"))
    texts = {key: value for key, value in given.items() if own.get(key)}
    if wrong := [key for key, value in texts.items() if value not in own[key]]:
        allowed = "|".join(own[wrong[0]])
        raise UsageError(f"{text}: {base} requires {wrong[0]}={allowed}, not {texts[wrong[0]]}")
    options = typed_options(registered, {key: given[key] for key in given if key not in texts})
    every = tuple({**options, **texts}.items())
    return Asked(text, base, registered, tuple(wrappers), every, rate)


@dataclass(frozen=True)
class Bare:
    """A layout without weights."""

    layout: ModelLayout
    fingerprint: str  # of a model's weights, or a shape's name


def shape_plan(
    asked: Asked,
    shape: Shape,
    rate: float,
    *,
    tokens: int,
    ranks: str | None = None,
    laid: Laid | None = None,
    alone: bool = False,
) -> ShapePlan:
    """Return the plan of a method on a shape without weights."""
    if asked.rate is not None:
        rate, alone = asked.rate, True
    if asked.base == "palu-folded":
        shape = replace(shape, rope=Rope("none", None), qk_norm=False)
    if asked.known:
        return _of_known_ranks(asked, shape, laid, rate, tokens, ranks, alone)
    options = dict(asked.options)
    needs = calibration_needs(asked.registered, **options)
    if needs is not None and needs.sized:
        raise UsageError(
            f"{asked.name} requires calibration, but {shape.name} is a shape without weights; "
            "name a model with weights (--model reference) or a saved plan (--plan FILE)"
        )
    # Layers that are left out need others beside them.
    whole = needs is None or "skip" in options
    bare = Bare(layout_of(shape), shape.name) if whole else _one_layer(shape)
    family = stand_in_family(laid or bare, asked.registered, **options)
    plan = plan_for_rate(family, rate, tokens, alone=alone)
    said = (
        f"{asked.name}: {shape.name} has no weights, so ranks and bits assume the same singular "
        "values in every head"
    )
    return ShapePlan(
        plan if laid is not None else of_shape(plan, shape),
        layer_words(plan, f"the plan of kvprof plan for {asked.name}"),
        (said,) if needs is not None else (),
    )


def plan_of_widths(
    method: str, shape: Shape, widths: Sequence[Widths], laid: Laid | None = None
) -> Plan:
    """Return a low-rank method's plan on a shape with ranks that are given."""
    where = Bare(laid.layout, laid.fingerprint) if laid else _one_layer(shape)
    family = _low_rank(where, method, shape.num_kv_heads // len(widths[0].values))
    assert family.at_ranks is not None  # of low ranks all can be given them
    plan = family.at_ranks(
        [getattr(widths[one.layer], one.side)[one.group] for one in family.targets]
    )
    return plan if laid is not None else of_shape(plan, shape)


def _one_layer(shape: Shape) -> Bare:
    """Return one layer, which stands for all of a shape's."""
    one = replace(shape, layers=1, sliding_window=None, window_pattern="F")
    return Bare(layout_of(one), shape.name)


def _of_known_ranks(
    asked: Asked,
    shape: Shape,
    laid: Laid | None,
    rate: float,
    tokens: int,
    ranks: str | None,
    alone: bool,
) -> ShapePlan:
    """Return the plan of ranks that are known, with what comes on top of them, at a rate."""
    made: dict[float, ShapePlan] = {}

    def build(knob: float) -> Plan:
        made[knob] = _of_ranks(asked, shape, laid, knob, ranks)
        return made[knob].plan

    own = asked.base in ("full", "fp8", "tale") or ranks is not None
    if not own and not asked.wrappers:
        return _of_ranks(asked, shape, laid, rate, ranks)
    settings, most = (rate,) if own else (), 1 - STEP / shape.head_dim
    family = PlanFamily(asked.name, "rate", build, (0.0, most), settings)
    plan = plan_for_rate(family, rate, tokens, alone=alone)
    return replace(made[plan.made["rate"]], plan=replace(plan, method=asked.base))


def _of_ranks(
    asked: Asked, shape: Shape, laid: Laid | None, rate: float, ranks: str | None
) -> ShapePlan:
    """Return the plan whose ranks have a rate, with what comes on top of them."""
    behind, options = _BEHIND.get(asked.base, asked.base), dict(asked.options)
    if behind in ("full", "fp8"):
        layout = laid.layout if laid else layout_of(shape)
        inputs = MethodInputs(layout, laid.fingerprint if laid else shape.name)
        # A scale is in the products that there are: it changes no byte and no launch's size.
        plain = {"scale": "none"} if behind == "fp8" else {}
        family = plan_family(behind, inputs, **plain)
        found = ShapePlan(family.build(family.settings[0]))
    else:
        rule = _RULES[asked.base]
        widths = rule(asked, shape, rate, ranks, len(laid.layout.layers) if laid else 1)
        plan = plan_of_widths(behind, shape, widths, laid)
        if asked.base == "tale" and not asked.wrappers and options.get("bits") != "none":
            plan = replace(plan, quantiser=per_token(PUBLISHED_BITS))
        source = widths[0].source
        if asked.base == "tale":
            source += (
                f"; the paper states {compression_ratio(paper_rate(plan)):.2f}×, without scales, "
                "zero points and sinks"
            )
        found = ShapePlan(plan, source, widths[0].warnings)
    plan = replace(found.plan, method=asked.base)
    if asked.wrappers:
        drawn = PlanFamily(asked.base, "rate", lambda _: plan)
        plan = compose(asked.name, asked.base, asked.wrappers, drawn, {}).build(0.0)
    return replace(found, plan=plan)


@lru_cache(maxsize=4)
def _low_rank(where: Bare, behind: str, shared: int) -> PlanFamily:
    """Return a method's plans, whose ranks are given; `shared` KV heads have a latent together."""
    given = {"heads": shared} if behind == "palu" else {}
    # Whatever has limited the head configs of ranks that are given, no plan has to keep to it.
    return stand_in_family(where, behind, allocation="uniform", kinds=0, **given)


# --- Ranks that are known.


def _recorded(
    asked: Asked, shape: Shape, rate: float, ranks: str | None, layers: int
) -> list[Widths]:
    if ranks is not None:
        return [ranks_from(ranks, shape)] * layers
    kinds = dict(asked.options).get("kinds", KINDS)
    # ZACK's heads lose by the same bases and share one removal rate as FDC's do.
    profile = "fdc" if asked.base == "zack" else asked.base
    return resampled_layers(shape, layers, rate, profile, kinds=kinds)


def _equal(
    _asked: Asked, shape: Shape, rate: float, _ranks: str | None, layers: int
) -> list[Widths]:
    width = min(shape.head_dim, max(STEP, round((1 - rate) * shape.head_dim / STEP) * STEP))
    whole = (width,) * shape.num_kv_heads
    return [Widths(whole, whole, f"uniform width {width}")] * layers


def _latents(
    asked: Asked, shape: Shape, rate: float, _ranks: str | None, layers: int
) -> list[Widths]:
    """Return the latent widths of Palu's groups: the same for all, multiples of 32."""
    heads = dict(asked.options).get("heads", 4) or shape.num_kv_heads
    most = min(heads, _WIDEST // shape.head_dim)
    group = max(size for size in range(1, most + 1) if shape.num_kv_heads % size == 0)
    step = 2 * STEP
    full = group * shape.head_dim
    width = min(full, max(step, round((1 - rate) * full / step) * step))
    count = shape.num_kv_heads // group
    words = f"uniform latents of {width}, one per {group} KV heads"
    warnings: tuple[str, ...] = ()
    if group != heads:
        warnings = (
            f"{asked.name}: {group} instead of {heads} of {shape.num_kv_heads} KV heads share a "
            f"latent (width limit {_WIDEST})",
        )
    return [Widths((width,) * count, (width,) * count, words, warnings)] * layers


def _tale(
    _asked: Asked, shape: Shape, _rate: float, _ranks: str | None, layers: int
) -> list[Widths]:
    """Return the widths of TALE's middle level, which holds nine tenths of the tokens."""
    full = (shape.head_dim,) * shape.num_kv_heads
    middle = tuple(widened(round((1 - PUBLISHED_SHARE) * width)) for width in full)
    source = "TALE's published setting at any requested rate (here its middle level)"
    return [Widths(full, middle, source)] * layers


_RULES: dict[str, Callable[[Asked, Shape, float, str | None, int], list[Widths]]] = {
    "fdc": _recorded,
    "zack": _recorded,
    "kq": _recorded,
    "uniform": _equal,
    "palu": _latents,
    "palu-folded": _latents,
    "tale": _tale,
}
