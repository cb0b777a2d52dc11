"""The report of ``kvprof stability``: does a basis from these tokens hold on the data?"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from kvprof.analysis.stats import significantly_above
from kvprof.report.blocks import (
    Block,
    Column,
    Curves,
    Heading,
    HeatMap,
    Paragraph,
    Report,
    Series,
    Table,
    framed,
)
from kvprof.results.stability import (
    NOISE_FLOOR,
    Claim,
    CurvePoint,
    Lengths,
    StabilityData,
    StabilityResult,
)
from kvprof.views.numbers import MISSING, count, interval, number, percent, rate_text

__all__ = ["Comparison", "comparisons", "report", "share_text"]

#: The papers' own limit for an average difference (FDC §6.7, ZACK §6.6).
_SAME_ELEMENTS = 0.005
_NOTHING, _ROUNDING, _DECADES = 1e-9, 1e-6, 20.0

_NOTES = (
    "Ratio: mean |difference| of two bases over their mean |element| (FDC §3.2).",
    "Clusters: columns that are interchangeable between seeds, at no loss.",
    "Extra lost energy and error: relative to the dataset's own basis.",
    "Subspace distance: 0 for equal subspaces, 1 for orthogonal ones.",
    "[…]: 2.5 and 97.5 percentiles over heads and seeds. Another seed: noise floor.",
)


@dataclass
class Comparison:
    """One pair's source against one target, at every token count.

    Attributes
    ----------
    pair, source, target : str
    position : int
        Which of the given ranks the cost is read at.
    points : dict of int to list of CurvePoint
        Token count to its averages, one per rank choice, in the result's order.
    heads : list of CurvePoint
        Of single heads, of every token count, seed and rank choice.
    """

    pair: str
    source: str
    target: str
    position: int = 0
    points: dict[int, list[CurvePoint]] = field(default_factory=lambda: defaultdict(list))
    heads: list[CurvePoint] = field(default_factory=list)

    @property
    def noise(self) -> bool:
        """Whether this is the noise floor."""
        return self.target == NOISE_FLOOR

    @property
    def most(self) -> int:
        """The largest token count."""
        return max(self.points)

    @property
    def label(self) -> str:
        """The target, named for what it is where it is the noise floor."""
        return "another seed" if self.noise else self.target

    def at(self, tokens: int | None = None) -> CurvePoint:
        """Return the average at the rank of the cost, by default at the largest token count."""
        points = self.points[self.most if tokens is None else tokens]
        given = [one for one in points if one.removal_rate is None] or points
        return given[min(self.position, len(given) - 1)]

    @property
    def cost(self) -> float | None:
        """Mean extra lost energy at the largest token count and the rank of the cost."""
        return self.at().extra_energy_loss

    def head_costs(self, rank: int | None) -> dict[tuple[int, int], dict[int | None, float]]:
        """Return the extra lost energy by layer and head, then by seed, at a given rank."""
        # A head's rows at a given rank r have min(r, its width), the largest of its ranks up to r.
        chosen: dict[tuple[int, int], tuple[float, dict[int | None, float]]] = {}
        for one in self.heads:
            value = one.extra_energy_loss
            if one.tokens != self.most or one.removal_rate is not None or value is None:
                continue
            if (rank is not None and one.rank > rank) or one.layer is None or one.kv_head is None:
                continue
            head = one.layer, one.kv_head
            if head not in chosen or one.rank > chosen[head][0]:
                chosen[head] = one.rank, {}
            if one.rank == chosen[head][0]:
                chosen[head][1][one.seed] = value
        return {head: costs for head, (_, costs) in chosen.items()}


def comparisons(result: StabilityResult) -> dict[str, list[Comparison]]:
    """Return the curves of a result by pair, the noise floor last."""
    found: dict[tuple[str, str, str], Comparison] = {}
    for point in result.data.curves:
        key = point.pair, point.source, point.target
        one = found.setdefault(key, Comparison(*key))
        if point.average:
            one.points[point.tokens].append(point)
        else:
            one.heads.append(point)
    ranks = list(dict.fromkeys(result.inputs.ranks))
    pairs: dict[str, list[Comparison]] = defaultdict(list)
    for one in sorted(found.values(), key=lambda one: one.noise):
        if one.points:
            rank = _rank(result, one.pair)
            one.position = ranks.index(rank) if rank is not None else 0
            pairs[one.pair].append(one)
    return dict(pairs)


def _rank(result: StabilityResult, pair: str) -> int | None:
    """Return the given rank that a pair's cost is read at."""
    named, ranks = result.data.half_ranks.get(pair), result.inputs.ranks
    return named if named in ranks else max(ranks, default=None)


