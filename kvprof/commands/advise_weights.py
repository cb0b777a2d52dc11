"""The weights depth of ``kvprof advise``: what plans keep on the model itself, while minutes last.

It imports torch: only with ``--minutes``.
"""

import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from kvprof import console
from kvprof.commands.loading import model_inputs
from kvprof.commands.options import SampleOptions
from kvprof.commands.planning import calibration_options, load_sample, method_calibrator, plan_of
from kvprof.errors import FailedError, Interrupted, KvprofError
from kvprof.evaluation.data import TaskSelection
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
from kvprof.results.advise import TORCH, AdvisedPlan, best_of

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
    # Half of what eval takes on a CPU: more plans in the minutes.
    count = 16 if main_device(request.device).type == "cpu" else None
    sample = load_sample(
        {"model": request.model and hub_name(request.model), **request.how},
        **SampleOptions(text=["prose", "code"], sequences=count, tasks="none").sample,
        settings=EvaluationSettings(),
        laid=lambda *_: None,
    )
    loaded, text = sample.evaluator.loaded, sample.evaluator

    def asking(selection: TaskSelection) -> tuple[Half, dict[str, Any], dict[str, Any]]:
        evaluator = Evaluator(loaded, text.samples, selection.items, text.settings)
        half = Half(evaluator, EvaluationCache(cache_folder(), evaluator.digest, warnings.append))
        with console.track(rows[0].plan, evaluator.baseline_steps) as bar:
            base = half.baseline(bar.advance, stop)
        return half, base, replace(sample, evaluator=evaluator, selection=selection).inputs()

    @cache
    def calibrator(length: int) -> Calibrator:
        options = calibration_options(min(length, loaded.context_length))
        return method_calibrator(loaded, options, stop, warnings.append)

    @cache
    def plan_at(index: int) -> Plan:
        own = PLANS[index]
        options = typed_options(own.method, options_in(own.options))
        family = calibrator(own.calibrate or described["seq_len"]).family(own.method, **options)
        return plan_of(loaded, family, own.rate, None, context)

    lost, described = list[str](), sample.inputs()
    with graceful_interrupt() as stop, suppress(Interrupted):
        problem: object = "the uncompressed model finds none"
        try:
            asked = select_tasks(loaded, (_TASK,), default_task_items(loaded))
            half, base, described = asking(asked)
            rows[0] = rows[0].model_copy(update={"needles": _needles(base)})
        except KvprofError as failure:  # its context or its memory is too small for them
            problem = failure
        if not (rows[0].needles or [0])[0]:
            warnings.append(f"no needles: {problem}")
            half, base, described = asking(sample.selection)
        for index in _order(rows, request.keep):
            if half.measured and time.monotonic() >= until:  # what was begun is kept
                break
            row = rows[index]
            try:
                plan = plan_at(index)
                with console.track(row.plan, half.evaluator.steps(plan)) as bar:
                    found = half.evaluation(plan, plan_digest(plan), bar.advance, stop)
                rows[index] = row.model_copy(update=_says(found, base, loaded.spec))
            except KvprofError as failure:
                said = row.model_dump(include={"plan", "engine", "command"})
                rows[index] = AdvisedPlan(**said, refused=f"{row.plan}: {failure}")
    if left := [row.plan for row in rows if row.record is not None]:
        warnings.append(f"not finished: {', '.join(left)}; repeat the command to resume")
    inputs = {**model_inputs(loaded), **described}
    if request.save is not None:
        own = [row for row in rows if row.engine == TORCH and row.record is None]
        try:
            if (best := best_of(own, request.keep)) is None:
                raise FailedError(f"none of kvprof's own was measured to keep {request.keep:g}")
            save_plan(plan_at(rows.index(best)), request.save, force=request.force)
            inputs["saved"] = str(request.save)
        except KvprofError as failure:
            lost.append(f"--save {request.save}: {failure}")
    return inputs, not stop.requested, lost


def _order(rows: list[AdvisedPlan], keep: float) -> list[int]:
    """Return what is measured: served plans from the named one on, then the others."""
    best, known = best_of(rows, keep), [row for row in rows[1:] if row.refused is None]
    known.sort(key=lambda row: (row.engine != rows[0].engine, row is not best, -(row.users or 0)))
    return [rows.index(row) for row in known]


def _says(found: dict[str, Any], base: dict[str, Any], model: str) -> dict[str, Any]:
    """Return what an evaluation on the model itself, beside the uncompressed one, says of a row."""
    interval, needles, most = found["relative_accuracy_interval"], _needles(found), _needles(base)
    return {
        "keeps": found["relative_accuracy"],
        "keeps_interval": interval and list(interval),
        "keeps_tokens": found["decoded_tokens"],
        "keeps_at_least": interval and interval[0],
        "finds_at_least": needles[0] / most[0] if needles else None,
        **{"measured_on": model, "measured_here": True, "record": None, "needles": needles or None},
    }


def _needles(found: dict[str, Any]) -> list[int]:
    """Return how many needles an evaluation found, and how many it asked for, if any."""
    task = found["tasks"].get(_TASK)
    return [round(task["accuracy"] * task["items"]), task["items"]] if task else []
