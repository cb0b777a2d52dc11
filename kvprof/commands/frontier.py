"""``kvprof frontier``: how far each method goes before the model notices."""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from kvprof import console
from kvprof.commands.options import (
    CalibrationOptions,
    ModelOptions,
    SampleOptions,
    joined,
    method_option,
)
from kvprof.commands.output import FigureOptions, Outcome, end_without_result, measuring
from kvprof.commands.request import Mark, Rule, excludes
from kvprof.errors import Interrupted, UsageError
from kvprof.evaluation.targets import check_metric, parse_targets
from kvprof.interrupt import Stop, graceful_interrupt
from kvprof.loading import loading
from kvprof.methods.named import ALWAYS, COMPARED, check_names, method_entries
from kvprof.progress import nested

if TYPE_CHECKING:
    from kvprof.commands.planning import Sample
    from kvprof.evaluation.data import TaskSelection, TextSample
    from kvprof.evaluation.evaluator import Evaluator
    from kvprof.evaluation.frontier import Frontier, FrontierOptions, Half
    from kvprof.evaluation.requests import MethodRequest
    from kvprof.methods.family import PlanFamily
    from kvprof.methods.plan import Plan
    from kvprof.models.load import LoadedModel
    from kvprof.moments.calibrator import CalibrationOptions as Calibration
    from kvprof.moments.uncalibrated import Laid

# Tokens at which bytes are told beside those of the evaluation: the default of ``kvprof bench``.
_LONG_CONTEXT = 102_400


class FrontierRequest(ModelOptions, CalibrationOptions, SampleOptions, FigureOptions):
    """Find the largest compression of each method that reaches a share of the model's accuracy.

    Examples
    --------
    kvprof frontier
    kvprof frontier --methods fdc,kq,kq-4bit --target 0.99 --svg frontier.svg
    kvprof frontier --methods kq,kq-4bit --target 0.99 --target needle=0.95
    """

    method: Annotated[
        list[str] | None,
        method_option(
            "Methods, comma-separated; kq:allocation=budget,grid=32 sets options. full and fp8 are "
            f"always included.  [default: {COMPARED}]"
        ),
        Mark.FREE,
    ] = None
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="[METRIC=]SHARE",
            help="Share of the uncompressed model's metric to reach; repeatable, then all must "
            "hold: 0.99, needle=0.95.  [default: 0.99]",
        ),
        Mark.FREE,
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            help="Metric of a --target without one: accuracy, perplexity, tasks (mean), or a "
            "task's name.  [default: accuracy]",
        ),
        Mark.FREE,
    ] = None
    points: Annotated[
        int,
        typer.Option("--points", min=1, max=1000, help="Maximum evaluations per method."),
        Mark.FREE,
    ] = 6
    cache: Annotated[
        Path | None,
        typer.Option("--cache", help="Directory for cached evaluations.  [env var: KVPROF_CACHE]"),
    ] = None
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Neither read nor write cached evaluations."),
        Mark.FREE,
    ] = False

    rules: ClassVar[tuple[Rule, ...]] = (excludes("cache", "no_cache"),)


@measuring(FrontierRequest)
def frontier(request: FrontierRequest) -> Outcome:
    """Search every method that a request asks for."""
    methods = joined(request.method) or COMPARED
    targets = parse_targets(request.target or (), request.metric)
    common = request.options()
    check_names(name for _, name, _ in method_entries(methods))

    # Everything from here on needs torch.
    with loading():
        from kvprof.commands.planning import calibration_options, load_sample
        from kvprof.evaluation.evaluation_cache import EvaluationCache, cache_folder
        from kvprof.evaluation.evaluator import EvaluationSettings
        from kvprof.evaluation.frontier import FrontierOptions, Half
        from kvprof.evaluation.requests import parse_methods
        from kvprof.methods.registry import calibration_needs

    requests = parse_methods(methods, common)
    needs = [calibration_needs(one.method, **one.options) for one in requests]
    if any(request.calibration.values()) and not any(needs):
        raise UsageError(
            "these methods need no calibration; leave out --calibrate, --calibrate-tokens and "
            "--calibrate-seq-len"
        )
    calibration_options(**request.calibration)
    options = FrontierOptions(targets, request.points)
    sample = load_sample(
        {"model": request.model, **request.how},
        **request.sample,
        settings=EvaluationSettings(decode=request.decode, batch_size=request.batch_size),
        laid=partial(_check, requests, options),
        halves=True,
    )
    evaluator, described, warnings = sample.evaluator, sample.inputs(), [*sample.warnings]
    loaded = evaluator.loaded
    seq_len = described["seq_len"]
    calibration = calibration_options(seq_len, **request.calibration)

    def warn(text: str) -> None:
        console.warn(text)
        warnings.append(text)

    folder = None if request.no_cache else cache_folder(request.cache)
    halves = [
        Half(half, EvaluationCache(folder, half.digest, warn))
        for half in _halves(evaluator, {target.metric for target in targets})
    ]
    halves[1].cache.check()
    if folder is not None and (known := len(halves[1].cache)):
        console.note(f"{folder} has {known} cached evaluations of this model on this data")
    with graceful_interrupt() as stop:
        data, searching, calibrated = _search(
            sample, requests, calibration, options, halves, warn, stop
        )
    asked = [one for one in data["methods"] if one["method"] not in ALWAYS]
    if searching.complete and len(asked) == 1 and not asked[0]["points"]:
        raise UsageError(f"{asked[0]['label']}: {asked[0]['reason']}")
    return Outcome(
        inputs={
            "model": loaded.spec,
            **loaded.origin,
            "fingerprint": loaded.fingerprint,
            "device": str(loaded.device),
            "methods": methods,
            "metric": targets[0].metric,
            "target": targets[0].share,
            "targets": {one.metric: one.share for one in targets},
            "points": request.points,
            **common,
            **described,
            "calibrate": request.calibrate,
            "calibration": calibrated,
            "seed": calibration.seed,
            "evaluations_found": sum(half.cache.found for half in halves),
            "evaluations_measured": searching.measured,
        },
        data={**data, "dtype": str(loaded.dtype).removeprefix("torch.")},
        warnings=[*warnings, *searching.warnings],
        complete=searching.complete,
        lost=[half.cache.failure for half in halves if half.cache.failure is not None],
    )


