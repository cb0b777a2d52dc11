"""Options and steps that ``plan``, ``eval``, ``frontier`` and ``generate`` share: one plan."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvprof import console
from kvprof.errors import ExitCode, UsageError
from kvprof.interrupt import Stop
from kvprof.methods.named import check_names
from kvprof.sizes import parse_count
from kvprof.sources.grammar import DEFAULT_SEQ_LEN, parse_source

if TYPE_CHECKING:
    from kvprof.methods.family import PlanFamily
    from kvprof.methods.plan import Plan
    from kvprof.models.load import LoadedModel
    from kvprof.moments.calibrator import CalibrationOptions

__all__ = [
    "calibration_interrupts",
    "calibration_options",
    "check_calibration",
    "check_choice",
    "make_plan",
    "plan_of",
]


def calibration_options(
    calibrate: str | None, calibrate_tokens: str | None, *, seq_len: int | None, seed: int = 0
) -> "CalibrationOptions":
    """Return what the user said about calibration.

    Parameters
    ----------
    calibrate, calibrate_tokens : str or None
        From the command line.
    seq_len : int or None
        Of the evaluation; None takes 2,048, or the model's context where that is shorter.
    seed : int
        Of random tokens.

    Raises
    ------
    UsageError
        For an unknown source, a count that is none, or two counts.
    """
    source = parse_source(calibrate, what="--calibrate") if calibrate else None
    tokens = parse_count(calibrate_tokens, what="--calibrate-tokens") if calibrate_tokens else None
    from kvprof.moments.calibrator import CalibrationOptions

    return CalibrationOptions(source, tokens, seq_len or DEFAULT_SEQ_LEN, seed)


def make_plan(
    loaded: "LoadedModel",
    *,
    method: str | None,
    rate: float | None,
    removal: float | None,
    plan_file: Path | None,
    calibrate: str | None,
    calibrate_tokens: str | None,
    options: dict[str, Any],
    context: int,
    seq_len: int | None,
    stop: Stop,
) -> "Plan":
    """Read the plan that was given, or calibrate the method that was named and make one.

    Parameters
    ----------
    loaded : LoadedModel
    method, rate, removal, plan_file, calibrate, calibrate_tokens
        From the command line.
    options : dict
        From `method_options`.
    context : int
        Tokens at which the bytes of a rate are counted.
    seq_len : int or None
        Of the calibration's sequences, the evaluation's.
    stop : Stop
        Asked after each batch.

    Raises
    ------
    UsageError
        For options that contradict each other or would mean nothing, a rate out of reach, and
        whatever the method refuses.
    typer.Exit
        With 130 when the calibration was interrupted: nothing can be planned then.
    """
    check_choice(
        method,
        plan_file,
        rate=rate,
        removal=removal,
        calibrate=calibrate,
        calibrate_tokens=calibrate_tokens,
        options=options,
    )
    if plan_file is not None:
        from kvprof.methods.plan_files import load_plan

        return load_plan(plan_file, fingerprint=loaded.fingerprint, layout=loaded.layout)
    assert method is not None  # check_choice has seen to it
    check_calibration(
        method,
        options,
        calibrated=bool(calibrate or calibrate_tokens),
        rated=rate is not None or removal is not None,
    )

    from kvprof.moments.calibrator import Calibrator

    given = calibration_options(calibrate, calibrate_tokens, seq_len=seq_len)
    calibrator = Calibrator(
        loaded, given, progress=console.track, should_stop=stop, notice=console.warn
    )
    with calibration_interrupts():
        family = calibrator.family(method, **options)
    with console.status(f"planning {method}"):
        return plan_of(loaded, family, rate, removal, context)


def check_calibration(
    method: str, options: Mapping[str, Any], *, calibrated: bool, rated: bool
) -> None:
    """Refuse what a method has no use for, or lacks.

    Parameters
    ----------
    method : str
    options : mapping
        Of the method.
    calibrated, rated : bool
        Whether the user said how to calibrate, and how much to remove.

    Raises
    ------
    UsageError
        Naming the options.
    """
    from kvprof.methods.registry import calibration_needs

    needs = calibration_needs(method, **options)
    if needs is None and calibrated:
        raise UsageError(
            f"{method} needs no calibration; leave out --calibrate and --calibrate-tokens"
        )
    if needs is not None and not rated:
        raise UsageError(f"--method {method} needs --rate or --removal")


@contextmanager
def calibration_interrupts() -> Iterator[None]:
    """Say that nothing was planned, and end with 130, when the body's calibration is interrupted.

    Raises
    ------
    typer.Exit
    """
    from kvprof.moments.calibrator import CalibrationInterrupted

    try:
        yield
    except CalibrationInterrupted as cause:
        console.error(f"calibration {cause}: there is no plan yet, and nothing is kept")
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def plan_of(
    loaded: "LoadedModel",
    family: "PlanFamily",
    rate: float | None,
    removal: float | None,
    context: int,
) -> "Plan":
    """Return the plan of a family that the user's rate or removal rate asks for.

    Parameters
    ----------
    loaded : LoadedModel
    family : PlanFamily
    rate, removal : float or None
        From the command line; neither is needed where the method has one setting.
    context : int
        Tokens at which the bytes of a rate are counted.

    Raises
    ------
    UsageError
        For a rate out of reach, or a removal rate of a method that has none.
    """
    from kvprof.methods.family import plan_at, plan_for_rate
    from kvprof.methods.low_rank import KNOBS

    if removal is not None:
        if family.knob != KNOBS["removal"]:
            raise UsageError(
                f"--removal is FDC's removal rate, and {family.method} turns its {family.knob} "
                "here; give --rate, or --allocation removal where the method has ranks"
            )
        return plan_at(family, removal)
    if rate is not None:
        return plan_for_rate(family, rate, context, itemsize=loaded.dtype.itemsize)
    if len(family.settings) == 1:
        return plan_at(family, family.settings[0])
    raise UsageError(f"--method {family.method} needs --rate or --removal")


def check_choice(
    method: str | None,
    plan_file: Path | None,
    *,
    rate: float | None,
    removal: float | None,
    calibrate: str | None,
    calibrate_tokens: str | None,
    options: dict[str, Any],
) -> None:
    """Refuse what contradicts itself before anything is run."""
    if plan_file is not None:
        given = {
            "--method": method is not None,
            "--rate": rate is not None,
            "--removal": removal is not None,
            "--calibrate": calibrate is not None,
            "--calibrate-tokens": calibrate_tokens is not None,
            **{f"--{key}" if key in _NAMED else f"--option {key}": True for key in options},
        }
        if said := [option for option, is_given in given.items() if is_given]:
            raise UsageError(
                f"--plan {plan_file} says everything already; leave out {' and '.join(said)}"
            )
        return
    if method is None:
        raise UsageError("give --method with --rate, for example --method kq --rate 0.5, or --plan")
    if rate is not None and removal is not None:
        raise UsageError("--rate and --removal both say how much is removed; keep one")
    if rate is not None and not 0 <= rate < 1:  # a NaN neither
        raise UsageError(f"--rate {rate:g} is not between 0 and 1 (1 would store nothing)")
    check_names([method])
    from kvprof.methods.registry import calibration_needs

    calibration_needs(method, **options)  # an unknown name, or a library that is missing


_NAMED = ("allocation", "grid", "minimum")