def report(result: StabilityResult) -> Report:
    """Return the report."""
    data, inputs = result.data, result.inputs
    pairs = comparisons(result)
    body: list[Block] = []
    if pairs:
        body += [Heading("Published claims"), *_claims(data.claims)]
    for pair, every in pairs.items():
        body += _pair(result, pair, every)
    if data.recommendation is not None:
        body += _advice(result, pairs)
    if data.lengths:
        body += [Heading("Sequence lengths"), _lengths_table(data.lengths)]
    model = inputs.model or f"model {inputs.fingerprint}"
    return framed(
        result,
        body,
        verdict=_verdict(result, pairs),
        subject=f"{model}: basis from {inputs.source} vs each dataset's own",
        notes=_NOTES if pairs else (),
        measured_with=_measured_with(result, pairs),
    )


# --- Does it hold?


def _verdict(result: StabilityResult, pairs: Mapping[str, Sequence[Comparison]]) -> str:
    said = [
        f"{pair} {_answer(every, result.data.negligible_cost, _rank(result, pair))}"
        for pair, every in pairs.items()
        if any(not one.noise for one in every)
    ]
    if not said:
        return "Nothing was compared."
    most = max(one.most for every in pairs.values() for one in every if not one.noise)
    source = "random" if result.inputs.source == "random" else f"{result.inputs.source}'s"
    return f"The basis from {count(most)} {source} tokens: {'; '.join(said)}."


def _answer(every: Sequence[Comparison], limit: float, rank: int | None) -> str:
    """Say whether a pair's basis holds, and the most that it costs."""
    known = [one for one in every if not one.noise and one.cost is not None]
    if not known:
        return "not testable (no cost was measured)"
    floor = next((one for one in every if one.noise), None)
    costly = [one for one in known if (one.cost or 0.0) > limit]
    ratios = [one.at().ratio_sign_aligned for one in known]
    if not costly:
        same = all(ratio is not None and ratio < _SAME_ELEMENTS for ratio in ratios)
        return "holds" if same else "holds by cost, not by elements"
    sure = [one for one in costly if floor is None or _exceeds(one, floor, rank)]
    told = [
        (sure, "does not hold"),
        (
            [one for one in costly if one not in sure],
            "is inconclusive (another seed costs as much)",
        ),
        ([one for one in known if one not in costly], "holds by cost"),
    ]
    parts = [(which, text) for which, text in told if which]
    worst = max(known, key=lambda one: one.cost or 0.0)
    end = f" ({share_text(worst.cost)} extra lost energy on {worst.target})" if sure else ""
    if len(parts) == 1:
        return parts[0][1] + end
    return ", ".join(f"{text} on {_names(which)}" for which, text in parts) + end


def _exceeds(one: Comparison, floor: Comparison, rank: int | None) -> bool:
    """Return whether a target costs more than another seed does, beyond what heads and seeds vary.

    Where both are of the same seeds, these are compared one by one; a source without a seed is
    taken to vary as one of the floor's does.
    """
    if floor.cost is None or one.most not in floor.points:
        return True
    if (one.cost or 0.0) <= floor.cost:
        return False
    costs, base = one.head_costs(rank), floor.head_costs(rank)
    heads = [
        fmean(own.values()) - fmean(base[head].values())
        for head, own in costs.items()
        if head in base
    ]
    if not heads:
        return True
    own, other = _means_of_seeds(costs), _means_of_seeds(base)
    common = own.keys() & other.keys()
    seeds = [own[seed] - other[seed] for seed in common] or [*other.values()]
    return significantly_above(heads, seeds, 1 if common else 1 + len(other))


def _means_of_seeds(
    costs: Mapping[tuple[int, int], Mapping[int | None, float]],
) -> dict[int | None, float]:
    seeds = {seed for own in costs.values() for seed in own}
    return {seed: fmean(own[seed] for own in costs.values() if seed in own) for seed in seeds}


def _names(every: Sequence[Comparison]) -> str:
    return " and ".join(one.target for one in every)


# --- The tables.


def _claims(claims: Sequence[Claim]) -> list[Block]:
    if not claims:
        return [Paragraph("No published claim covers this source and these pairs.")]
    columns = [
        Column(_statement, "claim", words=True),
        Column("threshold", "threshold", lambda value: f"{value:g}"),
        Column(lambda row: interval(row.measured, row.interval), "measured"),
        Column("verdict", "verdict", words=True),
    ]
    return [Table(columns, claims)]


def _statement(claim: Claim) -> str:
    at = "" if claim.tokens is None else f", {count(claim.tokens)} tokens"
    return f"{claim.paper}: {claim.claim}. {claim.pair} vs {claim.target}{at}."


