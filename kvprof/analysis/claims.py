"""What the papers say of rotation stability, held against what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kvprof.analysis.stability_study import Comparison

__all__ = ["CLAIMS", "NEGLIGIBLE_COST", "Claim", "given_rank", "judge", "recommend_tokens"]

#: Extra lost energy, relative to the dataset's own loss, up to which a basis costs nothing.
NEGLIGIBLE_COST = 0.01

#: "Stops falling": a doubling of tokens removes less than this share of what is left.
_STOPS_FALLING = 0.05

_RESAMPLES = 2000


@dataclass(frozen=True)
class Claim:
    """A paper's statement about δ/ε.

    Attributes
    ----------
    paper : str
        With the section or figure.
    statement : str
        In our own words.
    pair : str
        ``qk`` or ``vo``.
    threshold : float
        δ/ε must be below it.
    minimum_tokens : int
        The statement is about bases from at least this many tokens.
    random_source : bool
        Whether it is about random tokens (FDC) or coherent text (ZACK).
    average : bool
        About the average over datasets, or about each dataset.
    """

    paper: str
    statement: str
    pair: str
    threshold: float
    minimum_tokens: int
    random_source: bool
    average: bool


CLAIMS = (
    Claim(
        "FDC §3.2, table 2",
        "the QK rotation from random tokens differs from any dataset's own by less than 0.34 % of "
        "the average element",
        "qk",
        0.0034,
        1,
        random_source=True,
        average=False,
    ),
    Claim(
        "FDC §6.7, Fig. 14",
        "from 8K random tokens on, the difference averaged over datasets is below 0.5 %",
        "qk",
        0.005,
        8192,
        random_source=True,
        average=True,
    ),
    *(
        claim
        for pair, table in (("qk", 4), ("vo", 5))
        for claim in (
            Claim(
                f"ZACK §4.3, table {table}",
                f"the {pair.upper()} rotation from coherent text differs from any dataset's own by "
                "less than 0.34 % of the average element",
                pair,
                0.0034,
                1,
                random_source=False,
                average=False,
            ),
            Claim(
                "ZACK §6.6, Fig. 18",
                f"from 16K coherent tokens on, the {pair.upper()} difference averaged over "
                "datasets is below 0.5 %",
                pair,
                0.005,
                16384,
                random_source=False,
                average=True,
            ),
        )
    ),
)


def judge(
    comparisons: dict[tuple[str, str], list[Comparison]],
    *,
    random_source: bool,
    rank_share: float = 0.5,
) -> list[dict[str, Any]]:
    """Hold every claim that fits the source against the measurements.

    The papers' metric is taken after sign alignment, the only form of it in which a basis equals
    itself. Its interval is a 95 % bootstrap over heads: seeds and datasets share
    a head's basis, so a head is drawn with all of them.

    Parameters
    ----------
    comparisons : dict of (pair, target) to list of Comparison
        One comparison per seed; the noise floor left out.
    random_source : bool
        Whether the source is random tokens.
    rank_share : float
        The cost is read at the tested rank nearest this share of the width.

    Returns
    -------
    list of dict
        ``claim``, ``paper``, ``pair``, ``target``, ``tokens``, ``threshold``, ``measured``,
        ``interval``, ``cost``, ``holds`` and ``verdict`` in words; ``measured`` is null where the
        sweep holds nothing that could judge the claim.
    """
    entries = []
    for claim in CLAIMS:
        if claim.random_source != random_source:
            continue
        targets = [target for pair, target in comparisons if pair == claim.pair]
        groups = [targets] if claim.average and targets else [[target] for target in targets]
        for group in groups:
            members = [comparisons[claim.pair, target] for target in group]
            entries.append(_judge_one(claim, members, " and ".join(group), rank_share))
    return entries


def _judge_one(
    claim: Claim, members: Sequence[Sequence[Comparison]], target: str, rank_share: float
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "claim": claim.statement,
        "paper": claim.paper,
        "pair": claim.pair,
        "target": target,
        "threshold": claim.threshold,
    }
    seen = {row["tokens"] for dataset in members for c in dataset for row in c.rows}
    counts = {tokens for tokens in seen if tokens >= claim.minimum_tokens}
    if not counts:
        return entry | {
            "tokens": None,
            "measured": None,
            "interval": None,
            "cost": None,
            "holds": None,
            "verdict": f"cannot be judged: needs {claim.minimum_tokens:,} tokens or more",
        }
    # "From 8K on" must hold at every count from there, so the worst of them decides; a claim
    # without a count is given its best chance, the largest.
    judged = sorted(counts) if claim.average else [max(counts)]
    candidates = [_at(members, tokens, rank_share) for tokens in judged]
    measured, interval, cost, tokens = max(candidates, key=lambda candidate: candidate[0])
    holds = measured < claim.threshold
    cheap = cost <= NEGLIGIBLE_COST
    price = f"{cost:+.1%} lost energy"
    if holds:
        verdict = "holds" if cheap else f"holds by the paper's metric but costs {price}"
    else:
        verdict = (
            "does not hold by the paper's metric, but costs nothing" if cheap else "does not hold"
        )
        verdict += f" ({price})"
    return entry | {
        "tokens": tokens,
        "measured": measured,
        "interval": interval,
        "cost": cost,
        "holds": holds,
        "verdict": verdict,
    }


def _at(
    members: Sequence[Sequence[Comparison]], tokens: int, rank_share: float
) -> tuple[float, list[float], float, int]:
    """Return δ/ε, its interval, the mean extra lost energy, and the token count.

    Over several datasets the ratios are averaged, as FDC §6.7 and ZACK §6.6 do.
    """
    ratios, costs = [], []
    by_head: list[dict[tuple[int, int], list[tuple[float, float]]]] = []
    for dataset in members:
        parts: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for comparison in dataset:
            rank = given_rank(comparison, rank_share)
            rows = zip(comparison.rows, comparison.weights, comparison.asked, strict=True)
            for row, weight, asked in rows:
                if row["tokens"] == tokens and asked == rank:
                    head = (row["layer"], row["kv_head"])
                    parts.setdefault(head, []).append((weight[1], weight[3]))
                    costs.append(row["extra_energy_loss"])
        if not parts:  # an interrupted study: this dataset was not reached
            continue
        by_head.append(parts)
        total = np.sum([pair for pairs in parts.values() for pair in pairs], axis=0)
        ratios.append(total[0] / total[1])
    heads = sorted(by_head[0])
    chosen = np.random.default_rng(0).integers(len(heads), size=(_RESAMPLES, len(heads)))
    resampled = []
    for parts in by_head:
        sums = np.array([np.sum(parts[head], axis=0) for head in heads])[chosen].sum(1)
        resampled.append(sums[:, 0] / sums[:, 1])
    interval = np.percentile(np.mean(resampled, axis=0), [2.5, 97.5])
    return (
        float(np.mean(ratios)),
        [float(value) for value in interval],
        float(np.mean(costs)),
        tokens,
    )


def given_rank(comparison: Comparison, rank_share: float) -> int:
    """Return the rank asked for (not one picked by a removal rate) nearest a share of the width."""
    given = sorted({rank for rank in comparison.asked if rank is not None})
    return min(given, key=lambda rank: abs(rank - rank_share * comparison.width))


def recommend_tokens(points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Return the smallest token count after which the cost stops falling.

    One flat step does not end the fall when a later one still removes its share: from the count
    that is recommended on, no step may.

    Parameters
    ----------
    points : sequence of (tokens, cost)
        Mean extra lost energy at each count of the sweep.

    Returns
    -------
    dict
        ``tokens``, ``stopped_falling`` (False when the largest count is given because the cost
        still fell there), ``evidence``: per step how much of the cost a doubling removed.
    """
    ordered = sorted(points)
    evidence = []
    recommended = None
    for (fewer, before), (more, after) in pairwise(ordered):
        doublings = float(np.log2(more / fewer))
        left = 1.0 if before <= 0 else max(after, 0.0) / before
        removed = 1.0 - left ** (1.0 / doublings)
        evidence.append(
            {
                "from": fewer,
                "to": more,
                "cost_before": before,
                "cost_after": after,
                "removed_per_doubling": removed,
            }
        )
        if removed >= _STOPS_FALLING:
            recommended = None
        elif recommended is None:
            recommended = fewer
    return {
        "tokens": recommended if recommended is not None else ordered[-1][0],
        "stopped_falling": recommended is not None,
        "threshold": _STOPS_FALLING,
        "evidence": evidence,
    }
