"""Report, CSV and figure of ``kvprof stability``: is the rotation the model's, at what price?"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.analysis.stats import surely_above
from kvprof.report.spectrum import PAIR_NAMES
from kvprof.views.figure import draw_curves, outer_legend, panel_figure, titled
from kvprof.views.heatmap import HeatMap
from kvprof.views.numbers import MISSING, count, number, percent, rate_text
from kvprof.views.page import (
    bullets,
    ends,
    framed,
    heading,
    how_to_read,
    listed,
    paragraph,
    tidy_csv,
    weights_row,
)
from kvprof.views.plot import LinePlot, Series
from kvprof.views.tables import DataTable, claims_table, columns

__all__ = [
    "COLUMNS",
    "NOISE_FLOOR",
    "cost_rank",
    "curves_of",
    "figure",
    "head_costs",
    "report",
    "share_text",
    "to_csv",
    "verdict",
    "worst",
]

Row = Mapping[str, Any]

#: The target that is random tokens with another seed, as `kvprof.analysis.stability_data` names
#: it; views import no torch, so it is written twice, and a test holds the two together.
NOISE_FLOOR = "random, another seed"


@dataclass
class Curve:
    """One pair's source against one target, at every token count.

    Attributes
    ----------
    pair, source, target : str
        What was compared.
    cost_position : int
        Which of the given ranks the cost is read at.
    points : dict of int to list of mapping
        Token count to its averages, one per rank choice, in the result's order.
    heads : list of mapping
        Rows of single heads, of every token count, seed and rank choice.
    """

    pair: str
    source: str
    target: str
    cost_position: int = 0
    points: dict[int, list[Row]] = field(default_factory=dict)
    heads: list[Row] = field(default_factory=list)

    @property
    def noise(self) -> bool:
        """Whether this is the noise floor."""
        return self.target == NOISE_FLOOR

    @property
    def counts(self) -> list[int]:
        """Token counts, ascending."""
        return sorted(self.points)

    @property
    def label(self) -> str:
        """The target, marked when it is the noise floor."""
        return f"{self.target} (noise floor)" if self.noise else self.target

    def final(self) -> list[Row]:
        """Return the averages at the largest token count, one per rank choice."""
        return self.points[max(self.points)]

    def at_cost_rank(self, tokens: int | None = None) -> Row:
        """Return the average at the rank of the cost, by default at the largest token count."""
        rows = self.final() if tokens is None else self.points[tokens]
        given = [row for row in rows if row["removal_rate"] is None] or rows
        return given[min(self.cost_position, len(given) - 1)]

    @property
    def cost(self) -> float | None:
        """Mean extra lost energy at the largest token count and the rank of the cost."""
        value: float | None = self.at_cost_rank()["extra_energy_loss"]
        return value


_RATIO = (
    "Ratio: mean absolute difference of the elements of two bases over their mean size (FDC §3.2, "
    "ZACK §4.3). Signs of columns are arbitrary, and columns that a change of seed cannot tell "
    "apart (clusters) turn into each other at no loss."
)
_PRICE = (
    "Extra lost energy, extra score or output error: what the source's basis loses beyond the "
    "dataset's own at the same rank, relative to the dataset's own loss (as it is where that is "
    "below 1e-6 of the energy). An error below zero is no mistake: the own basis is the best for "
    "the energy only."
)
_SUBSPACE = (
    "Subspace distance: 0 for the same subspace, 1 for an orthogonal one. A rank with a removal "
    "rate beside it is the mean of what that rate picks from each dataset's own spectrum."
)
_SPREAD = "Below each mean stand the 2.5 and 97.5 percentiles over heads and seeds."
_HEIGHT = 12  # rows of a plot


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report for people."""
    data = result["data"]
    pairs = curves_of(result)
    answer, *evidence = verdict(result, pairs)
    parts: list[RenderableType] = []
    for text in evidence:
        parts += [Text(), paragraph(text)]
    if pairs:
        parts += [heading("What the papers claim"), _claims_part(data["claims"])]
    for pair, curves in pairs.items():
        parts += _pair_part(result, pair, curves)
    if pairs:
        parts += how_to_read((_RATIO, _SUBSPACE, _PRICE, _SPREAD))
    for pair, curves in pairs.items():
        parts += _plots(result, pair, curves)
    for pair, curves in pairs.items():
        parts += _heat_map(result, pair, curves)
    if pairs:
        parts += [heading("How many tokens"), bullets(_advice(result, pairs))]
    if data["recommendation"] is not None:
        parts += [Text(), _evidence_table(data["recommendation"])]
        parts += [paragraph("Cost: extra lost energy, averaged over the datasets.", "dim")]
    if data.get("lengths"):
        parts += [heading("Length of the sequences"), _lengths_table(data["lengths"])]
    return framed(
        result,
        parts,
        answer=answer,
        measured_with=_provenance(result, pairs),
        width=width,
        colour=colour,
    )


