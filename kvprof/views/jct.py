"""Report and CSV of ``kvprof bench --jct``: where does the time of a request go?"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.records.cases import Account, accounts, mean
from kvprof.records.parts import UNATTRIBUTED
from kvprof.sizes import format_bytes
from kvprof.views.bars import StackedBars, bar_of
from kvprof.views.jct_data import (
    QUANTITIES,
    Group,
    Quantity,
    Sweep,
    detailed,
    groups,
    memory_curves,
    peak_name,
    step_curves,
    sweep_curves,
    sweeps,
)
from kvprof.views.jct_figure import figure
from kvprof.views.kinds import loose_parts
from kvprof.views.numbers import (
    MISSING,
    change,
    count,
    duration,
    number,
    percent,
    shared,
    signed_percent,
    span,
    unit_of,
)
from kvprof.views.page import (
    bullets,
    capitalised,
    framed,
    heading,
    paragraph,
    tidy_csv,
    weights_row,
)
from kvprof.views.part_table import PartColumns, PartTable
from kvprof.views.plot import LinePlot
from kvprof.views.tables import DataTable, columns

__all__ = ["figure", "report", "to_csv"]

_HEIGHT = 14


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report for people."""
    data = result["data"]
    parts: list[RenderableType] = []
    found, shown = groups(result), detailed(result)
    known = accounts(data)
    for sweep in sweeps(result):
        parts += _swept(sweep, known)
    for group in shown:
        parts += _measured(result, group, known)
    if len(shown) < len(found):
        parts += [
            Text(),
            paragraph(
                f"{len(found) - len(shown)} more requests: kvprof export --to csv.",
                "dim",
            ),
        ]
    if requests := list(loose_parts(data["requests"])):
        parts += [heading("Requests of a trace"), *requests]
    if table := _telemetry_table(data["telemetry"]):
        parts += [heading("Telemetry"), table, *_throttled(data["telemetry"])]
    if limits := _limits(result):
        parts += [heading("Limits"), bullets(limits)]
    return framed(
        result,
        parts,
        answer=_answer(shown),
        notes=_notes(result),
        measured_with=_provenance(result),
        why="" if result["complete"] else f"{capitalised(result['incomplete_reason'])}.",
        width=width,
        colour=colour,
    )


def _answer(shown: list[Group]) -> str:
    lines = []
    for group in shown:
        done = [
            (case["jct_seconds"], name, case)
            for name, case in zip(group.names, group.cases, strict=True)
            if case["jct_seconds"] is not None
        ]
        if not done:
            continue
        base = group.baseline
        said = []
        for total, name, case in sorted(done, key=lambda entry: entry[0]):
            if base is None or case is base:
                said.append(f"{name} {duration(total)}")
                continue
            than = _change_words(change(total, base["jct_seconds"]))
            if ends := group.apart(case):
                than += f" [{', '.join(signed_percent(end) for end in ends)}]"
            said.append(f"{name} {duration(total)} ({than})")
        against = f", against {group.against()}" if base is not None and len(done) > 1 else ""
        lines.append(f"{capitalised(group.name)}{against}: {'; '.join(said)}.")
    return "\n".join(lines) or "No request was measured completely."


def _change_words(share: float | None) -> str:
    if share is None:
        return "not comparable"
    if abs(share) < 0.0005:
        return "unchanged"
    return f"{abs(share):.1%} {'more' if share > 0 else 'less'}".replace("%", " %")


def _measured(
    result: Mapping[str, Any], group: Group, known: Mapping[str, Account]
) -> list[RenderableType]:
    parts: list[RenderableType] = [heading(capitalised(group.name))]
    bars = [
        bar_of(name, known[case["case"]])
        for name, case in zip(group.names, group.cases, strict=True)
    ]
    parts += [StackedBars(bars, "JCT by part"), Text()]
    parts.append(_summary_table(group))
    if table := _reliability_table(group, known):
        parts += [Text(), table]
    parts += [Text(), _part_table(group, known, _parts_by_difference(result))]
    factor, unit = unit_of(
        row["seconds"] for row in result["data"]["steps"] if row["phase"] == "decode"
    )
    if curves := step_curves(result, group, factor):
        title = "Time between tokens by context"
        parts += [Text(), LinePlot(curves, title, "context in tokens", unit, height=_HEIGHT)]
    if table := _memory_table(result, group):
        parts += [Text(), table]
    curves, unit = memory_curves(result, group)
    if curves:
        title = "Stored cache by context"
        parts += [Text(), LinePlot(curves, title, "context in tokens", unit, height=_HEIGHT)]
    if table := _layer_table(result, group):
        parts += [Text(), table]
    return parts


