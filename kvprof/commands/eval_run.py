"""The run of ``kvprof eval``: baseline, plans and harness under one progress bar."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvprof import console
from kvprof.commands.steps import (
    Sample,
    calibration_interrupts,
    calibration_options,
    check_reach,
    plan_of,
)
from kvprof.errors import Interrupted, UsageError
from kvprof.evaluation.evaluator import hidden_in_one_pass
from kvprof.evaluation.harness import (
    HarnessSettings,
    check_harness,
    harness_rows,
    settings_described,
)
from kvprof.interrupt import Stop
from kvprof.methods.accounting import dim_rate, paper_rate
from kvprof.methods.family import plan_at
from kvprof.methods.named import ALWAYS, ENGINE_FORMATS
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import load_plan
from kvprof.methods.registry import calibration_needs, has_one_setting, typed_options
from kvprof.models.load import LoadedModel
from kvprof.moments.calibrator import Calibrator
from kvprof.moments.tokens import check_separate, chosen_on
from kvprof.moments.uncalibrated import Laid, uncalibrated_family
from kvprof.runtime.backends.route import kernel_facts

__all__ = [
    "EvalRun",
    "PlanRequest",
    "check_rates",
    "check_request",
    "fitting_request",
    "harness_settings",
    "make_plans",
    "run_evaluations",
]

# --- The plans that ``eval`` compares: those asked for, from one calibration, and FP8 beside
# them.


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
        Of every method that has a rate to turn; without any such of ``fp8``.
    calibrate_seq_len : str or None
    """

    methods: tuple[str, ...]
    rate: float | None
    removal: float | None
    plan_file: Path | None
    calibrate: str | None
    calibrate_tokens: str | None
    options: dict[str, Any]
    calibrate_seq_len: str | None = None

    @property
    def calibration(self) -> dict[str, str | None]:
        """What is said of calibration, by option."""
        return {
            "--calibrate": self.calibrate,
            "--calibrate-tokens": self.calibrate_tokens,
            "--calibrate-seq-len": self.calibrate_seq_len,
        }

    def options_of(self, method: str) -> dict[str, Any]:
        """Return the options that are a method's."""
        rated = any(name not in ALWAYS for name in self.methods)
        own = method not in ALWAYS or (method != ALWAYS[0] and not rated)
        return self.options if own and method in self.methods else {}


def check_request(request: PlanRequest) -> PlanRequest:
    """Refuse what contradicts itself or would mean nothing, before the model is loaded."""
    if request.plan_file is not None:
        return request
    first = request.methods[0]
    calibration_needs(first, **request.options_of(first))  # a library that is missing
    rated = [method for method in request.methods if method not in ALWAYS]
    needs = [calibration_needs(method, **request.options) for method in rated]
    turned = [x for x, own in zip(rated, needs, strict=True) if own and not has_one_setting(x)]
    if turned and request.rate is None and request.removal is None:
        raise UsageError(f"--method {','.join(turned)} needs --rate or --removal")
    single = len(rated) != 1 and all(map(has_one_setting, rated))
    if single and (request.rate is not None or request.removal is not None):
        option = "--rate" if request.rate is not None else "--removal"
        raise UsageError(
            f"{', '.join(request.methods)}: nothing to turn, each has one rate; leave out {option}"
        )
    turned = [method for method in request.methods if request.options_of(method)]
    if request.options and not turned:
        raise UsageError(f"{' and '.join(request.methods)} have no options")
    typed = [typed_options(method, request.options) for method in turned]
    return replace(request, options={key: one for own in typed for key, one in own.items()})


def fitting_request(laid: Laid, request: PlanRequest) -> tuple[PlanRequest, list[str]]:
    """Leave out engines' types that do not take the model's heads, unless nothing else is asked."""
    unfit: dict[str, str] = {}
    for method in request.methods:
        try:
            if method in ENGINE_FORMATS:
                uncalibrated_family(laid, method)
        except UsageError as problem:
            unfit[method] = f"not measured: {problem}"
    left = tuple(method for method in request.methods if method not in unfit)
    return (replace(request, methods=left), list(unfit.values())) if left else (request, [])


