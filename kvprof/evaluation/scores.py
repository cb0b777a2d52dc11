"""From one figure per decoded token to the figures of an evaluation, as JSON values."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprof.analysis.stats import binomial_tail, quantile, ratio_interval
from kvprof.evaluation.data import Scoring, TaskAnswer, TaskItem

__all__ = [
    "Pair",
    "TokenScores",
    "answer_lengths",
    "divergence",
    "perplexity",
    "score_tokens",
    "target_scores",
    "task_figures",
    "text_figures",
    "worst_tokens",
]

_TAIL = 0.999

#: Source, sequence and position to the token's id, its text and the text before it.
Describe = Callable[[str, int, int], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class TokenScores:
    """What a model made of every decoded token."""

    correct: NDArray[np.bool_]  # `[sequences, decoded]` bool: the likeliest token was the right one
    #: `[sequences, decoded]`: negative log-probability of the right one, in nats.
    loss: NDArray[np.float64]
    #: `[sequences, decoded]`: divergence from the uncompressed model, in nats.
    kl: NDArray[np.float64]

    @property
    def finite(self) -> bool:
        """Whether every figure is a number."""
        return bool(np.isfinite(self.loss).all() and np.isfinite(self.kl).all())

    @classmethod
    def joined(cls, parts: Iterable["TokenScores"]) -> "TokenScores":
        """Return the sequences of all parts, in order."""
        every = list(parts)
        return cls(
            np.concatenate([part.correct for part in every]),
            np.concatenate([part.loss for part in every]),
            np.concatenate([part.kl for part in every]),
        )


@dataclass(frozen=True, eq=False)
class Pair:
    """One source's scores by both models, for the same sequences."""

    base: TokenScores
    found: TokenScores


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, or in float32 on a device that has no float64."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def target_scores(log_probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Score predictions of one token each."""
    loss = -log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return log_probabilities.argmax(-1) == targets, loss


def divergence(base: Tensor, other: Tensor) -> Tensor:
    """Return ``KL(base ‖ other) = Σ p (log p − log q)`` in nats, from log-probabilities."""
    share = base.exp()
    terms = torch.where(share > 0, share * (base - other), 0.0)
    return terms.sum(-1).clamp(min=0)


def perplexity(loss: NDArray[np.float64]) -> float:
    """Return ``exp`` of the mean negative log-probability (nats) of all tokens."""
    return float(np.exp(loss.mean()))


def score_tokens(
    logits: Iterable[Tensor],
    targets: Tensor,
    base: Iterable[Tensor] | None,
    advance: Callable[[int], None],
) -> TokenScores:
    """Score every decoded token of a batch; only one figure per token leaves the device."""
    columns: list[Tensor] = []
    others: Iterable[Tensor | None] = repeat(None) if base is None else base
    for column, (step, other) in enumerate(zip(logits, others, strict=False)):
        with torch.inference_mode():
            own = wide(step).log_softmax(-1)
            correct, loss = target_scores(own, targets[:, column].to(step.device))
            kl = torch.zeros_like(loss)
            if other is not None:
                kl = divergence(wide(other.to(step.device)).log_softmax(-1), own)
            columns.append(torch.stack([correct.to(loss.dtype), loss, kl]))
        advance(1)
    figures = torch.stack(columns, dim=-1).cpu().double().numpy()
    return TokenScores(figures[0] > 0, figures[1], figures[2])


def text_figures(pairs: Mapping[str, Pair]) -> dict[str, Any]:
    """Return what an evaluation says of text, over all sources and for each."""
    base = TokenScores.joined(pair.base for pair in pairs.values())
    found = TokenScores.joined(pair.found for pair in pairs.values())
    sources = {}
    for name, pair in pairs.items():
        whole = _figures(pair.base, pair.found, [len(pair.base.loss)])
        sources[name] = {
            "accuracy": whole["accuracy"],
            "baseline_accuracy": whole["baseline_accuracy"],
            "relative_accuracy": whole["relative_accuracy"],
            "interval": whole["relative_accuracy_interval"],
            "perplexity": whole["perplexity"],
            "baseline_perplexity": whole["baseline_perplexity"],
            "kl_mean": whole["kl"]["mean"],
            "sequences": len(pair.found.loss),
            "tokens": pair.found.loss.size,
        }
    return {
        **_figures(base, found, [len(pair.base.loss) for pair in pairs.values()]),
        "sources": sources,
        "decoded_tokens": found.loss.size,
        "sequences": len(found.loss),
    }


def _figures(base: TokenScores, found: TokenScores, sizes: Sequence[int]) -> dict[str, Any]:
    hits, own_hits = (x.correct.sum(axis=1).astype(np.float64) for x in (found, base))
    losses, own_losses = (x.loss.sum(axis=1) for x in (found, base))
    tokens = np.full(len(losses), float(found.loss.shape[1]))
    accuracy, own_accuracy = (float(x.correct.mean()) for x in (found, base))
    surprise = ratio_interval(losses - own_losses, tokens, sizes)
    return {
        "accuracy": accuracy,
        "baseline_accuracy": own_accuracy,
        "relative_accuracy": accuracy / own_accuracy if own_accuracy else None,
        "relative_accuracy_interval": ratio_interval(hits, own_hits, sizes),
        "perplexity": perplexity(found.loss),
        "baseline_perplexity": perplexity(base.loss),
        "perplexity_ratio": float(np.exp((losses - own_losses).sum() / tokens.sum())),
        "perplexity_ratio_interval": None
        if surprise is None
        else (math.exp(surprise[0]), math.exp(surprise[1])),
        "kl": {
            "mean": float(found.kl.mean()),
            "p999": quantile(found.kl, _TAIL),
            "worst": float(found.kl.max()),
        },
    }


