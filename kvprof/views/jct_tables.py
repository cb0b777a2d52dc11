"""The tables of a report of ``kvprof bench --jct``."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from kvprof.records.cases import Account
from kvprof.records.parts import UNATTRIBUTED
from kvprof.sizes import format_bytes
from kvprof.views.jct_data import (
    QUANTITIES,
    Group,
    Quantity,
    Sweep,
    peak_name,
)
from kvprof.views.numbers import (
    MISSING,
    change,
    count,
    number,
    percent,
    shared,
    signed_percent,
    span,
    unit_of,
)
from kvprof.views.page import bullets
from kvprof.views.part_table import PartColumns, PartTable
from kvprof.views.tables import Column, DataTable

__all__ = [
    "layer_table",
    "memory_table",
    "part_table",
    "reliability_table",
    "summary_table",
    "sweep_table",
    "telemetry_table",
    "throttled",
]


def summary_table(group: Group, external: Mapping[str, Any] | None = None) -> DataTable:
    """Return one row per case of a request: job completion time, first token, between tokens.

    Parameters
    ----------
    group : Group
    external : mapping, optional
        ``data.external``: an engine's own figures of the same request are the last row.
    """
    against = group.against()
    request = {key: getattr(group, key) for key in ("batch", "input_len", "output_len")}
    beside = [
        {"rate": 0.0, "jct_seconds": None, **row}
        for row in (external or {"rows": ()})["rows"]
        if {key: row[key] for key in request} == request
    ]
    shown = [*group.cases, *beside]
    named = f"{external['engine']} {external['version']}" if external else ""
    columns = [Column("method", words=True), Column("rate")]
    cells: list[list[str]] = [
        [*group.names, *[named] * len(beside)],
        [MISSING if case["rate"] is None else f"{case['rate']:.3f}" for case in shown],
    ]
    for key, title in (("jct_seconds", "JCT"), ("ttft_seconds", "TTFT"), ("tbt_seconds", "TBT")):
        factor, unit = unit_of(case[key] for case in group.cases)
        columns.append(Column(f"{title} ({unit})"))
        cells.append([_scaled(case[key], factor) for case in shown])
        if against is not None and len(shown) > 1:
            columns.append(Column(f"to {against}"))
            cells.append(
                [
                    MISSING
                    if case is group.baseline
                    else signed_percent(change(case[key], group.base(key)))
                    for case in shown
                ]
            )
    return DataTable(columns, list(zip(*cells, strict=True)))


def reliability_table(group: Group, accounts: Mapping[str, Account]) -> DataTable | None:
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
        "method",
        f"TBT p99 ({unit})",
        "timing costs",
        "of decode",
        UNATTRIBUTED,
        "J per token",
    )
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


def part_table(
    group: Group, accounts: Mapping[str, Account], apart: Mapping[str, frozenset[str]]
) -> PartTable:
    """Return parts as rows, cases as columns: time, share and difference to the baseline's part.

    Parameters
    ----------
    group : Group
    accounts : mapping
        By case.
    apart : mapping
        Case to the parts that are differences of two times.
    """
    base = group.baseline
    return PartTable(
        [
            PartColumns(
                name,
                accounts[case["case"]],
                accounts[base["case"]]
                if base is not None and case is not base and case["jct_seconds"]
                else None,
                apart.get(case["case"], frozenset()),
            )
            for name, case in zip(group.names, group.cases, strict=True)
        ]
    )


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
        Column("method", words=True),
        Column("at tokens"),
        Column("stored"),
        Column("saved"),
        Column("allocated"),
        Column("full width"),
    ]
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
        )
    columns = (
        Column("method", words=True),
        Column("key ranks"),
        Column("value ranks"),
        *([Column(f"cache work ({unit} a layer)")] if timed else []),
        Column("largest error"),
    )
    return DataTable(columns, rows) if rows else None


def _kept(layers: Sequence[Mapping[str, Any]], key: str, heads: int | None) -> str:
    known = [row[key] for row in layers if row[key]]
    return shared(
        span([rank for ranks in known for rank in ranks]), heads, len(known[0]) if known else 0
    )


def _largest(errors: Sequence[tuple[float, int]]) -> str:
    if not errors:
        return MISSING
    error, layer = max(errors)
    return f"{number(error, 2)} (layer {layer})" if error > 0 else "0"


def _scaled(value: float | None, factor: float) -> str:
    return MISSING if value is None else number(value * factor).replace("-", "−")


# --- The machine during a run: clocks, power, temperature, memory, and what slowed it down.


def telemetry_table(telemetry: Mapping[str, Any]) -> DataTable | None:
    """Return a row per device and value: median and range over the run; None without any."""
    rows = []
    for device, found in telemetry.items():
        for name, values in found["values"].items():
            known = (values["median"], values["least"], values["most"])
            if name.endswith("_bytes"):
                words = name.removesuffix("_bytes")
                cells = tuple(format_bytes(value) for value in known)
            else:
                own = QUANTITIES.get(name, Quantity(name, "", 1.0, "{}"))
                words = own.words
                cells = tuple(
                    f"{number(value * own.factor)} {own.unit}".rstrip() for value in known
                )
            rows.append((device, words, *cells))
    columns = (
        Column("device", words=True),
        Column("value", words=True),
        Column("median"),
        Column("least"),
        Column("most"),
    )
    return DataTable(columns, rows) if rows else None


def throttled(telemetry: Mapping[str, Any]) -> list[RenderableType]:
    """Return a line per device and reason for which it ran slower; none where nothing slowed it."""
    lines = [
        f"{device} was throttled in {times} of {found['samples']} samples: {reason}"
        for device, found in telemetry.items()
        for reason, times in found["throttled"].items()
    ]
    return [bullets(lines, "yellow")] if lines else []
