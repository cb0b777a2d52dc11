"""The weights depth of ``kvprof advise``: what plans keep on the model itself, while minutes last.

It imports torch: only with ``--minutes``.
"""

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from kvprof import console
from kvprof.commands.loading import Sample, calibration_options, load_sample, model_inputs, plan_of
from kvprof.commands.options import SampleOptions
from kvprof.errors import FailedError, Interrupted, KvprofError, UsageError
from kvprof.evaluation.evaluation_cache import BASELINE, EvaluationCache, cache_folder, plan_digest
from kvprof.evaluation.evaluator import EvaluationSettings
from kvprof.evaluation.frontier import Half
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
    sample = _sample(request, warnings)
    evaluator, loaded = sample.evaluator, sample.evaluator.loaded
    inputs = {**model_inputs(loaded), **sample.inputs()}
    half = Half(evaluator, EvaluationCache(cache_folder(), evaluator.digest, warnings.append))
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

        try:
            with console.track(rows[0].plan, evaluator.baseline_steps) as bar:
                base = half.cache.get(BASELINE) or half.baseline(bar.advance, ended)
            rows[0] = rows[0].model_copy(update=_needles(base))
            for index in _order(rows, request.keep):
                row, own = rows[index], PLANS[index]
                try:
                    options = typed_options(own.method, options_in(own.options))
                    family = calibrator.family(own.method, **options)
                    plan = plan_of(loaded, family, own.rate, None, request.context)
                    with console.track(own.name, evaluator.steps(plan)) as bar:
                        found = half.evaluation(plan, plan_digest(plan), bar.advance, ended)
                    rows[index], made[own.name] = _kept(row, found, loaded.spec), plan
                except KvprofError as problem:
                    said = row.model_dump(include={"plan", "engine", "command"})
                    rows[index] = AdvisedPlan(**said, refused=f"{own.name}: {problem}")
        except Interrupted:
            left = [row.plan for row in rows if row.record is not None]
            warnings.append(f"not finished: {', '.join(left)}; repeat the command to resume")
    lost = []
    try:
        if request.save is not None:
            kvprofs = [row for row in rows if row.engine == TORCH and row.plan in made]
            if (best := best_of(kvprofs, request.keep)) is None:
                raise FailedError(f"no kvprof plan that was measured keeps {request.keep:g}")
            save_plan(made[best.plan], request.save, force=request.force)
            inputs["saved"] = str(request.save)
    except KvprofError as problem:
        lost.append(f"--save {request.save}: {problem}")
    return inputs, not stop.requested, lost


def _sample(request: "AdviseRequest", warnings: list[str]) -> Sample:
    """Load the model, with text and, where its context has room for them, needles."""
    # On a CPU half of what eval takes: twice as many plans in the minutes.
    count = 16 if main_device(request.device).type == "cpu" else None

    options = SampleOptions(text=["prose", "code"], sequences=count, tasks=_TASK).sample
    how = {"model": request.model and hub_name(request.model), **request.how}
    load = partial(load_sample, how, settings=EvaluationSettings(), laid=lambda *_: None)
    try:
        return load(**options)
    except UsageError as problem:
        sample = load(**options | {"tasks": "none"})
        warnings.append(f"no needles: {problem}")
        return sample


def _order(rows: list[AdvisedPlan], keep: float) -> list[int]:
    """Return which rows to measure: the named plan's, then served ones', most users first."""
    best = best_of(rows, keep)
    return sorted(
        (index for index, row in enumerate(rows) if index and row.refused is None),
        key=lambda one: (
            rows[one].engine != rows[0].engine,
            rows[one] is not best,
            -(rows[one].users or 0),
        ),
    )


def _kept(row: AdvisedPlan, found: dict[str, Any], model: str) -> AdvisedPlan:
    """Return a row with what an evaluation on the model itself says of it."""
    interval = found["relative_accuracy_interval"]
    return row.model_copy(
        update={
            "keeps": found["relative_accuracy"],
            "keeps_interval": interval and list(interval),
            "keeps_tokens": found["decoded_tokens"],
            "keeps_at_least": interval and interval[0],
            **{"measured_on": model, "measured_here": True, "record": None},
            **_needles(found),
        }
    )


def _needles(found: dict[str, Any]) -> dict[str, list[int] | None]:
    """Return how many needles were found, and asked for."""
    task = found["tasks"].get(_TASK)
    return {"needles": task and [round(task["accuracy"] * task["items"]), task["items"]]}
