"""Report, CSV and figure of ``kvprof bench --load``: what rate a method serves, and how fast."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.records.load import BESIDE, LIMITS, is_late
from kvprof.records.load_names import baseline_of, tps_of
from kvprof.records.load_served import UNJUDGED, fails, is_lossy, is_starved, sheds
from kvprof.sizes import format_bytes
from kvprof.views.figure import draw_curves, draw_reference, panel_figure, titled
from kvprof.views.numbers import (
    MISSING,
    count,
    duration,
    interval,
    number,
    percent,
    unit_of,
)
from kvprof.views.page import bullets, ends, framed, heading, listed, tidy_csv, weights_row
from kvprof.views.plot import Series
from kvprof.views.tables import DataTable, SplitTable, columns

__all__ = ["figure", "report", "to_csv"]

_LATENCIES = {
    "normalised_latency_seconds": "latency per token",
    "ttft_seconds": "TTFT",
    "tpot_seconds": "TPOT",
    "longest_gap_seconds": "longest gap",
}
_SHOWN = tuple(_LATENCIES)[:3]  # in tables and figures
_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_WHY = {
    "queue": "the queue grows",
    "unsettled": "too few requests to reach a steady state (raise --requests or --seconds)",
    "client": "the client cannot send requests in time",
    "shed": "the server sheds requests",
    "failures": "requests fail",
    "objective": "too few requests meet the SLO",
}
_PANEL = (4.4, 3.2)  # inches
_NEAR = 0.1  # of the rate that was asked for: arrivals farther off are told
_LEAST_ARRIVALS = 20  # fewer arrivals have no rate worth telling

Row = Mapping[str, Any]


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report of a load."""
    data, inputs = result["data"], result["inputs"]
    verdicts = [_verdict(method, data) for method in data["methods"]]
    body: list[RenderableType] = [bullets(verdicts[1:])] if len(verdicts) > 1 else []
    for method in data["methods"]:
        rows = _rows(data, method["method"])
        if rows:
            body += _method(method, rows, data)
    body += _paying(data)
    missing = list(_missing(data))
    if missing:
        body += [heading("Not measured"), bullets(missing)]
    return framed(
        result,
        body,
        answer=_simulated(inputs) + verdicts[0] if verdicts else "",
        cautions=_cautions(data, inputs),
        notes=_notes(data),
        measured_with=_measured_with(data, inputs),
        width=width,
        colour=colour,
    )


def _simulated(inputs: Mapping[str, Any]) -> str:
    """Say in front of all else that nothing was served, and whose steps were taken."""
    steps = inputs.get("step_times")
    if steps is None:
        return ""
    return f"Simulated, with steps of {steps['device']} ({steps['source']}): "


def _rows(data: Mapping[str, Any], method: str) -> list[Row]:
    return [row for row in data["rates"] if row["method"] == method]


# --- What each method serves, in a sentence.


def _verdict(method: Row, data: Mapping[str, Any]) -> str:
    name = method["method"]
    if not _rows(data, name):
        return f"{name}: n/a (not measured)"
    if method["largest_rate"] is None and (why := method["limited_by"]) in UNJUDGED:
        return f"{name}: no rate can be judged; {_WHY[why]}"
    said = f"{name} sustained {_served(method)}"
    base = baseline_of(name, data["baseline"])
    if name == base or method["ratio_interval"] is None:
        return said
    if (times := _ratio(method)) is not None:
        return f"{said}; {times} the rate of {base}"
    limits = {one["method"]: one["limited_by"] for one in data["methods"]}
    if method["ratio"] is not None and limits[name] is None and limits.get(base, "") is None:
        return f"{name} vs {base}: both sustained every tested rate, so no ratio can be given"
    return f"{said}; ratio to {base} not significant"


def _ratio(method: Row) -> str | None:
    if method["ratio_interval"] == [None, None]:
        return None
    ends = _ends([None if end is None else f"{end:.2f}" for end in method["ratio_interval"]])
    return f"{ends}×" if method["ratio"] is None else f"{method['ratio']:.2f}× {ends}"


