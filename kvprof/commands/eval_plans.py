"""The plans that ``eval`` compares: those asked for, from one calibration, and FP8 beside them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvprof import console
from kvprof.commands.planning import calibration_options, check_choice, plan_of
from kvprof.commands.sample import Sample
from kvprof.errors import ExitCode, UsageError
from kvprof.interrupt import Stop
from kvprof.methods.named import ALWAYS, check_names

if TYPE_CHECKING:
    from kvprof.methods.plan import Plan
    from kvprof.models.load import LoadedModel

__all__ = ["PlanRequest", "check_request", "make_plans", "refuse_blind", "split_methods"]

# Rows of every table; there is nothing to ask of them.


@dataclass(frozen=True)
class PlanRequest:
    """What the command line says about plans.

    Attributes
    ----------
    methods : tuple of str
        Empty with a plan file.
    rate, removal : float or None
    plan_file : Path or None
    calibrate, calibrate_tokens : str or None
    options : dict
        Of every method.
    """

    methods: tuple[str, ...]
    rate: float | None
    removal: float | None
    plan_file: Path | None
    calibrate: str | None
    calibrate_tokens: str | None
    options: dict[str, Any]


def split_methods(given: list[str] | None) -> tuple[str, ...]:
    """Read ``--method kq --method fdc,palu``.

    Raises
    ------
    UsageError
        When one is named twice.
    """
    names = [name.strip() for entry in given or [] for name in entry.split(",") if name.strip()]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--method: {twice[0]} is named twice")
    return tuple(names)


def check_request(request: PlanRequest) -> PlanRequest:
    """Refuse what contradicts itself or would mean nothing, before the model is loaded.

    Returns
    -------
    PlanRequest
        The same with its options as what the methods declare them to be.

    Raises
    ------
    UsageError
        Naming the options.
    """
    check_names(request.methods)
    check_choice(
        request.methods[0] if request.methods else None, request.plan_file, rate=request.rate,
        removal=request.removal, calibrate=request.calibrate,
        calibrate_tokens=request.calibrate_tokens, options=request.options,
    )  # fmt: skip
    if request.plan_file is not None:
        return request
    from kvprof.methods.registry import calibration_needs, typed_options

    rated = [method for method in request.methods if method not in ALWAYS]
    needs = [calibration_needs(method, **request.options) for method in rated]
    if not any(needs) and (request.calibrate or request.calibrate_tokens):
        raise UsageError("nothing is calibrated; leave out --calibrate and --calibrate-tokens")
    if any(needs) and request.rate is None and request.removal is None:
        raise UsageError(f"--method {','.join(rated)} needs --rate or --removal")
    if not rated and (request.rate is not None or request.removal is not None):
        option = "--rate" if request.rate is not None else "--removal"
        raise UsageError(
            f"{' and '.join(request.methods)}: nothing to turn, each has one rate; leave out "
            f"{option}"
        )
    if request.options and not rated:
        raise UsageError(f"{' and '.join(request.methods)} have no options")
    typed = [typed_options(method, request.options) for method in rated]
    return replace(request, options={key: one for own in typed for key, one in own.items()})


def make_plans(
    loaded: "LoadedModel", request: PlanRequest, sample: Sample, stop: Stop
) -> "list[Plan]":
    """Make every plan before anything is evaluated: what cannot be planned is found out first.

    Parameters
    ----------
    loaded : LoadedModel
    request : PlanRequest
    sample : Sample
        Rates are counted at its mean context; calibration takes sequences of its length.
    stop : Stop

    Returns
    -------
    list of Plan
        ``fp8`` first, then those asked for; without ``fp8`` where it has no figures
        (teacher-forced). The uncompressed model needs no plan.

    Raises
    ------
    UsageError
        For a rate out of reach, a plan for another model, one that was calibrated on the text it
        is evaluated on, or one that is to be scored in a single pass, which does not show it.
    typer.Exit
        With 130 when the calibration was interrupted.
    """
    from kvprof.calibration.overlap import check_separate

    single_pass = sample.evaluator.settings.teacher_forced
    if single_pass:
        for method in request.methods:  # before anything is calibrated
            refuse_blind(loaded, method, request.options if method not in ALWAYS else {})
    if request.plan_file is not None:
        from kvprof.methods.plan_files import load_plan

        asked = [load_plan(request.plan_file, fingerprint=loaded.fingerprint, layout=loaded.layout)]
    else:
        asked = _from_methods(loaded, request, sample, stop)
    for plan in asked:
        if single_pass:
            _shown(plan)
        check_separate(plan, sample.sources, sample.evaluator.samples)
    if single_pass:
        return asked
    fp8 = [] if any(plan.method == "fp8" for plan in asked) else [_unrated(loaded, "fp8")]
    return [*fp8, *asked]


def refuse_blind(loaded: "LoadedModel", method: str, options: dict[str, Any]) -> None:
    """Refuse, before anything is calibrated, a method that a single pass does not show.

    Parameters
    ----------
    loaded : LoadedModel
    method : str
    options : dict
        Of the method.

    Raises
    ------
    UsageError
        As `kvprof.evaluation.assembly.refuse_hidden`; and for what cannot be planned at all.
    """
    from kvprof.calibration.uncalibrated import uncalibrated_family

    family = uncalibrated_family(loaded, method, **options)
    if family is not None:  # of others the plan itself tells, once there is one
        _shown(family.build((family.settings or family.bounds)[-1]))


def _shown(plan: "Plan") -> None:
    from kvprof.evaluation.assembly import refuse_hidden

    try:
        refuse_hidden(plan)
    except UsageError as cause:
        raise UsageError(f"{cause}; leave out --teacher-forced, or {plan.method}") from None


def _from_methods(
    loaded: "LoadedModel", request: PlanRequest, sample: Sample, stop: Stop
) -> "list[Plan]":
    from kvprof.calibration.calibrator import CalibrationInterrupted, Calibrator

    rated = [method for method in request.methods if method not in ALWAYS]
    evaluator = sample.evaluator
    given = calibration_options(
        request.calibrate, request.calibrate_tokens, seq_len=evaluator.workload.seq_len
    )
    calibrator = Calibrator(
        loaded, given, progress=console.track, should_stop=stop, notice=console.warn
    )
    for method in rated:
        calibrator.expect(method, **request.options)
    plans = []
    try:
        for method in request.methods:
            if method in ALWAYS:
                plans.append(_unrated(loaded, method))
                continue
            family = calibrator.family(method, **request.options)
            with console.status(f"planning {method}"):
                plans.append(
                    plan_of(loaded, family, request.rate, request.removal, evaluator.context)
                )
    except CalibrationInterrupted as cause:
        console.error(f"calibration {cause}: nothing was evaluated, and nothing is kept")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    return plans


def _unrated(loaded: "LoadedModel", method: str) -> "Plan":
    """Return the one plan of a method that has nothing to turn."""
    from kvprof.methods.family import MethodInputs, plan_at
    from kvprof.methods.registry import plan_family

    family = plan_family(method, MethodInputs(loaded.layout, loaded.fingerprint))
    return plan_at(family, (family.settings or family.bounds)[0])