def check_rates(laid: Laid, request: PlanRequest, context: int) -> None:
    """Refuse a rate that a method does not reach, and calibration that is none."""
    calibration_options(
        request.calibrate,
        request.calibrate_tokens,
        seq_len=None,
        own_seq_len=request.calibrate_seq_len,
    )
    rated = [method for method in request.methods if method not in ALWAYS]
    for method in rated:
        wanted = request.rate, request.removal, context
        own = request.options_of(method)
        check_reach(laid, method, own, *wanted, alone=len(rated) == 1)


def harness_settings(
    tasks: str | None, limit: int | None, include: Path | None, batch_size: int | None
) -> HarnessSettings | None:
    """Return what of lm-evaluation-harness is run; None where nothing was asked for."""
    if tasks is None:
        if limit is not None or include is not None:
            raise UsageError("--harness-limit and --harness-include need --harness TASKS")
        return None
    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    if not names:
        raise UsageError(f"--harness {tasks!r} names no task")
    settings = HarnessSettings(names, limit, include, batch_size or 1)
    check_harness(settings)
    return settings


def make_plans(loaded: LoadedModel, request: PlanRequest, sample: Sample, stop: Stop) -> list[Plan]:
    """Make every plan before anything is evaluated: what cannot be planned is found out first."""
    saved = []
    if request.plan_file is not None:
        saved = [load_plan(request.plan_file, fingerprint=loaded.fingerprint, layout=loaded.layout)]
    beside = ["fp8"] if "fp8" not in request.methods else []
    if any(plan.method == "fp8" for plan in saved):
        beside = []
    plans = [*_from_methods(loaded, request, beside, sample, stop), *saved]
    for plan in plans:
        check_separate(plan, sample.sources, sample.evaluator.samples)
    return plans


def _from_methods(
    loaded: LoadedModel, request: PlanRequest, beside: list[str], sample: Sample, stop: Stop
) -> list[Plan]:
    methods = [*beside, *request.methods]
    alone = sum(method not in ALWAYS for method in request.methods) == 1
    evaluator = sample.evaluator
    given = calibration_options(
        request.calibrate,
        request.calibrate_tokens,
        seq_len=evaluator.workload.seq_len,
        own_seq_len=request.calibrate_seq_len,
    )
    calibrator = Calibrator(
        loaded, given, progress=console.track, should_stop=stop, notice=console.warn
    )
    for method in methods:
        calibrator.expect(method, **request.options_of(method))
    plans = []
    with calibration_interrupts("nothing was evaluated"):
        for method in methods:
            family = calibrator.family(method, **request.options_of(method))
            if method in ALWAYS:
                plans.append(plan_at(family, family.settings[0]))
                continue
            with console.status(f"planning {method}"):
                wanted = request.rate, request.removal, evaluator.context
                plans.append(plan_of(loaded, family, *wanted, alone=alone))
    return plans


# What a plan keeps to know its calibration data again; of no use to a reader, and long.
_PRIVATE = ("files", "digest", "sketch")


@dataclass
class EvalRun:
    """What was found.

    Attributes
    ----------
    data : dict
        Of the result.
    warnings : list of str
    complete : bool
    failure : Exception or None
        What ended the run early; the data holds what was measured before.
    """

    data: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    complete: bool = True
    failure: Exception | None = None


def _other_fp8(plan: Plan) -> list[str]:
    """Return that a row of this name is another one than that which is always there, if so."""
    scale = plan.made.get("options", {}).get("scale", "head")
    if plan.method != "fp8" or scale == "head":
        return []
    return [
        f"the row fp8 is of scale={scale} and not the one that is always there; kvprof frontier "
        f"--methods fp8:scale={scale} has both"
    ]


