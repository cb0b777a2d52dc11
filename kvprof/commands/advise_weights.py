"""The weights depth of ``kvprof advise``: what plans keep on the model itself, while minutes last.

It imports torch: only with ``--minutes``.
"""

import time
from typing import TYPE_CHECKING, Any

from kvprof import console
from kvprof.commands.loading import model_inputs
from kvprof.commands.options import SampleOptions
from kvprof.commands.planning import calibration_options, load_sample, plan_of
from kvprof.errors import FailedError, Interrupted, KvprofError
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
from kvprof.models.placement import main_device
from kvprof.moments.calibrator import Calibrator
from kvprof.results.advise import TORCH, AdvisedPlan, best_of

if TYPE_CHECKING:
    from kvprof.commands.advise import AdviseRequest

__all__ = ["measure"]

#: Asks for a needle.
_TASK = "niah_single_1"


def measure(
    request: "AdviseRequest", rows: list[AdvisedPlan], warnings: list[str], *, until: float
) -> tuple[dict[str, Any], bool, list[str]]:
    """Measure plans and replace their rows, until the time is over; then save kvprof's best.

    Returns what the result says of it, whether nobody stopped it, and why nothing was saved.
    """
    # Half of what eval takes on a CPU: twice as many plans in the minutes.
    count = 16 if main_device(request.device).type == "cpu" else None
    sample = load_sample(
        {"model": request.model and hub_name(request.model), **request.how},
        **SampleOptions(text=["prose", "code"], sequences=count, tasks="none").sample,
        settings=EvaluationSettings(),
        laid=lambda *_: None,
    )
    loaded = sample.evaluator.loaded
    inputs = {**model_inputs(loaded), **sample.inputs()}
    halves = [_half(sample.evaluator, warnings)]
    try:
        halves.append(_half(_questions(sample.evaluator), warnings))
    except KvprofError as problem:  # no prompt fits
        warnings.append(f"no needles: {problem}")
    made: dict[str, Plan] = {}  # by the row's name
    with graceful_interrupt() as stop:

        def ended() -> bool:
            return stop() or time.monotonic() >= until

        calibrator = Calibrator(
            loaded,
            calibration_options(inputs["seq_len"]),
            progress=console.track,
            should_stop=ended,
            notice=warnings.append,
        )

        def evaluate(half: Half, name: str) -> dict[str, Any]:
            plan, what = made[name], "text" if half is halves[0] else "needles"
            with console.track(f"{name}: {what}", half.evaluator.steps(plan)) as bar:
                return half.evaluation(plan, plan_digest(plan), bar.advance, ended)

        def baseline(half: Half) -> dict[str, Any]:
            if (known := half.cache.get(BASELINE)) is not None:
                return known
            with console.track(rows[0].plan, half.evaluator.baseline_steps) as bar:
                return half.baseline(bar.advance, ended)

        def measured(index: int) -> AdvisedPlan:
            row, own = rows[index], PLANS[index]
            try:
                options = typed_options(own.method, options_in(own.options))
                family = calibrator.family(own.method, **options)
                made[own.name] = plan_of(loaded, family, own.rate, None, request.context)
                return _kept(row, evaluate(halves[0], own.name), loaded.spec)
            except KvprofError as problem:
                said = row.model_dump(include={"plan", "engine", "command"})
                return AdvisedPlan(**said, refused=f"{own.name}: {problem}")

        def asked(half: Half, row: AdvisedPlan) -> AdvisedPlan:
            try:
                base = baseline(half)
                rows[0] = rows[0].model_copy(update=_needles(base))
                if not base["tasks"][_TASK]["accuracy"]:
                    raise FailedError("the uncompressed model finds none")
                return row.model_copy(update=_needles(evaluate(half, row.plan)))
            except KvprofError as problem:
                warnings.append(f"no needles: {problem}")
                halves.remove(half)
                return row

        try:
            baseline(halves[0])
            for group in _order(rows, request.keep):
                for index in group:
                    rows[index] = measured(index)
                for index in group:
                    if len(halves) > 1 and (rows[index].keeps_at_least or 0) >= request.keep:
                        rows[index] = asked(halves[1], rows[index])
        except Interrupted:
            left = [row.plan for row in rows if row.record is not None] or ["needles"]
            warnings.append(f"not finished: {', '.join(left)}; repeat the command to resume")
    lost = []
    try:
        if request.save is not None:
            own = [row for row in rows if row.engine == TORCH and row.record is None]
            if (best := best_of(own, request.keep)) is None:
                raise FailedError(f"no kvprof plan that was measured keeps {request.keep:g}")
            save_plan(made[best.plan], request.save, force=request.force)
            inputs["saved"] = str(request.save)
    except KvprofError as problem:
        lost.append(f"--save {request.save}: {problem}")
    return inputs, not stop.requested, lost


def _half(evaluator: Evaluator, warnings: list[str]) -> Half:
    """Return an evaluator with what is known of its evaluations."""
    return Half(evaluator, EvaluationCache(cache_folder(), evaluator.digest, warnings.append))


def _questions(text: Evaluator) -> Evaluator:
    """Return what asks for needles, beside one sequence of text."""
    items = select_tasks(text.loaded, (_TASK,), default_task_items(text.loaded)).items
    first = text.samples[0].part(0, len(text.samples[0].ids))
    return Evaluator(text.loaded, [first], items, text.settings)


def _order(rows: list[AdvisedPlan], keep: float) -> tuple[list[int], list[int]]:
    """Return which rows to measure: served ones from the named one on, most users first; others."""
    best = best_of(rows, keep)
    known = [index for index, row in enumerate(rows) if index and row.refused is None]
    known.sort(key=lambda one: (rows[one] is not best, -(rows[one].users or 0)))
    served = [one for one in known if rows[one].engine == rows[0].engine]
    return served, [one for one in known if one not in served]


def _kept(row: AdvisedPlan, found: dict[str, Any], model: str) -> AdvisedPlan:
    """Return a row with what an evaluation on the model itself says of it."""
    interval = found["relative_accuracy_interval"]
    return row.model_copy(
        update={
            "keeps": found["relative_accuracy"],
            "keeps_interval": interval and list(interval),
            "keeps_tokens": found["decoded_tokens"],
            "keeps_at_least": interval and interval[0],
            **{"measured_on": model, "measured_here": True, "record": None, "needles": None},
        }
    )


def _needles(found: dict[str, Any]) -> dict[str, list[int]]:
    """Return how many needles were found, and asked for."""
    task = found["tasks"][_TASK]
    return {"needles": [round(task["accuracy"] * task["items"]), task["items"]]}
