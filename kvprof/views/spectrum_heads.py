"""What one basis per query head would store, beside one per KV head."""

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType

from kvprof.views.numbers import number, span
from kvprof.views.page import heading, paragraph
from kvprof.views.spectrum_data import flat, mean, rate_text
from kvprof.views.tables import Column, DataTable

__all__ = ["per_query_head"]


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
