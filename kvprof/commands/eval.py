"""``kvprof eval``: what a compressed cache costs in accuracy."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from kvprof import console
from kvprof.analysis.stats import RESAMPLES, SEED
from kvprof.commands.options import DATA, MethodOptions, ModelOptions, SampleOptions
from kvprof.commands.output import Outcome, TableOptions, end_without_result, measuring
from kvprof.commands.request import Mark, Parsed, Rule, needs
from kvprof.errors import Interrupted, UsageError
from kvprof.interrupt import Stop, graceful_interrupt
from kvprof.loading import loading
from kvprof.methods.named import ALWAYS, ENGINE_FORMATS, check_names, listed

if TYPE_CHECKING:
    from kvprof.commands.planning import Sample
    from kvprof.evaluation.data import TextSample
    from kvprof.evaluation.harness import HarnessSettings
    from kvprof.methods.plan import Plan
    from kvprof.models.load import LoadedModel
    from kvprof.moments.uncalibrated import Laid

# What a plan keeps to know its calibration data again; of no use to a reader, and long.
_PRIVATE = ("files", "digest", "sketch")
_OTHER_FP8 = (
    "the fp8 row uses scale={0} and replaces the default one; kvprof frontier --methods "
    "fp8:scale={0} has both"
)


def _harness_tasks(text: str, *, what: str) -> tuple[str, ...]:
    if names := tuple(name.strip() for name in text.split(",") if name.strip()):
        return names
    raise UsageError(f"{what} {text!r} names no task")


def _names_each_once(request: "EvalRequest") -> str | None:
    twice = [name for name in request.methods if request.methods.count(name) > 1]
    return f"--method names {twice[0]} twice" if twice else None


class EvalRequest(ModelOptions, MethodOptions, SampleOptions, TableOptions):
    """Evaluate compressed caches: accuracy, perplexity, KL divergence and tasks.

    Examples
    --------
    kvprof eval --method kq,fdc,palu --rate 0.3
    kvprof eval --method kq-4bit --rate 0.75 --text prose --text code
    kvprof eval --method engine-formats
    kvprof eval --plan kq.plan --csv eval.csv
    """

    worst: Annotated[
        int,
        typer.Option("--worst", min=0, help="Tokens of largest divergence to list per method."),
        Mark.FREE,
    ] = 5
    harness: Annotated[
        tuple[str, ...] | None,
        typer.Option(
            "--harness",
            rich_help_panel=DATA,
            help="lm-evaluation-harness tasks, comma-separated (needs the extra harness).",
        ),
        Parsed(_harness_tasks),
    ] = None
    harness_limit: Annotated[
        int | None,
        typer.Option(
            "--harness-limit", rich_help_panel=DATA, min=1, help="Questions per harness task."
        ),
        Mark.FREE,
    ] = None
    harness_include: Annotated[
        Path | None,
        typer.Option(
            "--harness-include", rich_help_panel=DATA, help="Folder with your own harness tasks."
        ),
    ] = None

    rules: ClassVar[tuple[Rule, ...]] = (
        needs("harness_limit", "harness"),
        needs("harness_include", "harness"),
        _names_each_once,
    )

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods, of all that name some; none with a plan's file."""
        return tuple(name for entry in self.method or () for name in listed(entry))


@dataclass
class _Run:
    """What is evaluated of a request, and what was found."""

    request: EvalRequest
    methods: tuple[str, ...]
    options: dict[str, Any]  # of every method with a rate; without any such of fp8
    warnings: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    failure: Exception | None = None

    @property
    def rated(self) -> list[str]:
        """The methods that are not always there."""
        return [method for method in self.methods if method not in ALWAYS]

    def options_of(self, method: str) -> dict[str, Any]:
        """Return the options that are a method's."""
        own = method not in ALWAYS or (method != ALWAYS[0] and not self.rated)
        return self.options if own and method in self.methods else {}


@measuring(EvalRequest)
def eval(request: EvalRequest) -> Outcome:
    """Evaluate the plans that a request asks for."""
    check_names(request.methods)
    choice = request.choice(request.methods[0] if request.methods else None)

    # Everything from here on needs torch.
    with loading():
        from kvprof.commands.planning import load_sample
        from kvprof.evaluation.decode import mean_context
        from kvprof.evaluation.evaluator import EvaluationSettings

    run = _Run(request, request.methods, choice["options"])
    _check(run)
    harness = _harness(request)

    def laid(one: "Laid", samples: "list[TextSample]", _: object) -> None:
        _check_rates(run, one, mean_context(samples[0].ids.shape[1]))

    sample = load_sample(
        {"model": request.model, **request.how},
        plan_file=request.plan_file,
        **request.sample,
        settings=EvaluationSettings(request.decode, request.batch_size, request.worst),
        laid=laid,
    )
    run.warnings += sample.warnings
    with graceful_interrupt() as stop:
        plans = _plans(run, sample, stop)
        if stop():
            end_without_result("interrupted before anything was evaluated; no result")
        run.warnings += dict.fromkeys(note for one in plans for note in one.made.get("notes", ()))
        _evaluate(run, sample, plans, stop)
        if harness is not None and run.complete:
            _run_harness(run, sample.evaluator.loaded, plans, harness, stop)
        return Outcome(
            inputs=_inputs(run, sample, harness),
            data=run.data,
            warnings=run.warnings,
            complete=run.complete,
            problem=run.failure,
        )


