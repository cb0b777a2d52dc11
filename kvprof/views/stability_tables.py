"""The tables of a stability report."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.views.numbers import MISSING, count, number, percent
from kvprof.views.page import paragraph
from kvprof.views.spectrum_data import rate_text
from kvprof.views.stability_data import (
    Curve,
    Row,
    degrees_text,
    error_key,
    given_ranks,
    ratio_text,
    share_text,
    spread_text,
)
from kvprof.views.tables import Column, DataTable, claims_table

__all__ = [
    "claims_part",
    "cluster_table",
    "evidence_table",
    "lengths_table",
    "rank_tables",
    "ratio_table",
]

_SPREAD_NOTE = "  2.5–97.5 %"


def claims_part(claims: Sequence[Mapping[str, Any]]) -> RenderableType:
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


def ratio_table(curves: Sequence[Curve]) -> DataTable:
    """Return the papers' ratio of every target, in its three forms, with the spread below."""
    figures = ("ratio", "ratio_sign_aligned", "ratio_cluster_aligned")
    rows: list[tuple[str, ...]] = []
    for curve in curves:
        row = curve.at_cost_rank()
        rows.append(
            (
                f"{curve.source} against {curve.label}",
                count(max(curve.counts)),
                *(ratio_text(row[figure]) for figure in figures),
            )
        )
        rows.append((_SPREAD_NOTE, "", *(spread_text(row, figure) for figure in figures)))
    columns = (
        Column("ratio", words=True),
        Column("tokens"),
        Column("unaligned"),
        Column("signs aligned"),
        Column("clusters aligned"),
    )
    return DataTable(columns, rows)


def cluster_table(
    curves: Sequence[Curve], clusters: Sequence[Mapping[str, Any]]
) -> DataTable | None:
    """Return how many columns were aligned together at the largest token count; None without.

    Parameters
    ----------
    curves : sequence of Curve
        Of one pair.
    clusters : sequence of mapping
        ``data.clusters``.
    """
    found: list[tuple[Curve, dict[int, int]]] = []
    for curve in curves:
        for entry in clusters:
            where = (entry["pair"], entry["target"], entry["tokens"])
            if where == (curve.pair, curve.target, max(curve.counts)) and entry["sizes"]:
                # In columns, not in clusters: what share of the basis was turned freely.
                columns = {int(size): int(size) * n for size, n in entry["sizes"].items()}
                found.append((curve, columns))
    if not found:
        return None
    bins = list(_bins(max(max(columns) for _, columns in found)))
    rows: list[tuple[str, ...]] = []
    for curve, columns in found:
        total = sum(columns.values())
        shares = [
            percent(sum(n for size, n in columns.items() if low <= size <= high) / total)
            for low, high in bins
        ]
        rows.append((f"{curve.source} against {curve.label}", *shares, str(max(columns))))
    titles = [f"by {low}–{high}" if low < high else f"by {low}" for low, high in bins]
    titles[0] = "aligned alone"
    heads = [Column("share of columns", words=True), *(Column(title) for title in titles)]
    return DataTable([*heads, Column("largest cluster")], rows)


def _bins(largest: int) -> Iterator[tuple[int, int]]:
    """Yield 1, 2, 3–4, 5–8 … until `largest` is in."""
    low, high = 1, 1
    while low <= largest:
        yield low, min(high, largest)
        low, high = high + 1, high * 2


def rank_tables(curves: Sequence[Curve], result: Mapping[str, Any]) -> list[RenderableType]:
    """Return a table per source and target at its largest token count, a row per rank choice."""
    error = error_key(curves[0].pair)
    columns = (
        Column("rank (removal rate)", words=True),
        Column("subspace distance"),
        Column("largest angle (degrees)"),
        Column("extra lost energy"),
        Column(error.replace("_", " ")),
    )
    parts: list[RenderableType] = []
    for curve in curves:
        rows: list[tuple[str, ...]] = []
        for name, row in zip(_choices(curve.final(), result), curve.final(), strict=True):
            rows.append(
                (
                    name,
                    ratio_text(row["subspace_distance"]),
                    degrees_text(row["principal_angle"]),
                    share_text(row["extra_energy_loss"]),
                    share_text(row[error]),
                )
            )
            figures = ("subspace_distance", "principal_angle", "extra_energy_loss", error)
            rows.append((_SPREAD_NOTE, *(spread_text(row, figure) for figure in figures)))
        title = (
            f"{curve.pair}: {curve.source} against {curve.label}, {count(max(curve.counts))} tokens"
        )
        parts += [Text(), DataTable(columns, rows, title=title)]
    return parts


def _choices(rows: Sequence[Row], result: Mapping[str, Any]) -> list[str]:
    """Name each average's rank choice: given ranks come in the order they were asked for."""
    asked = iter(given_ranks(result))
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


def evidence_table(recommendation: Mapping[str, Any]) -> DataTable:
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
    columns = (
        Column("tokens", words=True),
        Column("cost before"),
        Column("cost after"),
        Column("removed per doubling"),
    )
    return DataTable(columns, rows)


def lengths_table(lengths: Sequence[Mapping[str, Any]]) -> DataTable:
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
    columns = (
        Column("extra lost energy", words=True),
        Column("calibrated at"),
        Column("cost there"),
        Column("used at"),
        Column("cost there"),
    )
    return DataTable(columns, rows)


def _length(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"