def _check(
    requests: "Sequence[MethodRequest]",
    options: "FrontierOptions",
    laid: "Laid",
    samples: "Sequence[TextSample]",
    selection: "TaskSelection",
) -> None:
    """Refuse a search that would find nothing."""
    from kvprof.moments.uncalibrated import uncalibrated_family

    if short := [one.name for one in samples if len(one.ids) < 2]:
        raise UsageError(
            f"--text {short[0]} gives one sequence; frontier requires --sequences 2 or more, 64 "
            "for intervals"
        )
    tasks = list(dict.fromkeys(item.task for item in selection.items))
    for target in options.targets:
        check_metric(target.metric, tasks, what=options.metric_option)
    asked = [request for request in requests if request.method not in ALWAYS]
    if len(asked) == 1:
        uncalibrated_family(laid, asked[0].method, **asked[0].options)


class _NotSeparateError(Exception):
    """Calibration data is evaluation data: no row of a table, but the end of the run."""


def _search(
    sample: "Sample",
    requests: "list[MethodRequest]",
    calibration: "Calibration",
    options: "FrontierOptions",
    halves: "Sequence[Half]",
    warn: Any,
    stop: Stop,
) -> "tuple[dict[str, Any], Frontier, dict[str, Any]]":
    """Search every method, with one progress bar; return what calibrated each too."""
    from kvprof.evaluation.frontier import Frontier, expected_steps
    from kvprof.moments.calibrator import Calibrator
    from kvprof.moments.tokens import check_separate, chosen_on

    loaded, samples = sample.evaluator.loaded, sample.evaluator.samples
    calibrated: dict[str, Any] = {}
    told: set[str] = set()
    total = expected_steps(requests, options.points, halves)
    with console.track(f"frontier of {loaded.spec}", total) as progress:
        calibrator = Calibrator(
            loaded, calibration, progress=nested.get(), should_stop=stop, notice=warn
        )
        for request in requests:
            calibrator.expect(request.method, **request.options)

        def family_of(request: "MethodRequest") -> "PlanFamily":
            family = calibrator.family(request.method, **request.options)
            made = family.build((family.settings or family.bounds)[0]).made
            chosen = [f"{request.label}: {note}" for note in chosen_on(made, samples)]
            for note in [*made.get("notes", ()), *chosen]:
                if note not in told:
                    warn(note)
                told.add(note)
            try:
                check_separate(made, sample.sources, samples)
            except UsageError as clash:
                raise _NotSeparateError(str(clash)) from None
            if known := made.get("calibration"):
                calibrated[request.label] = {
                    key: known.get(key) for key in ("source", "tokens", "seq_len")
                }
            return family

        searching = Frontier(
            halves[0],
            halves[1],
            options,
            family_of,
            facts_of=partial(_facts, loaded),
            describe=progress.describe,
            advance=progress.advance,
            should_stop=stop,
        )
        try:
            return searching.run(requests), searching, calibrated
        except Interrupted:
            end_without_result("interrupted before anything could be compared; no result")
        except _NotSeparateError as clash:
            raise UsageError(str(clash)) from None


def _halves(evaluator: "Evaluator", metrics: Collection[str]) -> "list[Evaluator]":
    """Return what evaluates on one half of a sample, and on the other: no token is in both.

    Questions are of the second half alone, unless a target is of them.
    """
    from kvprof.evaluation.evaluator import Evaluator

    items = evaluator.items
    asked = [x for x in items if "tasks" in metrics or x.task in metrics]
    searched = [
        item
        for task in dict.fromkeys(x.task for x in asked)
        # Lengths take turns, and both halves have all of them.
        for item in sorted(
            (x for x in asked if x.task == task), key=lambda x: (x.length, x.depth or 0)
        )[::2]
    ]
    rest = [item for item in items if item not in searched]
    loaded, settings = evaluator.loaded, evaluator.settings
    return [
        Evaluator(loaded, [one.part(half, 2) for one in evaluator.samples], own, settings)
        for half, own in enumerate((searched, rest))
    ]


def _facts(loaded: "LoadedModel", plan: "Plan") -> dict[str, Any]:
    """Return what running a plan takes, and what it stores of a long context."""
    from kvprof.methods.accounting import SERVED_BYTES, bytes_at, rate
    from kvprof.methods.needs import runtime_needs
    from kvprof.runtime.backends.support import kernel_facts

    stored = bytes_at(plan, _LONG_CONTEXT, itemsize=SERVED_BYTES).total
    return {
        "needs": runtime_needs(plan),
        "kernel": kernel_facts(plan, loaded),
        "long_context": {
            "context": _LONG_CONTEXT,
            "bytes_per_token": stored / _LONG_CONTEXT,
            "rate": rate(plan, _LONG_CONTEXT),
        },
    }
