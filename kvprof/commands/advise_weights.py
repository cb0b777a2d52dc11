"""The weights depth of ``kvprof advise``: what plans keep on the model itself, while minutes last.

It imports torch: only with ``--minutes``.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvprof import console
from kvprof.commands.steps import Sample, calibration_options, load_sample, plan_of
from kvprof.errors import FailedError, Interrupted, KvprofError
from kvprof.evaluation.evaluation_cache import (
    BASELINE,
    EvaluationCache,
    cache_folder,
    plan_digest,
)
from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator
from kvprof.evaluation.frontier import Half
from kvprof.evaluation.tasks.registry import default_task_items, select_tasks
from kvprof.interrupt import Stop
from kvprof.methods.advice import PLANS
from kvprof.methods.named import options_in
from kvprof.methods.plan import Plan
from kvprof.methods.registry import typed_options
from kvprof.models.config_files import hub_name
from kvprof.moments.calibrator import Calibrator
from kvprof.results.advise import WEIGHTS, AdvisedPlan, best_of

if TYPE_CHECKING:
    from kvprof.commands.advise import AdviseRequest

__all__ = ["Measuring", "load"]

_TEXT = ["prose", "code"]
#: Asks for a needle; its prompts have so many tokens at least.
_TASK, _SHORTEST = "niah_single_1", 512
#: What is known of a row before it is measured.
_NOTHING: dict[str, Any] = {
    **dict.fromkeys(("keeps", "keeps_interval", "keeps_tokens", "keeps_at_least", "needles")),
    **{"measured_on": None, "measured_here": False, "record": None},
}


def load(request: "AdviseRequest") -> Sample:
    """Load the model, and the text that plans are measured on: ``kvprof eval``'s."""
    return load_sample(
        {"model": request.model and hub_name(request.model), **request.how},
        text=_TEXT,
        sequences=None,
        seq_len=None,
        tasks="none",
        task_items=None,
        task_lengths=None,
        settings=EvaluationSettings(),
        laid=lambda *_: None,
    )