def _check(run: _Run) -> None:
    """Refuse what would mean nothing, before the model is loaded; read the methods' options."""
    from kvprof.methods.registry import calibration_needs, has_one_setting, typed_options

    request = run.request
    if request.plan_file is not None:
        return
    first, rated = run.methods[0], run.rated
    calibration_needs(first, **run.options_of(first))  # a library that is missing
    needed = [method for method in rated if calibration_needs(method, **run.options)]
    turned = [method for method in needed if not has_one_setting(method)]
    asked = request.given("rate", "removal")
    if turned and not asked:
        raise UsageError(f"--method {','.join(turned)} requires --rate or --removal")
    if asked and len(rated) != 1 and all(map(has_one_setting, rated)):
        named = ", ".join(run.methods)
        raise UsageError(f"--method {named}: the rate is fixed; leave out {asked}")
    takers = [method for method in run.methods if run.options_of(method)]
    if run.options and not takers:
        raise UsageError(f"{' and '.join(run.methods)} have no options")
    typed = [typed_options(method, run.options) for method in takers]
    run.options = {key: one for own in typed for key, one in own.items()}


def _check_rates(run: _Run, laid: "Laid", context: int) -> None:
    """Refuse a rate that a method does not reach, and calibration that is none.

    Engines' types that do not take the model's heads are left out, unless nothing else is asked.
    """
    from kvprof.commands.planning import calibration_options, check_reach
    from kvprof.moments.uncalibrated import uncalibrated_family

    unfit: dict[str, str] = {}
    for method in [one for one in run.methods if one in ENGINE_FORMATS]:
        try:
            uncalibrated_family(laid, method)
        except UsageError as problem:
            unfit[method] = f"not measured: {problem}"
    if left := tuple(method for method in run.methods if method not in unfit):
        run.methods, run.warnings = left, list(unfit.values())
    asked = run.request
    calibration_options(**asked.calibration)
    for method in run.rated:
        wanted = asked.rate, asked.removal, context
        check_reach(laid, method, run.options_of(method), *wanted, alone=len(run.rated) == 1)


def _harness(request: EvalRequest) -> "HarnessSettings | None":
    """Return what of lm-evaluation-harness is run; None where nothing was asked for."""
    if request.harness is None:
        return None
    from kvprof.evaluation.harness import HarnessSettings, check_harness

    limits = request.harness_limit, request.harness_include
    settings = HarnessSettings(request.harness, *limits, request.batch_size or 1)
    check_harness(settings)
    return settings


def _plans(run: _Run, sample: "Sample", stop: Stop) -> "list[Plan]":
    """Make every plan before anything is evaluated: what cannot be planned is found out first."""
    from kvprof.commands.planning import (
        calibration_interrupts,
        calibration_options,
        method_calibrator,
        plan_of,
    )
    from kvprof.methods.family import plan_at
    from kvprof.moments.tokens import check_separate

    asked, evaluator, saved = run.request, sample.evaluator, []
    loaded = evaluator.loaded
    if (file := asked.plan_file) is not None:
        from kvprof.methods.plan_files import load_plan

        saved = [load_plan(file, fingerprint=loaded.fingerprint, layout=loaded.layout)]
    there = "fp8" in (*run.methods, *(plan.method for plan in saved))
    methods = [*([] if there else ["fp8"]), *run.methods]
    given = calibration_options(evaluator.workload.seq_len, **asked.calibration)
    calibrator = method_calibrator(loaded, given, stop)
    for method in methods:
        calibrator.expect(method, **run.options_of(method))
    plans = []
    with calibration_interrupts("nothing was evaluated"):
        for method in methods:
            family = calibrator.family(method, **run.options_of(method))
            if method in ALWAYS:
                plans.append(plan_at(family, family.settings[0]))
                continue
            with console.status(f"planning {method}"):
                wanted = asked.rate, asked.removal, evaluator.context
                plans.append(plan_of(loaded, family, *wanted, alone=len(run.rated) == 1))
    plans += saved
    for plan in plans:
        check_separate(plan, sample.sources, evaluator.samples)
    return plans


@contextmanager
def _end_with_results(run: _Run) -> Iterator[None]:
    """End a run with what was measured, whatever ends the body."""
    try:
        yield
    except Interrupted:
        run.complete = False
    except Exception as failure:
        run.failure, run.complete = failure, False


