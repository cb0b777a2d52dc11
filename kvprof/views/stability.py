"""The report of ``kvprof stability``: is the rotation a property of the model, at what price?"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvprof.views.heatmap import HeatMap
from kvprof.views.numbers import count
from kvprof.views.page import Fitted, bullets, heading, incomplete_note, paragraph
from kvprof.views.plot import LinePlot
from kvprof.views.spectrum_data import PAIR_NAMES
from kvprof.views.stability_csv import to_csv
from kvprof.views.stability_data import (
    Curve,
    cost_rank,
    curves_of,
    datasets,
    head_costs,
    worst,
)
from kvprof.views.stability_figure import figure, series, spans_decades
from kvprof.views.stability_tables import (
    claims_part,
    cluster_table,
    evidence_table,
    lengths_table,
    rank_tables,
    ratio_table,
)
from kvprof.views.stability_verdict import advice, verdict
from kvprof.views.tables import key_values

__all__ = ["figure", "report", "to_csv"]

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
    parts: list[RenderableType] = []
    if not result["complete"]:
        parts += [incomplete_note(), Text()]
    for index, text in enumerate(verdict(result, pairs)):
        parts += [Text()] if index else []
        parts.append(paragraph(text, "" if index else "bold"))
    if pairs:
        parts += [heading("What the papers claim"), claims_part(data["claims"])]
    for pair, curves in pairs.items():
        parts += _pair_part(result, pair, curves)
    if pairs:
        parts += [heading("How to read this"), bullets((_RATIO, _SUBSPACE, _PRICE, _SPREAD))]
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
    parts += [heading("Measured with"), key_values(_provenance(result, pairs))]
    if result["warnings"]:
        parts += [heading("Warnings"), bullets(result["warnings"], "yellow")]
    if not result["complete"]:
        parts += [Text(), incomplete_note()]
    return Fitted(Group(*parts), width=width, colour=colour)


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


def _provenance(result: Mapping[str, Any], pairs: Mapping[str, Sequence[Curve]]) -> dict[str, str]:
    """Return what the figures depend on, in words; what the result does not name is left out."""
    inputs = result["inputs"]
    seeds = [str(seed) for seed in inputs["seeds"] if seed is not None]
    removal = ", ".join(f"{100 * rate:.6g} %" for rate in inputs["removal"])
    compared = [curve for curves in pairs.values() for curve in datasets(curves)]
    counts = sorted({tokens for curve in compared for tokens in curve.counts})
    shown = {
        "model": inputs["model"] or "none loaded, saved moments",
        "fingerprint": inputs["fingerprint"],
        "source": f"{inputs['source']}, {', '.join(map(count, counts)) or 'no'} tokens in "
        f"sequences of {inputs['seq_len']:,}",
        "datasets": f"{', '.join(inputs['targets'])}; {count(inputs['target_tokens'])} tokens in "
        f"sequences of {inputs['target_seq_len']:,}",
        "seeds": ", ".join(seeds) or None,
        "ranks": ", ".join(map(str, dict.fromkeys(inputs["ranks"]))) or None,
        "removal rates": f"{removal}, of the dataset's own spectrum" if removal else None,
        "dtype": f"{inputs['dtype']} on {inputs['device']}" if inputs["dtype"] else None,
        "written": result.get("created"),
    }
    return {key: str(value) for key, value in shown.items() if value is not None}
