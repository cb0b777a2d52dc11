"""The report of ``kvprof stability``: is the rotation a property of the model, at what price?"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.views.figure import draw_curves, outer_legend, panel_figure, titled
from kvprof.views.heatmap import HeatMap
from kvprof.views.numbers import count
from kvprof.views.page import bullets, framed, heading, how_to_read, listed, paragraph, weights_row
from kvprof.views.plot import LinePlot, Series
from kvprof.views.spectrum_data import PAIR_NAMES, rate_text
from kvprof.views.stability_tables import (
    Curve,
    claims_part,
    cluster_table,
    cost_rank,
    curves_of,
    datasets,
    error_key,
    evidence_table,
    head_costs,
    lengths_table,
    noise_of,
    rank_tables,
    ratio_table,
    ratio_text,
    share_text,
    source_words,
    to_csv,
    worst,
)

__all__ = ["advice", "figure", "report", "series", "spans_decades", "to_csv", "verdict"]

# --- The figure of a stability result: each measure against the number of tokens, pair by pair.


_PANEL = (3.0, 2.7)  # inches
_MEASURES = 4  # of a pair, side by side
_NOTHING = 1e-9
_ROUNDING = 1e-6
_DECADES = 20.0


def series(curves: Sequence[Curve], figure: str, scale: float = 1.0) -> list[Series]:
    """Return one curve per target of a figure at the rank of the cost, with its spread.

    Parameters
    ----------
    curves : sequence of Curve
        Of one pair.
    figure : str
        Key of a curve's row.
    scale : float
        What values are multiplied by; 100 writes a share in per cent.
    """
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


def spans_decades(drawn: Sequence[Series]) -> bool:
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


def figure(result: Mapping[str, Any]) -> Any:
    """Return four panels per pair, with bands that hold 95 % of the heads and seeds.

    The papers' ratio after sign alignment (FDC Fig. 14, ZACK Fig. 18), the subspace distance, the
    extra lost energy and the extra error of scores or outputs, at the given rank nearest half the
    width.

    Parameters
    ----------
    result : mapping
        Of ``kvprof stability``.

    Returns
    -------
    matplotlib.figure.Figure
        For `kvprof.views.figure.figure_bytes`.

    Raises
    ------
    LackingError
        When matplotlib is not installed.
    """
    pairs = curves_of(result)
    draws: list[Callable[[Any], None]] = []
    for pair, curves in pairs.items():
        error = error_key(pair)
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
                series=(drawn := series(curves, key, scale)),
                title=title,
                x_label="tokens",
                y_label=y_label,
                log_x=True,
                log_y=spans_decades(drawn),
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


# --- What a stability result says in words: is the rotation a property of the model?


#: The papers' own limit for an average difference (FDC §6.7, ZACK §6.6).
_SAME_ELEMENTS = 0.005


def verdict(
    result: Mapping[str, Any], pairs: Mapping[str, Sequence[Curve]] | None = None
) -> list[str]:
    """Return paragraphs: the answer in one line, what it rests on per pair, and the yardsticks.

    Figures are averages at the largest token count and the given rank nearest half the width.

    Parameters
    ----------
    result : mapping
        Of ``kvprof stability``.
    pairs : mapping of str to sequence of Curve, optional
        From `curves_of`, when the caller already has them.
    """
    chosen = curves_of(result) if pairs is None else pairs
    judged = {pair: datasets(curves) for pair, curves in chosen.items() if datasets(curves)}
    if not judged:
        return ["Nothing was compared."]
    limit = result["data"].get("negligible_cost", 0.01)
    answers = [f"{pair}: {_answer(chosen[pair], limit)}." for pair in judged]
    source = source_words(result["inputs"]["source"])
    question = f"Is the rotation a property of this model, the same from {source} as from data?"
    text = [" ".join([question, *answers])]
    text += [f"{pair}: {_evidence(result, pair, chosen[pair])}" for pair in judged]
    unrelated = _unrelated(result)
    text.append(
        "For comparison, two unrelated bases give a ratio of about "
        f"{ratio_text(unrelated['unaligned'])} (√2) as they stand and 1.34–1.36 with signs "
        f"aligned; a basis that costs up to {rate_text(limit)} of extra lost energy is taken to "
        "cost nothing."
    )
    return text


def _unrelated(result: Mapping[str, Any]) -> Mapping[str, float]:
    fallback = {"unaligned": 2**0.5, "sign_aligned": 1.35}
    named: Mapping[str, float] = result["data"].get("unrelated_ratio", fallback)
    return named


def _answer(curves: Sequence[Curve], limit: float) -> str:
    known = [curve for curve in datasets(curves) if curve.cost is not None]
    if not known:
        return "it cannot be told, no cost was measured"
    costly = [curve for curve in known if (curve.cost or 0.0) > limit]
    ratios = [curve.at_cost_rank()["ratio_sign_aligned"] for curve in known]
    if not costly:
        same = all(ratio is not None and ratio < _SAME_ELEMENTS for ratio in ratios)
        return "yes" if same else "by its elements no, but the difference costs nothing"
    noise = noise_of(curves)
    floor = None if noise is None else noise.cost
    if floor is not None and all((curve.cost or 0.0) <= floor for curve in costly):
        return "it cannot be told, another seed costs as much as another source"
    if len(costly) < len(known):
        cheap = [curve.target for curve in known if curve not in costly]
        return f"for {listed(cheap)} yes in what it costs, for {_targets(costly)} no"
    return "no" if len(known) > 1 else f"no, not for {_targets(known)}"


def _evidence(result: Mapping[str, Any], pair: str, curves: Sequence[Curve]) -> str:
    every = datasets(curves)
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
    noise = noise_of(curves)
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
    figures = ", ".join(f"{ratio_text(ratio)} on {target}" for target, ratio in known.items())
    text = f"With signs aligned its elements differ by {figures}, relative to their mean size"
    floor = None if noise is None else noise.at_cost_rank()["ratio_sign_aligned"]
    if floor is not None:
        text += f", against {ratio_text(floor)} between two seeds"
    return text + "."


def _targets(curves: Sequence[Curve]) -> str:
    return listed([curve.target for curve in curves])


def advice(result: Mapping[str, Any], pairs: Mapping[str, Sequence[Curve]]) -> list[str]:
    """Return in words how many tokens to calibrate with, and what that does not buy.

    Parameters
    ----------
    result : mapping
        Of ``kvprof stability``.
    pairs : mapping of str to sequence of Curve
        From `curves_of`.
    """
    found = result["data"]["recommendation"]
    if found is None:
        return ["No recommendation: it takes a sweep of two token counts or more."]
    source = source_words(result["inputs"]["source"])
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
    """Return the report for people.

    Parameters
    ----------
    result : mapping
        A result of kind ``stability``.
    width : int or None
        Columns at most; None takes the console's.
    colour : bool
        False leaves out every escape code.
    """
    data = result["data"]
    pairs = curves_of(result)
    answer, *evidence = verdict(result, pairs)
    parts: list[RenderableType] = []
    for text in evidence:
        parts += [Text(), paragraph(text)]
    if pairs:
        parts += [heading("What the papers claim"), claims_part(data["claims"])]
    for pair, curves in pairs.items():
        parts += _pair_part(result, pair, curves)
    if pairs:
        parts += how_to_read((_RATIO, _SUBSPACE, _PRICE, _SPREAD))
    for pair, curves in pairs.items():
        parts += _plots(result, pair, curves)
    for pair, curves in pairs.items():
        parts += _heat_map(result, pair, curves)
    if pairs:
        parts += [heading("How many tokens"), bullets(advice(result, pairs))]
    if data["recommendation"] is not None:
        parts += [Text(), evidence_table(data["recommendation"])]
        parts += [paragraph("Cost: extra lost energy, averaged over the datasets.", "dim")]
    if data.get("lengths"):
        parts += [heading("Length of the sequences"), lengths_table(data["lengths"])]
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
    parts: list[RenderableType] = [heading(f"{pair}: {name}"), ratio_table(curves)]
    clusters = cluster_table(curves, result["data"].get("clusters", ()))
    if clusters is None:
        parts += [Text(), paragraph("No clusters were aligned: that takes two seeds.")]
    else:
        parts += [Text(), clusters]
    return [*parts, *rank_tables(curves, result)]


def _plots(result: Mapping[str, Any], pair: str, curves: Sequence[Curve]) -> list[RenderableType]:
    if not any(len(curve.counts) > 1 for curve in datasets(curves)):
        return []
    source = datasets(curves)[0].source
    rank = cost_rank(result, pair)
    at = "" if rank is None else f" at rank {rank}"
    shown = (
        ("ratio_sign_aligned", f"{pair}: ratio with signs aligned", "ratio", 1.0),
        ("subspace_distance", f"{pair}: subspace distance{at}", "distance", 1.0),
        ("extra_energy_loss", f"{pair}: extra lost energy{at}", "per cent", 100.0),
    )
    parts: list[RenderableType] = []
    for key, title, y_label, scale in shown:
        drawn = series(curves, key, scale)
        plot = LinePlot(
            drawn,
            f"{title}, by number of tokens",
            "random tokens" if source == "random" else f"tokens of {source}",
            y_label,
            height=_HEIGHT,
            log_x=True,
            log_y=spans_decades(drawn),
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
    which = f"{top.target} (the worst)" if len(datasets(curves)) > 1 else top.target
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
    removal = ", ".join(f"{100 * rate:.6g} %" for rate in inputs["removal"])
    compared = [curve for curves in pairs.values() for curve in datasets(curves)]
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