def run_evaluations(
    loaded: LoadedModel,
    sample: Sample,
    plans: list[Plan],
    harness: HarnessSettings | None,
    stop: Stop,
) -> EvalRun:
    """Evaluate the uncompressed model, which all are compared with, then every plan, FP8 last.

    An error in the middle keeps what was measured before it; one in the baseline leaves nothing.
    """
    evaluator = sample.evaluator
    data: dict[str, Any] = {
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "context": evaluator.context,
        "evaluations": [],
        "harness": None,
    }
    run = EvalRun(data)
    total = evaluator.baseline_steps + sum(evaluator.steps(plan) for plan in plans)
    with console.track(f"evaluating {loaded.spec}", total) as progress:
        progress.describe(f"{loaded.spec}, uncompressed")
        baseline = evaluator.baseline(progress.advance, stop)
        run.complete = baseline["complete"]
        # Asked for by name, full width runs through the compressed cache like any other plan.
        if all(plan.method != "full" for plan in plans):
            data["evaluations"].append({**baseline, "plan": None})
        rows: dict[int, dict[str, Any]] = {}
        for index, plan in _fp8_last(plans):
            if not run.complete or stop():
                run.complete = False
                break
            progress.describe(f"{loaded.spec}, {plan.method}")
            try:
                evaluation = evaluator.evaluate(plan, progress.advance, stop)
            except Interrupted:
                run.complete = False
                break
            except Exception as failure:  # whatever it is, it costs nothing that was measured
                run.failure, run.complete = failure, False
                break
            run.warnings += [
                *_other_fp8(plan),
                *evaluation["warnings"],
                *(f"{plan.method}: {note}" for note in chosen_on(plan.made, evaluator.samples)),
            ]
            run.complete = evaluation["complete"]
            rows[index] = {**evaluation, "plan": _described(plan, loaded)}
        data["evaluations"] += [rows[index] for index in sorted(rows)]
    if harness is not None and run.complete:
        _run_harness(loaded, plans, harness, run, stop)
    return run


def _fp8_last(plans: list[Plan]) -> list[tuple[int, Plan]]:
    """Return plans, each with its row, in the order in which they are measured."""
    return sorted(enumerate(plans), key=lambda numbered: numbered[1].method == "fp8")


def _run_harness(
    loaded: LoadedModel,
    plans: list[Plan],
    settings: HarnessSettings,
    run: EvalRun,
    stop: Stop,
) -> None:
    rows: list[dict[str, Any]] = []
    run.data["harness"] = {**settings_described(settings), "rows": rows}
    for plan in [None, *(plan for _, plan in _fp8_last(plans) if plan.method != "full")]:
        if stop():
            run.complete = False
            return
        name = "uncompressed" if plan is None else plan.method
        hidden = None if plan is None else hidden_in_one_pass(plan)
        blind = list(dict.fromkeys(row["task"] for row in rows if row["single_pass"]))
        if hidden and blind:
            text = (
                f"{name} is not measured on {', '.join(blind)}: lm-eval scores choices in a single "
                f"pass, which does not show the cost of {hidden}"
            )
            console.warn(text)
            run.warnings.append(text)
        if hidden and {row["task"] for row in rows} <= set(blind):
            continue
        try:
            with console.status(f"lm-eval, {loaded.spec}, {name}"):
                found = harness_rows(loaded, plan, settings)
            rows += [row for row in found if not (hidden and row["single_pass"])]
        except Interrupted:
            run.complete = False
            return
        except Exception as failure:
            run.failure, run.complete = failure, False
            return


def _described(plan: Plan, loaded: LoadedModel) -> dict[str, Any]:
    """Return what a reader wants to know of a plan beyond its rate."""
    return {
        "kernel": kernel_facts(plan, loaded),
        "dim_rate": dim_rate(plan),
        "paper_rate": paper_rate(plan),
        "made": _public(plan.made),
    }


def _public(made: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _public(value) if isinstance(value, dict) else value
        for key, value in made.items()
        if key not in _PRIVATE
    }
