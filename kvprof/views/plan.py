"""Report of ``kvprof plan``: what a plan stores and runs, what fits, and what two differ in."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from kvprof.sizes import format_bytes, format_count
from kvprof.views.heatmap import rank_maps
from kvprof.views.numbers import MISSING, duration, number, percent, rate_in_bytes, span
from kvprof.views.page import bullets, framed, heading, paragraph, weights_row
from kvprof.views.tables import Column, DataTable, SplitTable, columns, key_values

__all__ = ["report"]

_PARTS = {
    "keys": "keys",
    "values": "values",
    "scales": "scales",
    "zeros": "zero points",
    "outliers": "outliers",
    "window": "window at full precision",
    "sinks": "sinks at full precision",
    "eviction": "kept for eviction",
    "bases": "bases of each sequence",
}
_SHOWN_DIFFERENCES = 20
_LONGEST_VALUE = 48


def report(
    result: Mapping[str, Any],
    width: int | None = None,
    colour: bool = True,
    *,
    describe: bool = False,
) -> RenderableType:
    """Return the report for people."""
    data = result["data"]
    parts: list[RenderableType] = []
    if data["fit"] is not None:
        parts += _fit_parts(result)
    if data.get("transfer") is not None:
        parts += _transfer_parts(result)
    if data["plan"] is not None:
        parts += _plan_parts(result, describe=describe)
    if data["comparison"] is not None:
        parts += _comparison_parts(data["plan"], data["comparison"])
    return framed(result, parts, spaced=False, repeated=False, width=width, colour=colour)


def _summary(result: Mapping[str, Any]) -> str:
    """Return one paragraph on what the plan of a result saves."""
    plan = result["data"]["plan"]
    stored = plan["bytes"]
    made = plan["made"]
    wanted = made.get("rate_asked", 0.0) if made.get("context") == plan["context"] else 0.0
    asked = f" ({wanted:g} was asked for)" if plan["rate"] > wanted + _BESIDE > _BESIDE else ""
    return (
        f"{plan['method']} stores {format_bytes(stored['total'])} of "
        f"{format_bytes(stored['full'])} (full width at 16 bits) at "
        f"{plan['context']:,} tokens, everything counted: rate {plan['rate']:.3f}{asked}, "
        f"compression ratio {plan['compression_ratio']:.2f}. This says nothing about accuracy "
        "(kvprof eval does)."
    )


def _plan_parts(result: Mapping[str, Any], *, describe: bool) -> list[RenderableType]:
    plan = result["data"]["plan"]
    parts: list[RenderableType] = [paragraph(_summary(result)), heading("Bytes"), _bytes(result)]
    parts += [heading("Rates"), key_values(_rates(plan))]
    if plan["folded"] or plan["online"]:
        parts += _stored_dimensions(plan)
    if trials := plan["made"].get("centre_trials"):
        parts += _pairs(plan["made"]["centre"], trials)
    parts += [heading("Weights and work"), key_values(_work(plan, result["inputs"]))]
    if describe:
        parts += [heading("In words"), bullets(plan["sentences"])]
        parts += _heat_maps(plan)
    parts += [heading("Made from"), key_values(_provenance(result))]
    return parts


def _bytes(result: Mapping[str, Any]) -> RenderableType:
    plan = result["data"]["plan"]
    stored, tokens = plan["bytes"], plan["context"]
    shown = [(words, stored[name]) for name, words in _PARTS.items() if stored[name]]
    shown += [
        ("total", stored["total"]),
        ("full width, 16 bits", stored["full"]),
    ]
    rows = [
        (words, format_bytes(size), f"{size / tokens:,.1f} B", percent(size / stored["full"]))
        for words, size in shown
    ]
    return DataTable(columns("part", figures=("bytes", "per token", "of full width")), rows)


def _rates(plan: Mapping[str, Any]) -> dict[str, str]:
    return {
        "rate": (
            f"{plan['rate']:.4f} of the bytes at full width in 16 bits, at {plan['context']:,} "
            "tokens (--context)"
        ),
        "compression_ratio": f"{plan['compression_ratio']:.2f}×",
        "dim_rate": f"{plan['dim_rate']:.4f}, dimensions only",
        "paper_rate": (
            f"{plan['paper_rate']:.4f}, from 16 bits, without scales, windows and sinks; not bytes"
        ),
        **_kinds(plan),
    }


def _kinds(plan: Mapping[str, Any]) -> dict[str, str]:
    """Say how many kinds of head there are; nothing of a plan that leaves heads as they are."""
    if not plan.get("kinds"):
        return {}
    allowed = (plan["made"].get("options") or {}).get("kinds")
    limit = f", of at most {allowed} (option kinds)" if allowed else ""
    said = f"{plan['kinds']} of head: distinct ranks, or bits by column, of K and V{limit}"
    return {"kinds": said}


def _stored_ranks(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ranks of most tokens: of the lowest level where tokens have levels."""
    ranks: Mapping[str, Any] = plan["levels"]["least_ranks"] if plan["levels"] else plan["ranks"]
    return ranks


