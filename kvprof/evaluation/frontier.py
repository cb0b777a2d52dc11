"""How far each method goes before a target is missed: every method searched, nothing lost.

The search of one method is `kvprof.evaluation.rate_search`. Here one method follows another:
evaluations come from the cache or are measured and kept at once, a method that does not fit the
model becomes a row that says why, and an interruption leaves everything measured so far. One half
of the text says which rates are tried, the other what they keep: a choice and its figures on the
same tokens promise too much.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvprof.errors import Interrupted, KvprofError
from kvprof.evaluation.evaluation_cache import BASELINE, EvaluationCache
from kvprof.evaluation.rate_search import MeasuredRate, search_rates
from kvprof.evaluation.requests import MethodRequest
from kvprof.evaluation.targets import (
    Target,
    binding,
    check_baseline,
    holds,
    joint_interval,
    joint_rate,
    kept_of,
    max_rate,
    share_of,
)
from kvprof.methods.accounting import compression_ratio
from kvprof.methods.family import PlanFamily
from kvprof.methods.named import ALWAYS
from kvprof.methods.plan import Plan

__all__ = [
    "TARGETS",
    "Evaluates",
    "Frontier",
    "FrontierOptions",
    "Half",
    "expected_steps",
    "frontier_row",
]

# --- One method of a frontier as a result holds it: its points, and the rates read off them.


#: Targets for which ``max_rates`` is read off the points that were tested.
TARGETS = (0.999, 0.99, 0.98, 0.95)


def frontier_row(
    request: MethodRequest,
    tested: Sequence[MeasuredRate],
    reason: str | None,
    targets: Sequence[Target],
) -> dict[str, Any]:
    """Return one method of a result (`kvprof.results.frontier`), from points in any order."""
    first = targets[0]
    points = [
        {
            **entry.evaluation,
            "method": request.method,
            "rate": entry.rate,
            "rate_asked": entry.rate_asked,
            "compression_ratio": compression_ratio(entry.rate),
            **kept_of(entry.evaluation, first.metric),
            **_shares(entry.evaluation, targets),
        }
        for entry in sorted(tested, key=lambda entry: entry.rate)
    ]
    found = joint_rate(points, targets)
    if found is None and reason is None:
        least = points[0]
        asked = " and ".join(
            f"{target.share:g} of the baseline's {target.metric}" for target in targets
        )
        kept = " and ".join(_share_text(share_of(least, target.metric)) for target in targets)
        reason = f"no tested rate reaches {asked}; the lowest, {least['rate']:.3f}: {kept}"
    interval = joint_interval(points, targets)
    return {
        "label": request.label,
        "method": request.method,
        "options": dict(request.options),
        "sure_rate": None if interval is None else interval[0],
        "max_rate": found,
        "max_rate_interval": None if interval is None else list(interval),
        "max_rates": {f"{one:g}": max_rate(points, one) for one in TARGETS},
        "binding": binding(points, targets),
        "reason": reason,
        "points": points,
    }


def _shares(evaluation: Mapping[str, Any], targets: Sequence[Target]) -> dict[str, Any]:
    """Return what is kept of every target's metric, where there are several."""
    if len(targets) == 1:
        return {}
    return {"shares": {one.metric: kept_of(evaluation, one.metric) for one in targets}}


def _share_text(share: float | None) -> str:
    return "nothing" if share is None else f"{share:.4f}"


# --- The search over all methods.


class Evaluates(Protocol):
    """What is needed of `kvprof.evaluation.evaluator.Evaluator`."""

    context: int
    baseline_steps: int

    def steps(self, plan: Plan | None = ..., /) -> int:
        """Return what `advance` counts for one evaluation."""

    def baseline(
        self, advance: Callable[[int], None] = ..., should_stop: Callable[[], bool] = ...
    ) -> dict[str, Any]:
        """Return the uncompressed model's figures."""

    def evaluate(
        self,
        plan: Plan,
        advance: Callable[[int], None] = ...,
        should_stop: Callable[[], bool] = ...,
    ) -> dict[str, Any]:
        """Return a plan's figures."""


