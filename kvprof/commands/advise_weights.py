"""The weights depth of ``kvprof advise``: what plans keep on the model itself, while minutes last.

It imports torch: only with ``--minutes``.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvprof import console
from kvprof.commands.loading import model_inputs
from kvprof.commands.options import SampleOptions
from kvprof.commands.steps import calibration_options, load_sample, plan_of
from kvprof.errors import FailedError, Interrupted, KvprofError
from kvprof.evaluation.data import TaskItem
from kvprof.evaluation.evaluation_cache import BASELINE, EvaluationCache, cache_folder, plan_digest
from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator
from kvprof.evaluation.frontier import Half
from kvprof.evaluation.tasks.registry import default_task_items, select_tasks
from kvprof.interrupt import graceful_interrupt
from kvprof.methods.advice import PLANS
from kvprof.methods.named import options_in
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import save_plan
from kvprof.methods.registry import typed_options
from kvprof.models.config_files import hub_name
from kvprof.moments.calibrator import Calibrator
from kvprof.results.advise import CONFIG, WEIGHTS, AdvisedPlan, best_of

if TYPE_CHECKING:
    from kvprof.commands.advise import Advice, AdviseRequest

__all__ = ["measure"]

#: Asks for a needle; its prompts have so many tokens at least.
_TASK, _SHORTEST = "niah_single_1", 512


def measure(request: "AdviseRequest", found: "Advice", *, until: float) -> None:
    """Measure plans on the model, and save the best of kvprof's own where that is asked for."""
    sample = load_sample(
        {"model": request.model and hub_name(request.model), **request.how},
        **SampleOptions(text=["prose", "code"], tasks="none").sample,
        settings=EvaluationSettings(),
        laid=lambda *_: None,
    )
    found.warnings += sample.warnings
    with graceful_interrupt() as stop:
        run = _Measuring(
            request, found, sample.evaluator, lambda: stop() or time.monotonic() >= until
        )
        run.run()
    found.complete = not stop.requested
    if request.save is not None:
        own = [row for row in found.plans if not row.served and row.depth == WEIGHTS]
        try:
            if (best := best_of(own, request.keep)) is None:
                raise FailedError(f"no kvprof plan reaches --keep {request.keep:g}")
            save_plan(run.plan(best), request.save, force=request.force)
            found.saved, found.inputs["saved"] = best.plan, str(request.save)
        except KvprofError as problem:
            found.lost.append(f"--save {request.save}: {problem}")


