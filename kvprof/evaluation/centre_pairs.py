"""How few rotary pairs a plan has to store without their mean (`kvprof.analysis.centring`)."""

from collections.abc import Callable

from kvprof.errors import Interrupted
from kvprof.evaluation.data import text_samples
from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.progress import Progress
from kvprof.sources.grammar import Source

__all__ = ["fewest_pairs"]

# Kernels will pay for each pair.
_TRIED = (0, 4, 8, 16)
_TOLERANCE = 0.002
# Sequences and tokens of each, by kind of device.
_CPU_SHAPE, _GPU_SHAPE = (8, 256), (32, 1024)


def fewest_pairs(
    loaded: LoadedModel,
    plan: Plan,
    again: Callable[[int], Plan],
    text: Source,
    *,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> Plan:
    """Return a plan with as few pairs as keep its accuracy, and what each number kept.

    The fewest from which on every number that is tried keeps within 0.002 of what all pairs keep,
    on text that plans are calibrated on.

    Parameters
    ----------
    loaded : LoadedModel
    plan : Plan
        Centred in all pairs.
    again : callable
        From a number of pairs to the plan with as many, the same otherwise.
    text : Source
        Calibration text.
    progress : Progress
    should_stop : callable
        Asked after each batch.

    Returns
    -------
    Plan
        With ``made["centre"]``, the number of pairs, and ``made["centre_trials"]``.

    Raises
    ------
    Interrupted
        When `should_stop` said so.
    UsageError
        When the text is shorter than one sequence.
    """
    sequences, length = _CPU_SHAPE if loaded.device.type == "cpu" else _GPU_SHAPE
    length = min(length, loaded.context_length)
    samples = text_samples(loaded, [text], seq_len=length, sequences=sequences, calibrating=True)
    evaluator = Evaluator(loaded, samples, [], EvaluationSettings())
    every = max(len(layer.rotary_pairs or ()) for layer in loaded.layout.layers)
    counts = [count for count in _TRIED if count < every]
    plans = {every: plan, **{count: again(count) for count in counts}}
    kept: dict[int, float] = {}
    total = evaluator.baseline_steps + sum(evaluator.steps(one) for one in plans.values())
    with progress("choosing pairs without their mean", total) as bar:
        evaluator.baseline(bar.advance, should_stop)
        for count in plans:
            found = evaluator.evaluate(plans[count], bar.advance, should_stop)
            if not found["complete"]:
                raise Interrupted("interrupted while choosing pairs")
            kept[count] = found["relative_accuracy"]
    chosen = every
    for count in reversed(counts):
        if kept[count] < kept[every] - _TOLERANCE:
            break
        chosen = count
    trials = {
        "text": text.name,
        "tokens": samples[0].ids.numel(),
        "pairs": every,
        "kept": {str(count): kept[count] for count in sorted(kept)},
    }
    best = plans[chosen]
    best.made.update(centre=chosen, centre_trials=trials)
    return best