def _pair_part(
    result: Mapping[str, Any], pair: str, curves: Sequence[Curve]
) -> list[RenderableType]:
    name = PAIR_NAMES.get(pair, pair)
    parts: list[RenderableType] = [heading(f"{pair}: {name}"), _ratio_table(curves)]
    clusters = _cluster_table(curves, result["data"].get("clusters", ()))
    if clusters is None:
        parts += [Text(), paragraph("No clusters were aligned: that takes two seeds.")]
    else:
        parts += [Text(), clusters]
    return [*parts, *_rank_tables(curves, result)]


def _plots(result: Mapping[str, Any], pair: str, curves: Sequence[Curve]) -> list[RenderableType]:
    if not any(len(curve.counts) > 1 for curve in _datasets(curves)):
        return []
    source = _datasets(curves)[0].source
    rank = cost_rank(result, pair)
    at = "" if rank is None else f" at rank {rank}"
    shown = (
        ("ratio_sign_aligned", f"{pair}: ratio with signs aligned", "ratio", 1.0),
        ("subspace_distance", f"{pair}: subspace distance{at}", "distance", 1.0),
        ("extra_energy_loss", f"{pair}: extra lost energy{at}", "per cent", 100.0),
    )
    parts: list[RenderableType] = []
    for key, title, y_label, scale in shown:
        drawn = _series(curves, key, scale)
        plot = LinePlot(
            drawn,
            f"{title}, by number of tokens",
            "random tokens" if source == "random" else f"tokens of {source}",
            y_label,
            height=_HEIGHT,
            log_x=True,
            log_y=_spans_decades(drawn),
        )
        parts += [Text(), plot]
    return parts


def _heat_map(
    result: Mapping[str, Any], pair: str, curves: Sequence[Curve]
) -> list[RenderableType]:
    top = worst(curves)
    if top is None or not top.heads:
        return []
    tokens = max(top.counts)
    values = head_costs(top, cost_rank(result, pair), tokens)
    largest = max((abs(v) for row in values for v in row if v is not None), default=0.0)
    # Whole per cents where they tell heads apart.
    decimals = 0 if largest >= 0.2 else 1 if largest >= 0.02 else 2
    which = f"{top.target} (the worst)" if len(_datasets(curves)) > 1 else top.target
    title = (
        f"{pair}: extra lost energy by layer and head in per cent, against {which}, "
        f"{count(tokens)} tokens, rank {cost_rank(result, pair)}"
    )
    shown = HeatMap(
        [[None if v is None else 100 * v for v in row] for row in values],
        title,
        write=lambda value: f"{value:,.{decimals}f}",
    )
    return [Text(), shown]


def _provenance(result: Mapping[str, Any], pairs: Mapping[str, Sequence[Curve]]) -> dict[str, Any]:
    """Return what the figures depend on, in words; None for what the result does not name."""
    inputs = result["inputs"]
    seeds = [str(seed) for seed in inputs["seeds"] if seed is not None]
    removal = ", ".join(map(rate_text, inputs["removal"]))
    compared = [curve for curves in pairs.values() for curve in _datasets(curves)]
    counts = sorted({tokens for curve in compared for tokens in curve.counts})
    return {
        "model": inputs["model"] or "none loaded, saved moments",
        **weights_row(inputs),
        "fingerprint": inputs["fingerprint"],
        "source": f"{inputs['source']}, {', '.join(map(count, counts)) or 'no'} tokens in "
        f"sequences of {inputs['seq_len']:,}",
        "datasets": f"{', '.join(inputs['targets'])}; {count(inputs['target_tokens'])} tokens in "
        f"sequences of {inputs['target_seq_len']:,}",
        "seeds": ", ".join(seeds) or None,
        "ranks": ", ".join(map(str, dict.fromkeys(inputs["ranks"]))) or None,
        "removal rates": f"{removal}, of the dataset's own spectrum" if removal else None,
        "dtype": f"{inputs['dtype']} on {inputs['device']}" if inputs["dtype"] else None,
    }