class Measuring:
    """Plans measured one after another, those first that may change the verdict."""

    def __init__(
        self,
        request: "AdviseRequest",
        sample: Sample,
        rows: list[AdvisedPlan],
        until: float,
        stop: Stop,
    ) -> None:
        self.rows = rows
        self.warnings: list[str] = []
        self._plans: dict[str, Plan] = {}  # by the row's name
        self._keep, self._context = request.keep, request.context
        self._ended: Callable[[], bool] = lambda: stop() or time.monotonic() >= until
        self._left = [one for one in rows[1:] if one.refused is None]
        self._loaded = loaded = sample.evaluator.loaded
        # Half of what eval takes on a CPU: twice as many plans in the minutes, 32 sequences still.
        step = 2 if loaded.device.type == "cpu" else 1
        samples = [one.part(0, step) for one in sample.evaluator.samples]
        self._samples = samples
        self._text = self._half(Evaluator(loaded, samples, [], EvaluationSettings()))
        self._needles: Half | None = None
        self._finds = loaded.context_length >= _SHORTEST  # as far as is known
        self._calibrator = Calibrator(
            loaded,
            calibration_options(sample.evaluator.workload.seq_len),
            progress=console.track,
            should_stop=self._ended,
            notice=self.warnings.append,
        )

    def run(self) -> None:
        """Measure until nothing is left, the minutes are over, or somebody stops it."""
        for one in self._left:
            method, options, _ = _method(one.plan)
            self._calibrator.expect(method, **options)
        try:
            self._baseline(self._text, "measuring")
            self._put(self.rows[0])
            while (row := self._next()) is not None:
                if row in self._left:
                    self._measure(row)
                    self._left.remove(row)
                else:
                    self._ask(row)
        except Interrupted:
            names = ", ".join(row.plan for row in self._left) or "needles"
            self.warnings.append(f"not finished: {names}; repeat the command to resume")

        if any(x.keeps and not x.served and x.depth == WEIGHTS for x in self.rows):
            tokens, exact = self._samples[0].ids.shape[1], max(one.exact for one in PLANS)
            self.warnings.append(
                f"plans that are torch only leave {exact} tokens per sequence uncompressed, of "
                f"{tokens:,} here and {self._context:,} when serving; accuracy may be lower "
                "there"
            )

    def inputs(self) -> dict[str, Any]:
        """Return what a result says of the model and the text."""
        samples = self._samples
        return {
            "fingerprint": self._loaded.fingerprint,
            "text": [one.name for one in samples],
            "sequences": sum(len(one.ids) for one in samples),
            "seq_len": int(samples[0].ids.shape[1]),
            "dtype": str(self._loaded.dtype).removeprefix("torch."),
            "device": str(self._loaded.device),
        }

    def best_own(self) -> tuple[str, Plan]:
        """Return the plan of no engine's that keeps enough and fits most users."""
        own = [one for one in self.rows if not one.served and one.depth == WEIGHTS]
        best = best_of(own, self._keep) if own else None
        if best is None:
            raise FailedError(f"no kvprof plan reaches --keep {self._keep:g}")
        return best.plan, self._plans[best.plan]

    def _half(self, evaluator: Evaluator) -> Half:
        cache = EvaluationCache(cache_folder(), evaluator.digest, self.warnings.append)
        return Half(evaluator, cache)

    def _baseline(self, half: Half, doing: str) -> dict[str, Any]:
        """Return the uncompressed model's figures, found or measured."""
        if (found := half.cache.get(BASELINE)) is not None:
            return found
        with console.track(f"{doing} 16 bits", half.evaluator.baseline_steps) as bar:
            return half.baseline(bar.advance, self._ended)

    def _next(self) -> AdvisedPlan | None:
        """Return what decides most: the plan to be named, then served ones that fit more users.

        A row that is measured is returned to be asked for needles; None is the end.
        """
        best = best_of(self.rows, self._keep)
        if best in self._left:
            return best
        least = 0 if best is None else best.users or 0
        served = [x for x in self._left if x.engine == self.rows[0].engine]
        if more := [x for x in served if (x.users or 0) > least]:
            return max(more, key=_users)
        asked = [
            x
            for x in self.rows[1:]
            if x.depth == WEIGHTS and x.needles is None and (x.keeps_at_least or 0) >= self._keep
        ]
        if self._finds and best in asked:
            return best
        if self._left:
            return max(self._left, key=_users)
        return max(asked, key=_users) if self._finds and asked else None

    def _measure(self, row: AdvisedPlan) -> None:
        try:
            plan = self._plan(row.plan)
            with console.track(f"measuring {row.plan}", self._text.evaluator.steps(plan)) as bar:
                found = self._text.evaluation(plan, plan_digest(plan), bar.advance, self._ended)
        except KvprofError as problem:  # then another model's figure is none of this one's
            self._put(row, **_NOTHING, refused=f"{row.plan}: {problem}")
            return
        interval = found["relative_accuracy_interval"]
        self._put(
            row,
            **_NOTHING
            | {
                "keeps": found["relative_accuracy"],
                "keeps_interval": None if interval is None else list(interval),
                "keeps_tokens": found["decoded_tokens"],
                "keeps_at_least": None if interval is None else interval[0],
                "measured_on": self._loaded.spec,
                "measured_here": True,
            },
        )

    def _ask(self, row: AdvisedPlan) -> None:
        """Ask a plan for needles, where the uncompressed model finds some."""
        if self._needles is None:
            try:
                self._needles = self._half(self._asking())
                task = self._baseline(self._needles, "asking")["tasks"][_TASK]
            except KvprofError as problem:
                self._finds = False
                self.warnings.append(f"no needles: {problem}")
                return
            found, asked = _needle_counts(task)
            self._put(self.rows[0], needles=[found, asked])
            if not task["judges"]:
                self._finds = False
                self.warnings.append(
                    f"the uncompressed model finds {found} of {asked} needles: plans are not asked"
                )
                return
        plan = self._plan(row.plan)
        with console.track(f"asking {row.plan}", self._needles.evaluator.steps(plan)) as bar:
            evaluation = self._needles.evaluation(plan, plan_digest(plan), bar.advance, self._ended)
        self._put(row, needles=_needle_counts(evaluation["tasks"][_TASK]))

    def _asking(self) -> Evaluator:
        """Return what evaluates needles; one sequence of text is there, as there must be some."""
        loaded = self._loaded
        items = select_tasks(loaded, (_TASK,), default_task_items(loaded)).items
        text = self._samples[0].part(0, len(self._samples[0].ids))
        return Evaluator(loaded, [text], items, EvaluationSettings())

    def _put(self, row: AdvisedPlan, **found: Any) -> AdvisedPlan:
        """Replace a row by what was found of it."""
        place = next(i for i, one in enumerate(self.rows) if one.plan == row.plan)
        self.rows[place] = row.model_copy(update={**found, "depth": WEIGHTS})
        return self.rows[place]

    def _plan(self, name: str) -> Plan:
        """Make a plan, by its bytes at the context that was asked for."""
        if name in self._plans:
            return self._plans[name]
        method, options, rate = _method(name)
        family = self._calibrator.family(method, **options)
        self._plans[name] = plan_of(self._loaded, family, rate, None, self._context)
        return self._plans[name]


def _method(name: str) -> tuple[str, dict[str, Any], float | None]:
    """Return a plan's method, its options and its rate."""
    plan = next(one for one in PLANS if one.name == name)
    return plan.method, typed_options(plan.method, options_in(plan.options)), plan.rate


def _users(row: AdvisedPlan) -> float:
    return row.users or 0


def _needle_counts(task: Mapping[str, Any]) -> list[int]:
    """Return the needles found and asked for."""
    return [round(task["accuracy"] * task["items"]), task["items"]]