def _parts_by_difference(result: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    marked: dict[str, set[str]] = {}
    for row in result["data"]["parts"]:
        if row["by_difference"]:
            marked.setdefault(row["case"], set()).add(row["part"])
    return {case: frozenset(parts) for case, parts in marked.items()}


def _swept(sweep: Sweep, known: Mapping[str, Account]) -> list[RenderableType]:
    parts: list[RenderableType] = [heading(capitalised(sweep.name)), _sweep_table(sweep)]
    curves = sweep_curves(sweep)
    parts += [
        Text(),
        LinePlot(
            curves.series,
            curves.what,
            curves.x_label,
            curves.unit,
            height=_HEIGHT,
            log_x=True,
            log_y=curves.log_y,
        ),
    ]
    for method in sweep.methods():
        bars = [
            bar_of(count(sweep.length(group)), known[case["case"]])
            for group in sweep.members
            for name, case in zip(group.names, group.cases, strict=True)
            if name == method
        ]
        title = f"{method}: share of JCT by part and {curves.x_label}"
        parts += [Text(), StackedBars(bars, title, shares=True)]
    return parts


# --- The tables of the report.


def _summary_table(group: Group) -> DataTable:
    """Return one row per case of a request: job completion time, first token, between tokens."""
    against = group.against()
    shown = group.cases
    titles = ["rate"]
    cells: list[list[str]] = [
        group.names,
        [MISSING if case["rate"] is None else f"{case['rate']:.3f}" for case in shown],
    ]
    for key, title in (("jct_seconds", "JCT"), ("ttft_seconds", "TTFT"), ("itl_seconds", "ITL")):
        factor, unit = unit_of(case[key] for case in group.cases)
        titles.append(f"{title} ({unit})")
        cells.append([_scaled(case[key], factor) for case in shown])
        if against is not None and len(shown) > 1:
            titles.append(f"to {against}")
            cells.append(
                [
                    MISSING
                    if case is group.baseline
                    else signed_percent(change(case[key], group.base(key)))
                    for case in shown
                ]
            )
    return DataTable(columns("method", figures=titles), list(zip(*cells, strict=True)))


def _reliability_table(group: Group, accounts: Mapping[str, Account]) -> DataTable | None:
    """Return what tells how far the figures can be believed; None where nothing does."""
    rows = []
    factor, unit = unit_of(case["itl_p99_seconds"] for case in group.cases)
    for name, case in zip(group.names, group.cases, strict=True):
        rows.append(
            (
                name,
                _scaled(case["itl_p99_seconds"], factor),
                _unattributed(accounts[case["case"]]),
                number(case["energy_per_token_joules"]),
            )
        )
    heads = columns(
        "method",
        figures=(
            f"ITL p99 ({unit})",
            UNATTRIBUTED,
            "J per token",
        ),
    )
    kept = [
        index
        for index in range(len(heads))
        if index == 0 or any(row[index] != MISSING for row in rows)
    ]
    if len(kept) == 1:
        return None
    return DataTable(
        [heads[index] for index in kept],
        [[row[index] for index in kept] for row in rows],
    )


def _unattributed(account: Account) -> str:
    # Beside its bar it says what parts that do not add up sum to.
    share = account.unattributed_share() if account.adds_up() else None
    return percent(share).replace("-", "−")


def _part_table(
    group: Group, accounts: Mapping[str, Account], apart: Mapping[str, frozenset[str]]
) -> PartTable:
    """Return parts as rows, cases as columns: time, share and difference to the baseline's part."""
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


def _sweep_table(sweep: Sweep) -> DataTable:
    """Return job completion time by length, a column per method with its difference."""
    methods = sweep.methods()
    factor, unit = unit_of(case["jct_seconds"] for group in sweep.members for case in group.cases)
    title = "input" if sweep.varied == "input_len" else "output"
    against = next((name for group in sweep.members if (name := group.against())), None)
    titles = []
    for method in methods:
        titles.append(method)
        if against is not None and method != against:
            titles.append(f"to {against}")
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
    return DataTable(columns(f"{title} (JCT in {unit})", figures=titles), rows)


def _memory_table(result: Mapping[str, Any], group: Group) -> DataTable | None:
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
    titles = ["at tokens", "stored", "saved", "allocated", "uncompressed"]
    if any(peaks for *_, peaks in rows):  # nobody holds the whole cache of a composed request
        titles.append(peak_name(result["inputs"]))
    cells = [(*row, format_bytes(max(peaks)) if peaks else MISSING) for *row, peaks in rows]
    heads = columns("method", figures=titles)
    return DataTable(heads, [row[: len(heads)] for row in cells]) if rows else None


def _layer_table(result: Mapping[str, Any], group: Group) -> DataTable | None:
    """Return a row per case: what its layers keep and cost; None without any."""
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
        seconds = [row["seconds"] * factor for row in layers if row["seconds"] is not None]
        rows.append(
            (
                name,
                *(_rank_span(layers, key, heads) for key in ("key_ranks", "value_ranks")),
                *([span(seconds)] if timed else []),
            )
        )
    work = [f"cache work ({unit} a layer)"] if timed else []
    titles = ("key ranks", "value ranks", *work)
    return DataTable(columns("method", figures=titles), rows) if rows else None


def _rank_span(layers: Sequence[Mapping[str, Any]], key: str, heads: int | None) -> str:
    known = [row[key] for row in layers if row[key]]
    return shared(
        span([rank for ranks in known for rank in ranks]), heads, len(known[0]) if known else 0
    )


def _scaled(value: float | None, factor: float) -> str:
    return MISSING if value is None else number(value * factor).replace("-", "−")


# --- The machine during a run: clocks, power, temperature, memory, and what slowed it down.


def _telemetry_table(telemetry: Mapping[str, Any]) -> DataTable | None:
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
    heads = columns("device", "value", figures=("median", "least", "most"))
    return DataTable(heads, rows) if rows else None


def _throttled(telemetry: Mapping[str, Any]) -> list[RenderableType]:
    """Return a line per device and reason for which it ran slower; none where nothing slowed it."""
    lines = [
        f"{device} was throttled in {times} of {found['samples']} samples: {reason}"
        for device, found in telemetry.items()
        for reason, times in found["throttled"].items()
    ]
    return [bullets(lines, "yellow")] if lines else []


# --- What a reader must know beside the figures.

_MODES = {
    "real": "Real run: the model generated every token; times are wall times.",
    "composed": "Composed run: one layer's parts, timed at several contexts and added up.",
}
_PARTS = "Unattributed: wall time minus the parts, which are timed in separate runs."
_COMPOSED_PARTS = "Unattributed: time of whole layers minus the sum of their parts."
_SHARES = "Share: of JCT. Differs: the part's time minus the same part's of {baseline}."
_TIMES = "JCT: the whole request. TTFT: prefill. ITL: the median decode step."
_APART = "[…]: 95 % interval of the JCT difference; the range below 15 samples."


def _notes(result: Mapping[str, Any]) -> list[str]:
    """Return how to read the report."""
    data = result["data"]
    composed = data["mode"] == "composed"
    found = [_MODES[data["mode"]], _TIMES, _COMPOSED_PARTS if composed else _PARTS]
    found.append(_SHARES.format(baseline=data["baseline"]))
    if any(group.apart(case) for group in groups(result) for case in group.cases):
        found.append(_APART)
    return found


def _limits(result: Mapping[str, Any]) -> list[str]:
    """Return what the cases' labels say of their figures."""
    found: list[str] = []
    labels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for case in result["data"]["cases"]:
        for name, text in case["labels"].items():
            if name != "by_difference":
                labels.setdefault((name, text), []).append(case)
    for (name, text), own in labels.items():
        of = _case_labels(result, own)
        found.append(f"{capitalised(name.replace('_', ' '))}{of}: {text}.")
    return found


def _case_labels(result: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> str:
    """Return of which cases something is told, as short as can be; nothing where it is of all."""
    every = result["data"]["cases"]
    if len(own) == len(every):
        return ""
    names = {case["case"] for case in own}
    methods = list(dict.fromkeys(case["method"] for case in own))
    if len(own) == sum(case["method"] in methods for case in every):
        return f" ({', '.join(methods)})"
    whole = [group for group in groups(result) if names >= {one["case"] for one in group.cases}]
    if len(own) == sum(len(group.cases) for group in whole):
        return f" ({'; '.join(group.name for group in whole)})"
    return f" ({', '.join(case['case'] for case in own)})"


def _provenance(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was measured with what."""
    inputs, data, environment = result["inputs"], result["data"], result["environment"]
    shape = data["shape"]
    packages = environment.get("packages", {})
    gpus = environment.get("gpus", [])
    device = str(inputs.get("device", ""))
    cpu = environment["cpu"]
    machine = f"{cpu['model']}, {cpu['threads']} threads"
    if device.startswith("cuda") and gpus:
        index = int(device.partition(":")[2] or 0)
        machine = f"{gpus[min(index, len(gpus) - 1)]['name']} ({device})"
    return {
        "shape": ", ".join(
            [
                str(shape["name"]),
                *(
                    f"{shape[key]} {words}"
                    for key, words in (
                        ("layers", "layers"),
                        ("num_heads", "query heads"),
                        ("num_kv_heads", "KV heads"),
                    )
                    if key in shape
                ),
            ]
        ),
        **weights_row(shape),
        "run": data["mode"],
        "device": machine,
        "dtype": inputs.get("dtype"),
        "torch": packages.get("torch"),
        "seed": inputs.get("seed"),
    }


# --- A ``jct`` result as one tidy table.

_REQUEST = ("case", "method", "batch", "input_len", "output_len")
_FIGURES = (
    "rate",
    "jct_seconds",
    "ttft_seconds",
    "decode_seconds",
    "itl_seconds",
    "itl_p99_seconds",
    "measured_seconds",
    "unattributed_share",
    "excess_share",
    "energy_per_token_joules",
    "complete",
)
_COLUMNS = (
    "kind",
    *_REQUEST,
    "phase",
    "part",
    "step",
    "layer",
    "context",
    "seconds",
    "share",
    "by_difference",
    "weight",
    *_FIGURES,
    "key_rank_mean",
    "value_rank_mean",
    "nbytes",
    "logical",
    "allocated",
    "full_width",
    "peak",
    "level",
    "tokens",
    "device",
    "time",
    "name",
    "value",
)


def to_csv(result: Mapping[str, Any]) -> str:
    """Return what was measured, one observation per row; ``kind`` says of what.

    ``case``: a case's totals. ``part``: a part of a case in one phase. ``step``: a forward pass.
    ``layer``: a layer of a case. ``memory``: the cache's bytes at a context, and ``level``: its
    tokens per level. ``telemetry``: a value of a device. Floats are written in full (`repr`).
    """
    return tidy_csv(_COLUMNS, _rows(result["data"]))


def _rows(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    known = accounts(data)
    request = {case["case"]: {key: case[key] for key in _REQUEST} for case in data["cases"]}
    for case in data["cases"]:
        account = known[case["case"]]
        yield {
            "kind": "case",
            **{key: case.get(key) for key in (*_REQUEST, *_FIGURES)},
            "measured_seconds": account.seconds,
            "excess_share": account.excess_share(),
        }
    for row in data["parts"]:
        yield {"kind": "part", **row, "share": known[row["case"]].share(row["seconds"])}
    for row in data["steps"]:
        yield {"kind": "step", **request[row["case"]], **row}
    for row in data["layers"]:
        yield {
            "kind": "layer",
            **request[row["case"]],
            **{key: row[key] for key in ("layer", "nbytes", "seconds")},
            "key_rank_mean": mean(row["key_ranks"]),
            "value_rank_mean": mean(row["value_ranks"]),
        }
    for row in data["memory"]:
        known = {key: value for key, value in row.items() if key != "levels"}
        yield {"kind": "memory", **request[row["case"]], **known}
        for level, tokens in row["levels"].items():
            yield {
                "kind": "level",
                **request[row["case"]],
                "context": row["context"],
                "level": level,
                "tokens": tokens,
            }
    for device, found in data["telemetry"].items():
        series = found["series"]
        for name in series:
            if name == "time":
                continue
            for time, value in zip(series["time"], series[name], strict=True):
                if value is not None:
                    yield {
                        "kind": "telemetry",
                        "device": device,
                        "time": time,
                        "name": name,
                        "value": value,
                    }