class _Measuring:
    """Plans measured one after another, those first that may change the verdict."""

    def __init__(
        self,
        request: "AdviseRequest",
        found: "Advice",
        evaluator: Evaluator,
        ended: Callable[[], bool],
    ) -> None:
        self._request, self._ended = request, ended
        self._rows, self._warnings = found.plans, found.warnings
        self._plans: dict[str, Plan] = {}  # by the row's name
        self._loaded = loaded = evaluator.loaded
        # Half of what eval takes on a CPU: twice as many plans in the minutes, 32 sequences still.
        step = 2 if loaded.device.type == "cpu" else 1
        self._samples = [one.part(0, step) for one in evaluator.samples]
        self._tokens = int(self._samples[0].ids.shape[1])
        self._text = self._half([])
        self._needles: Half | None = None
        self._finds = loaded.context_length >= _SHORTEST  # as far as is known
        self._calibrator = Calibrator(
            loaded,
            calibration_options(self._tokens),
            progress=console.track,
            should_stop=ended,
            notice=self._warnings.append,
        )
        found.inputs |= {
            **model_inputs(loaded),
            "text": [one.name for one in self._samples],
            "sequences": sum(len(one.ids) for one in self._samples),
            "seq_len": self._tokens,
        }

    def run(self) -> None:
        """Measure until nothing is left, the minutes are over, or somebody stops it."""
        for left in self._left():
            method, options, _ = _method(left)
            self._calibrator.expect(method, **options)
        try:
            self._baseline(self._text, "measuring")
            self._put(self._rows[0])
            while (row := self._next()) is not None:
                if row.depth == CONFIG:
                    self._measure(row)
                else:
                    self._ask(row)
        except Interrupted:
            names = ", ".join(left.plan for left in self._left()) or "needles"
            self._warnings.append(f"not finished: {names}; repeat the command to resume")
        if any(row.keeps and not row.served and row.depth == WEIGHTS for row in self._rows):
            self._warnings.append(
                f"plans that are torch only leave {max(plan.exact for plan in PLANS)} tokens per "
                f"sequence uncompressed, of {self._tokens:,} here and {self._request.context:,} "
                "when serving; accuracy may be lower there"
            )

    def _left(self) -> list[AdvisedPlan]:
        return [row for row in self._rows[1:] if row.refused is None and row.depth == CONFIG]

    def _next(self) -> AdvisedPlan | None:
        """Return what decides most: the plan to be named, then served ones that fit more users.

        A row that is measured is returned to be asked for needles; None is the end.
        """
        keep, rows, left = self._request.keep, self._rows, self._left()
        best = best_of(rows, keep)
        least = 0 if best is None else _users(best)
        enough = [row for row in rows[1:] if (row.keeps_at_least or 0) >= keep]
        asked = [row for row in enough if row.depth == WEIGHTS and row.needles is None]
        asked = asked if self._finds else []
        choices = (
            [row for row in left if row is best],
            [row for row in left if row.engine == rows[0].engine and _users(row) > least],
            [row for row in asked if row is best],
            left,
            asked,
        )
        return next((max(choice, key=_users) for choice in choices if choice), None)

    def _measure(self, row: AdvisedPlan) -> None:
        try:
            self._put(row, **self._keeps(self._evaluation(self._text, row, "measuring")))
        except KvprofError as problem:  # then another model's figure is none of this one's
            self._put(row, **self._keeps({}), refused=f"{row.plan}: {problem}")

    def _keeps(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a row says of an evaluation, or of none."""
        interval = found.get("relative_accuracy_interval")
        return {
            "keeps": found.get("relative_accuracy"),
            "keeps_interval": interval and list(interval),
            "keeps_tokens": found.get("decoded_tokens"),
            "keeps_at_least": interval and interval[0],
            "needles": None,
            "measured_on": self._loaded.spec if found else None,
            "measured_here": bool(found),
            "record": None,
        }

    def _ask(self, row: AdvisedPlan) -> None:
        """Ask a plan for needles, where the uncompressed model finds some."""
        if self._needles is None:
            try:
                items = default_task_items(self._loaded)
                self._needles = self._half(select_tasks(self._loaded, (_TASK,), items).items)
                task = self._baseline(self._needles, "asking")["tasks"][_TASK]
                found, asked = _needle_counts(task)
                self._put(self._rows[0], needles=[found, asked])
                if not task["judges"]:
                    raise FailedError(f"the uncompressed model finds {found} of {asked}")
            except KvprofError as problem:
                self._finds = False
                self._warnings.append(f"no needles: {problem}")
                return
        evaluation = self._evaluation(self._needles, row, "asking")
        self._put(row, needles=_needle_counts(evaluation["tasks"][_TASK]))

    def _half(self, items: list[TaskItem]) -> Half:
        """Return what evaluates text, or questions; with them one sequence, as some must be."""
        samples = [self._samples[0].part(0, len(self._samples[0].ids))] if items else self._samples
        evaluator = Evaluator(self._loaded, samples, items, EvaluationSettings())
        cache = EvaluationCache(cache_folder(), evaluator.digest, self._warnings.append)
        return Half(evaluator, cache)

    def _baseline(self, half: Half, doing: str) -> dict[str, Any]:
        """Return the uncompressed model's figures, found or measured."""
        if (found := half.cache.get(BASELINE)) is not None:
            return found
        with console.track(f"{doing} 16 bits", half.evaluator.baseline_steps) as bar:
            return half.baseline(bar.advance, self._ended)

    def _evaluation(self, half: Half, row: AdvisedPlan, doing: str) -> dict[str, Any]:
        plan = self.plan(row)
        with console.track(f"{doing} {row.plan}", half.evaluator.steps(plan)) as bar:
            return half.evaluation(plan, plan_digest(plan), bar.advance, self._ended)

    def plan(self, row: AdvisedPlan) -> Plan:
        """Return a row's plan, made once, by its bytes at the context that was asked for."""
        if row.plan not in self._plans:
            method, options, rate = _method(row)
            family = self._calibrator.family(method, **options)
            plan = plan_of(self._loaded, family, rate, None, self._request.context)
            self._plans[row.plan] = plan
        return self._plans[row.plan]

    def _put(self, row: AdvisedPlan, **found: Any) -> None:
        """Replace a row by what was found of it."""
        self._rows[self._rows.index(row)] = row.model_copy(update={**found, "depth": WEIGHTS})


def _method(row: AdvisedPlan) -> tuple[str, dict[str, Any], float | None]:
    """Return a row's method, its options and its rate."""
    plan = next(one for one in PLANS if one.name == row.plan)
    return plan.method, typed_options(plan.method, options_in(plan.options)), plan.rate


def _users(row: AdvisedPlan) -> float:
    return row.users or 0


def _needle_counts(task: Mapping[str, Any]) -> list[int]:
    """Return the needles found and asked for."""
    return [round(task["accuracy"] * task["items"]), task["items"]]
