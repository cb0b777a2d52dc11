"""The report of ``kvprof plan``: what a plan stores and runs, and what moving takes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvprof.report.blocks import (
    Block,
    Column,
    Facts,
    Heading,
    HeatMap,
    Paragraph,
    Report,
    Table,
    framed,
)
from kvprof.results.plan import Comparison, MovedRow, Plan, PlanInputs, PlanResult, Transfer
from kvprof.sizes import format_bytes
from kvprof.views.numbers import duration, number, percent, rate_in_bytes, span

__all__ = ["report"]

_SHOWN_DIFFERENCES, _LONGEST_VALUE = 20, 48
#: How far a plan's rate may be from the one asked for without a word: ranks are steps.
_BESIDE = 0.02
_OVER = "*"

_PLAN_NOTES = (
    "rate: share of the uncompressed bytes that is saved, everything counted.",
    "dim_rate: of dimensions. paper_rate: without scales, windows and sinks.",
    "Accuracy is measured by kvprof eval.",
)
_RATE_NOTE = "rate: share of the bytes saved; --rate is counted at {} tokens."
_OVER_NOTE = f"{_OVER} longer than the model's own context."
_TIME_NOTE = "Time: bytes over one direction's speed, without latency or packing."


#: A verdict, blocks and notes.
Read = tuple[str, list[Block], list[str]]


def report(result: PlanResult) -> Report:
    """Return the report."""
    data, inputs = result.data, result.inputs
    reads: list[tuple[Any, Callable[..., Read]]] = [
        (data.plan, _plan),
        (data.transfer, _transfer),
    ]
    parts = [read(part, inputs) for part, read in reads if part is not None]
    body = [block for _, blocks, _ in parts for block in blocks]
    if data.plan is not None and data.comparison is not None:
        body += _comparison(data.plan, data.comparison)
    name = data.plan.method if data.plan is not None else "several methods"
    return framed(
        result,
        body,
        verdict=" ".join(verdict for verdict, _, _ in parts),
        subject=f"{inputs.model or 'a model'}, {name}",
        notes=list(dict.fromkeys(note for _, _, notes in parts for note in notes)),
        measured_with=_measured_with(data.plan, inputs),
    )


def _measured_with(plan: Plan | None, inputs: PlanInputs) -> dict[str, Any]:
    if plan is None:
        return {"model": inputs.model}
    made = plan.made
    calibration, options = made.get("calibration") or {}, made.get("options") or {}
    tokens = f", {calibration['tokens']:,} tokens" if "tokens" in calibration else ""
    given = (f"{key} {_short(value)}" for key, value in options.items() if value is not None)
    return {
        "model": made.get("model") or inputs.model,
        "plan": inputs.plan_file,
        "saved": inputs.saved,
        "asked": f"rate {made['rate_asked']:g}" if "rate_asked" in made else None,
        "calibrated on": f"{calibration['source']}{tokens}" if "source" in calibration else None,
        "options": ", ".join(given),
    }


def _short(value: Any) -> str:
    text = number(value) if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} …"


# --- One plan.


def _plan(plan: Plan, inputs: PlanInputs) -> Read:
    stored, made = plan.bytes, plan.made
    wanted = made.get("rate_asked", 0.0) if made.get("context") == plan.context else 0.0
    asked = f" ({wanted:g} was asked for)" if plan.rate > wanted + _BESIDE > _BESIDE else ""
    verdict = (
        f"{plan.method} stores {format_bytes(stored.total)} of {format_bytes(stored.full)} "
        f"(uncompressed, 16 bits) at {plan.context:,} tokens: rate {plan.rate:.3f}{asked}, "
        f"compression ratio {plan.compression_ratio:.2f}."
    )
    columns = [
        Column(0, "part", words=True),
        Column(1, "bytes", format_bytes),
        Column(1, "per token", lambda size: f"{size / plan.context:,.1f} B"),
        Column(1, "of uncompressed", lambda size: percent(size / stored.full)),
    ]
    named = {"zeros": "zero points", "full": "uncompressed (16 bits)"}
    shown = [(named.get(part, part), size) for part, size in stored if size or part == "total"]
    rates = {name: f"{getattr(plan, name):.4f}" for name in ("rate", "dim_rate", "paper_rate")}
    if plan.kinds:
        allowed = (made.get("options") or {}).get("kinds")
        limit = f" (limit {allowed}, --option kinds=N)" if allowed else ""
        rates["distinct head shapes"] = f"{plan.kinds}{limit}"
    blocks: list[Block] = [Heading("Bytes"), Table(columns, shown)]
    blocks += [Heading("Rates"), Facts(rates)]
    if plan.folded or plan.online:
        blocks += _across(plan) if plan.across else _ranks(plan)
    if trials := made.get("centre_trials"):
        blocks += _pairs(made["centre"], trials)
    blocks += [Heading("Weights and work"), Facts(_work(plan, inputs))]
    if inputs.describe:
        blocks += [Heading("In words"), *(Paragraph(line) for line in plan.sentences)]
        blocks += _maps(plan)
    return verdict, blocks, list(_PLAN_NOTES)


def _across(plan: Plan) -> list[Block]:
    """Show what several layers have together."""
    alike = Counter((one.side, one.layers, one.kept, one.width) for one in plan.across or ())
    columns = [
        Column(lambda row: row[0][0], "side", words=True),
        Column(lambda row: row[0][1], "layers together"),
        Column(1, "such"),
        Column(lambda row: row[0][2], "components", "{:,}".format),
        Column(lambda row: row[0][3], "of", "{:,}".format),
    ]
    return [Heading("What layers keep together"), Table(columns, list(alike.items()))]


def _ranks(plan: Plan) -> list[Block]:
    least = plan.levels.least_ranks if plan.levels else plan.ranks
    kinds = {"requested": plan.rounding.requested} if plan.rounding is not None else {}
    columns = [Column(str, "side", words=True)]
    for name, ranks in {**kinds, "stored": least}.items():
        every = {side: [r for layer in own for r in layer] for side, own in ranks.sides().items()}
        columns += [
            Column(every.__getitem__, f"{name}, mean", lambda own: f"{sum(own) / len(own):.1f}"),
            Column(every.__getitem__, "over heads", span),
        ]
    of = "Ranks of old tokens, at the lowest level." if plan.levels else "Ranks by group of heads."
    if (found := plan.rounding) is not None:
        share = percent(found.bytes_lost / plan.bytes.full)
        of += (
            f" Rounding them up to multiples of {found.grid}, at least {found.minimum}, adds "
            f"{format_bytes(found.bytes_lost)} ({share} of uncompressed); without it the rate is "
            f"{found.requested_rate:.4f}."
        )
    return [Heading("Ranks"), Table(columns, ("keys", "values")), Paragraph(of, "aside")]


def _pairs(chosen: int, trials: Mapping[str, Any]) -> list[Block]:
    """Show what accuracy each number of pairs without their mean kept."""
    columns = [
        Column(0, "pairs"),
        Column(1, "accuracy kept", "{:.4f}".format),
        Column(lambda row: "this plan" if row[0] == str(chosen) else "", "", words=True),
    ]
    text = f"Measured on {trials['tokens']:,} tokens of {trials['text']}."
    table = Table(columns, list(trials["kept"].items()))
    return [Heading("Rotary pairs stored without their mean"), table, Paragraph(text, "aside")]


def _work(plan: Plan, inputs: PlanInputs) -> dict[str, str]:
    shown = {"folded": _layers(plan.folded), "online": _layers(plan.online)}
    if (kernel := plan.kernel) is not None:
        what = "all layers" if kernel.reason is None else f"{kernel.layers} of {kernel.of} layers"
        why = f": {kernel.reason}" if kernel.reason is not None else ""
        shown["kernels"] = f"run {what} in {inputs.dtype} on {inputs.device}{why}"
    if (weights := plan.weights) is None:
        return {**shown, "extra weights": "not counted: give the model"}
    named = {"online": weights.online, "folded": weights.folded, "second W_O": weights.kept_twice}
    extra = ", ".join(f"{name} {_signed(size)}" for name, size in named.items() if size)
    shown["extra weights"] = f"{_signed(weights.total)}{f' ({extra})' if extra else ''}"
    if weights.running != weights.total:
        shown["in memory"] = f"{_signed(weights.running)} (folded projections keep their width)"
    return shown


def _layers(by_name: Mapping[str, int]) -> str:
    return "; ".join(f"{name} ({n} layer{'s'[: n != 1]})" for name, n in by_name.items()) or "none"


def _signed(size: int) -> str:
    return f"{'+' if size > 0 else ''}{format_bytes(size)}"


def _maps(plan: Plan) -> list[Block]:
    if plan.across:
        return []
    least = plan.levels.least_ranks if plan.levels else plan.ranks
    of = " of old tokens" if plan.levels else ""
    maps = {f"Rank of {side}{of}": (own, least) for side, own in least.sides().items()}
    if plan.bits is not None:
        maps |= {f"Bits of {side}": (own, plan.bits) for side, own in plan.bits.sides().items()}
    found: list[Block] = []
    for title, (values, scale) in maps.items():
        every = [value for own in scale.sides().values() for layer in own for value in layer]
        ends: dict[str, Any] = {"low": min(every), "high": max(every), "show": "{:.0f}".format}
        title = f"{title} by layer and group of heads"
        found.append(HeatMap(values, title, columns="group of KV heads", **ends))
    return found


def _comparison(plan: Plan, other: Comparison) -> list[Block]:
    heading, differences = Heading(f"Compared with {other.file}"), other.differences
    if not differences:
        return [heading, Paragraph("Both plans store and compute the same.")]
    columns = [
        Column("path", "where", words=True),
        Column("this", f"this: {plan.method}", _short, words=True),
        Column("other", f"other: {other.method}", _short, words=True),
    ]
    more = "" if len(differences) <= _SHOWN_DIFFERENCES else f", first {_SHOWN_DIFFERENCES} shown"
    said = (
        f"{other.file} stores {format_bytes(other.bytes.total)} (rate {other.rate:.3f}), this plan "
        f"{format_bytes(plan.bytes.total)} (rate {plan.rate:.3f}). Differences: "
        f"{len(differences):,}{more}."
    )
    return [heading, Paragraph(said), Table(columns, differences[:_SHOWN_DIFFERENCES])]


# --- Several plans: what moving a cache takes.


_METHOD = [Column("label", "method", words=True)]


def _not_planned(missing: Sequence[Any]) -> list[Block]:
    columns = [*_METHOD, Column("reason", "reason", words=True)]
    return [Heading("Not planned"), Table(columns, missing)] if missing else []


def _transfer(moved: Transfer, _: PlanInputs) -> Read:
    blocks: list[Block] = []
    for index, at in enumerate(moved.contexts):
        over = _OVER if at.over_model_context else ""
        blocks += [Heading(f"Moving the cache of {at.context:,} tokens{over}")]
        blocks += [_moving(moved, index)]
    speeds = {
        one.link: f"{_speed(one.bytes_per_s)}, {'nominal' if one.nominal else 'as given'}"
        for one in moved.links
    }
    blocks += [Heading("Links"), Facts(speeds), *_not_planned(moved.missing)]
    verdict = "No method was planned."
    if moved.rows and moved.contexts and moved.links:
        least = min(moved.rows, key=lambda row: row.at[0].bytes)
        verdict = (
            f"Moving {moved.contexts[0].context:,} tokens over {moved.links[0].link} takes "
            f"{duration(least.at[0].seconds[0])} with {least.label}, the fewest bytes."
        )
    longer = any(one.over_model_context for one in moved.contexts)
    tokens = " and ".join(f"{n:,}" for n in sorted({row.rate_context for row in moved.rows}))
    notes = [_RATE_NOTE.format(tokens)] * bool(moved.rows) + [_OVER_NOTE] * longer
    return verdict, blocks, [*notes, _TIME_NOTE]


def _moving(moved: Transfer, index: int) -> Table:
    def seconds(link: int, row: MovedRow) -> float:
        return row.at[index].seconds[link]

    columns = [
        *_METHOD,
        Column(lambda row: row.at[index].rate, "rate", rate_in_bytes),
        Column(lambda row: row.at[index].bytes, "bytes", format_bytes),
    ]
    columns += [
        Column(partial(seconds, link), one.link, duration) for link, one in enumerate(moved.links)
    ]
    return Table(columns, moved.rows)


def _speed(per_s: float) -> str:
    units = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (0.0, "kB/s"))
    factor, unit = next((f, u) for f, u in units if per_s >= f)
    return f"{number(per_s / (factor or 1e3))} {unit}"