def _fp8_last(plans: "list[Plan]") -> "list[Plan]":
    """Return plans in the order in which they are measured."""
    return sorted(plans, key=lambda plan: plan.method == "fp8")


def _evaluate(run: _Run, sample: "Sample", plans: "list[Plan]", stop: Stop) -> None:
    """Evaluate the uncompressed model, which all are compared with, then every plan, FP8 last.

    An error in the middle keeps what was measured before it; one in the baseline leaves nothing.
    """
    from kvprof.methods.accounting import dim_rate, paper_rate
    from kvprof.moments.tokens import chosen_on
    from kvprof.runtime.backends.support import kernel_facts

    evaluator = sample.evaluator
    loaded = evaluator.loaded
    rows: dict[int, dict[str, Any]] = {}
    total = evaluator.baseline_steps + sum(evaluator.steps(plan) for plan in plans)
    with console.track(f"evaluating {loaded.spec}", total) as progress:
        progress.describe(f"{loaded.spec}, uncompressed")
        baseline = evaluator.baseline(progress.advance, stop)
        run.complete = baseline["complete"]
        for plan in _fp8_last(plans):
            if not run.complete or stop():
                run.complete = False
                break
            progress.describe(f"{loaded.spec}, {plan.method}")
            with _end_with_results(run):
                evaluation = evaluator.evaluate(plan, progress.advance, stop)
                notes = [f"{plan.method}: {one}" for one in chosen_on(plan.made, evaluator.samples)]
                scale = plan.made.get("options", {}).get("scale", "head")
                if plan.method == "fp8" and scale != "head":
                    run.warnings.append(_OTHER_FP8.format(scale))
                run.warnings += [*evaluation["warnings"], *notes]
                run.complete = evaluation["complete"]
                facts = {
                    "kernel": kernel_facts(plan, loaded),
                    "dim_rate": dim_rate(plan),
                    "paper_rate": paper_rate(plan),
                    "made": _public_part(plan.made),
                }
                rows[id(plan)] = {**evaluation, "plan": facts}
    # Asked for by name, the uncompressed plan runs through the compressed cache like any other.
    own = [{**baseline, "plan": None}] if all(plan.method != "full" for plan in plans) else []
    run.data = {
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "context": evaluator.context,
        "evaluations": [*own, *(rows[id(plan)] for plan in plans if id(plan) in rows)],
        "harness": None,
    }


def _run_harness(
    run: _Run, loaded: "LoadedModel", plans: "list[Plan]", settings: "HarnessSettings", stop: Stop
) -> None:
    from kvprof.evaluation.evaluator import hidden_in_one_pass
    from kvprof.evaluation.harness import harness_rows, settings_described

    rows: list[dict[str, Any]] = []
    run.data["harness"] = {**settings_described(settings), "rows": rows}
    for plan in [None, *(plan for plan in _fp8_last(plans) if plan.method != "full")]:
        if not run.complete or stop():
            run.complete = False
            return
        name = "uncompressed" if plan is None else plan.method
        hidden = None if plan is None else hidden_in_one_pass(plan)
        blind = list(dict.fromkeys(row["task"] for row in rows if row["single_pass"]))
        if hidden and blind:
            text = (
                f"{name} is not measured on {', '.join(blind)}: lm-eval scores choices in one "
                f"pass, which hides the cost of {hidden}"
            )
            console.warn(text)
            run.warnings.append(text)
        if hidden and {row["task"] for row in rows} <= set(blind):
            continue
        with _end_with_results(run), console.status(f"lm-eval, {loaded.spec}, {name}"):
            found = harness_rows(loaded, plan, settings)
            rows += [row for row in found if not (hidden and row["single_pass"])]


def _public_part(made: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _public_part(value) if isinstance(value, dict) else value
        for key, value in made.items()
        if key not in _PRIVATE
    }


def _inputs(run: _Run, sample: "Sample", harness: "HarnessSettings | None") -> dict[str, Any]:
    """Return every resolved input, so that a reader can repeat the run."""
    request, evaluator = run.request, sample.evaluator
    loaded = evaluator.loaded
    return {
        "model": loaded.spec,
        "architecture": loaded.layout.architecture,
        **loaded.origin,
        "fingerprint": loaded.fingerprint,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "methods": list(run.methods),
        "rate": request.rate,
        "removal": request.removal,
        "plan": request.plan_file.name if request.plan_file is not None else None,
        **request.calibration,
        "options": run.options,
        **sample.inputs(),
        "context": evaluator.context,
        "batch_size": evaluator.workload.batch_size,
        "resamples": RESAMPLES,
        "seed": SEED,
        "digest": evaluator.digest,
        "harness": list(harness.tasks) if harness is not None else None,
    }
