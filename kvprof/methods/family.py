"""The contract of a method: from what is known of a model to plans that one knob turns.

A method is one function ``method(inputs, *, option=default, …) -> PlanFamily``. Its keyword-only
arguments are its options, and their annotations what each takes (`kvprof.methods.option_types`);
the registry refuses any other. A package of one's own registers such a
function under the entry-point group ``kvprof.methods``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvprof.analysis.moments import LossMoments, Moments
from kvprof.analysis.rank_allocation import RankTarget
from kvprof.errors import FailedError, UsageError
from kvprof.methods.accounting import rate
from kvprof.methods.plan import Plan
from kvprof.models.layout import ModelLayout
from kvprof.sizes import check_rate
from kvprof.tensor_files import other_model

__all__ = [
    "CalibrationNeeds",
    "HeadWeights",
    "MethodInputs",
    "PlanFamily",
    "by_head",
    "check_reached",
    "grid_words",
    "plan_at",
    "plan_for_rate",
]

#: ``{"keys": [layer][head], "values": [layer][head]}``: one figure per KV head or per group.
HeadWeights = Mapping[str, Sequence[Sequence[float]]]

# Halvings of the knob: to 1e-8, finer than what one rank is worth.
_HALVINGS = 27
# A rate as tables print it, in three digits, is the rate.
_AS_WRITTEN = 5e-4


@dataclass(frozen=True)
class CalibrationNeeds:
    """What has to be collected before a method can be planned.

    Attributes
    ----------
    source : str
        What it is calibrated on unless the user says otherwise; the grammar of ``--calibrate``.
    pre_rope : bool
        Moments of K before RoPE.
    joint_heads : int or None
        Joint moments over groups of this many KV heads (`kvprof.analysis.moments`).
    tokens : int or None
        How many unless the user says; fewer where a text is shorter. None is kvprof's default.
    fisher_tokens : int or None
        The same of Fisher information, where it is taken.
    magnitudes : bool
        How large the values of K and V are, counted.
    outputs : bool
        Moments of what each query head puts out.
    across : tuple of (int, int) or None
        Moments of so many layers together, 0 for all, without so many first tokens
        (`kvprof.analysis.moments`).
    sized : bool
        Whether nothing is known of plans without these data, not even bytes (entropy coding).
    shares : bool
        Whether any data will do: unless the user says, those that another method of the same
        command is calibrated on, in the same pass.
    """

    source: str
    pre_rope: bool = False
    joint_heads: int | None = None
    tokens: int | None = None
    fisher_tokens: int | None = None
    magnitudes: bool = False
    outputs: bool = False
    across: tuple[int, int] | None = None
    sized: bool = False
    shares: bool = False


@dataclass(frozen=True, eq=False)
class MethodInputs:
    """What a method may use.

    Attributes
    ----------
    layout : ModelLayout
    fingerprint : str
        Of the model.
    moments : Moments or None
        Of the calibration data; None where there are none (methods without bases need none).
    fisher : HeadWeights or None
        Palu's importance of each head's W_K and W_V.
    sensitivities : HeadWeights or None
        Increase of the next-token KL divergence per unit of predicted error, for ``budget``.
    loss : LossMoments or None
        What errors of stored keys and values cost the next token, for ``kq-wf``'s ``loss``.
    width_costs : mapping or None
        For ``budget``: ``{"keys": {rank: cost}, "values": …}``, for example measured times of a
        kernel at each width of the grid; None counts dimensions.
    made : dict
        JSON values that every plan shall carry: model, calibration.
    skip : frozenset of int
        Layers that are left out whatever a method plans for them (option ``skip``), so that it need
        not hand them anything.
    """

    layout: ModelLayout
    fingerprint: str
    moments: Moments | None = None
    fisher: HeadWeights | None = None
    sensitivities: HeadWeights | None = None
    loss: LossMoments | None = None
    width_costs: Mapping[str, Mapping[int, float]] | None = None
    made: dict[str, Any] = field(default_factory=dict)
    skip: frozenset[int] = frozenset()

    def calibrated(self, method: str) -> Moments:
        """Return the moments.

        Raises
        ------
        UsageError
            When there are none, or they are of another model.
        """
        if self.moments is None:
            raise UsageError(f"{method} needs calibration data; give it with --calibrate")
        shapes = [(x.rest["q"].shape[:2], x.rest["v"].shape[:2]) for x in self.moments.layers]
        own = [
            ((x.num_heads, x.qk_head_dim), (x.num_kv_heads, x.v_head_dim))
            for x in self.layout.layers
        ]
        if other_model(self.moments.fingerprint, self.fingerprint) or shapes != own:
            raise UsageError(
                f"{method}: the moments belong to another model "
                f"({self.moments.fingerprint[:12]}), not to this one ({self.fingerprint[:12]})"
            )
        if not self.moments.complete:
            raise UsageError(f"{method}: the calibration was interrupted; run it again")
        return self.moments


@dataclass(frozen=True, eq=False)
class PlanFamily:
    """The plans of one method, ordered by one knob.

    Attributes
    ----------
    method : str
    knob : str
        What the knob is, for messages and for ``made``.
    build : callable
        From the knob's value to a plan; its rate never falls as the knob grows.
    bounds : tuple of float
        Least and greatest value of the knob.
    settings : tuple of float
        Where the knob has single settings only (bits): all of them, by growing rate.
    at_rate : callable or None
        ``(rate, tokens) -> Plan`` where a combination shares the rate out by a rule of its own
        instead of turning the knob.
    targets : tuple of RankTarget
        What a low-rank method hands ranks out to, with the error that each rank is predicted to
        have; empty for other methods.
    at_ranks : callable or None
        From ranks in the order of `targets` to a plan: how a sensitivity is measured, with one
        target cut and all others whole.
    finish : callable or None
        Applied once to the plan that is chosen; it changes no byte (Hadamard rotation).
    """

    method: str
    knob: str
    build: Callable[[float], Plan]
    bounds: tuple[float, float] = (0.0, 1.0)
    settings: tuple[float, ...] = ()
    at_rate: Callable[[float, int], Plan] | None = None
    finish: Callable[[Plan], Plan] | None = None
    targets: tuple[RankTarget, ...] = ()
    at_ranks: Callable[[Sequence[int]], Plan] | None = None


def by_head(targets: Sequence[RankTarget], figures: Sequence[float]) -> HeadWeights:
    """Return one figure per target as ``{side: [layer][group]}``.

    What was measured for each of a family's targets becomes ``MethodInputs.sensitivities``.

    Parameters
    ----------
    targets : sequence of RankTarget
        Of a family.
    figures : sequence of float
        In their order.
    """
    layers = 1 + max((target.layer for target in targets), default=-1)
    rows: dict[str, list[list[float]]] = {
        side: [[] for _ in range(layers)] for side in ("keys", "values")
    }
    for target, figure in zip(targets, figures, strict=True):
        rows[target.side][target.layer].append(figure)
    return rows


def plan_at(family: PlanFamily, value: float) -> Plan:
    """Return the plan at a value of the method's own knob (``--removal`` and its like).

    Raises
    ------
    UsageError
        When the knob has no such value.
    """
    low, high = family.bounds
    if family.settings and value not in family.settings:
        known = ", ".join(f"{setting:g}" for setting in family.settings)
        raise UsageError(f"{family.method}: {family.knob} {value:g} is not available; use {known}")
    if not family.settings and not low <= value <= high:
        raise UsageError(
            f"{family.method}: {family.knob} {value:g} is not between {low:g} and {high:g}"
        )
    return _finished(family, family.build(value), {family.knob: value})


def plan_for_rate(family: PlanFamily, wanted: float, tokens: int, *, alone: bool = True) -> Plan:
    """Return the plan of least compression whose byte rate is at least the one asked for.

    The rate is the plan's own, everything counted, bits of a quantiser on top too.

    Parameters
    ----------
    family : PlanFamily
    wanted : float
        ``1 - bytes(plan) / bytes(uncompressed)`` at a context of `tokens` tokens; 0 is
        uncompressed, with what a method keeps beside it.
    tokens : int
        Context at which bytes are counted.
    alone : bool
        False among several methods: one with a single setting then stands at its own rate.

    Raises
    ------
    UsageError
        When the method does not reach that rate; the message gives the range it reaches.
    FailedError
        When its rate falls as its knob grows.
    """
    check_rate(wanted)
    if not alone and len(family.settings) == 1:
        return plan_at(family, family.settings[0])
    asked = {"rate_asked": wanted, "context": tokens}
    if family.at_rate is not None:
        plan = family.at_rate(wanted, tokens)  # its parts are finished already
        return replace(plan, method=family.method, made={**plan.made, **asked})
    least = _least_rate(family, wanted, tokens)
    value = (family.settings or family.bounds)[0]
    if wanted > 0 and least < wanted:
        value = _least_knob(family, wanted, tokens)
    return _finished(family, family.build(value), {**asked, family.knob: value})


def check_reached(family: PlanFamily, wanted: float, tokens: int, *, alone: bool = True) -> None:
    """Refuse a rate that `plan_for_rate` would, without looking for the knob that gives it.

    Parameters and errors are those of `plan_for_rate`.
    """
    if family.at_rate is not None:  # only the plan's own parts know
        plan_for_rate(family, wanted, tokens)
        return
    check_rate(wanted)
    if alone or len(family.settings) != 1:
        _least_rate(family, wanted, tokens)


def _least_rate(family: PlanFamily, wanted: float, tokens: int) -> float:
    """Return the rate of a family's least compression; refuse a rate that it does not reach."""
    values = family.settings or family.bounds
    least, most = (rate(family.build(value), tokens) for value in (values[0], values[-1]))
    if most < least - 1e-9:
        raise FailedError(
            f"{family.method}: the rate must rise with {family.knob}, but falls from "
            f"{least:.3f} to {most:.3f}"
        )
    if not least - _AS_WRITTEN <= wanted <= most + _AS_WRITTEN:
        if len(family.settings) == 1:
            raise UsageError(
                f"{family.method} has one rate, {max(0.0, least):.3f} at {tokens:,} tokens, not "
                f"{wanted:g}; leave out --rate"
            )
        raise UsageError(
            f"{family.method} reaches rates from {max(0.0, least):.3f} to {max(0.0, most):.3f} at "
            f"{tokens:,} tokens, not {wanted:g}{grid_words(family)}"
        )
    return least