# --- What the result says in words: is the rotation a property of the model?

#: The papers' own limit for an average difference (FDC §6.7, ZACK §6.6).
_SAME_ELEMENTS = 0.005


def verdict(
    result: Mapping[str, Any], pairs: Mapping[str, Sequence[Curve]] | None = None
) -> list[str]:
    """Return paragraphs: the answer in one line, what it rests on per pair, and the yardsticks.

    Figures are averages at the largest token count and the given rank nearest half the width.
    """
    chosen = curves_of(result) if pairs is None else pairs
    judged = {pair: _datasets(curves) for pair, curves in chosen.items() if _datasets(curves)}
    if not judged:
        return ["Nothing was compared."]
    limit = result["data"].get("negligible_cost", 0.01)
    answers = [
        f"{pair}: {_answer(chosen[pair], limit, cost_rank(result, pair))}." for pair in judged
    ]
    source = _source_words(result["inputs"]["source"])
    question = f"Is the rotation a property of this model, the same from {source} as from data?"
    text = [" ".join([question, *answers])]
    text += [f"{pair}: {_evidence(result, pair, chosen[pair])}" for pair in judged]
    unrelated = _unrelated(result)
    text.append(
        "For comparison, two unrelated bases give a ratio of about "
        f"{_ratio_text(unrelated['unaligned'])} (√2) as they stand and 1.34–1.36 with signs "
        f"aligned; a basis that costs up to {rate_text(limit)} of extra lost energy is taken to "
        "cost nothing."
    )
    return text


def _unrelated(result: Mapping[str, Any]) -> Mapping[str, float]:
    fallback = {"unaligned": 2**0.5, "sign_aligned": 1.35}
    named: Mapping[str, float] = result["data"].get("unrelated_ratio", fallback)
    return named


def _answer(curves: Sequence[Curve], limit: float, rank: int | None) -> str:
    known = [curve for curve in _datasets(curves) if curve.cost is not None]
    if not known:
        return "it cannot be told, no cost was measured"
    costly = [curve for curve in known if (curve.cost or 0.0) > limit]
    ratios = [curve.at_cost_rank()["ratio_sign_aligned"] for curve in known]
    if not costly:
        same = all(ratio is not None and ratio < _SAME_ELEMENTS for ratio in ratios)
        return "yes" if same else "by its elements no, but the difference costs nothing"
    noise = _noise_of(curves)
    sure = [one for one in costly if noise is None or _surely_above(one, noise, rank)]
    doubtful = [one for one in costly if one not in sure]
    if len(sure) == len(known):
        return "no" if len(known) > 1 else f"no, not for {_targets(known)}"
    if len(doubtful) == len(known):
        return f"it cannot be told, {_AS_MUCH}"
    cheap = [one for one in known if one not in costly]
    told = (
        (cheap, "yes in what it costs"),
        (sure, "no"),
        (doubtful, f"it cannot be told, {_AS_MUCH}"),
    )
    return ", ".join(f"for {_targets(which)} {said}" for which, said in told if which)


_AS_MUCH = "another seed costs as much as another source"


def _surely_above(curve: Curve, noise: Curve, rank: int | None) -> bool:
    """Return whether a target costs more than another seed does, beyond what heads and seeds vary.

    The mean difference of the heads is above 0 by more than two standard errors, those of heads and
    of seeds together. Where both are of the same seeds, these are compared one by one; a source
    without a seed is taken to vary as one of the floor's does.
    """
    tokens = max(curve.counts)
    if noise.cost is None or tokens not in noise.points:
        return True
    if (curve.cost or 0.0) <= noise.cost:
        return False
    costs, floor = (_costs_by_head(one, rank, tokens) for one in (curve, noise))
    heads = [
        fmean(own.values()) - fmean(floor[head].values())
        for head, own in costs.items()
        if head in floor
    ]
    if not heads:
        return True
    own, other = _means_of_seeds(costs), _means_of_seeds(floor)
    common = own.keys() & other.keys()
    # Without seeds in common another source is taken to vary as the floor's seeds do.
    seeds = [own[seed] - other[seed] for seed in common] or [*other.values()]
    return surely_above(heads, seeds, 1 if common else 1 + len(other))