def _pair(result: StabilityResult, pair: str, every: Sequence[Comparison]) -> list[Block]:
    """Return a pair's tables, its curves, and the map of the dataset that costs most."""
    rank = _rank(result, pair)
    body: list[Block] = [Heading(f"{pair}: vs each dataset's own basis")]
    body += [_ratios(result.data, every), Paragraph(""), _costs(result, every)]
    if any(len(one.points) > 1 for one in every if not one.noise):
        source = "random tokens" if every[0].source == "random" else f"tokens of {every[0].source}"
        at = "" if rank is None else f" at rank {rank}"
        for name, title, unit, scale in (
            ("extra_energy_loss", f"{pair}: extra lost energy{at}", "per cent", 100.0),
            ("ratio_sign_aligned", f"{pair}: ratio, signs aligned", "ratio", 1.0),
        ):
            series = [_series(one, name, scale) for one in every]
            known = [y for one in series for y in one.y if y is not None]
            log = bool(known) and min(known) > _ROUNDING and max(known) > _DECADES * min(known)
            body.append(Curves(series, title, source, unit, log_x=True, log_y=log, height=12))
    worst = max(
        (one for one in every if not one.noise and one.cost is not None),
        key=lambda one: one.cost or 0.0,
        default=None,
    )
    if worst is not None and worst.heads:
        body.append(_head_map(worst, rank))
    return body


def _ratios(data: StabilityData, every: Sequence[Comparison]) -> Table:
    sizes = {(one.pair, one.target, one.tokens): one.sizes for one in data.clusters}

    def clustered(one: Comparison) -> dict[int, int]:
        found = sizes.get((one.pair, one.target, one.most), {})
        return {int(size): int(size) * number for size, number in found.items()}

    def alone(one: Comparison) -> str:
        found = clustered(one)  # in columns, not in clusters
        return percent(found.get(1, 0) / sum(found.values())) if found else MISSING

    columns = [
        Column("label", "against", words=True),
        Column("most", "tokens", count),
        Column(lambda one: _ratio(one.at().ratio), "ratio"),
        Column(lambda one: _ranged(one.at(), "ratio_sign_aligned", _ratio), "signs aligned"),
        Column(lambda one: _ratio(one.at().ratio_cluster_aligned), "clusters aligned"),
        Column(alone, "columns aligned singly", goes=1),
        Column(lambda one: str(max(clustered(one), default=MISSING)), "largest cluster", goes=1),
    ]
    return Table(columns, every)


def _costs(result: StabilityResult, every: Sequence[Comparison]) -> Table:
    error = "extra score error" if every[0].pair in ("qk", "k") else "extra output error"
    columns = [
        Column(0, "against", words=True),
        Column(1, "rank (removal rate)"),
        Column(lambda row: row[2].subspace_distance, "subspace distance", _ratio),
        Column(lambda row: row[2].principal_angle, "largest angle (degrees)", _degrees, goes=2),
        Column(lambda row: _ranged(row[2], "extra_energy_loss", share_text), "extra lost energy"),
        Column(lambda row: row[2].error, error, share_text),
        Column(lambda row: row[2].own_energy_loss, "own lost energy", share_text, goes=1),
    ]
    rows = [
        (one.label if index == 0 else "", name, point)
        for one in every
        for index, (name, point) in enumerate(
            zip(_choices(result, one.points[one.most]), one.points[one.most], strict=True)
        )
    ]
    return Table(columns, rows)


def _choices(result: StabilityResult, points: Sequence[CurvePoint]) -> list[str]:
    """Name each average's rank choice: given ranks come in the order they were asked for."""
    asked = iter(dict.fromkeys(result.inputs.ranks))
    names = []
    for point in points:
        rank = number(point.rank) if point.rank % 1 else f"{point.rank:.0f}"
        if point.removal_rate is not None:
            names.append(f"{rank} ({rate_text(point.removal_rate)})")
            continue
        wanted = next(asked, None)
        # Heads narrower than the rank keep their own width.
        narrow = wanted is not None and point.rank != wanted
        names.append(f"{wanted} (mean {rank})" if narrow else rank)
    return names


def _head_map(worst: Comparison, rank: int | None) -> HeatMap:
    """Return the extra lost energy of each head in per cent, mean over seeds."""
    values: list[list[float | None]] = []
    for (layer, kv_head), seeds in sorted(worst.head_costs(rank).items()):
        values += [[] for _ in range(layer + 1 - len(values))]
        values[layer] += [None] * (kv_head - len(values[layer]))
        values[layer].append(100 * fmean(seeds.values()))
    largest = max((abs(v) for row in values for v in row if v is not None), default=0.0)
    decimals = 0 if largest >= 20 else 1 if largest >= 2 else 2  # that tell heads apart
    return HeatMap(
        values,
        f"{worst.pair}: extra lost energy (%) by layer and head on {worst.target}, "
        f"{count(worst.most)} tokens, rank {rank}",
        show=lambda value: f"{value:,.{decimals}f}",
    )


