"""How few rotary pairs a plan has to store without their mean (`kvprof.analysis.centring`)."""

from collections.abc import Callable

import numpy as np
import torch

from kvprof.errors import Interrupted
from kvprof.evaluation.data import TextSample
from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.moments.tokens import CalibrationTokens
from kvprof.progress import Progress

__all__ = ["ON_CPU", "ON_GPU", "fewest_pairs"]

# Kernels will pay for each pair.
_TRIED = (0, 4, 8, 16)
_TOLERANCE = 0.002
#: Tokens to choose on, and of a sequence, on a CPU and elsewhere.
ON_CPU, ON_GPU = (2048, 256), (32768, 1024)


def fewest_pairs(
    loaded: LoadedModel,
    plan: Plan,
    again: Callable[[int], Plan],
    text: CalibrationTokens,
    *,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> Plan:
    """Return a plan with as few pairs as keep its accuracy, and what each number kept.

    The fewest that keep within 0.002 of what all pairs keep, on text that plans are calibrated on.
    """
    length = max(map(len, text.sequences))
    rows = [row for row in text.sequences if len(row) == length]
    sample = TextSample(text.source.name, torch.from_numpy(np.stack(rows)))
    evaluator = Evaluator(loaded, [sample], [], EvaluationSettings())
    every = max(len(layer.rotary_pairs or ()) for layer in loaded.layout.layers)
    counts = [count for count in _TRIED if count < every]
    plans = {every: plan, **{count: again(count) for count in counts}}
    kept: dict[int, float] = {}
    total = evaluator.baseline_steps + sum(evaluator.steps(one) for one in plans.values())
    with progress("choosing the pairs to centre", total) as bar:
        evaluator.baseline(bar.advance, should_stop)
        for count in plans:
            found = evaluator.evaluate(plans[count], bar.advance, should_stop)
            if not found["complete"]:
                raise Interrupted("interrupted while choosing the pairs to centre")
            kept[count] = found["relative_accuracy"]
    # Where nothing is right nothing is kept, and all do.
    if None in kept.values():
        return plan
    chosen = min(count for count in kept if kept[count] >= kept[every] - _TOLERANCE)
    trials = {
        "text": sample.name,
        "tokens": sample.ids.numel(),
        "pairs": every,
        "kept": {str(count): kept[count] for count in sorted(kept)},
    }
    best = plans[chosen]
    best.made.update(centre=chosen, centre_trials=trials)
    return best