def _means_of_seeds(
    costs: Mapping[tuple[int, int], Mapping[int | None, float]],
) -> dict[int | None, float]:
    seeds = {seed for own in costs.values() for seed in own}
    return {seed: fmean(own[seed] for own in costs.values() if seed in own) for seed in seeds}


def _evidence(result: Mapping[str, Any], pair: str, curves: Sequence[Curve]) -> str:
    every = _datasets(curves)
    first = every[0]
    basis = f"the basis from {count(max(first.counts))} tokens of {first.source}"
    if first.source == "random":
        basis = f"the basis from {count(max(first.counts))} random tokens"
    costs = sorted((c for c in every if c.cost is not None), key=lambda c: c.cost or 0.0)
    sentences = []
    if costs:
        most, least = costs[-1], costs[0]
        text = (
            f"kept at rank {cost_rank(result, pair)}, {basis} loses "
            f"{share_text(most.cost)} more energy than the data's own on {most.target}"
        )
        own = most.at_cost_rank().get("own_energy_loss")
        if own is not None:
            text += f" (whose own loses {share_text(own)} of all)"
        if least is not most:
            where = "the least" if len(costs) > 2 else "the other"
            text += f" and {share_text(least.cost)} more on {least.target}, {where}"
        sentences.append(text + ".")
    noise = _noise_of(curves)
    if noise is None:
        sentences.append("There is no noise floor to hold that against.")
    else:
        sentences.append(
            f"Random tokens with another seed cost {share_text(noise.cost)}: the noise floor."
        )
    sentences.append(_ratios(every, noise))
    return " ".join(sentence for sentence in sentences if sentence)


def _ratios(curves: Sequence[Curve], noise: Curve | None) -> str:
    known = {
        curve.target: ratio
        for curve in curves
        if (ratio := curve.at_cost_rank()["ratio_sign_aligned"]) is not None
    }
    if not known:
        return ""
    figures = ", ".join(f"{_ratio_text(ratio)} on {target}" for target, ratio in known.items())
    text = f"With signs aligned its elements differ by {figures}, relative to their mean size"
    floor = None if noise is None else noise.at_cost_rank()["ratio_sign_aligned"]
    if floor is not None:
        text += f", against {_ratio_text(floor)} between two seeds"
    return text + "."


def _targets(curves: Sequence[Curve]) -> str:
    return listed([curve.target for curve in curves])


def _advice(result: Mapping[str, Any], pairs: Mapping[str, Sequence[Curve]]) -> list[str]:
    """Return in words how many tokens to calibrate with, and what that does not buy."""
    found = result["data"]["recommendation"]
    if found is None:
        return ["No recommendation: it takes a sweep of two token counts or more."]
    source = _source_words(result["inputs"]["source"])
    tokens = count(found["tokens"])
    if found["stopped_falling"]:
        lines = [
            f"Calibrate with {tokens} tokens ({source}): that is where the extra lost energy stops "
            "falling for every pair."
        ]
    else:
        lines = [
            f"At least {tokens} tokens ({source}): at the sweep's end the extra lost energy was "
            "still falling, so a longer sweep (--tokens) may recommend more."
        ]
    lines += [f"{pair}: {_steps(entry)}" for pair, entry in found["pairs"].items()]
    limit = result["data"].get("negligible_cost", 0.01)
    for pair, entry in found["pairs"].items():
        top = worst(pairs.get(pair, ()))
        if entry["stopped_falling"] and top is not None and (top.cost or 0.0) > limit:
            lines.append(
                f"{pair}: more tokens of this source do not help any further, yet "
                f"{share_text(top.cost)} of extra lost energy stays on {top.target}; calibrate "
                "on such data to lose it."
            )
    return lines


def _steps(entry: Mapping[str, Any]) -> str:
    """Say how much of the cost the doublings on both sides of the recommendation removed."""
    share = rate_text(entry["threshold"])
    before = [step for step in entry["evidence"] if step["to"] <= entry["tokens"]]
    after = [step for step in entry["evidence"] if step["from"] >= entry["tokens"]]
    if not entry["stopped_falling"]:
        removed = share_text(before[-1]["removed_per_doubling"])
        return f"still falling at {count(entry['tokens'])}; the last doubling removed {removed}."
    most = share_text(max(step["removed_per_doubling"] for step in after))
    text = f"{count(entry['tokens'])}; a doubling after it removes {most} at most, under {share}"
    if before:
        text += f"; the one before it removed {share_text(before[-1]['removed_per_doubling'])}"
    return text + "."