def _served(method: Row) -> str:
    low, high = method["largest_rate_interval"]
    why = _WHY.get(method["limited_by"])
    if method["largest_rate"] is None:
        return f"no tested rate: {why}" if why else "no completed rate"
    ends = _ends([None if end is None else f"{end:g}" for end in (low, high)])
    said = f"{_a_second(method['largest_rate'])} {ends}"
    if why:
        return f"{said}; above it {why}"
    if low == method["largest_rate"]:
        said = _a_second(low)
    return f"{said}, the highest rate tested; its limit was not reached"


def _ends(bounds: Sequence[str | None]) -> str:
    """Write an interval, of which an end may be unknown: ``[2, n/a]``."""
    if not any(bounds):
        return "(not significant)"
    return f"[{', '.join(end or 'n/a' for end in bounds)}]"


def _a_second(rate: float) -> str:
    return f"{rate:g} req/s"


def _cautions(data: Mapping[str, Any], inputs: Mapping[str, Any]) -> list[str]:
    said = []
    if data["mode"] == "served" and len(data["methods"]) > 1 and inputs.get("memory") is None:
        said.append("each server sized its own cache; --memory gives every method the same")
    if failed := [row for row in data["rates"] if row["failed"]]:
        said += [
            f"{row['case']}: {row['failed']:,} of {row['requests']:,} requests failed ("
            + ", ".join(f"{kind}: {n:,}" for kind, n in row["failures"].items())
            + ")"
            for row in failed
        ]
    said += [
        f"{row['case']}: the server rejected {row['shed']:,} of {row['requests']:,} requests "
        "(HTTP 429 or 503); they miss the SLO"
        for row in data["rates"]
        if row.get("shed")
    ]
    said += [
        f"{row['case']}: {row['arrived_per_s']:.3g} req/s arrived by chance; more requests come "
        "closer to the rate"
        for row in data["rates"]
        if row["arrived_per_s"] is not None
        and row["counted"] >= _LEAST_ARRIVALS
        and abs(row["arrived_per_s"] - row["rate"]) > _NEAR * row["rate"]
    ]
    said += _unattributed_notes(data["rates"])
    said += [
        f"{row['case']} is not complete: {row['reason']}"
        for row in data["rates"]
        if not row["complete"]
    ]
    return said


def _unattributed_notes(rows: Sequence[Row]) -> list[str]:
    """Say where much of a request's time is none of its engine's."""
    said = []
    names = ("elsewhere", "outside", "end_to_end")
    for row in rows:
        parts = row["parts"] or {}
        front, way, engine = (parts.get(f"{name}_seconds") for name in names)
        if front is None or way is None or engine is None:
            continue
        if engine + way > 0 and front + way >= BESIDE * (engine + way):
            hint = " (vLLM's --api-server-count adds front ends)" if front > way else ""
            said.append(
                f"{row['case']}: {duration(front + way)} of a request's {duration(engine + way)} "
                f"are outside the engine: {duration(way)} client and network, {duration(front)} "
                f"server front end{hint}"
            )
    return said


# --- Tables of one method.


def _method(method: Row, rows: Sequence[Row], data: Mapping[str, Any]) -> list[RenderableType]:
    objective = bool(_limits(data["objective"]))
    parts: list[RenderableType] = [heading(f"{method['method']} by rate")]
    units = {
        name: unit_of(row[name]["p99"] or row[name]["mean"] for row in rows) for name in _LATENCIES
    }
    titles = ["req/s"]
    for name in _SHOWN:
        said, unit = _LATENCIES[name], units[name][1]
        titles += [f"{said} {unit}", "p50", "p99"]
    last = ["tok/s", *(["within"] if objective else []), "queue"]
    cells = []
    for row in rows:
        line = [f"{row['rate']:g}"]
        for name in _SHOWN:
            line += _latency(row[name], units[name][0])
        line.append(number(row["tokens_per_s"]))
        if objective:
            line.append(percent(row["attained_share"], 0))
        line.append(_queue(row))
        cells.append(line)
    parts.append(
        SplitTable(columns("req/s", figures=[*titles[1:], *last]), cells, (3, 3, 3, len(last)))
    )
    parts += [Text(), _state(rows)]
    if any(row["parts"] for row in rows):
        parts += [Text(), _time_by_stage(rows, simulated=data["mode"] == "simulated")]
    if method["fit"] is not None:
        parts += [Text(), bullets([_fit_said(method["fit"])])]
    return parts


