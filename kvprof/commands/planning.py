"""Options and steps that ``plan``, ``eval``, ``frontier`` and ``generate`` share: one plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprof import console
from kvprof.errors import ExitCode, UsageError
from kvprof.interrupt import Stop
from kvprof.sizes import parse_count
from kvprof.sources.defaults import DEFAULT_SEQ_LEN
from kvprof.sources.grammar import parse_source

if TYPE_CHECKING:
    from kvprof.calibration.calibrator import CalibrationOptions
    from kvprof.methods.family import PlanFamily
    from kvprof.methods.plan import Plan
    from kvprof.models.load import LoadedModel

__all__ = [
    "AllocationOption",
    "CalibrateOption",
    "CalibrateTokensOption",
    "GridOption",
    "MethodOption",
    "MethodOptionsOption",
    "MinimumOption",
    "PlanFileOption",
    "RateOption",
    "RemovalOption",
    "calibration_options",
    "make_plan",
    "method_options",
]

MethodOption = Annotated[
    str | None,
    typer.Option("--method", help="fdc, zack, palu, tale, kq, fp8 …, or kq-4bit, fdc+keyformer."),
]
RateOption = Annotated[
    float | None,
    typer.Option("--rate", help="Share of the cache's bytes saved, everything counted; 0 is full."),
]
RemovalOption = Annotated[
    float | None,
    typer.Option("--removal", help="Instead of --rate: the removal rate of FDC eq. 1."),
]
PlanFileOption = Annotated[
    Path | None, typer.Option("--plan", help="A saved plan, instead of --method.")
]
CalibrateOption = Annotated[
    str | None,
    typer.Option(
        "--calibrate",
        help="random:8k, prose, code, tasks, calibration (embedded), a file, or saved moments. "
        "Default by method.",
    ),
]
CalibrateTokensOption = Annotated[
    str | None,
    typer.Option("--calibrate-tokens", help="How many; k is 1,024. Default 8k, less of a text."),
]
AllocationOption = Annotated[
    str | None,
    typer.Option(
        "--allocation", help="removal, uniform, tail, fisher or budget. Default by method."
    ),
]
GridOption = Annotated[
    int | None,
    typer.Option("--grid", min=1, help="Ranks are multiples of this. Default by method."),
]
MinimumOption = Annotated[
    int | None, typer.Option("--minimum", min=1, help="Smallest rank. Default by method.")
]
MethodOptionsOption = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="Another option of the method; repeatable."),
]


def method_options(
    allocation: str | None, grid: int | None, minimum: int | None, extra: list[str] | None
) -> dict[str, Any]:
    """Return the options of a method as keyword arguments; those not given are left out.

    Parameters
    ----------
    allocation, grid, minimum
        From the command line.
    extra : list of str or None
        ``KEY=VALUE``; values are read as whole numbers, numbers, ``true`` or ``false``, several of
        these with commas between them, or else as text.

    Raises
    ------
    UsageError
        When an entry has no value, or an option is given twice.
    """
    named = {"allocation": allocation, "grid": grid, "minimum": minimum}
    options = {key: value for key, value in named.items() if value is not None}
    for entry in extra or []:
        key, equals, value = entry.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise UsageError(f"--option {entry!r}: write KEY=VALUE, for example heads=4")
        if key in options:
            raise UsageError(f"--option {entry!r}: {key} is given twice")
        options[key] = _value(value.strip())
    return options


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
    from kvprof.calibration.calibrator import CalibrationOptions

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
    _check_choice(
        method, plan_file, rate=rate, removal=removal, calibrate=calibrate,
        calibrate_tokens=calibrate_tokens, options=options,
    )  # fmt: skip
    if plan_file is not None:
        from kvprof.methods.plan_files import load_plan

        return load_plan(plan_file, fingerprint=loaded.fingerprint)
    assert method is not None

    from kvprof.calibration.calibrator import CalibrationInterrupted, Calibrator
    from kvprof.methods.registry import calibration_needs

    needs = calibration_needs(method, **options)
    if needs is None and (calibrate or calibrate_tokens):
        raise UsageError(
            f"{method} needs no calibration; leave out --calibrate and --calibrate-tokens"
        )
    if needs is not None and rate is None and removal is None:
        raise UsageError(f"--method {method} needs --rate or --removal")
    given = calibration_options(calibrate, calibrate_tokens, seq_len=seq_len)
    calibrator = Calibrator(loaded, given, progress=console.track, should_stop=stop)
    try:
        family = calibrator.family(method, **options)
    except CalibrationInterrupted as cause:
        console.error(f"calibration {cause}: there is no plan yet, and nothing is kept")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    with console.status(f"planning {method}"):
        return _chosen(loaded, family, rate, removal, context)


def _chosen(
    loaded: "LoadedModel",
    family: "PlanFamily",
    rate: float | None,
    removal: float | None,
    context: int,
) -> "Plan":
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


def _check_choice(
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
            "--method": method is not None, "--rate": rate is not None,
            "--removal": removal is not None, "--calibrate": calibrate is not None,
            "--calibrate-tokens": calibrate_tokens is not None,
            **{f"--{key}" if key in _NAMED else f"--option {key}": True for key in options},
        }  # fmt: skip
        if said := [option for option, is_given in given.items() if is_given]:
            raise UsageError(
                f"--plan {plan_file} says everything already; leave out {' and '.join(said)}"
            )
        return
    if method is None:
        raise UsageError("give --method with --rate, for example --method kq --rate 0.5, or --plan")
    if rate is not None and removal is not None:
        raise UsageError("--rate and --removal both say how much is removed; keep one")


_NAMED = ("allocation", "grid", "minimum")


def _value(text: str) -> Any:
    """Read one value of ``--option``."""
    if "," in text:
        return tuple(_value(part.strip()) for part in text.split(","))
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