# --- Curves in order, the rank of the cost, and how figures are written.


def _given_ranks(result: Mapping[str, Any]) -> list[int]:
    """Return the ranks that were asked for, each once."""
    return list(dict.fromkeys(result["inputs"]["ranks"]))


def cost_rank(result: Mapping[str, Any], pair: str) -> int | None:
    """Return the given rank that costs are read at: the one nearest half the pair's width."""
    ranks = _given_ranks(result)
    named = result["data"].get("half_ranks", {}).get(pair)
    return named if named in ranks else max(ranks, default=None)


def curves_of(result: Mapping[str, Any]) -> dict[str, list[Curve]]:
    """Sort the rows of a result into curves, in one pass."""
    found: dict[tuple[str, str, str], Curve] = {}
    for row in result["data"]["curves"]:
        key = (row["pair"], row["source"], row["target"])
        curve = found.get(key)
        if curve is None:
            curve = found[key] = Curve(*key)
        if row["layer"] is None:
            curve.points.setdefault(row["tokens"], []).append(row)
        else:
            curve.heads.append(row)
    ranks = _given_ranks(result)
    pairs: dict[str, list[Curve]] = {}
    for curve in sorted(found.values(), key=lambda curve: curve.noise):
        if curve.points:
            rank = cost_rank(result, curve.pair)
            curve.cost_position = ranks.index(rank) if rank is not None else 0
            pairs.setdefault(curve.pair, []).append(curve)
    return pairs


