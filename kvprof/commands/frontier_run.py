"""The run of ``kvprof frontier``: calibration, cache and progress around the search."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvprof import console
from kvprof.errors import Interrupted, UsageError
from kvprof.evaluation.data import TextSample
from kvprof.evaluation.evaluation_cache import EvaluationCache
from kvprof.evaluation.evaluator import Evaluator
from kvprof.evaluation.frontier import Frontier, FrontierOptions, Half, expected_steps
from kvprof.evaluation.requests import MethodRequest
from kvprof.evaluation.targets import check_metric
from kvprof.evaluation.tasks.registry import TaskSelection
from kvprof.interrupt import Stop
from kvprof.methods.accounting import SERVED_BYTES, bytes_at, rate
from kvprof.methods.family import PlanFamily
from kvprof.methods.named import ALWAYS
from kvprof.methods.needs import runtime_needs
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.moments.calibrator import CalibrationOptions, Calibrator
from kvprof.moments.tokens import check_separate, chosen_on
from kvprof.moments.uncalibrated import Laid, uncalibrated_family
from kvprof.runtime.backends.route import kernel_facts
from kvprof.sources.grammar import Source

__all__ = ["FrontierRun", "check_frontier", "run_frontier"]

# Tokens at which bytes are told beside those of the evaluation: the default of ``kvprof bench``.
_LONG_CONTEXT = 102_400


class _NotSeparateError(Exception):
    """Calibration data is evaluation data: no row of a table, but the end of the run."""


@dataclass(frozen=True)
class FrontierRun:
    """What a frontier found.

    Attributes
    ----------
    data : dict
        Of the result.
    complete : bool
    warnings : list of str
    found, measured : int
        Evaluations that the cache had, and those that were run.
    unkept : list of str
        What the cache could not take.
    calibration : dict
        Label to the source and number of tokens; methods that need none are not there.
    """

    data: dict[str, Any]
    complete: bool
    warnings: list[str]
    found: int
    measured: int
    unkept: list[str]
    calibration: dict[str, dict[str, Any]]


def check_frontier(
    requests: Sequence[MethodRequest],
    options: FrontierOptions,
    laid: Laid,
    samples: Sequence[TextSample],
    selection: TaskSelection,
) -> None:
    """Refuse a search that would find nothing."""
    if short := [one.name for one in samples if len(one.ids) < 2]:
        raise UsageError(
            f"--text {short[0]} gives one sequence; a frontier searches on one half of them and "
            "reports on the other: take --sequences 2 or more, 64 for intervals"
        )
    tasks = list(dict.fromkeys(item.task for item in selection.items))
    for target in options.targets:
        check_metric(target.metric, tasks, what=options.metric_option)
    asked = [request for request in requests if request.method not in ALWAYS]
    if len(asked) == 1:
        uncalibrated_family(laid, asked[0].method, **asked[0].options)


def run_frontier(
    evaluator: Evaluator,
    sources: Sequence[Source],
    requests: list[MethodRequest],
    calibration: CalibrationOptions,
    options: FrontierOptions,
    folder: Path | None,
    stop: Stop,
) -> FrontierRun | None:
    """Search every method, with one progress bar over all of them."""
    warnings: list[str] = []
    calibration_of: dict[str, dict[str, Any]] = {}

    def warn(text: str) -> None:
        console.warn(text)
        warnings.append(text)

    search, report = halves = [
        Half(half, EvaluationCache(folder, half.digest, warn))
        for half in _halves(evaluator, {target.metric for target in options.targets})
    ]
    report.cache.check()
    if folder is not None and len(report.cache):
        console.note(
            f"{len(report.cache)} evaluations of this model on this data are in {folder}; those "
            "that come up again are not repeated"
        )
    total = expected_steps(requests, options.points, halves)
    with console.track(f"frontier of {evaluator.loaded.spec}", total) as progress:

        @contextmanager
        def stage(description: str, total: int, /) -> Iterator[_Counter]:
            # A bar of its own would draw over the one that shows the whole run.
            yield _Counter(progress, description, total)

        calibrator = Calibrator(
            evaluator.loaded, calibration, progress=stage, should_stop=stop, notice=warn
        )
        for request in requests:
            calibrator.expect(request.method, **request.options)

        def family_of(request: MethodRequest) -> PlanFamily:
            family = calibrator.family(request.method, **request.options)
            made = family.build((family.settings or family.bounds)[0]).made
            chosen = [f"{request.label}: {note}" for note in chosen_on(made, evaluator.samples)]
            for note in [*made.get("notes", ()), *chosen]:
                if note not in warnings:
                    warn(note)
            try:
                check_separate(made, sources, evaluator.samples)
            except UsageError as clash:
                raise _NotSeparateError(str(clash)) from None
            if known := made.get("calibration"):
                calibration_of[request.label] = {
                    key: known.get(key) for key in ("source", "tokens", "seq_len")
                }
            return family

        searching = Frontier(
            search,
            report,
            options,
            family_of,
            facts_of=partial(_facts, evaluator.loaded),
            describe=progress.describe,
            advance=progress.advance,
            should_stop=stop,
        )
        try:
            data = searching.run(requests)
        except Interrupted:
            return None
        except _NotSeparateError as clash:
            raise UsageError(str(clash)) from None
    dtype = str(evaluator.loaded.dtype).removeprefix("torch.")
    _refuse_only_failure(data, searching.complete)
    return FrontierRun(
        {**data, "dtype": dtype},
        searching.complete,
        [*warnings, *searching.warnings],
        sum(half.cache.found for half in halves),
        searching.measured,
        [half.cache.failure for half in halves if half.cache.failure is not None],
        calibration_of,
    )


def _halves(evaluator: Evaluator, metrics: Collection[str]) -> list[Evaluator]:
    """Return what evaluates on one half of a sample, and on the other: no token is in both.

    Questions are of the second half alone, unless a target is of them.
    """
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


def _facts(loaded: LoadedModel, plan: Plan) -> dict[str, Any]:
    """Return what running a plan takes, and what it stores of a long context."""
    return {
        "needs": runtime_needs(plan),
        "kernel": kernel_facts(plan, loaded),
        "long_context": {
            "context": _LONG_CONTEXT,
            "bytes_per_token": bytes_at(plan, _LONG_CONTEXT, itemsize=SERVED_BYTES).total
            / _LONG_CONTEXT,
            "rate": rate(plan, _LONG_CONTEXT),
        },
    }


def _refuse_only_failure(data: dict[str, Any], complete: bool) -> None:
    """Refuse a frontier of one method that could not be evaluated at all."""
    asked = [method for method in data["methods"] if method["method"] not in ALWAYS]
    if complete and len(asked) == 1 and not asked[0]["points"]:
        raise UsageError(f"{asked[0]['label']}: {asked[0]['reason']}")


class _Counter:
    """Tells how far a calibration is in the words in front of the one bar."""

    def __init__(self, progress: console.Tracker, description: str, total: int) -> None:
        self._progress = progress
        self._description = description
        self._total = total
        self._done = 0
        self.advance(0)

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        share = self._done / max(1, self._total)
        self._progress.describe(f"{self._description}, {share:.0%}")

    def describe(self, text: str) -> None:
        self._description = text
