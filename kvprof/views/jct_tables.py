"""The tables of a report of job completion time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.records.cases import Account, ordered_parts
from kvprof.sizes import format_bytes
from kvprof.views.durations import change, signed_percent, unit_of
from kvprof.views.jct_data import Group, Sweep, peak_name
from kvprof.views.numbers import MISSING, count, number, percent, shared, span
from kvprof.views.tables import Column, DataTable

__all__ = [
    "PartTable",
    "doubt_table",
    "layer_table",
    "memory_table",
    "summary_table",
    "sweep_table",
]


def summary_table(group: Group) -> DataTable:
    """Return one row per case of a request: job completion time, first token, between tokens."""
    against = group.against()
    columns = [Column("method", words=True), Column("rate")]
    cells: list[list[str]] = [
        group.names,
        [MISSING if case["rate"] is None else f"{case['rate']:.3f}" for case in group.cases],
    ]
    for key, title in (("jct_seconds", "JCT"), ("ttft_seconds", "TTFT"), ("tbt_seconds", "TBT")):
        factor, unit = unit_of(case[key] for case in group.cases)
        columns.append(Column(f"{title} ({unit})"))
        cells.append([_scaled(case[key], factor) for case in group.cases])
        if against is not None and len(group.cases) > 1:
            columns.append(Column(f"to {against}"))
            cells.append(
                [
                    MISSING
                    if case is group.baseline
                    else signed_percent(change(case[key], group.base(key)))
                    for case in group.cases
                ]
            )
    return DataTable(columns, list(zip(*cells, strict=True)))


def doubt_table(group: Group, accounts: Mapping[str, Account]) -> DataTable | None:
    """Return what tells how far the figures can be believed; None where nothing does.

    Parameters
    ----------
    group : Group
    accounts : mapping
        By case.
    """
    rows = []
    factor, unit = unit_of(case["tbt_p99_seconds"] for case in group.cases)
    for name, case in zip(group.names, group.cases, strict=True):
        rows.append(
            (
                name,
                _scaled(case["tbt_p99_seconds"], factor),
                signed_percent(case["overhead"]),
                signed_percent(case["decode_overhead"]),
                _unattributed(accounts[case["case"]]),
                number(case["energy_per_token_joules"]),
            )
        )
    titles = (
        "method", f"TBT p99 ({unit})", "timing costs", "of decode", "unattributed", "J per token",
    )  # fmt: skip
    kept = [
        index
        for index in range(len(titles))
        if index == 0 or any(row[index] != MISSING for row in rows)
    ]
    if len(kept) == 1:
        return None
    return DataTable(
        [Column(titles[index], words=index == 0) for index in kept],
        [[row[index] for index in kept] for row in rows],
    )


def _unattributed(account: Account) -> str:
    # Beside its bar it says what parts that do not add up sum to.
    share = account.unattributed_share() if account.adds_up() else None
    return percent(share).replace("-", "−")


@dataclass(frozen=True)
class PartTable:
    """Parts as rows, cases as columns: time, share and difference to the baseline's part.

    As many cases as fit stand side by side; the others follow below.

    Attributes
    ----------
    group : Group
    accounts : mapping
        By case.
    apart : mapping
        Case to the parts that are differences of two times.
    """

    group: Group
    accounts: Mapping[str, Account]
    apart: Mapping[str, frozenset[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        group = self.group
        own = [self.accounts[case["case"]].by_part() for case in group.cases]
        parts = ordered_parts(part for one in own for part in one)
        if not parts:
            yield Text("Nothing was timed in parts yet.", style="dim", overflow="fold")
            return
        known = [value for one in own for value in one.values()]
        factor, unit = unit_of(known)
        decimals = _decimals(known, factor)
        first = Column(f"part ({unit})", words=True)
        blocks = [self._block(index, parts, factor, decimals) for index in range(len(group.cases))]
        room = options.max_width - max([len(first.title), *map(len, parts)])
        chunk: list[tuple[list[Column], list[list[str]]]] = []
        used = 0
        for block in blocks:
            width = sum(
                2 + max(len(column.title), *map(len, cells))
                for column, cells in zip(*block, strict=True)
            )
            if chunk and used + width > room:
                yield _joined(first, parts, chunk)
                yield Text()
                chunk, used = [], 0
            chunk.append(block)
            used += width
        if chunk:
            yield _joined(first, parts, chunk)
        if any(self.apart.get(case["case"]) for case in group.cases):
            yield Text("* a difference of two measured times", style="dim", overflow="fold")

    def _block(
        self, index: int, parts: Sequence[str], factor: float, decimals: int
    ) -> tuple[list[Column], list[list[str]]]:
        group = self.group
        case = group.cases[index]
        account = self.accounts[case["case"]]
        own = account.by_part()
        stars = self.apart.get(case["case"], frozenset())
        columns = [Column(group.names[index]), Column("share")]
        cells = [
            [_fixed(own.get(part), factor, decimals) + "*" * (part in stars) for part in parts],
            [percent(account.share(own[part])).replace("-", "−") if part in own else MISSING
             for part in parts],
        ]  # fmt: skip
        if group.baseline is not None and case is not group.baseline and case["jct_seconds"]:
            base = self.accounts[group.baseline["case"]].by_part()
            columns.append(Column("differs"))
            cells.append(
                [
                    _fixed(own.get(part, 0.0) - base.get(part, 0.0), factor, decimals, "+")
                    if part in own or part in base
                    else MISSING
                    for part in parts
                ]
            )
        return columns, cells


def _joined(
    first: Column, parts: Sequence[str], chunk: Sequence[tuple[list[Column], list[list[str]]]]
) -> DataTable:
    columns = [first, *(column for own, _ in chunk for column in own)]
    cells = [list(parts), *(one for _, own in chunk for one in own)]
    # A part that none of these cases has is of others.
    rows = [row for row in zip(*cells, strict=True) if any(cell != MISSING for cell in row[1:])]
    return DataTable(columns, rows)


def sweep_table(sweep: Sweep) -> DataTable:
    """Return job completion time by length, a column per method with its difference."""
    methods = sweep.methods()
    factor, unit = unit_of(case["jct_seconds"] for group in sweep.members for case in group.cases)
    title = "input" if sweep.varied == "input_len" else "output"
    against = next((name for group in sweep.members if (name := group.against())), None)
    columns = [Column(f"{title} (JCT in {unit})", words=True)]
    for method in methods:
        columns.append(Column(method))
        if against is not None and method != against:
            columns.append(Column(f"to {against}"))
    rows = []
    for group in sweep.members:
        own = dict(zip(group.names, group.cases, strict=True))
        row = [count(sweep.length(group))]
        for method in methods:
            value = own[method]["jct_seconds"] if method in own else None
            row.append(_scaled(value, factor))
            if against is not None and method != against:
                row.append(signed_percent(change(value, group.base("jct_seconds"))))
        rows.append(row)
    return DataTable(columns, rows)


def memory_table(result: Mapping[str, Any], group: Group) -> DataTable | None:
    """Return the cache's bytes of each case at its longest context; None without any."""
    rows = []
    for name, case in zip(group.names, group.cases, strict=True):
        own = [row for row in result["data"]["memory"] if row["case"] == case["case"]]
        if not own:
            continue
        last = max(own, key=lambda row: row["context"])
        peaks = [row["peak"] for row in own if row["peak"] is not None]
        saved = 1 - last["logical"] / last["full_width"] if last["full_width"] else None
        rows.append(
            (
                name,
                count(last["context"]),
                format_bytes(last["logical"]),
                percent(saved),
                format_bytes(last["allocated"]),
                format_bytes(last["full_width"]),
                peaks,
            )
        )
    columns = [
        Column("method", words=True), Column("at tokens"), Column("stored"), Column("saved"),
        Column("allocated"), Column("full width"),
    ]  # fmt: skip
    if any(peaks for *_, peaks in rows):  # nobody holds the whole cache of a composed request
        columns.append(Column(peak_name(result["inputs"])))
    cells = [(*row, format_bytes(max(peaks)) if peaks else MISSING) for *row, peaks in rows]
    return DataTable(columns, [row[: len(columns)] for row in cells]) if rows else None