def worst_tokens(
    pairs: Mapping[str, Pair], number: int, start: int, describe: Describe
) -> list[dict[str, Any]]:
    """Return the tokens whose prediction diverged most, the worst first."""
    found = []
    for name, pair in pairs.items():
        for flat in np.argsort(-pair.found.kl, axis=None, kind="stable")[:number]:
            sequence, step = (int(i) for i in np.unravel_index(flat, pair.found.kl.shape))
            found.append(
                {
                    "source": name,
                    "sequence": sequence,
                    "position": start + step,
                    **describe(name, sequence, start + step),
                    "kl": float(pair.found.kl[sequence, step]),
                    "probability": float(np.exp(-pair.found.loss[sequence, step])),
                    "baseline_probability": float(np.exp(-pair.base.loss[sequence, step])),
                }
            )
    return sorted(found, key=lambda token: -token["kl"])[:number]


_SURE = 0.05  # a score that guessing reaches more often than this does not tell from guessing


def task_figures(
    items: Sequence[TaskItem],
    base: Sequence[TaskAnswer | None],
    found: Sequence[TaskAnswer | None],
) -> dict[str, Any]:
    """Return each task's score and exact matches, by depth and by length too.

    A task judges a method only where the uncompressed model does better than chance: the strings
    that were asked for are counted one by one, and guessing them would reach the count in fewer
    than five of a hundred cases (one-sided binomial test; any right one, where nothing can be
    guessed).
    """
    tasks: dict[str, Any] = {}
    for task, rows in _answered(items, base, found).items():
        if rows[0].item.scoring is Scoring.NONE:
            continue
        own = np.array([row.base.score for row in rows])
        other = np.array([row.found.score for row in rows])
        interval = ratio_interval(other - own, np.ones(len(rows)), [len(rows)])
        asked = np.array([row.item.asked for row in rows])
        chance = float(np.array([row.item.chance for row in rows]) @ asked / asked.sum())
        tasks[task] = {
            **_share(rows),
            "scoring": str(rows[0].item.scoring),
            "chance": chance,
            "judges": binomial_tail(float(own @ asked), int(asked.sum()), chance) < _SURE,
            "exact_match": float(np.mean([row.found.exact for row in rows])),
            "baseline_exact_match": float(np.mean([row.base.exact for row in rows])),
            "difference_interval": interval,
            "by_depth": _share_by(rows, "depth"),
            "by_length": _share_by(rows, "length"),
        }
    return tasks


def answer_lengths(
    items: Sequence[TaskItem],
    base: Sequence[TaskAnswer | None],
    found: Sequence[TaskAnswer | None],
) -> dict[str, Any] | None:
    """Return whether answers to the same prompts become longer; None where none was written.

    An answer that does not end within its limit counts as long as the limit, so that a ratio is
    between the true one and 1 where only one of the two is cut.
    """
    tasks = {
        task: rows
        for task, every in _answered(items, base, found).items()
        if (rows := [r for r in every if None not in (r.base.written, r.found.written)])
    }
    if not tasks:
        return None
    rows = [row for own in tasks.values() for row in own]
    by_task = {
        task: {**_lengths(own, [len(own)]), "limit": own[0].item.answer_tokens}
        for task, own in tasks.items()
    }
    return {**_lengths(rows, [len(own) for own in tasks.values()]), "by_task": by_task}


def _lengths(rows: Sequence["_Row"], sizes: Sequence[int]) -> dict[str, Any]:
    base, found = (
        np.array([float(getattr(row, side).written) for row in rows]) for side in ("base", "found")
    )
    base_open, open_ = (
        np.array([float(not getattr(row, side).ended) for row in rows])
        for side in ("base", "found")
    )
    return {
        "prompts": len(rows),
        "tokens": float(found.mean()),
        "baseline_tokens": float(base.mean()),
        "ratio": float(found.sum() / base.sum()),
        "ratio_interval": ratio_interval(found, base, sizes),
        "never_ended": float(open_.mean()),
        "baseline_never_ended": float(base_open.mean()),
        "never_ended_interval": ratio_interval(open_ - base_open, np.ones(len(rows)), sizes),
    }


@dataclass(frozen=True)
class _Row:
    """A question that both models answered."""

    item: TaskItem
    base: TaskAnswer
    found: TaskAnswer


def _answered(
    items: Sequence[TaskItem],
    base: Sequence[TaskAnswer | None],
    found: Sequence[TaskAnswer | None],
) -> dict[str, list[_Row]]:
    tasks: dict[str, list[_Row]] = {}
    for item, own, other in zip(items, base, found, strict=True):
        if own is not None and other is not None:
            tasks.setdefault(item.task, []).append(_Row(item, own, other))
    return tasks


def _share_by(rows: Sequence[_Row], attribute: str) -> dict[str, Any]:
    values = sorted({v for row in rows if (v := getattr(row.item, attribute)) is not None})
    return {
        f"{value:g}": _share([row for row in rows if getattr(row.item, attribute) == value])
        for value in values
    }


def _share(rows: Sequence[_Row]) -> dict[str, Any]:
    return {
        "accuracy": sum(row.found.score for row in rows) / len(rows),
        "baseline": sum(row.base.score for row in rows) / len(rows),
        "items": len(rows),
    }
