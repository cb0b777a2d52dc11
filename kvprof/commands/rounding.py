"""A plan beside what was requested before its ranks were rounded up to the grid."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvprof import console
from kvprof.commands.planning import (
    calibration_interrupts,
    calibration_options,
    check_calibration,
    plan_of,
)
from kvprof.interrupt import Stop

if TYPE_CHECKING:
    from kvprof.calibration.calibrator import Calibrator
    from kvprof.methods.family import PlanFamily
    from kvprof.methods.plan import Plan
    from kvprof.models.load import LoadedModel

__all__ = ["RoundedPlan", "rounded_plan"]

# Fisher and budget hand out steps of the grid; the others ask for a rank and round it up.
_ROUNDED_UP = ("removal", "uniform", "tail")


@dataclass(frozen=True)
class RoundedPlan:
    """A plan and its request.

    Attributes
    ----------
    plan : Plan
    fine : Plan or None
        The same setting with ranks of any size; None where nothing was rounded up.
    knob : str or None
        What the setting is called.
    """

    plan: "Plan"
    fine: "Plan | None"
    knob: str | None


def rounded_plan(
    loaded: "LoadedModel",
    *,
    method: str,
    rate: float | None,
    removal: float | None,
    calibrate: str | None,
    calibrate_tokens: str | None,
    options: dict[str, Any],
    context: int,
    stop: Stop,
) -> RoundedPlan:
    """Make a plan, and once more without a grid from the same calibration.

    Parameters and errors are those of `kvprof.commands.planning.make_plan`.
    """
    check_calibration(
        method, options, calibrated=bool(calibrate or calibrate_tokens),
        rated=rate is not None or removal is not None,
    )  # fmt: skip
    from kvprof.calibration.calibrator import Calibrator

    given = calibration_options(calibrate, calibrate_tokens, seq_len=None)
    calibrator = Calibrator(
        loaded, given, progress=console.track, should_stop=stop, notice=console.warn
    )
    with calibration_interrupts():
        family = calibrator.family(method, **options)
        with console.status(f"planning {method}"):
            plan = plan_of(loaded, family, rate, removal, context)
            fine = _fine(calibrator, family, plan, options)
    return RoundedPlan(plan, fine, family.knob if fine is not None else None)


def _fine(
    calibrator: "Calibrator", family: "PlanFamily", plan: "Plan", options: dict[str, Any]
) -> "Plan | None":
    """Return the plan with the ranks that its knob asks for, or None where it asks for none."""
    made, value = plan.made.get("options", {}), plan.made.get(family.knob)
    if made.get("allocation") not in _ROUNDED_UP or value is None:
        return None
    if made["grid"] == 1 and made["minimum"] == 1:
        return plan
    fine = calibrator.family(family.method, **{**options, "grid": 1, "minimum": 1})
    # Only the ranks: what a combination evicts was shared out with the rounded ones.
    return replace(plan, layers=fine.build(value).layers)