def _datasets(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves that are not the noise floor."""
    return [curve for curve in curves if not curve.noise]


def _noise_of(curves: Sequence[Curve]) -> Curve | None:
    """Return the noise floor, or None when it was not measured."""
    return next((curve for curve in curves if curve.noise), None)


def worst(curves: Sequence[Curve]) -> Curve | None:
    """Return the dataset with the highest cost; None when no cost is known."""
    known = [curve for curve in _datasets(curves) if curve.cost is not None]
    return max(known, key=lambda curve: curve.cost or 0.0, default=None)


def head_costs(curve: Curve, rank: int | None, tokens: int) -> list[list[float | None]]:
    """Return the extra lost energy of each head, mean over seeds, as ``[layer][kv_head]``."""
    chosen = _costs_by_head(curve, rank, tokens)
    if not chosen:
        return []
    values: list[list[float | None]] = [[] for _ in range(max(layer for layer, _ in chosen) + 1)]
    for (layer, kv_head), seeds in sorted(chosen.items()):
        values[layer] += [None] * (kv_head - len(values[layer]))
        values[layer].append(sum(seeds.values()) / len(seeds))
    return values


def _costs_by_head(
    curve: Curve, rank: int | None, tokens: int
) -> dict[tuple[int, int], dict[int | None, float]]:
    """Return the extra lost energy by layer and head, then by seed; as `head_costs`."""
    # A head's rows at a given rank r have min(r, its width), the largest of its ranks up to r.
    chosen: dict[tuple[int, int], tuple[float, dict[int | None, float]]] = {}
    for row in curve.heads:
        value = row["extra_energy_loss"]
        if row["tokens"] != tokens or row["removal_rate"] is not None or value is None:
            continue
        if rank is not None and row["rank"] > rank:
            continue
        head = row["layer"], row["kv_head"]
        if head not in chosen or row["rank"] > chosen[head][0]:
            chosen[head] = row["rank"], {}
        if row["rank"] == chosen[head][0]:
            chosen[head][1][row["seed"]] = value
    return {head: costs for head, (_, costs) in chosen.items()}


def _error_key(pair: str) -> str:
    """Return which error of a product belongs to a pair: of the scores or of the outputs."""
    return "extra_score_error" if pair in ("qk", "k") else "extra_output_error"


def _source_words(source: str) -> str:
    """Return a source as a sentence names it."""
    return "random tokens" if source == "random" else source


def _ratio_text(value: float | None) -> str:
    """Write a ratio or a distance with three digits; rounding noise as below 1e-6."""
    if value is not None and 0 < abs(value) < 1e-6:
        return "<1e-6"
    return number(value)


def share_text(value: float | None) -> str:
    """Write a share as per cent: ``0.81 %``, ``41.3 %``, ``1,234 %``."""
    return MISSING if value is None else f"{_per_cent(value)} %"


def _degrees_text(value: float | None) -> str:
    """Write an angle, given in radians, in degrees with one decimal."""
    return MISSING if value is None else f"{math.degrees(value):.1f}"


def _spread_text(row: Row, figure: str) -> str:
    """Write the 2.5–97.5 % range of an average's figure in the unit of its mean."""
    bounds = row.get("spread", {}).get(figure)
    if bounds is None:
        return MISSING
    if figure.startswith("extra_"):
        low, high, unit = _per_cent(bounds[0]), _per_cent(bounds[1]), " %"
    elif figure == "principal_angle":
        low, high, unit = _degrees_text(bounds[0]), _degrees_text(bounds[1]), ""
    else:
        low, high, unit = _ratio_text(bounds[0]), _ratio_text(bounds[1]), ""
    # A dash before a minus sign cannot be read.
    between = " to " if low.startswith("-") else "–"
    return f"{low}{between}{high}{unit}"


def _per_cent(share: float) -> str:
    value = 100 * share
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if not text.strip("-0.") else text


_NOTHING = 1e-9
_ROUNDING = 1e-6
_DECADES = 20.0


def _series(curves: Sequence[Curve], figure: str, scale: float = 1.0) -> list[Series]:
    """Return one curve per target of a figure at the rank of the cost, with its spread."""
    drawn = []
    for curve in curves:
        rows = [curve.at_cost_rank(tokens) for tokens in curve.counts]
        ends = [row.get("spread", {}).get(figure) or (None, None) for row in rows]
        drawn.append(
            Series(
                curve.label,
                curve.counts,
                [_scaled(row[figure], scale) for row in rows],
                [_scaled(low, scale) for low, _ in ends],
                [_scaled(high, scale) for _, high in ends],
            )
        )
    return drawn


def _spans_decades(drawn: Sequence[Series]) -> bool:
    """Return whether curves lie so far apart that a linear axis would press one to its edge.

    A zero (a dataset against itself) or what rounding makes of it has no place on a log axis.
    """
    known = [value for one in drawn for value in one.y if value is not None]
    return bool(known) and min(known) > _ROUNDING and max(known) > _DECADES * min(known)


def _scaled(value: float | None, scale: float) -> float | None:
    if value is None:
        return None
    # A dataset against itself: what rounding leaves is no curve.
    return 0.0 if abs(value) < _NOTHING else value * scale


# --- The tables of the report.

_SPREAD_NOTE = "  2.5–97.5 %"


def _claims_part(claims: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the papers' statements with what was measured; each statement is written once."""
    if not claims:
        return paragraph("No published claim is about this source and these pairs.")
    shown = []
    before = None
    for claim in claims:
        statement = f"{claim['paper']}: {claim['claim']}."
        at = "" if claim["tokens"] is None else f", {count(claim['tokens'])} tokens"
        lead = "The same," if statement == before else statement
        before = statement
        text = f"{lead} {claim['pair']} against {claim['target']}{at}."
        shown.append({**claim, "claim": text, "threshold": f"{claim['threshold']:g}"})
    return claims_table(shown, title="")


def _ratio_table(curves: Sequence[Curve]) -> DataTable:
    """Return the papers' ratio of every target, in its three forms, with the spread below."""
    figures = ("ratio", "ratio_sign_aligned", "ratio_cluster_aligned")
    rows: list[tuple[str, ...]] = []
    for curve in curves:
        row = curve.at_cost_rank()
        rows.append(
            (
                f"{curve.source} against {curve.label}",
                count(max(curve.counts)),
                *(_ratio_text(row[figure]) for figure in figures),
            )
        )
        rows.append((_SPREAD_NOTE, "", *(_spread_text(row, figure) for figure in figures)))
    titles = ("tokens", "unaligned", "signs aligned", "clusters aligned")
    return DataTable(columns("ratio", figures=titles), rows)


def _cluster_table(
    curves: Sequence[Curve], clusters: Sequence[Mapping[str, Any]]
) -> DataTable | None:
    """Return how many columns were aligned together at the largest token count; None without."""
    found: list[tuple[Curve, dict[int, int]]] = []
    for curve in curves:
        for entry in clusters:
            where = (entry["pair"], entry["target"], entry["tokens"])
            if where == (curve.pair, curve.target, max(curve.counts)) and entry["sizes"]:
                # In columns, not in clusters: what share of the basis was turned freely.
                sizes = {int(size): int(size) * n for size, n in entry["sizes"].items()}
                found.append((curve, sizes))
    if not found:
        return None
    bins = list(_bins(max(max(sizes) for _, sizes in found)))
    rows: list[tuple[str, ...]] = []
    for curve, sizes in found:
        total = sum(sizes.values())
        shares = [
            percent(sum(n for size, n in sizes.items() if low <= size <= high) / total)
            for low, high in bins
        ]
        rows.append((f"{curve.source} against {curve.label}", *shares, str(max(sizes))))
    titles = [f"by {low}–{high}" if low < high else f"by {low}" for low, high in bins]
    titles[0] = "aligned alone"
    heads = columns("share of columns", figures=(*titles, "largest cluster"))
    return DataTable(heads, rows)


def _bins(largest: int) -> Iterator[tuple[int, int]]:
    """Yield 1, 2, 3–4, 5–8 … until `largest` is in."""
    low, high = 1, 1
    while low <= largest:
        yield low, min(high, largest)
        low, high = high + 1, high * 2


def _rank_tables(curves: Sequence[Curve], result: Mapping[str, Any]) -> list[RenderableType]:
    """Return a table per source and target at its largest token count, a row per rank choice."""
    error = _error_key(curves[0].pair)
    heads = columns(
        "rank (removal rate)",
        figures=(
            "subspace distance",
            "largest angle (degrees)",
            "extra lost energy",
            error.replace("_", " "),
        ),
    )
    parts: list[RenderableType] = []
    for curve in curves:
        rows: list[tuple[str, ...]] = []
        for name, row in zip(_choices(curve.final(), result), curve.final(), strict=True):
            rows.append(
                (
                    name,
                    _ratio_text(row["subspace_distance"]),
                    _degrees_text(row["principal_angle"]),
                    share_text(row["extra_energy_loss"]),
                    share_text(row[error]),
                )
            )
            figures = ("subspace_distance", "principal_angle", "extra_energy_loss", error)
            rows.append((_SPREAD_NOTE, *(_spread_text(row, figure) for figure in figures)))
        title = (
            f"{curve.pair}: {curve.source} against {curve.label}, {count(max(curve.counts))} tokens"
        )
        parts += [Text(), DataTable(heads, rows, title=title)]
    return parts


def _choices(rows: Sequence[Row], result: Mapping[str, Any]) -> list[str]:
    """Name each average's rank choice: given ranks come in the order they were asked for."""
    asked = iter(_given_ranks(result))
    names = []
    for row in rows:
        rank = number(row["rank"]) if row["rank"] % 1 else f"{row['rank']:.0f}"
        if row["removal_rate"] is not None:
            names.append(f"{rank} ({rate_text(row['removal_rate'])})")
            continue
        wanted = next(asked, None)
        # Heads narrower than the rank keep their own width.
        narrow = wanted is not None and row["rank"] != wanted
        names.append(f"{wanted} (mean {rank})" if narrow else rank)
    return names


def _evidence_table(recommendation: Mapping[str, Any]) -> DataTable:
    """Return what every step of the sweep removed of the cost, per pair."""
    rows = [
        (
            f"{pair}, {count(step['from'])} to {count(step['to'])}",
            share_text(step["cost_before"]),
            share_text(step["cost_after"]),
            share_text(step["removed_per_doubling"]),
        )
        for pair, entry in recommendation["pairs"].items()
        for step in entry["evidence"]
    ]
    titles = ("cost before", "cost after", "removed per doubling")
    return DataTable(columns("tokens", figures=titles), rows)


def _lengths_table(lengths: Sequence[Mapping[str, Any]]) -> DataTable:
    """Return the cost at the source's own sequence length beside that at the dataset's."""
    rows = [
        (
            f"{row['pair']} against {row['target']}",
            _length(row["seq_len_source"]),
            share_text(row["cost_same_length"]),
            _length(row["seq_len_target"]),
            share_text(row["cost"]),
        )
        for row in lengths
    ]
    titles = ("calibrated at", "cost there", "used at", "cost there")
    return DataTable(columns("extra lost energy", figures=titles), rows)


def _length(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


# --- A stability result as one tidy table.

_FIGURES = (
    "ratio",
    "ratio_sign_aligned",
    "ratio_cluster_aligned",
    "subspace_distance",
    "principal_angle",
    "extra_energy_loss",
    "extra_score_error",
    "extra_output_error",
)
_KEYS = (
    "pair",
    "source",
    "target",
    "tokens",
    "seq_len_source",
    "seq_len_target",
    "seed",
    "layer",
    "kv_head",
    "rank",
    "removal_rate",
    *_FIGURES,
)
# Results of before 2026-11-21 lack it.
_OWN = "own_energy_loss"

#: Keys of a curve's row, then the ends of each figure's spread, which averages alone have.
COLUMNS = (
    *_KEYS,
    _OWN,
    "heads_and_seeds",
    *(f"{figure}_{end}" for figure in _FIGURES for end in ("low", "high")),
)


def to_csv(result: Mapping[str, Any]) -> str:
    """Return every curve row of a stability result in one table that pandas reads as it is.

    A row without ``layer`` and ``kv_head`` is an average over heads and seeds; it alone has
    ``heads_and_seeds`` (how many) and, for every figure, ``<figure>_low`` and ``<figure>_high``
    (2.5 and 97.5 percentiles over them). Angles are in radians, losses and errors are shares;
    floats are written in full (`repr`).
    """
    return tidy_csv(COLUMNS, _rows(result))


def _rows(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for row in result["data"]["curves"]:
        line = {key: row[key] for key in _KEYS} | {_OWN: row.get(_OWN)}
        if row["layer"] is None:
            line["heads_and_seeds"] = row.get("heads_and_seeds")
            for figure, bounds in row.get("spread", {}).items():
                line |= ends(figure, bounds)
        yield line


# --- The figure: each measure against the number of tokens, pair by pair.

_PANEL = (3.0, 2.7)  # inches
_MEASURES = 4  # of a pair, side by side


def figure(result: Mapping[str, Any]) -> Any:
    """Return four panels per pair, with bands that hold 95 % of the heads and seeds.

    The papers' ratio after sign alignment (FDC Fig. 14, ZACK Fig. 18), the subspace distance, the
    extra lost energy and the extra error of scores or outputs, at the given rank nearest half the
    width.
    """
    pairs = curves_of(result)
    draws: list[Callable[[Any], None]] = []
    for pair, curves in pairs.items():
        error = _error_key(pair)
        rank = cost_rank(result, pair)
        at = "" if rank is None else f", rank {rank}"
        measures = (
            ("ratio_sign_aligned", f"{pair}: ratio δ/ε", "ratio, signs aligned", 1.0),
            ("subspace_distance", f"{pair}: subspaces{at}", "subspace distance", 1.0),
            ("extra_energy_loss", f"{pair}: lost energy{at}", "extra lost energy (%)", 100.0),
            (error, f"{pair}: {error.split('_')[1]}s{at}", f"{error.replace('_', ' ')} (%)", 100.0),
        )
        draws += [
            partial(
                draw_curves,
                series=(drawn := _series(curves, key, scale)),
                title=title,
                x_label="tokens",
                y_label=y_label,
                log_x=True,
                log_y=_spans_decades(drawn),
            )
            for key, title, y_label, scale in measures
        ]
    drawing = panel_figure(
        draws or [lambda axes: None] * _MEASURES,  # nothing compared: empty panels say so
        _PANEL,
        columns=_MEASURES,
        margin=(0.0, 0.7),
        title=_title(result),
    )
    # One legend for all: eight of them would hide the curves.
    handles: dict[str, Any] = {}
    for axes in drawing.axes:
        drawn_here, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn_here, strict=True))
        if axes.get_legend() is not None:
            axes.get_legend().remove()
    outer_legend(drawing, handles, _MEASURES)
    return drawing


def _title(result: Mapping[str, Any]) -> str:
    inputs = result["inputs"]
    model = inputs["model"] or f"model {inputs['fingerprint']}"
    return titled(result, f"{model}: the basis from {inputs['source']} against each dataset's own")
