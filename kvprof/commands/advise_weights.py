"""The weights depth of ``kvprof advise``: what plans keep on the model itself, while minutes last.

It imports torch: only with ``--minutes``.
"""

import time
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from kvprof import console
from kvprof.commands.loading import model_inputs
from kvprof.commands.options import SampleOptions
from kvprof.commands.planning import calibration_options, load_sample, method_calibrator, plan_of
from kvprof.errors import FailedError, Interrupted, KvprofError
from kvprof.evaluation.evaluation_cache import EvaluationCache, cache_folder, plan_digest
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
from kvprof.results.advise import TORCH, AdvisedPlan, best_of

if TYPE_CHECKING:
    from kvprof.commands.advise import AdviseRequest

_TASK = "niah_single_1"  # asks for a needle


def measure(
    request: "AdviseRequest",
    context: int,
    rows: list[AdvisedPlan],
    warnings: list[str],
    until: float,
) -> tuple[dict[str, Any], bool, list[str]]:
    """Measure rows while time lasts; return inputs, whether nobody stopped it, what was lost."""
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
    half_of = cache(lambda what: _half(sample.evaluator, what, warnings))
    with graceful_interrupt() as stop:

        def ended() -> bool:
            return stop() or time.monotonic() >= until

        calibration = calibration_options(inputs["seq_len"])
        calibrator = method_calibrator(loaded, calibration, ended, warnings.append)

        @cache
        def plan_at(index: int) -> Plan:
            own = PLANS[index]
            options = typed_options(own.method, options_in(own.options))
            family = calibrator.family(own.method, **options)
            return plan_of(loaded, family, own.rate, None, context)

        def found(index: int, what: str) -> dict[str, Any]:
            plan = plan_at(index) if index else None  # the first row is the uncompressed model
            half = half_of(what)
            steps = half.evaluator.steps(plan) if plan else half.evaluator.baseline_steps
            with console.track(f"{rows[index].plan}: {what}", steps) as bar:
                if plan is None:
                    return half.baseline(bar.advance, ended)
                return half.evaluation(plan, plan_digest(plan), bar.advance, ended)

        try:
            found(0, "text")
            for index, what in _work(rows, request.keep):
                row = rows[index]
                try:
                    says = _says(found(index, what), what, loaded.spec)
                    rows[index] = row.model_copy(update=says)
                except KvprofError as problem:
                    if what == "text":
                        said = row.model_dump(include={"plan", "engine", "command"})
                        rows[index] = AdvisedPlan(**said, refused=f"{row.plan}: {problem}")
                    elif (why := f"no needles: {problem}") not in warnings:
                        warnings.append(why)
        except Interrupted:
            left = [row.plan for row in rows if row.record is not None] or ["needles"]
            warnings.append(f"not finished: {', '.join(left)}; repeat the command to resume")
    if rows[0].needles and not rows[0].needles[0]:
        warnings.append("no needles: the uncompressed model finds none")
    lost = []
    if request.save is not None:
        own = [row for row in rows if row.engine == TORCH and row.record is None]
        try:
            if (best := best_of(own, request.keep)) is None:
                raise FailedError(f"no kvprof plan that was measured keeps {request.keep:g}")
            save_plan(plan_at(rows.index(best)), request.save, force=request.force)
            inputs["saved"] = str(request.save)
        except KvprofError as problem:
            lost.append(f"--save {request.save}: {problem}")
    return inputs, not stop.requested, lost


def _half(text: Evaluator, what: str, warnings: list[str]) -> Half:
    """Return what evaluates on the text, or asks for needles beside one sequence of it."""
    evaluator = text
    if what == "needles":
        items = select_tasks(text.loaded, (_TASK,), default_task_items(text.loaded)).items
        first = text.samples[0].part(0, len(text.samples[0].ids))
        evaluator = Evaluator(text.loaded, [first], items, text.settings)
    return Half(evaluator, EvaluationCache(cache_folder(), evaluator.digest, warnings.append))


def _work(rows: list[AdvisedPlan], keep: float) -> Iterator[tuple[int, str]]:
    """Yield which row is measured on what: served plans from the named one on, then the others.

    Needles come after a group's text, for plans that keep enough, if the model itself finds any.
    """
    best = best_of(rows, keep)
    known = [index for index, row in enumerate(rows) if index and row.refused is None]
    known.sort(key=lambda one: (rows[one] is not best, -(rows[one].users or 0)))
    for served in (True, False):
        group = [one for one in known if (rows[one].engine == rows[0].engine) is served]
        yield from ((index, "text") for index in group)
        enough = [one for one in group if (rows[one].keeps_at_least or 0) >= keep]
        if enough and rows[0].needles is None:
            yield 0, "needles"
        if rows[0].needles and rows[0].needles[0]:
            yield from ((index, "needles") for index in enough)


def _says(found: dict[str, Any], what: str, model: str) -> dict[str, Any]:
    """Return what an evaluation on the model itself says of a row."""
    if what == "needles":
        task = found["tasks"][_TASK]
        return {"needles": [round(task["accuracy"] * task["items"]), task["items"]]}
    interval = found["relative_accuracy_interval"]
    return {
        "keeps": found["relative_accuracy"],
        "keeps_interval": interval and list(interval),
        "keeps_tokens": found["decoded_tokens"],
        "keeps_at_least": interval and interval[0],
        **{"measured_on": model, "measured_here": True, "record": None, "needles": None},
    }