def _series(one: Comparison, name: str, scale: float) -> Series:
    counts = sorted(one.points)
    points = [one.at(tokens) for tokens in counts]
    ends = [point.spread.get(name) or (None, None) for point in points]
    return Series(
        one.label,
        counts,
        [_scaled(getattr(point, name), scale) for point in points],
        [_scaled(low, scale) for low, _ in ends],
        [_scaled(high, scale) for _, high in ends],
    )


def _scaled(value: float | None, scale: float) -> float | None:
    if value is None:
        return None
    # A dataset against itself: what rounding leaves is no curve.
    return 0.0 if abs(value) < _NOTHING else value * scale


def _advice(result: StabilityResult, pairs: Mapping[str, Sequence[Comparison]]) -> list[Block]:
    found = result.data.recommendation
    assert found is not None
    source = "random" if result.inputs.source == "random" else f"{result.inputs.source}'s"
    lead = f"Calibrate with {count(found.tokens)} {source} tokens; more do not lower the cost."
    if not found.stopped_falling:
        lead = (
            f"Calibrate with {count(found.tokens)} {source} tokens or more; the cost still falls."
        )
    columns = [
        Column(0, "pair", words=True),
        Column(lambda row: f"{count(row[1].start)} to {count(row[1].to)}", "tokens"),
        Column(lambda row: row[1].cost_before, "cost before", share_text),
        Column(lambda row: row[1].cost_after, "cost after", share_text),
        Column(lambda row: row[1].removed_per_doubling, "removed per doubling", share_text),
    ]
    steps = [(pair, step) for pair, one in found.pairs.items() for step in one.evidence]
    caution = "Cost: extra lost energy, averaged over the datasets."
    return [Heading("Tokens"), Paragraph(lead), Table(columns, steps), Paragraph(caution, "aside")]


def _lengths_table(lengths: Sequence[Lengths]) -> Table:
    columns = [
        Column(lambda row: f"{row.pair} against {row.target}", "extra lost energy", words=True),
        Column("seq_len_source", "calibrated at", _length),
        Column("cost_same_length", "cost there", share_text),
        Column("seq_len_target", "used at", _length),
        Column("cost", "cost there", share_text),
    ]
    return Table(columns, lengths)


def _measured_with(
    result: StabilityResult, pairs: Mapping[str, Sequence[Comparison]]
) -> dict[str, Any]:
    inputs = result.inputs
    counts = sorted(
        {n for every in pairs.values() for one in every if not one.noise for n in one.points}
    )
    removal = ", ".join(map(rate_text, inputs.removal))
    return {
        "model": inputs.model or "none (saved moments)",
        "source": f"{inputs.source}, {', '.join(map(count, counts)) or 'no'} tokens in "
        f"sequences of {inputs.seq_len:,}",
        "datasets": f"{', '.join(inputs.targets)}; {count(inputs.target_tokens)} tokens in "
        f"sequences of {inputs.target_seq_len:,}",
        "seeds": ", ".join(str(seed) for seed in inputs.seeds if seed is not None),
        "ranks": ", ".join(map(str, dict.fromkeys(inputs.ranks))),
        "removal rates": f"{removal}, of the dataset's own spectrum" if removal else None,
    }


# --- How figures are written.


def _ratio(value: float | None) -> str:
    """Write a ratio or a distance with three digits; rounding noise as below 1e-6."""
    return "<1e-6" if value is not None and 0 < abs(value) < _ROUNDING else number(value)


def share_text(value: float | None) -> str:
    """Write a share as per cent: ``0.81 %``, ``41.3 %``, ``1,234 %``."""
    if value is None:
        return MISSING
    share = 100 * value
    decimals = 0 if abs(share) >= 99.95 else 1 if abs(share) >= 9.995 else 2
    text = f"{share:,.{decimals}f}"
    return f"{text.removeprefix('-') if not text.strip('-0.') else text} %"


def _degrees(value: float | None) -> str:
    return MISSING if value is None else f"{math.degrees(value):.1f}"


def _length(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def _ranged(point: CurvePoint, name: str, show: Any) -> str:
    """Write an average's figure with its percentiles: ``71.2 % [44.7, 111]``."""
    shown: str = show(getattr(point, name))
    bounds = point.spread.get(name)
    if bounds is None:
        return shown
    low, high = (show(one).removesuffix(" %") for one in bounds)
    return f"{shown} [{low}, {high}]"