def _stored_dimensions(plan: Mapping[str, Any]) -> list[RenderableType]:
    """Tell the ranks of a layer's groups, or of what several layers have together."""
    if across := plan.get("across"):
        alike = Counter((one["side"], one["layers"], one["kept"], one["width"]) for one in across)
        rows = [
            (side, f"{layers}", f"{count}", f"{kept:,}", f"{width:,}")
            for (side, layers, kept, width), count in alike.items()
        ]
        figures = ("layers together", "such", "components", "of")
        table = DataTable(columns("side", figures=figures), rows)
        return [heading("What layers keep together"), table]
    return [heading("Ranks"), _ranks(plan), paragraph(_ranks_note(plan), "dim")]


def _ranks(plan: Mapping[str, Any]) -> RenderableType:
    kinds = {"stored": _stored_ranks(plan)}
    if plan["rounding"] is not None:
        kinds = {"requested": plan["rounding"]["requested"], **kinds}
    figures = [title for kind in kinds for title in (f"{kind}, mean", "over heads")]
    rows = []
    for side in ("keys", "values"):
        cells = [side]
        for ranks in kinds.values():
            every = [rank for layer in ranks[side] for rank in layer]
            cells += [f"{sum(every) / len(every):.1f}", span(every)]
        rows.append(cells)
    return DataTable(columns("side", figures=figures), rows)


def _ranks_note(plan: Mapping[str, Any]) -> str:
    rounding, full = plan["rounding"], plan["bytes"]["full"]
    text = "Ranks of old tokens, the lowest level." if plan["levels"] else "Per group of heads."
    if rounding is None:
        return text
    text += (
        f" At {rounding['knob']} {number(rounding['value'], 4)}; multiples of {rounding['grid']} "
        f"from {rounding['minimum']} on "
    )
    if not rounding["bytes_lost"]:
        return f"{text}cost nothing here."
    return (
        f"{text}cost {format_bytes(rounding['bytes_lost'])} "
        f"({percent(rounding['bytes_lost'] / full)} of full width): without rounding the rate "
        f"would be {rounding['requested_rate']:.4f}."
    )


def _pairs(chosen: int, trials: Mapping[str, Any]) -> list[RenderableType]:
    """Tell what accuracy each number of pairs without their mean kept."""
    rows = [
        (count, f"{kept:.4f}", "this plan" if count == str(chosen) else "")
        for count, kept in trials["kept"].items()
    ]
    measured = f"Measured on {trials['tokens']:,} tokens of {trials['text']}."
    return [
        heading("Rotary pairs stored without their mean"),
        DataTable(columns("pairs", figures=("accuracy kept", "")), rows),
        paragraph(measured, "dim"),
    ]


def _work(plan: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, str]:
    weights = plan["weights"]
    shown = {
        "folded": _listed(plan["folded"]) or "nothing",
        "online": _listed(plan["online"]) or "nothing",
    }
    if (kernel := plan.get("kernel")) is not None:
        where = f"in {inputs['dtype']} on {inputs['device']}"
        shown["kernels"] = (
            f"run it {where}"
            if kernel["reason"] is None
            else f"run {kernel['layers'] or 'none'} of {kernel['of']} layers {where}: "
            f"{kernel['reason']}"
        )
    if weights is None:
        return {**shown, "extra weights": f"{MISSING} (name the MODEL to have them counted)"}
    named = {
        "run online": weights["online"],
        "folded": weights["folded"],
        "W_O kept twice": weights["kept_twice"],
    }
    extra = ", ".join(f"{name} {_signed(size)}" for name, size in named.items() if size)
    shown["extra weights"] = f"{_signed(weights['total'])}{f' ({extra})' if extra else ''}"
    if weights["running"] != weights["total"]:
        shown["in memory"] = (
            f"{_signed(weights['running'])}: folded input projections keep their width"
        )
    return shown


def _listed(layers_of: Mapping[str, int]) -> str:
    """Say in how many layers, once for adjacent entries that share the number."""
    groups: list[tuple[int, list[str]]] = []
    for name, layers in layers_of.items():
        if groups and groups[-1][0] == layers:
            groups[-1][1].append(name)
        else:
            groups.append((layers, [name]))
    return "; ".join(
        f"{', '.join(names)} ({layers} layer{'s' if layers != 1 else ''})"
        for layers, names in groups
    )