def _latency(found: Row, factor: float) -> list[str]:
    bounds = found["mean_interval"]
    ends = None if bounds is None else [_scaled(one, factor) for one in bounds]
    mean = interval(_scaled(found["mean"], factor), ends)
    return [mean, *(number(_scaled(found[name], factor)) for name in ("p50", "p99"))]


def _scaled(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor


def _queue(row: Row) -> str:
    if is_starved(row):
        return "not judged"
    if row["grows"] is not True and (sheds(row) or fails(row)):
        return "sheds" if sheds(row) else "fails"
    return {True: "grows", False: "steady"}.get(row["grows"], "open")


def _state(rows: Sequence[Row]) -> RenderableType:
    """Return what the servers were busy with, rate by rate."""
    titles = (
        "running",
        "waiting",
        "most",
        "cache used",
        "most",
        "preempted",
        "failed",
        "shed",
        "late p99",
        "client busy",
    )
    cells = [
        [
            f"{row['rate']:g}",
            _level(row["running"], "mean", number),
            _level(row["waiting"], "mean", number),
            _level(row["waiting"], "most", number),
            _level(row["cache_share"], "mean", percent),
            _level(row["cache_share"], "most", percent),
            MISSING if row["preemptions"] is None else f"{row['preemptions']:,}",
            f"{row['failed']:,}",
            f"{row.get('shed', 0):,}",
            duration(row["lateness_seconds"]["p99"]),
            percent(row.get("client_busy_share")),
        ]
        for row in rows
    ]
    return SplitTable(columns("req/s", figures=titles), cells, (3, 2, 5))


def _level(level: Row | None, name: str, write: Callable[[float], str]) -> str:
    return MISSING if level is None else write(level[name])


def _time_by_stage(rows: Sequence[Row], *, simulated: bool) -> RenderableType:
    """Return where a request's time goes, by the engine's own marks or those of the simulator."""
    names = ("waiting", "prefill", "decode", "elsewhere", "end_to_end", "outside")
    titles = ["waiting", "prefill", "decode", "front end", "all", "client side", "preemptions"]
    cells = []
    for row in rows:
        parts = row["parts"] or {}
        often = parts.get("preemptions_per_request")
        cells.append(
            [
                f"{row['rate']:g}",
                *(duration(parts.get(f"{name}_seconds")) for name in names),
                MISSING if often is None else f"{often:.2f}",
            ]
        )
    return DataTable(
        columns("req/s", figures=titles),
        cells,
        title="Mean request time, " + ("simulated" if simulated else "by the engine's metrics"),
    )


# --- From where on a method pays, and what lines through the steps say, in sentences.


def _paying(data: Mapping[str, Any]) -> list[RenderableType]:
    lines, tables = [], []
    for method in data["methods"]:
        pays = method["pays"]
        if pays is None or not pays["ratios"]:
            continue
        name = method["method"]
        base = baseline_of(name, data["baseline"])
        rate = pays["from_rate"]
        both = [row for row in data["rates"] if row["method"] in (name, base)]
        lossy = {row["rate"] for row in both if is_lossy(row)}
        lossy &= {one["rate"] for one in pays["ratios"]}
        bounded = [
            one
            for one in pays["ratios"]
            if one["interval"] is not None and one["rate"] not in lossy
        ]
        faster = [f"{one['rate']:g} req/s" for one in bounded if one["interval"][1] < 1]
        slower = [f"{one['rate']:g} req/s" for one in bounded if one["interval"][0] > 1]
        if rate is not None:
            said = f"is faster than {base} from {_a_second(rate)} on"
        elif faster:  # and not at one above them
            said = f"is significantly faster than {base} only at {', '.join(faster)}"
        else:
            said = f"is significantly faster than {base} at no tested rate"
        if slower:
            said += f" and significantly slower at {', '.join(slower)}"
        if lossy:
            rates = ", ".join(f"{rate:g} req/s" for rate in sorted(lossy))
            said += f" (too many requests failed at {rates})"
        lines.append(f"{name} {said}, by latency per token")
        lines += [_context_said(name, base, one) for one in pays["contexts"]]
        tables += [heading(f"{name} vs {base}, same requests"), _latency_ratios(pays["ratios"])]
    return [heading("Break-even"), bullets(lines), *tables] if lines else []


def _latency_ratios(ratios: Sequence[Row]) -> RenderableType:
    """Return a method's mean latencies over the baseline's, rate by rate."""
    called = (_LATENCIES[name] for name in _SHOWN)
    names = dict(zip(("ratio", "ttft_ratio", "tpot_ratio"), called, strict=True))
    # Records of before know latencies per token alone.
    known = [name for name in names if any(name in one for one in ratios)]
    cells = [
        [
            f"{one['rate']:g}",
            *(
                interval(one[name], one["interval" if name == "ratio" else f"{name}_interval"])
                for name in known
            ),
            f"{one['count']:,}",
        ]
        for one in ratios
    ]
    titles = (*(names[name] for name in known), "requests")
    return SplitTable(columns("req/s", figures=titles), cells, (1,) * len(titles))


def _fit_said(fit: Row) -> str:
    """Say the line through the steps: what a token costs, and each thing it grows with."""
    said, unresolved = [], []
    costs = [("per-token", "", fit["intercept_seconds"], fit["intercept_seconds_interval"], 1.0)]
    words = {
        "context": ("per-context", " per 1,000 context tokens", 1000.0),
        "batch": ("per-request", " per decoding request", 1.0),
        "prefill": ("per-prompt", " per 1,000 prompt tokens", 1000.0),
    }
    for name, found in fit["slopes"].items():
        called, of, factor = words[name]
        costs.append((called, of, found["seconds"], found["seconds_interval"], factor))
    for called, of, value, bounds, factor in costs:
        if _resolved(value, bounds):
            scaled = None if bounds is None else [one * factor for one in bounds]
            said.append(f"{_seconds(value * factor, scaled)}{of}")
        else:
            unresolved.append(called)
    sentences = [" + ".join(said)] if said else []
    if unresolved:
        sentences.append(f"{listed(unresolved)} cost not significant")
    if fit["left_out"]:
        sentences.append(f"{listed(fit['left_out'])} did not vary")
    return f"Fitted step time: {'; '.join(sentences)}"


def _resolved(value: float, bounds: Sequence[float] | None) -> bool:
    """Whether a cost is told: none is below zero, and an interval that goes there tells none."""
    return value > 0 and (bounds is None or bounds[0] > 0)


def _seconds(value: float, bounds: Sequence[float] | None) -> str:
    factor, unit = unit_of([value])
    scaled = None if bounds is None else [one * factor for one in bounds]
    return f"{interval(value * factor, scaled)} {unit}"


def _context_said(name: str, base: str, found: Row) -> str:
    """Say from which context on, or up to which, a method's steps are shorter."""
    batch = f"batch {found['batch']:g}"
    sure = "" if found["certain"] is None else f" ({percent(found['certain'], 0)} of resamples)"
    if found["pays"] in ("always", "never"):
        return f"{batch}: {name}'s steps are {found['pays']} shorter than {base}'s{sure}"
    if found["context"] is None:
        return f"{batch}: the steps of {name} and {base} do not differ significantly"
    word = "from" if found["pays"] == "from" else "up to"
    beyond = "" if found["seen"] else "; extrapolated"
    tokens = f"{found['context']:,.0f}"
    if found["interval"] is not None:
        low, high = found["interval"]
        tokens += f" [{low:,.0f}, {high:,.0f}]"
    return (
        f"{batch}: {name}'s steps are shorter than {base}'s {word} {tokens} context "
        f"tokens{sure}{beyond}"
    )


# --- What a reader must know.


def _missing(data: Mapping[str, Any]) -> Iterator[str]:
    rates = data["rates"]
    if rates and all(row["cache_share"] is None for row in rates):
        told = "no sample in the counted time"
        yield "cache use: " + (told if data["mode"] == "simulated" else "no server reports it")
    if rates and all(row["preemptions"] is None for row in rates):
        yield "preemptions: no server reports them"
    if rates and all(row["parts"] is None for row in rates):
        yield "time of a request by phase: no server reports it"
    if not _limits(data["objective"]):
        yield "requests within an SLO: none was given (--slo ttft=2s,tpot=50ms)"
    for method in data["methods"]:
        rows = _rows(data, method["method"])
        if rows and method["fit"] is None:
            why = "too few tokens came"
            if any(row["preemptions"] for row in rows):
                why += " at rates without preemption"
            elif any(is_late(row["parts"]) for row in rows):
                why += " at rates at which the server's front end kept up"
            yield f"{method['method']}: fitted step time; {why}"
        if untold := [
            f"{row['rate']:g}" for row in rows if row["complete"] and row["grows"] is None
        ]:
            yield (
                f"{method['method']}: whether the queue grows at {', '.join(untold)} req/s; raise "
                "--requests"
            )


def _notes(data: Mapping[str, Any]) -> list[str]:
    notes = [
        "Latency per token: from arrival to the last token, per output token.",
        "TTFT: from arrival to the first token. TPOT: mean time between output tokens.",
        "Counted: requests after warm-up, except the last tenth of the run.",
        "Queue: grows, or steady (under 2 % of the rate), at 95 %; otherwise open.",
    ]
    if (limits := _limits(data["objective"])) and data["rates"]:
        share = data["rates"][0].get("objective_share")
        notes.append(f"Within: requests that meet {limits}; {percent(share, 0)} have to.")
    return notes


def _limits(objective: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{_LATENCIES[name]} ≤ {duration(objective[name])}" for name in LIMITS if name in objective
    )


def _measured_with(data: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    cache = [
        f"{method['method']}: "
        + ", ".join(
            part
            for part in (
                f"{count(method['cache_tokens'])} tokens" if method["cache_tokens"] else "",
                format_bytes(method["cache_bytes"]) if method["cache_bytes"] else "",
            )
            if part
        )
        for method in data["methods"]
        if method["cache_tokens"] or method["cache_bytes"]
    ]
    engines = dict.fromkeys(m["engine"] for m in data["methods"] if m["engine"])
    told = [
        f"{method['method']}: {own}"
        for method in data["methods"]
        if (own := method["settings"].get("engine variables"))
    ]
    lengths = inputs.get("lengths", {})
    return {
        "model": data["shape"].get("name"),
        "layers": inputs.get("layers"),
        "weights": f"{weights} (only times are meaningful)"
        if (weights := inputs.get("weights"))
        else weights_row(inputs).get("weights"),
        "engine": ", ".join(engines) or None,
        "engine variables": "; ".join(told) or None,
        "servers": {
            "served": "started by kvprof, one method at a time",
            "url": "already running",
            "simulated": "simulated",
        }.get(data["mode"]),
        "step times": None if (steps := inputs.get("step_times")) is None else _steps(steps),
        "engine settings": None
        if (engine := inputs.get("engine_settings")) is None
        else ", ".join(f"{name.replace('_', ' ')} {_setting(v)}" for name, v in engine.items()),
        "lengths": lengths.get("name"),
        "arrivals": inputs.get("arrivals"),
        "memory of the cache": format_bytes(inputs["memory"]) if inputs.get("memory") else None,
        "replicas": inputs.get("replicas") if (inputs.get("replicas") or 1) > 1 else None,
        "router": inputs.get("router") if (inputs.get("replicas") or 1) > 1 else None,
        "tensor parallelism": None if (tps := tps_of(inputs)) == [1] else ", ".join(map(str, tps)),
        "cache": "; ".join(cache) or None,
        "seed": inputs.get("seed"),
    }


def _setting(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _steps(steps: Mapping[str, Any]) -> str:
    """Say where a simulation's step times are from, and how near they come to what was measured."""
    widest = max((one["largest_difference"] or 0.0 for one in steps["methods"]), default=0.0)
    return (
        f"{steps['source']}, {steps['device']}, {steps['created'][:10]}; within {percent(widest)} "
        "of measured steps"
    )


# --- CSV and figure.


def to_csv(result: Mapping[str, Any]) -> str:
    """Return a row per method and rate."""
    rows = []
    for row in result["data"]["rates"]:
        line: dict[str, Any] = {
            name: row[name]
            for name in (
                "method",
                "rate",
                "complete",
                "requests",
                "counted",
                "failed",
                "arrived_per_s",
                "completed_per_s",
                "tokens_per_s",
                "growth_per_s",
            )
        }
        line["shed"] = row.get("shed", 0)
        line |= ends("growth_per_s", row["growth_per_s_interval"])
        line |= {"grows": row["grows"], "attained_share": row["attained_share"]}
        line |= ends("attained_share", row["attained_share_interval"])
        line |= {"goodput_per_s": row["goodput_per_s"], "preemptions": row["preemptions"]}
        for name in ("cache_share", "running", "waiting"):
            level = row[name] or {}
            line |= {f"{name}_{which}": level.get(which) for which in ("mean", "most")}
        for name in _LATENCIES:
            for statistic in _STATISTICS:
                key = f"{statistic}_{name}"
                line[key] = row[name][statistic]
                line |= ends(key, row[name][f"{statistic}_interval"])
        parts = row["parts"] or {}
        for name in ("waiting", "prefill", "decode", "elsewhere"):
            line[f"engine_{name}_seconds"] = parts.get(f"{name}_seconds")
        line["outside_seconds"] = parts.get("outside_seconds")
        line["client_busy_share"] = row.get("client_busy_share")
        rows.append(line)
    return tidy_csv(list(rows[0]) if rows else ["method", "rate"], rows)


def figure(result: Mapping[str, Any]) -> Any:
    """Return latency per token, TTFT and TPOT against the rate, a curve per method."""
    data = result["data"]
    limits = data["objective"]

    def panel(name: str, said: str) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            every = [row[name]["mean"] for row in data["rates"]]
            factor, unit = unit_of(every)
            curves = [_curve(data, method["method"], name, factor) for method in data["methods"]]
            draw_curves(
                axes,
                [one for one in curves if one.x],
                title=said,
                x_label="request rate (req/s)",
                y_label=f"mean, {unit}",
            )
            if limits.get(name) is not None:
                draw_reference(axes, limits[name] * factor, "objective")

        return draw

    return panel_figure(
        [panel(name, _LATENCIES[name]) for name in _SHOWN],
        _PANEL,
        columns=3,
        title=titled(result, f"{data['shape']['name']} under load"),
    )


def _curve(data: Mapping[str, Any], method: str, name: str, factor: float) -> Series:
    rows = [row for row in _rows(data, method) if row["complete"] and row[name]["mean"] is not None]
    bounds = [row[name]["mean_interval"] for row in rows]
    known = bool(rows) and all(one is not None for one in bounds)
    return Series(
        method,
        [row["rate"] for row in rows],
        [row[name]["mean"] * factor for row in rows],
        low=[one[0] * factor for one in bounds] if known else None,
        high=[one[1] * factor for one in bounds] if known else None,
    )
