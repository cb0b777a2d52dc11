"""From what the passes found to one evaluation, as JSON values."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprof.errors import UsageError
from kvprof.evaluation.data import TaskItem, TextSample
from kvprof.evaluation.scores import Pair, TokenScores, task_figures, text_figures, worst_tokens
from kvprof.evaluation.workload import TextBatch, Workload
from kvprof.methods.accounting import bytes_at, rate
from kvprof.methods.plan import Placement, Plan
from kvprof.methods.tokens import quantises
from kvprof.models.load import LoadedModel

__all__ = [
    "EvaluationSettings",
    "Found",
    "assembled",
    "hidden_in_one_pass",
    "refuse_hidden",
    "without_intervals",
]

_DEVIATION = 0.01  # of measured bytes from the account
_BEFORE = 8  # tokens shown in front of a worst one


@dataclass(frozen=True)
class EvaluationSettings:
    """How a sample is evaluated.

    Attributes
    ----------
    teacher_forced : bool
        Text in a single pass through the cache, instead of prefill and decode. The same tokens
        are scored; tasks are decoded all the same. Plans of which a single pass does not show all
        (`hidden_in_one_pass`) are refused.
    batch_size : int or None
        Sequences at once; None by device and memory.
    worst : int
        Tokens of largest divergence to name.
    resamples : int
        Of the bootstrap.
    seed : int
        Of the bootstrap.
    """

    teacher_forced: bool = False
    batch_size: int | None = None
    worst: int = 10
    resamples: int = 1000
    seed: int = 0


@dataclass(eq=False)
class Found:
    """What one evaluation has found so far.

    Attributes
    ----------
    began : float
        By `time.perf_counter`.
    text : list of (TextBatch, TokenScores)
    answers : dict
        Index of a question in the list of all to whether it was answered right.
    measured : int
        Bytes that the caches of all text batches held at their ends.
    notes : list of str
        What they stored otherwise than the plan says.
    complete : bool
        Whether nothing was left out.
    """

    began: float = field(default_factory=time.perf_counter)
    text: list[tuple[TextBatch, TokenScores]] = field(default_factory=list)
    answers: dict[int, bool] = field(default_factory=dict)
    measured: int = 0
    notes: list[str] = field(default_factory=list)
    complete: bool = True


def _because(notes: list[str]) -> str:
    return f" ({'; '.join(notes)})" if notes else ""


def assembled(
    loaded: LoadedModel,
    plan: Plan,
    workload: Workload,
    samples: Sequence[TextSample],
    items: Sequence[TaskItem],
    settings: EvaluationSettings,
    *,
    found: Found,
    base_answers: dict[int, bool],
) -> dict[str, Any]:
    """Put one evaluation together from what was done.

    Parameters
    ----------
    loaded : LoadedModel
    plan : Plan
    workload : Workload
    samples : sequence of TextSample
    items : sequence of TaskItem
    settings : EvaluationSettings
    found : Found
        By this plan.
    base_answers : dict
        Index of a question to whether the uncompressed model answered it right.
    """
    itemsize, context = loaded.dtype.itemsize, workload.context
    pairs: dict[str, Pair] = {}
    for index, sample in enumerate(samples):
        own = [
            (batch.base, scores)
            for batch, scores in found.text
            if batch.sample == index and batch.base is not None
        ]
        if own:
            base, other = (TokenScores.joined(part) for part in zip(*own, strict=True))
            pairs[sample.name] = Pair(base, other)
    text = text_figures(pairs, settings.resamples, settings.seed)
    tasks = task_figures(
        items,
        [base_answers.get(index) for index in range(len(items))],
        [found.answers.get(index) for index in range(len(items))],
        settings.resamples,
        settings.seed,
    )
    by_name = {sample.name: sample for sample in samples}
    worst = worst_tokens(
        pairs,
        settings.worst,
        workload.start,
        lambda name, sequence, position: _described(loaded, by_name[name], sequence, position),
    )
    # The last token of a sequence is predicted, never fed.
    seen = workload.seq_len - 1
    account = bytes_at(plan, seen, itemsize=itemsize).total
    measured = found.measured / text["sequences"]
    warnings = []
    if found.measured and abs(measured - account) > _DEVIATION * account:
        warnings.append(
            f"{plan.method}: the cache held {measured:,.0f} bytes per sequence of {seen:,} tokens, "
            f"its account says {account:,}{_because(found.notes)}; rates rest on the account"
        )
    return {
        "method": plan.method,
        "rate": rate(plan, context, itemsize=itemsize),
        "bytes_per_token": bytes_at(plan, context, itemsize=itemsize).total / context,
        "context": context,
        **text,
        "tasks": tasks,
        "worst_tokens": worst,
        "protocol": "teacher_forced" if settings.teacher_forced else "decode",
        "measured_bytes": measured,
        "accounted_bytes": account,
        "seconds": time.perf_counter() - found.began,
        "complete": found.complete,
        "warnings": warnings,
    }


def hidden_in_one_pass(plan: Plan) -> str | None:
    """Return in words what of a plan a single pass cannot show; None where it shows all of it.

    A pass attends to its own tokens before they are quantised or evicted, at the rank of the level
    that they have after the pass, and with a lazy plan or bases of its own exactly (see
    `kvprof.methods.plan`); with nothing stored before it, that is all it attends to. Decoding reads
    what is stored at each step, so a single pass stands for it only where nothing of that matters:
    where every token is stored once, as it is attended to, and stays so.

    Parameters
    ----------
    plan : Plan
    """
    eviction = plan.eviction
    whole = [layer for layer in plan.layers if layer.sliding_window is None]  # others keep a window
    groups = [group for layer in whole for group in (*layer.keys.groups, *layer.values.groups)]
    projected = any(
        layer.keys.placement is not Placement.NONE or layer.values.projected
        for layer in plan.layers
    )
    parts = {
        "quantising": any(quantises(plan, layer) for layer in plan.layers),
        "evicting": eviction is not None and eviction.keep < 1 and bool(whole),
        "moving tokens down levels": any(len(set(group.ranks)) > 1 for group in groups),
        "its projections (prefill is exact)": (plan.lazy or plan.online_bases) and projected,
    }
    return " and ".join(name for name, there in parts.items() if there) or None


def refuse_hidden(plan: Plan) -> None:
    """Refuse to score in a single pass what a single pass cannot show.

    Raises
    ------
    UsageError
        See `hidden_in_one_pass`.
    """
    if hidden := hidden_in_one_pass(plan):
        raise UsageError(
            f"{plan.method} has no figures teacher-forced: a single pass does not show the cost of "
            f"{hidden}"
        )


def without_intervals(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return the same with None for every interval: nothing was compared."""
    plain: dict[str, Any] = {}
    for key, value in evaluation.items():
        if isinstance(value, dict):
            plain[key] = without_intervals(value)
        else:
            plain[key] = None if key.endswith("interval") else value
    return plain


def _described(
    loaded: LoadedModel, sample: TextSample, sequence: int, position: int
) -> dict[str, Any]:
    """Name a token: its id, its text and the text in front of it, where there is a tokenizer."""
    ids = sample.ids[sequence].tolist()
    described: dict[str, Any] = {"token": ids[position], "text": None, "before": None}
    try:
        tokenizer = loaded.tokenizer()
    except UsageError:  # ids from a file, of a model without a tokenizer
        return described
    before = ids[max(0, position - _BEFORE) : position]
    return described | {
        "text": tokenizer.decode([ids[position]]),
        "before": tokenizer.decode(before),
    }