def _signed(size: int) -> str:
    return f"{'+' if size > 0 else ''}{format_bytes(size)}"


def _heat_maps(plan: Mapping[str, Any]) -> list[RenderableType]:
    if plan.get("across"):
        return []
    ranks = _stored_ranks(plan)
    of = " of old tokens" if plan["levels"] else ""
    titled = {
        f"Rank of {side}{of} by layer and group of heads": ranks[side]
        for side in ("keys", "values")
    }
    bits = plan.get("bits") or {}
    widths = {f"Bits of {side} by layer and group of heads": bits[side] for side in bits}
    maps = rank_maps(titled, columns="group of KV heads")
    return maps + rank_maps(widths, columns="group of KV heads")


def _provenance(result: Mapping[str, Any]) -> dict[str, str]:
    plan, inputs = result["data"]["plan"], result["inputs"]
    made = plan["made"]
    calibration, options = made.get("calibration") or {}, made.get("options") or {}
    tokens = f", {calibration['tokens']:,} tokens" if "tokens" in calibration else ""
    shown = {
        "model": made.get("model"),
        **weights_row(result["inputs"]),
        "fingerprint": plan["fingerprint"],
        "plan": inputs.get("plan_file"),
        "saved": inputs.get("saved"),
        "asked": f"rate {made['rate_asked']:g}" if "rate_asked" in made else None,
        "calibrated on": f"{calibration['source']}{tokens}" if "source" in calibration else None,
        "options": ", ".join(f"{k} {_short(v)}" for k, v in options.items() if v is not None),
        "written": result.get("created"),
    }
    return {key: str(value) for key, value in shown.items() if value}


def _comparison_parts(plan: Mapping[str, Any], other: Mapping[str, Any]) -> list[RenderableType]:
    differences: Sequence[Mapping[str, Any]] = other["differences"]
    parts: list[RenderableType] = [heading(f"Compared with {other['file']}")]
    if not differences:
        return [*parts, paragraph("Both store and compute the same.")]
    parts.append(
        paragraph(
            f"{other['file']} is {other['method']} and stores "
            f"{format_bytes(other['bytes']['total'])} (rate {other['rate']:.3f}), this one "
            f"{format_bytes(plan['bytes']['total'])} (rate {plan['rate']:.3f}). They differ in "
            f"{len(differences):,} place{'s' if len(differences) != 1 else ''}."
        )
    )
    rows = [
        (entry["path"], _short(entry["this"]), _short(entry["other"]))
        for entry in differences[:_SHOWN_DIFFERENCES]
    ]
    parts.append(DataTable(columns("where", "this", "other"), rows))
    if len(differences) > _SHOWN_DIFFERENCES:
        rest = len(differences) - _SHOWN_DIFFERENCES
        parts.append(paragraph(f"{rest:,} more are in the result (--json).", "dim"))
    return parts


def _short(value: Any) -> str:
    text = number(value) if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} …"


# --- What fits into a memory.

_OVER = "*"
#: By so much a plan's rate may be beside the one asked for without a word: ranks are steps.
_BESIDE = 0.02


def _fit_parts(result: Mapping[str, Any]) -> list[RenderableType]:
    """Return what the report says about a fit."""
    fit = result["data"]["fit"]
    rows: Sequence[Mapping[str, Any]] = fit["rows"]
    parts: list[RenderableType] = [
        heading(f"What fits into {format_bytes(fit['memory_bytes'])}"),
        key_values(_memory(result)),
        heading("Longest context, in tokens per sequence"),
        _table(
            fit,
            [f"batch {batch:,}" for batch in fit["batches"]],
            lambda row: [_tokens(entry) for entry in row["longest_context"]],
        ),
        heading("Largest batch, in sequences"),
        _table(
            fit,
            [_context(length, fit["model_context"]) for length in fit["contexts"]],
            lambda row: [_batch(entry) for entry in row["largest_batch"]],
        ),
    ]
    parts.append(paragraph(_legend(fit), "dim"))
    parts += _not_planned(fit)
    if any(row["kept_beside_bytes"] for row in rows):
        most = max(row["kept_beside_bytes"] for row in rows)
        parts += [
            heading("Not counted"),
            paragraph(
                "A server folds once. kvprof's own runs keep what they fold and replace, to give "
                f"the model back unchanged: up to {format_bytes(most)} more."
            ),
        ]
    return parts


def _not_planned(part: Mapping[str, Any]) -> list[RenderableType]:
    lines = [f"{entry['label']}: {entry['reason']}" for entry in part["missing"]]
    return [heading("Not planned"), bullets(lines)] if lines else []


