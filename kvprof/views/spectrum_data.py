"""What the views of a spectrum result share: names of the pairs, the row shown, plain lists."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from kvprof.errors import UsageError
from kvprof.views.numbers import number, span
from kvprof.views.page import heading, paragraph
from kvprof.views.tables import Column, DataTable

__all__ = [
    "PAIR_NAMES",
    "SHOWN_DIM_RATE",
    "chosen_removal",
    "flat",
    "half_energy",
    "heads_of",
    "mean",
    "normalised_mean",
    "per_query_head",
    "rate_text",
    "width_text",
    "widths",
]

#: What a pair's vectors are, in the words of ``definitions``.
PAIR_NAMES = {
    "qk": "queries and keys of a KV head's group",
    "vo": "values with W_O",
    "q": "queries",
    "k": "keys",
    "v": "values",
    "q_pre": "queries before RoPE",
    "k_pre": "keys before RoPE",
    "w_v": "weight of the value projection",
}

#: Without a rate asked for, the removal rate whose dim_rate is nearest this is shown.
SHOWN_DIM_RATE = 0.5

Result = Mapping[str, Any]


def flat(rows: Iterable[Iterable[float]]) -> list[float]:
    """Return ``[layer][kv_head]`` as one list."""
    return [value for row in rows for value in row]


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN of nothing."""
    return sum(values) / len(values) if values else float("nan")


def heads_of(pair: Result, key: str) -> list[list[float]]:
    """Return ``[layer][kv_head][dim]`` of a pair as one list of heads."""
    return [head for layer in pair[key] for head in layer]


def widths(pair: Result) -> list[int]:
    """Return each head's full width, layer by layer."""
    return [len(head) for head in heads_of(pair, "singular_values")]


def width_text(pair: Result) -> str:
    """Return the full width in words: ``128``, or ``64–128`` when layers differ."""
    every = widths(pair)
    low, high = min(every), max(every)
    return f"{low}" if low == high else f"{low}–{high}"


def half_energy(pair: Result) -> list[float]:
    """Return the energy that each head keeps at half its width (rounded down, at least 1)."""
    return [head[max(1, len(head) // 2) - 1] for head in heads_of(pair, "energy_kept")]


def normalised_mean(pair: Result) -> list[float]:
    """Return the mean curve divided by its first value; empty when that is zero."""
    curve = pair["mean"]
    return [value / curve[0] for value in curve] if curve and curve[0] > 0 else []


def rate_text(rate: float) -> str:
    """Return a removal rate as it was asked for: 0.05 as ``5 %``, 0.0025 as ``0.25 %``."""
    return f"{100 * rate:.6g} %"


def chosen_removal(result: Result, removal_rate: float | None = None) -> Result | None:
    """Return the entry of ``data.removal`` that heat maps and summary show.

    Parameters
    ----------
    result : mapping
        Of ``kvprof spectrum``.
    removal_rate : float or None
        One of those in the result; by default the one whose ``dim_rate`` is nearest 0.5.

    Returns
    -------
    mapping or None
        None when the result has no removal rates (``qk`` or ``vo`` was not selected).

    Raises
    ------
    UsageError
        When the rate asked for is not in the result.
    """
    rows: Sequence[Result] = result["data"].get("removal") or ()
    if removal_rate is not None:
        for row in rows:
            if abs(row["removal_rate"] - removal_rate) < 1e-9:
                return row
        known = ", ".join(f"{row['removal_rate']:g}" for row in rows) or "none"
        raise UsageError(f"removal rate {removal_rate:g} is not in this result; it has {known}")
    return min(rows, key=lambda row: abs(row["dim_rate"] - SHOWN_DIM_RATE), default=None)


# --- What one basis per query head would store, beside one per KV head.


def per_query_head(data: Mapping[str, Any], grouped: Mapping[str, Any]) -> list[RenderableType]:
    """Return the report's part about bases per query head (FDC §5.1 read literally).

    Parameters
    ----------
    data : mapping
        ``data.per_query_head`` of a spectrum result.
    grouped : mapping
        ``data.pairs.qk`` of it: one basis per KV head.
    """
    parts: list[RenderableType] = [heading("One basis of qk per query head")]
    if set(data["group"]) == {1}:
        return [
            *parts,
            paragraph("Every KV head has one query head here, so both bases are the same."),
        ]
    own, shared = flat(data["qk"]["effective_rank"]), flat(grouped["effective_rank"])
    times = span(sorted(set(data["group"])))
    parts.append(
        paragraph(
            f"A basis per query head has an effective rank of {number(mean(own))}, one per KV head "
            f"{number(mean(shared))}. But each would have to store its own compressed key: {times} "
            "per KV head and token instead of one. Dimensions below are those of keys per token, "
            "over all layers."
        )
    )
    if not data["removal"]:
        return parts
    rounded = any(row["grid"] > 1 for row in data["removal"])
    columns = [
        Column("removal rate"),
        Column("mean rank per query head"),
        Column("dims stored"),
        Column("with grouped bases"),
        Column("at full width"),
        Column("of grouped"),
        Column("of full"),
    ]
    if rounded:
        grid = span([row["grid"] for row in data["removal"]])
        columns += [Column(f"dims in multiples of {grid}"), Column("grouped, likewise")]
    cells = []
    for row in data["removal"]:
        stored, full = row["stored_dims"], row["full_dims"]
        line = [
            rate_text(row["removal_rate"]),
            f"{mean(flat(row['ranks'])):.1f}",
            f"{stored:,}",
            f"{row['grouped_dims']:,}",
            f"{full:,}",
            f"{stored / row['grouped_dims']:.2f}×",
            f"{stored / full:.2f}×",
        ]
        if rounded:
            line += [f"{row['stored_dims_rounded']:,}", f"{row['grouped_dims_rounded']:,}"]
        cells.append(line)
    return [*parts, DataTable(columns, cells)]