def layer_table(result: Mapping[str, Any], group: Group) -> DataTable | None:
    """Return a row per case: what its layers keep, cost and get wrong; None without any."""
    rows = []
    own = {case["case"]: name for name, case in zip(group.names, group.cases, strict=True)}
    times = [row["seconds"] for row in result["data"]["layers"] if row["case"] in own]
    factor, unit = unit_of(times)
    heads = result["data"]["shape"].get("num_kv_heads")
    # A composed run times one layer for all, so none of them has a time of its own.
    timed = any(seconds is not None for seconds in times)
    for case, name in own.items():
        layers = [row for row in result["data"]["layers"] if row["case"] == case]
        if not layers:
            continue
        errors = [(row["error"], row["layer"]) for row in layers if row["error"] is not None]
        seconds = [row["seconds"] * factor for row in layers if row["seconds"] is not None]
        rows.append(
            (
                name,
                *(_kept(layers, key, heads) for key in ("key_ranks", "value_ranks")),
                *([span(seconds)] if timed else []),
                _largest(errors),
            )
        )  # fmt: skip
    columns = (
        Column("method", words=True), Column("key ranks"), Column("value ranks"),
        *([Column(f"cache work ({unit} a layer)")] if timed else []), Column("largest error"),
    )  # fmt: skip
    return DataTable(columns, rows) if rows else None


def _kept(layers: Sequence[Mapping[str, Any]], key: str, heads: int | None) -> str:
    known = [row[key] for row in layers if row[key]]
    return shared(span([rank for ranks in known for rank in ranks]), heads,
                  len(known[0]) if known else 0)  # fmt: skip


def _largest(errors: Sequence[tuple[float, int]]) -> str:
    if not errors:
        return MISSING
    error, layer = max(errors)
    return f"{number(error, 2)} (layer {layer})" if error > 0 else "0"


def _scaled(value: float | None, factor: float) -> str:
    return MISSING if value is None else number(value * factor).replace("-", "−")


def _decimals(seconds: Sequence[float], factor: float) -> int:
    """Return the decimals of a column whose largest figure has four digits or more.

    Fixed, so that the points stand below each other and a difference is as precise as its terms.
    """
    most = max((abs(value) * factor for value in seconds), default=0.0)
    return min(6, max(0, 3 - floor(log10(most)))) if most > 0 else 0


def _fixed(value: float | None, factor: float, decimals: int, plus: str = "") -> str:
    if value is None:
        return MISSING
    text = f"{abs(value) * factor:,.{decimals}f}"
    if not any(digit in text for digit in "123456789"):
        return text
    return f"{'−' if value < 0 else plus}{text}"