def _memory(result: Mapping[str, Any]) -> dict[str, str]:
    fit, inputs = result["data"]["fit"], result["inputs"]
    left = fit["memory_bytes"] - fit["reserve_bytes"] - fit["weights_bytes"]
    own = fit["model_context"]
    return {
        "model": f"{inputs['model']}, {format_bytes(fit['weights_bytes'])} in {fit['dtype']}",
        "reserve": (
            f"{format_bytes(fit['reserve_bytes'])} for activations and the allocator "
            f"(--reserve {inputs['reserve']})"
        ),
        "left for a cache": f"{format_bytes(left)}, less what a plan adds to the weights",
        "own context": f"{own:,} tokens" if own is not None else "not stated by the model",
    }


def _table(fit: Mapping[str, Any], titles: Sequence[str], cells: Any) -> RenderableType:
    columns = [
        Column("method", words=True),
        Column("rate"),
        *(Column(title) for title in titles),
    ]
    return DataTable(
        columns,
        [(row["label"], f"{row['rate']:.3f}", *cells(row)) for row in fit["rows"]],
    )


def _tokens(entry: Mapping[str, Any]) -> str:
    if entry["tokens"] is None:
        return f"any{_OVER}"
    if not entry["tokens"]:
        return "none"
    return f"{entry['tokens']:,}{_OVER if entry['over_model_context'] else ''}"


def _batch(entry: Mapping[str, Any]) -> str:
    if not entry["batch"]:
        return "none"
    return f"{entry['batch']:,}{_OVER if entry['over_model_context'] else ''}"


def _context(length: int, own: int | None) -> str:
    return f"at {format_count(length)}{' (own)' if length == own else ''}"


def _rates_said(part: Mapping[str, Any]) -> str:
    contexts = sorted({row["rate_context"] for row in part["rows"]})
    at = " and ".join(f"{tokens:,}" for tokens in contexts)
    return f"Rates are bytes saved of full width at 16 bits; --rate is counted at {at} tokens."


def _legend(fit: Mapping[str, Any]) -> str:
    rows = fit["rows"]
    text = [_rates_said(fit)]
    if any(
        entry["over_model_context"]
        for row in rows
        for entry in (*row["longest_context"], *row["largest_batch"])
    ):
        text.append(f"{_OVER} longer than the model's own context.")
    return " ".join(text)


# --- What moving a cache takes.

_LINKS_AT_ONCE = 4  # columns


def _transfer_parts(result: Mapping[str, Any]) -> list[RenderableType]:
    """Return what the report says about moving caches."""
    moved = result["data"]["transfer"]
    parts: list[RenderableType] = []
    for index, at in enumerate(moved["contexts"]):
        over = _OVER if at["over_model_context"] else ""
        parts += [
            heading(f"Moving the cache of {at['context']:,} tokens{over}"),
            _moving(moved, index),
        ]
    parts += [
        heading("Links"),
        key_values({one["link"]: _speed_said(one) for one in moved["links"]}),
        paragraph(" ".join(_moving_legend(moved)), "dim"),
    ]
    return parts + _not_planned(moved)


def _moving(moved: Mapping[str, Any], index: int) -> SplitTable:
    names = [one["link"] for one in moved["links"]]
    heads = columns("method", figures=("rate", "bytes", *names))
    rows = []
    for row in moved["rows"]:
        at = row["at"][index]
        times = [duration(seconds) for seconds in at["seconds"]]
        rows.append([row["label"], rate_in_bytes(at["rate"]), format_bytes(at["bytes"]), *times])
    few = [min(_LINKS_AT_ONCE, len(names) - at) for at in range(0, len(names), _LINKS_AT_ONCE)]
    return SplitTable(heads, rows, (2, *few))


def _speed(per_s: float) -> str:
    factor, unit = next(
        ((f, u) for f, u in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")) if per_s >= f),
        (1e3, "kB/s"),
    )
    return f"{number(per_s / factor)} {unit}"


def _speed_said(link: Mapping[str, Any]) -> str:
    how = "nominal" if link["nominal"] else "as given"
    return f"{_speed(link['bytes_per_s'])}, {how}"


def _moving_legend(moved: Mapping[str, Any]) -> list[str]:
    text = [
        _rates_said(moved),
        "Seconds: bytes over the speed of one direction; latency, packing and a busy host come on "
        "top. A GB is 10⁹ bytes. Nominal: what the standard says of the wires.",
    ]
    if any(at["over_model_context"] for at in moved["contexts"]):
        text.append(f"{_OVER} longer than the model's own context.")
    return text
