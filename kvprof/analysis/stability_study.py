"""Compare the rotations of an offline source with those of datasets, head by head."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvprof.analysis.moments import from_eigenvalues
from kvprof.analysis.rank_allocation import removal_ranks
from kvprof.analysis.stability import (
    Run,
    Stack,
    align_clusters,
    align_signs,
    cluster_sizes,
    clusters,
    column_ratio,
    extra_loss,
    loss,
    principal_angle,
    seed_perturbation,
    subspace_distance,
)
from kvprof.analysis.stats import draws, ends

__all__ = [
    "CLAIMS",
    "FIGURES",
    "NEGLIGIBLE_COST",
    "Claim",
    "Comparison",
    "RankChoice",
    "average",
    "compare",
    "given_rank",
    "judge",
    "recommend_tokens",
]

#: Figures of a curve's row that are averaged over heads and seeds.
FIGURES = (
    "ratio",
    "ratio_sign_aligned",
    "ratio_cluster_aligned",
    "subspace_distance",
    "principal_angle",
    "extra_energy_loss",
    "extra_score_error",
    "extra_output_error",
)

_RATIOS = FIGURES[:3]


@dataclass(frozen=True)
class RankChoice:
    """A rank to look at: the same for all heads, or what a removal rate picks per head.

    The removal rate is applied to the dataset's own spectrum, so that along a curve only the
    basis changes, never the rank.
    """

    rank: int | None = None
    removal_rate: float | None = None

    def ranks(self, values: Tensor) -> list[int]:
        """Return the rank of each head from its eigenvalues ``[heads, d]``."""
        heads, width = values.shape
        if self.removal_rate is not None:
            ranks: list[int] = removal_ranks(from_eigenvalues(values), self.removal_rate).tolist()
            return ranks
        return [min(self.rank or width, width)] * heads


@dataclass
class Comparison:
    """One source run against one target run for one pair, at every token count.

    Attributes
    ----------
    rows : list of dict
        One per token count, layer, KV head and rank choice, with the keys of a curve.
    weights : list of tuple
        ``(δ, δ aligned, δ cluster-aligned, ε)`` of each row, for ratios of means.
    asked : list of int or None
        The rank that was asked for in each row: a narrow head has less than that, and still
        belongs to the same point of a curve. None where a removal rate picked the rank.
    cluster_sizes : dict
        Token count to a histogram {size: number of clusters}.
    width : int
        Of the widest head.
    """

    width: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    weights: list[tuple[float, float, float | None, float]] = field(default_factory=list)
    asked: list[int | None] = field(default_factory=list)
    cluster_sizes: dict[int, dict[int, int]] = field(default_factory=dict)


def compare(
    source: Run,
    siblings: Sequence[Run],
    target: Run,
    pair: str,
    choices: Sequence[RankChoice],
    *,
    target_name: str | None = None,
) -> Comparison:
    """Judge the bases of `source` at each of its token counts on the data of `target`."""
    own = target.stacks(max(target.snapshots), pair)
    result = Comparison(width=max(stack.basis.shape[-1] for stack in own))
    for tokens in sorted(source.snapshots):
        common = {
            "pair": pair,
            "source": source.name,
            "target": target_name or target.name,
            "tokens": tokens,
            "seq_len_source": source.seq_len,
            "seq_len_target": target.seq_len,
            "seed": source.seed,
        }
        known = [run.stacks(tokens, pair) for run in siblings if tokens in run.snapshots]
        for index, stack in enumerate(own):
            offline = source.stacks(tokens, pair)[index].basis
            grams = [stacks[index].gram for stacks in known]
            starts = _clusters(stack, grams) if len(grams) > 1 else None
            _compare_stack(result, stack, offline, starts, choices, pair, common)
    return result


def _clusters(stack: Stack, grams: Sequence[Tensor]) -> Tensor:
    """Return the clusters of each head on the CPU, from what a change of seed does to it."""
    perturbation = seed_perturbation(torch.stack(list(grams)), stack.basis)
    return clusters(stack.values.cpu(), perturbation.cpu())


def _compare_stack(
    result: Comparison,
    own: Stack,
    offline: Tensor,
    starts: Tensor | None,
    choices: Sequence[RankChoice],
    pair: str,
    common: Mapping[str, Any],
) -> None:
    """Add the rows of one token count and one width of heads to `result`."""
    ratios = _ratios(offline, own.basis, starts)
    if starts is not None:
        histogram = result.cluster_sizes.setdefault(common["tokens"], {})
        # A group of size s holds s columns.
        columns = cluster_sizes(starts).flatten().bincount().tolist()
        for size, number in enumerate(columns):
            if number:
                histogram[size] = histogram.get(size, 0) + number // size
    overlap = offline.mT @ own.basis
    overlap_on_cpu = overlap.cpu()
    extra = extra_loss(loss(own.gram, own.left, own.right, offline), own.loss)
    energy, product = extra.energy.tolist(), extra.product.tolist()
    own_energy = own.loss.energy.tolist()
    error = "extra_score_error" if pair in ("qk", "k") else "extra_output_error"
    for choice in choices:
        ranks = choice.ranks(own.values)
        distances = subspace_distance(overlap, ranks).tolist()
        angles = principal_angle(overlap_on_cpu, ranks).tolist()
        for head, rank in enumerate(ranks):
            delta, signed, clustered, epsilon = ratios[head]
            layer, kv_head = own.heads[head]
            row: dict[str, Any] = dict.fromkeys(FIGURES)
            row |= common
            row |= {"layer": layer, "kv_head": kv_head, "rank": rank}
            row["removal_rate"] = choice.removal_rate
            row["ratio"] = delta / epsilon
            row["ratio_sign_aligned"] = signed / epsilon
            row["ratio_cluster_aligned"] = None if clustered is None else clustered / epsilon
            row["subspace_distance"] = distances[head]
            row["principal_angle"] = angles[head]
            row["extra_energy_loss"] = energy[head][rank]
            row["own_energy_loss"] = own_energy[head][rank]
            row[error] = product[head][rank]
            result.rows.append(row)
            result.weights.append(ratios[head])
            result.asked.append(choice.rank)


def _ratios(
    offline: Tensor, basis: Tensor, starts: Tensor | None
) -> list[tuple[float, float, float | None, float]]:
    """Return δ as it stands, after sign and after cluster alignment, and ε, for each head."""
    raw = column_ratio(offline, basis)
    signed = column_ratio(align_signs(offline, basis), basis).delta
    clustered: list[float | None] = [None] * len(basis)
    if starts is not None:
        clustered = column_ratio(align_clusters(offline, basis, starts), basis).delta.tolist()
    return list(
        zip(raw.delta.tolist(), signed.tolist(), clustered, raw.epsilon.tolist(), strict=True)
    )


def average(comparisons: Sequence[Comparison]) -> Iterator[dict[str, Any]]:
    """Yield one row per curve point, averaged over layers, heads and seeds.

    Ratios are ratios of means, as the papers form them (mean |ΔR| over mean |R|); the other
    figures are means. ``spread`` holds the 2.5 and 97.5 percentiles over heads and seeds.
    """
    grouped: dict[tuple[Any, ...], list[int]] = {}
    rows = [row for comparison in comparisons for row in comparison.rows]
    weights = [weight for comparison in comparisons for weight in comparison.weights]
    asked = [rank for comparison in comparisons for rank in comparison.asked]
    for index, (row, rank) in enumerate(zip(rows, asked, strict=True)):
        grouped.setdefault((row["tokens"], row["removal_rate"], rank), []).append(index)
    for (tokens, removal_rate, _), members in grouped.items():
        point: dict[str, Any] = {
            **rows[members[0]],
            "tokens": tokens,
            "seed": None,
            "layer": None,
            "kv_head": None,
            "rank": float(np.mean([rows[index]["rank"] for index in members])),
            "removal_rate": removal_rate,
            "heads_and_seeds": len(members),
            "spread": {},
        }
        own = [loss for i in members if (loss := rows[i].get("own_energy_loss")) is not None]
        point["own_energy_loss"] = float(np.mean(own)) if own else None
        for figure in FIGURES:
            samples = [rows[i][figure] for i in members if rows[i][figure] is not None]
            point[figure] = float(np.mean(samples)) if samples else None
            if samples:
                point["spread"][figure] = [
                    float(value) for value in np.percentile(samples, [2.5, 97.5])
                ]
            if figure in _RATIOS and samples:
                column = _RATIOS.index(figure)
                parts = [(weights[i][column], weights[i][3]) for i in members]
                known = [(delta, epsilon) for delta, epsilon in parts if delta is not None]
                point[figure] = math.fsum(p[0] for p in known) / math.fsum(p[1] for p in known)
        yield point


# --- What the papers say of rotation stability, held against what was measured.


#: Extra lost energy, relative to the dataset's own loss, up to which a basis costs nothing.
NEGLIGIBLE_COST = 0.01

#: "Stops falling": a doubling of tokens removes less than this share of what is left.
_STOPS_FALLING = 0.05


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
) -> list[dict[str, Any]]:
    """Hold every claim that fits the source against the measurements.

    The papers' metric is taken after sign alignment, the only form of it in which a basis equals
    itself. Its interval is a 95 % bootstrap over heads: seeds and datasets share a head's basis, so
    a head is drawn with all of them. Costs are read at the rank of `given_rank`.
    """
    entries = []
    for claim in CLAIMS:
        if claim.random_source != random_source:
            continue
        targets = [target for pair, target in comparisons if pair == claim.pair]
        groups = [targets] if claim.average and targets else [[target] for target in targets]
        for group in groups:
            members = [comparisons[claim.pair, target] for target in group]
            entries.append(_judge_one(claim, members, " and ".join(group)))
    return entries


def _judge_one(
    claim: Claim, members: Sequence[Sequence[Comparison]], target: str
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
            "verdict": f"not testable: needs {claim.minimum_tokens:,} tokens or more",
        }
    # "From 8K on" must hold at every count from there, so the worst of them decides; a claim
    # without a count is given its best chance, the largest.
    judged = sorted(counts) if claim.average else [max(counts)]
    candidates = [_at(members, tokens) for tokens in judged]
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
    members: Sequence[Sequence[Comparison]], tokens: int
) -> tuple[float, list[float] | None, float, int]:
    """Return δ/ε, its interval, the mean extra lost energy, and the token count.

    Over several datasets the ratios are averaged, as FDC §6.7 and ZACK §6.6 do.
    """
    ratios, costs = [], []
    by_head: list[dict[tuple[int, int], list[tuple[float, float]]]] = []
    for dataset in members:
        parts: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for comparison in dataset:
            rank = given_rank(comparison)
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
    counts = draws([len(heads)])
    resampled = []
    for parts in by_head:
        sums = counts @ np.array([np.sum(parts[head], axis=0) for head in heads])
        resampled.append(sums[:, 0] / sums[:, 1])
    return (
        float(np.mean(ratios)),
        list(ends(np.mean(resampled, axis=0), len(heads))) if len(heads) > 1 else None,
        float(np.mean(costs)),
        tokens,
    )


def given_rank(comparison: Comparison) -> int:
    """Return the rank asked for (not one picked by a removal rate) nearest half the width."""
    given = sorted({rank for rank in comparison.asked if rank is not None})
    return min(given, key=lambda rank: abs(rank - comparison.width / 2))


def recommend_tokens(points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Return the smallest token count after which the cost stops falling.

    One flat step does not end the fall when a later one still removes its share: from the count
    that is recommended on, no step may.
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
