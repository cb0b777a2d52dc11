"""The run of ``kvprof eval``: baseline, plans and harness under one progress bar."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvprof import console
from kvprof.commands.sample import Sample
from kvprof.interrupt import Stop

if TYPE_CHECKING:
    from kvprof.evaluation.harness import HarnessSettings
    from kvprof.methods.plan import Plan
    from kvprof.models.load import LoadedModel

__all__ = ["EvalRun", "run_evaluations"]

# What a plan keeps to know its calibration data again; of no use to a reader, and long.
_PRIVATE = ("files", "digest", "sketch")


@dataclass
class EvalRun:
    """What was found.

    Attributes
    ----------
    data : dict
        Of the result.
    warnings : list of str
    complete : bool
    failure : Exception or None
        What ended the run early; the data holds what was measured before.
    """

    data: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    complete: bool = True
    failure: Exception | None = None


def run_evaluations(
    loaded: "LoadedModel",
    sample: Sample,
    plans: "list[Plan]",
    harness: "HarnessSettings | None",
    stop: Stop,
) -> EvalRun:
    """Evaluate the uncompressed model and every plan.

    An error in the middle keeps what was measured before it; one in the baseline leaves nothing.

    Parameters
    ----------
    loaded : LoadedModel
    sample : Sample
    plans : list of Plan
    harness : HarnessSettings or None
        What of lm-evaluation-harness is run on each of them too.
    stop : Stop
        Asked after each batch.
    """
    evaluator = sample.evaluator
    data: dict[str, Any] = {
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "context": evaluator.context,
        "evaluations": [],
        "harness": None,
    }
    run = EvalRun(data)
    total = evaluator.baseline_steps + len(plans) * evaluator.steps
    with console.track(f"evaluating {loaded.spec}", total) as progress:
        progress.describe(f"{loaded.spec}, uncompressed")
        baseline = evaluator.baseline(progress.advance, stop)
        run.complete = baseline["complete"]
        # Asked for by name, full width runs through the compressed cache like any other plan.
        if all(plan.method != "full" for plan in plans):
            data["evaluations"].append({**baseline, "plan": None})
        for plan in plans:
            if not run.complete:
                break
            progress.describe(f"{loaded.spec}, {plan.method}")
            try:
                evaluation = evaluator.evaluate(plan, progress.advance, stop)
            except Exception as failure:  # whatever it is, it costs nothing that was measured
                run.failure, run.complete = failure, False
                break
            run.warnings += evaluation["warnings"]
            run.complete = evaluation["complete"]
            data["evaluations"].append({**evaluation, "plan": _described(plan)})
            if stop() and plan is not plans[-1]:
                run.complete = False
    if harness is not None and run.complete:
        _run_harness(loaded, plans, harness, run, stop)
    return run


def _run_harness(
    loaded: "LoadedModel",
    plans: "list[Plan]",
    settings: "HarnessSettings",
    run: EvalRun,
    stop: Stop,
) -> None:
    from kvprof.evaluation.assembly import hidden_in_one_pass
    from kvprof.evaluation.harness import harness_rows, settings_described

    rows: list[dict[str, Any]] = []
    run.data["harness"] = {**settings_described(settings), "rows": rows}
    for plan in [None, *(plan for plan in plans if plan.method != "full")]:
        if stop():
            run.complete = False
            return
        name = "uncompressed" if plan is None else plan.method
        hidden = None if plan is None else hidden_in_one_pass(plan)
        blind = list(dict.fromkeys(row["task"] for row in rows if row["single_pass"]))
        if hidden and blind:
            text = (
                f"{name} is not measured on {', '.join(blind)}: lm-eval scores choices in a single "
                f"pass, which does not show the cost of {hidden}"
            )
            console.warn(text)
            run.warnings.append(text)
        if hidden and {row["task"] for row in rows} <= set(blind):
            continue
        try:
            with console.status(f"lm-eval, {loaded.spec}, {name}"):
                found = harness_rows(loaded, plan, settings)
            rows += [row for row in found if not (hidden and row["single_pass"])]
        except Exception as failure:
            run.failure, run.complete = failure, False
            return


def _described(plan: "Plan") -> dict[str, Any]:
    """Return what a reader wants to know of a plan beyond its rate."""
    from kvprof.methods.accounting import dim_rate, paper_rate

    return {
        "dim_rate": dim_rate(plan),
        "paper_rate": paper_rate(plan),
        "made": _public(plan.made),
    }


def _public(made: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _public(value) if isinstance(value, dict) else value
        for key, value in made.items()
        if key not in _PRIVATE
    }
