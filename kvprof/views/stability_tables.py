"""A stability result as its report needs it: curves in order, the rank of the cost, the tables."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.views.numbers import MISSING, count, number, percent
from kvprof.views.page import ends, paragraph, tidy_csv
from kvprof.views.spectrum_data import rate_text
from kvprof.views.tables import Column, DataTable, claims_table

__all__ = [
    "COLUMNS",
    "NOISE_FLOOR",
    "Curve",
    "claims_part",
    "cluster_table",
    "cost_rank",
    "curves_of",
    "datasets",
    "degrees_text",
    "error_key",
    "evidence_table",
    "given_ranks",
    "head_costs",
    "lengths_table",
    "noise_of",
    "rank_tables",
    "ratio_table",
    "ratio_text",
    "share_text",
    "source_words",
    "spread_text",
    "to_csv",
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


def given_ranks(result: Mapping[str, Any]) -> list[int]:
    """Return the ranks that were asked for, each once."""
    return list(dict.fromkeys(result["inputs"]["ranks"]))


def cost_rank(result: Mapping[str, Any], pair: str) -> int | None:
    """Return the given rank that costs are read at: the one nearest half the pair's width.

    Parameters
    ----------
    result : mapping
        Of ``kvprof stability``. ``data.half_ranks`` names the rank per pair; in a result without
        it the largest given rank is taken, which by default is half the width. Every figure says
        which rank it is for.
    pair : str
        One of the result's.

    Returns
    -------
    int or None
        None when no rank was given.
    """
    ranks = given_ranks(result)
    named = result["data"].get("half_ranks", {}).get(pair)
    return named if named in ranks else max(ranks, default=None)


def curves_of(result: Mapping[str, Any]) -> dict[str, list[Curve]]:
    """Sort the rows of a result into curves, in one pass.

    Returns
    -------
    dict of str to list of Curve
        By pair; the noise floor comes last. Curves without an average are left out.
    """
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
    ranks = given_ranks(result)
    pairs: dict[str, list[Curve]] = {}
    for curve in sorted(found.values(), key=lambda curve: curve.noise):
        if curve.points:
            rank = cost_rank(result, curve.pair)
            curve.cost_position = ranks.index(rank) if rank is not None else 0
            pairs.setdefault(curve.pair, []).append(curve)
    return pairs


def datasets(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves that are not the noise floor."""
    return [curve for curve in curves if not curve.noise]


def noise_of(curves: Sequence[Curve]) -> Curve | None:
    """Return the noise floor, or None when it was not measured."""
    return next((curve for curve in curves if curve.noise), None)


def worst(curves: Sequence[Curve]) -> Curve | None:
    """Return the dataset with the highest cost; None when no cost is known."""
    known = [curve for curve in datasets(curves) if curve.cost is not None]
    return max(known, key=lambda curve: curve.cost or 0.0, default=None)


def head_costs(curve: Curve, rank: int | None, tokens: int) -> list[list[float | None]]:
    """Return the extra lost energy of each head, mean over seeds, as ``[layer][kv_head]``.

    Parameters
    ----------
    curve : Curve
        Of one pair and target.
    rank : int or None
        Given rank; a narrower head is taken at its full width, None at its largest given rank.
    tokens : int
        Token count.
    """
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
    if not chosen:
        return []
    values: list[list[float | None]] = [[] for _ in range(max(layer for layer, _ in chosen) + 1)]
    for (layer, kv_head), (_, seeds) in sorted(chosen.items()):
        values[layer] += [None] * (kv_head - len(values[layer]))
        values[layer].append(sum(seeds.values()) / len(seeds))
    return values


def error_key(pair: str) -> str:
    """Return which error of a product belongs to a pair: of the scores or of the outputs."""
    return "extra_score_error" if pair in ("qk", "k") else "extra_output_error"


def source_words(source: str) -> str:
    """Return a source as a sentence names it."""
    return "random tokens" if source == "random" else source


def ratio_text(value: float | None) -> str:
    """Write a ratio or a distance with three digits; rounding noise as below 1e-6."""
    if value is not None and 0 < abs(value) < 1e-6:
        return "<1e-6"
    return number(value)


def share_text(value: float | None) -> str:
    """Write a share as per cent: ``0.81 %``, ``41.3 %``, ``1,234 %``."""
    return MISSING if value is None else f"{_per_cent(value)} %"


def degrees_text(value: float | None) -> str:
    """Write an angle, given in radians, in degrees with one decimal."""
    return MISSING if value is None else f"{math.degrees(value):.1f}"


def spread_text(row: Row, figure: str) -> str:
    """Write the 2.5–97.5 % range of an average's figure in the unit of its mean."""
    bounds = row.get("spread", {}).get(figure)
    if bounds is None:
        return MISSING
    if figure.startswith("extra_"):
        low, high, unit = _per_cent(bounds[0]), _per_cent(bounds[1]), " %"
    elif figure == "principal_angle":
        low, high, unit = degrees_text(bounds[0]), degrees_text(bounds[1]), ""
    else:
        low, high, unit = ratio_text(bounds[0]), ratio_text(bounds[1]), ""
    # A dash before a minus sign cannot be read.
    between = " to " if low.startswith("-") else "–"
    return f"{low}{between}{high}{unit}"


def _per_cent(share: float) -> str:
    value = 100 * share
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if not text.strip("-0.") else text


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

    Parameters
    ----------
    result : mapping
        Of ``kvprof stability``.
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


# --- The tables of the report.


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