@dataclass
class Half:
    """One half of the text, and what is known of it."""

    evaluator: Evaluates
    cache: EvaluationCache
    ran_baseline: bool = False  # the uncompressed model, here; not only were its figures found
    measured: int = 0  # evaluations that were run, not found

    def baseline(
        self, advance: Callable[[int], None], should_stop: Callable[[], bool]
    ) -> dict[str, Any]:
        """Return the uncompressed model's figures: found, or measured and kept."""
        return self.cache.get(BASELINE) or self._run_baseline(advance, should_stop)

    def _run_baseline(
        self, advance: Callable[[int], None], should_stop: Callable[[], bool]
    ) -> dict[str, Any]:
        """Measure the uncompressed model; without it there is nothing to compare with."""
        found = self.evaluator.baseline(advance, should_stop)
        if not found["complete"]:
            raise Interrupted
        self.ran_baseline = True
        self.cache.put(BASELINE, found)
        return found

    def evaluation(
        self,
        plan: Plan,
        digest: str,
        advance: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> dict[str, Any]:
        """Return a plan's figures: found, or measured and kept."""
        steps = self.evaluator.steps(plan)
        found = self.cache.get(digest)
        if found is not None:
            advance(steps)
            return found
        if should_stop():
            raise Interrupted
        if not self.ran_baseline:
            self._run_baseline(advance, should_stop)  # what plans are compared with by token
        counted = 0

        def count(amount: int) -> None:
            nonlocal counted
            counted += amount
            advance(amount)

        found = self.evaluator.evaluate(plan, count, should_stop)
        if not found["complete"]:
            raise Interrupted
        advance(max(0, steps - counted))
        self.cache.put(digest, found)
        self.measured += 1
        return found


@dataclass(frozen=True)
class FrontierOptions:
    """What is searched for: all targets together, in so many evaluations per method at most."""

    targets: tuple[Target, ...] = (Target(),)
    points: int = 6

    def check(self, baseline: Mapping[str, Any]) -> None:
        """Refuse a metric of which the uncompressed model has nothing that could be kept."""
        for target in self.targets:
            check_baseline(target.metric, baseline, what=self.metric_option)

    @property
    def metric_option(self) -> str:
        """The options that name the targets' metrics: one may be named by either."""
        return "--metric or --target" if len(self.targets) == 1 else "--target"


def expected_steps(requests: Sequence[MethodRequest], points: int, halves: Sequence[Half]) -> int:
    """Return how many units a frontier advances its progress by, the baselines included."""
    planned = sum(_planned(request, points) for request in requests)
    each = [half.evaluator for half in halves]
    return sum(one.baseline_steps + planned * one.steps() for one in each)


def _planned(request: MethodRequest, points: int) -> int:
    return 1 if request.method in ALWAYS else points


class Frontier:
    """Searches methods one after the other.

    `search` says which rates are tried, all figures are of `report`. `facts_of` returns what a
    point says of a plan besides its evaluation; it is never kept for later.
    """

    def __init__(
        self,
        search: Half,
        report: Half,
        options: FrontierOptions,
        family_of: Callable[[MethodRequest], PlanFamily],
        *,
        facts_of: Callable[[Plan], dict[str, Any]] = lambda _: {},
        describe: Callable[[str], None] = lambda _: None,
        advance: Callable[[int], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._search, self._report = search, report
        self._options = options
        self._family_of = family_of
        self._facts_of = facts_of
        self._describe = describe
        self._advance = advance
        self._stop = should_stop
        self.complete = True
        self.warnings: list[str] = []

    @property
    def measured(self) -> int:
        """Evaluations that were run, not found."""
        return self._search.measured + self._report.measured

    def run(self, requests: Sequence[MethodRequest]) -> dict[str, Any]:
        """Search every method, each label once, and return ``data`` of a result.

        The only method asked for (but for `ALWAYS`) is refused where it does not fit the model.
        """
        asked = [request for request in requests if request.method not in ALWAYS]
        # The first calibration comes first: what is wrong with its data, or with the only method,
        # shows before anything is measured.
        ready: dict[str, PlanFamily | KvprofError] = {}
        for request in asked[:1]:
            self._describe(f"{request.label}: calibrating")
            try:
                ready[request.label] = self._family_of(request)
            except KvprofError as failure:
                if len(asked) == 1:
                    raise
                ready[request.label] = failure
        self._describe("the uncompressed model")
        for half in (self._search, self._report):
            baseline = half.baseline(self._advance, self._stop)
            self._options.check(baseline)
        methods = []
        for number, request in enumerate(requests, 1):
            lead = f"{request.label} ({number} of {len(requests)})"
            methods.append(self._method(request, lead, ready.get(request.label)))
        return {
            "metric": self._options.targets[0].metric,
            "target": self._options.targets[0].share,
            "targets": [target.described() for target in self._options.targets],
            "baseline": baseline,
            "context": self._report.evaluator.context,
            "methods": methods,
        }

    def _method(
        self, request: MethodRequest, lead: str, ready: PlanFamily | KvprofError | None
    ) -> dict[str, Any]:
        points: list[MeasuredRate] = []
        reason: str | None = None
        planned = _planned(request, self._options.points)
        targets = self._options.targets

        def keep(tested: MeasuredRate) -> None:
            points.append(tested)

        def evaluate(plan: Plan, digest: str) -> dict[str, Any]:
            self._describe(f"{lead}: evaluation {len(points) + 1} of {planned} at most")
            tried, evaluation = (
                half.evaluation(plan, digest, self._advance, self._stop)
                for half in (self._search, self._report)
            )
            self.warnings += [text for text in evaluation["warnings"] if text not in self.warnings]
            searched = {one.metric: kept_of(tried, one.metric) for one in targets}
            return {**evaluation, **self._facts_of(plan), "searched": searched}

        try:
            if self._stop():
                raise Interrupted
            if isinstance(ready, KvprofError):
                raise ready
            if ready is None:
                self._describe(f"{lead}: calibrating")
                ready = self._family_of(request)
            reason = search_rates(
                ready,
                evaluate,
                meets=lambda found: holds(found.evaluation["searched"], targets),
                tokens=self._report.evaluator.context,
                points=self._options.points,
                keep=keep,
            )
        except Interrupted:
            self.complete = False
            reason = "interrupted"
        except KvprofError as failure:
            reason = str(failure)
            if points:
                self.warnings.append(
                    f"{request.label}: stopped after {len(points)} evaluations: {failure}"
                )
        each = sum(half.evaluator.steps() for half in (self._search, self._report))
        self._advance(max(0, planned - len(points)) * each)
        return frontier_row(request, points, reason, targets)
