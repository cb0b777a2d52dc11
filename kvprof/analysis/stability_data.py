"""From the runs of a stability study to the ``data`` of its result."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvprof.analysis.stability import HAAR_RATIO, Run
from kvprof.analysis.stability_study import (
    NEGLIGIBLE_COST,
    Comparison,
    RankChoice,
    average,
    compare,
    given_rank,
    judge,
    recommend_tokens,
)
from kvprof.results.stability import NOISE_FLOOR

__all__ = ["stability_data"]

Comparisons = dict[tuple[str, str], list[Comparison]]


def stability_data(
    sources: Sequence[Run],
    noise: Sequence[Run],
    targets: Sequence[Run],
    short_targets: Sequence[Run],
    pairs: Sequence[str],
    choices: Sequence[RankChoice],
    *,
    random_source: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Compare every source run with every target and sum up."""
    # Runs with a seed of their own; a file of moments may hold the very tokens of one of them.
    siblings = [run for run in (*sources, *noise) if run.seed is not None]
    floor = _noise_pairs(siblings, 1 if sources[0].seed is None else len(sources))
    data_comparisons: Comparisons = {}
    floor_comparisons: Comparisons = {}
    for pair in pairs:
        for target in targets:
            data_comparisons[pair, target.name] = [
                compare(source, siblings, target, pair, choices) for source in sources
            ]
        if floor:
            floor_comparisons[pair, NOISE_FLOOR] = [
                compare(one, siblings, other, pair, choices, target_name=NOISE_FLOOR)
                for one, other in floor
            ]
        for run in (*sources, *noise, *targets):
            run.forget()
    # A text against itself tests no claim: the papers' are about data that was not seen.
    itself = sources[0].name if sources[0].seed is None else None
    tested = {key: group for key, group in data_comparisons.items() if key[1] != itself}
    everything = {**data_comparisons, **floor_comparisons}
    curves = [row for group in everything.values() for row in average(group)]
    curves += [row for group in everything.values() for one in group for row in one.rows]
    lengths, warnings = _lengths(sources, siblings, short_targets, data_comparisons, choices)
    for run in (*sources, *targets):
        warnings += run.warnings
    if len(tested) < len(data_comparisons):
        warnings.append(f"{itself} is both source and dataset, so no claim is tested on it")
    warnings += _unexplained_lengths(sources[0], targets, short_targets)
    if not floor:
        warnings.append("no noise floor: it requires the model and two seeds of random tokens")
    data = {
        "curves": curves,
        "claims": judge(tested, random_source=random_source),
        "recommendation": _recommendation(data_comparisons, pairs),
        "clusters": _cluster_sizes(everything),
        "lengths": lengths,
        "unrelated_ratio": {"unaligned": HAAR_RATIO[0], "sign_aligned": HAAR_RATIO[1]},
        "negligible_cost": NEGLIGIBLE_COST,
        "half_ranks": {pair: given_rank(_any(data_comparisons, pair)) for pair in pairs},
    }
    return data, warnings


def _any(comparisons: Comparisons, pair: str) -> Comparison:
    return next(group[0] for (its, _), group in comparisons.items() if its == pair)


def _noise_pairs(siblings: Sequence[Run], judged: int) -> list[tuple[Run, Run]]:
    """Pair each of the first `judged` random runs with the next, so that another seed judges it."""
    usable = [run for run in siblings if run.snapshots]
    if len(usable) < 2:
        return []
    return [(run, usable[(i + 1) % len(usable)]) for i, run in enumerate(usable[:judged])]


def mean_cost(comparisons: Sequence[Comparison], tokens: int) -> float:
    """Return the mean extra lost energy at the given rank nearest half the width."""
    costs = []
    for one in comparisons:
        rank = given_rank(one)
        costs += [
            row["extra_energy_loss"]
            for row, asked in zip(one.rows, one.asked, strict=True)
            if row["tokens"] == tokens and asked == rank
        ]
    return float(np.mean(costs))


def _recommendation(comparisons: Comparisons, pairs: Sequence[str]) -> dict[str, Any] | None:
    """Recommend per pair by the cost averaged over datasets; the largest count serves all."""
    per_pair = {}
    for pair in pairs:
        groups = [group for (p, _), group in comparisons.items() if p == pair]
        counts = sorted({row["tokens"] for group in groups for one in group for row in one.rows})
        if len(counts) < 2:
            return None
        points = [
            (tokens, float(np.mean([mean_cost(group, tokens) for group in groups])))
            for tokens in counts
        ]
        per_pair[pair] = recommend_tokens(points)
    return {
        "tokens": max(entry["tokens"] for entry in per_pair.values()),
        "stopped_falling": all(entry["stopped_falling"] for entry in per_pair.values()),
        "pairs": per_pair,
    }


def _cluster_sizes(comparisons: Comparisons) -> list[dict[str, Any]]:
    """Return how many columns were aligned together, per curve and token count."""
    rows = []
    for (pair, target), group in comparisons.items():
        counts = sorted({tokens for one in group for tokens in one.cluster_sizes})
        for tokens in counts:
            sizes: dict[int, int] = {}
            for one in group:
                for size, number in one.cluster_sizes.get(tokens, {}).items():
                    sizes[size] = sizes.get(size, 0) + number
            rows.append(
                {
                    "pair": pair,
                    "target": target,
                    "tokens": tokens,
                    "sizes": {str(size): sizes[size] for size in sorted(sizes)},
                }
            )
    return rows


def _unexplained_lengths(
    source: Run, targets: Sequence[Run], short_targets: Sequence[Run]
) -> list[str]:
    """Warn of saved moments whose length is far off, for which no second pass could be run."""
    rerun = {run.name for run in short_targets}
    return [
        f"{target.name} has sequence length {target.seq_len:,}, the source {source.seq_len:,}; "
        "saved moments cannot separate its effect"
        for target in targets
        if target.name not in rerun
        and max(target.seq_len, source.seq_len) > 2 * min(target.seq_len, source.seq_len)
    ]


def _lengths(
    sources: Sequence[Run],
    siblings: Sequence[Run],
    short_targets: Sequence[Run],
    comparisons: Comparisons,
    choices: Sequence[RankChoice],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Tell what of the cost comes from the length: the same data at the source's own length."""
    rows: list[dict[str, Any]] = []
    warnings = []
    for (pair, name), group in comparisons.items():
        for short in short_targets:
            if short.name != name:
                continue
            same = [compare(source, siblings, short, pair, choices) for source in sources]
            tokens = max(row["tokens"] for one in same for row in one.rows)
            row = {
                "pair": pair,
                "target": name,
                "tokens": tokens,
                "seq_len_source": sources[0].seq_len,
                "seq_len_target": group[0].rows[0]["seq_len_target"],
                "cost_same_length": mean_cost(same, tokens),
                "cost": mean_cost(group, tokens),
            }
            rows.append(row)
            grown = row["cost"] - row["cost_same_length"]
            if grown > max(NEGLIGIBLE_COST, 0.1 * abs(row["cost_same_length"])):
                warnings.append(
                    f"{pair} on {name}: extra lost energy {row['cost']:.1%} at sequence length "
                    f"{row['seq_len_target']:,}, {row['cost_same_length']:.1%} at the source's "
                    f"{row['seq_len_source']:,}"
                )
    return rows, warnings