def grid_words(family: PlanFamily) -> str:
    """Say which ranks there are, where that is what limits the rate.

    Parameters
    ----------
    family : PlanFamily

    Returns
    -------
    str
        Goes on from a sentence about rates; empty for a method without a grid.
    """
    options = family.build((family.settings or family.bounds)[0]).made.get("options", {})
    if "grid" not in options or "minimum" not in options:
        return ""
    return (
        f"; ranks are multiples of {options['grid']} from {options['minimum']} on "
        "(options grid and minimum)"
    )


def _least_knob(family: PlanFamily, wanted: float, tokens: int) -> float:
    """Return the smallest knob that reaches a rate which the largest does reach, as written."""

    def reaches(plan: Plan) -> bool:
        return rate(plan, tokens) >= wanted - 1e-12

    if family.settings:
        return next((x for x in family.settings if reaches(family.build(x))), family.settings[-1])
    low, high = family.bounds
    below = above = None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        plan = family.build(middle)
        # A family may give the plan again that it gave nearby.
        if plan is above or (plan is not below and reaches(plan)):
            high, above = middle, plan
        else:
            low, below = middle, plan
    return high


def _finished(family: PlanFamily, plan: Plan, how: dict[str, Any]) -> Plan:
    plan = replace(plan, method=family.method, made={**plan.made, **how})
    return family.finish(plan) if family.finish is not None else plan
