"""The weights depth of ``kvprof advise``: what plans keep on the model itself, while minutes last.

It imports torch: only with ``--minutes``.
"""

import time
from dataclasses import replace
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
from kvprof.moments.calibrator import Calibrator
from kvprof.results.advise import TORCH, AdvisedPlan, at_least, best_of

if TYPE_CHECKING:
    from kvprof.commands.advise import AdviseRequest

_TASK = "niah_single_1"


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
    loaded, selection = sample.evaluator.loaded, sample.selection
    try:
        selection = select_tasks(loaded, (_TASK,), default_task_items(loaded))
    except KvprofError as problem:  # a context too short for them
        warnings.append(f"no needles: {problem}")
    text = sample.evaluator
    evaluator = Evaluator(loaded, text.samples, selection.items, text.settings)
    sample = replace(sample, evaluator=evaluator, selection=selection)
    inputs = {**model_inputs(loaded), **sample.inputs()}
    half = Half(evaluator, EvaluationCache(cache_folder(), evaluator.digest, warnings.append))
    with graceful_interrupt() as stop:

        def ended() -> bool:
            return stop() or time.monotonic() >= until

        @cache
        def calibrator(length: int) -> Calibrator:
            options = calibration_options(min(length, loaded.context_length))
            return method_calibrator(loaded, options, ended, warnings.append)

        @cache
        def plan_at(index: int) -> Plan:
            own = PLANS[index]
            options = typed_options(own.method, options_in(own.options))
            calibrated = calibrator(own.calibrate or inputs["seq_len"])
            family = calibrated.family(own.method, **options)
            return plan_of(loaded, family, own.rate, None, context)

        try:
            with console.track(rows[0].plan, evaluator.baseline_steps) as bar:
                base = half.baseline(bar.advance, ended)
            rows[0] = rows[0].model_copy(update={"needles": _needles(base) or None})
            for index in _order(rows, request.keep):
                row = rows[index]
                try:
                    plan = plan_at(index)
                    with console.track(row.plan, evaluator.steps(plan)) as bar:
                        found = half.evaluation(plan, plan_digest(plan), bar.advance, ended)
                    says = _says(found, _needles(base)[:1], loaded.spec)
                    rows[index] = row.model_copy(update=says)
                except KvprofError as problem:
                    said = row.model_dump(include={"plan", "engine", "command"})
                    rows[index] = AdvisedPlan(**said, refused=f"{row.plan}: {problem}")
        except Interrupted:
            left = [row.plan for row in rows if row.record is not None]
            warnings.append(f"not finished: {', '.join(left)}; repeat the command to resume")
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


def _order(rows: list[AdvisedPlan], keep: float) -> list[int]:
    """Return what is measured: an engine after another, the named one and most users first."""
    engines, best = [row.engine for row in rows], best_of(rows, keep)

    def rank(index: int) -> tuple[int, bool, float]:
        row = rows[index]
        return engines.index(row.engine), row is not best, -(row.users or 0)

    return sorted((one for one in range(1, len(rows)) if rows[one].refused is None), key=rank)


def _says(found: dict[str, Any], most: list[int], model: str) -> dict[str, Any]:
    """Return what an evaluation on the model itself says of a row; without a plan it finds most."""
    interval, needles = found["relative_accuracy_interval"], _needles(found)
    return {
        "keeps": found["relative_accuracy"],
        "keeps_interval": interval and list(interval),
        "keeps_tokens": found["decoded_tokens"],
        "keeps_at_least": at_least(interval, *needles[:1], *most),
        **{"measured_on": model, "measured_here": True, "record": None},
        "needles": needles or None,
    }


def _needles(found: dict[str, Any]) -> list[int]:
    """Return how many needles an evaluation found, and how many it asked for, if any."""
    task = found["tasks"].get(_TASK)
    return [round(task["accuracy"] * task["items"]), task["items"]] if task else []
