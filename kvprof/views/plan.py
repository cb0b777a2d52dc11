"""The report of ``kvprof plan``: what a plan stores, folds and runs, and what two differ in."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from kvprof.sizes import format_bytes
from kvprof.views.heatmap import rank_maps
from kvprof.views.numbers import MISSING, number, percent, span
from kvprof.views.page import bullets, framed, heading, paragraph, weights_row
from kvprof.views.plan_fit import fit_parts, transfer_parts
from kvprof.views.tables import Column, DataTable, key_values

__all__ = ["report", "summary"]

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
    """Return the report for people.

    Parameters
    ----------
    result : mapping
        A result of kind ``plan``.
    width : int or None
        Columns at most; None takes the console's.
    colour : bool
        False leaves out every escape code.
    describe : bool
        Say in words what is done, and show every layer's ranks.
    """
    data = result["data"]
    parts: list[RenderableType] = []
    if data["fit"] is not None:
        parts += fit_parts(result)
    if data.get("transfer") is not None:
        parts += transfer_parts(result)
    if data["plan"] is not None:
        parts += _plan_parts(result, describe=describe)
    if data["comparison"] is not None:
        parts += _comparison_parts(data["plan"], data["comparison"])
    return framed(result, parts, spaced=False, repeated=False, width=width, colour=colour)


def summary(result: Mapping[str, Any]) -> str:
    """Return one paragraph on what the plan of a result saves.

    Parameters
    ----------
    result : mapping
        Of ``kvprof plan`` with a plan.
    """
    plan = result["data"]["plan"]
    stored = plan["bytes"]
    return (
        f"{plan['method']} stores {format_bytes(stored['total'])} of "
        f"{format_bytes(stored['full'])} (full width in {result['inputs']['dtype']}) at "
        f"{plan['context']:,} tokens, everything counted: rate {plan['rate']:.3f}, compression "
        f"ratio {plan['compression_ratio']:.2f}. This says nothing about accuracy (kvprof eval "
        "does)."
    )


def _plan_parts(result: Mapping[str, Any], *, describe: bool) -> list[RenderableType]:
    plan = result["data"]["plan"]
    parts: list[RenderableType] = [paragraph(summary(result)), heading("Bytes"), _bytes(result)]
    parts += [heading("Rates"), key_values(_rates(plan, result["inputs"]["dtype"]))]
    if plan["folded"] or plan["online"]:
        parts += [heading("Ranks"), _ranks(plan), paragraph(_ranks_note(plan), "dim")]
    parts += [heading("Weights and work"), key_values(_work(plan, result["inputs"]))]
    if describe:
        parts += [heading("In words"), bullets(plan["sentences"])]
        parts += _heat_maps(plan)
    parts += [heading("Made from"), key_values(_provenance(result))]
    return parts


def _bytes(result: Mapping[str, Any]) -> RenderableType:
    plan = result["data"]["plan"]
    stored, tokens = plan["bytes"], plan["context"]
    columns = (
        Column("part", words=True),
        Column("bytes"),
        Column("per token"),
        Column("of full width"),
    )
    shown = [(words, stored[name]) for name, words in _PARTS.items() if stored[name]]
    shown += [
        ("total", stored["total"]),
        (f"full width, {result['inputs']['dtype']}", stored["full"]),
    ]
    rows = [
        (words, format_bytes(size), f"{size / tokens:,.1f} B", percent(size / stored["full"]))
        for words, size in shown
    ]
    return DataTable(columns, rows)


def _rates(plan: Mapping[str, Any], dtype: str) -> dict[str, str]:
    return {
        "rate": (
            f"{plan['rate']:.4f} of the bytes at full width in {dtype}, at {plan['context']:,} "
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
    return {"kinds": f"{plan['kinds']} of head: distinct ranks of K and V{limit}"}


def _stored_ranks(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ranks of most tokens: of the lowest level where tokens have levels."""
    ranks: Mapping[str, Any] = plan["levels"]["least_ranks"] if plan["levels"] else plan["ranks"]
    return ranks


def _ranks(plan: Mapping[str, Any]) -> RenderableType:
    kinds = {"stored": _stored_ranks(plan)}
    if plan["rounding"] is not None:
        kinds = {"requested": plan["rounding"]["requested"], **kinds}
    columns = [Column("side", words=True)]
    for kind in kinds:
        columns += [Column(f"{kind}, mean"), Column("over heads")]
    rows = []
    for side in ("keys", "values"):
        cells = [side]
        for ranks in kinds.values():
            every = [rank for layer in ranks[side] for rank in layer]
            cells += [f"{sum(every) / len(every):.1f}", span(every)]
        rows.append(cells)
    return DataTable(columns, rows)


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
    columns = (Column("where", words=True), Column("this", words=True), Column("other", words=True))
    rows = [
        (entry["path"], _short(entry["this"]), _short(entry["other"]))
        for entry in differences[:_SHOWN_DIFFERENCES]
    ]
    parts.append(DataTable(columns, rows))
    if len(differences) > _SHOWN_DIFFERENCES:
        rest = len(differences) - _SHOWN_DIFFERENCES
        parts.append(paragraph(f"{rest:,} more are in the result (--json).", "dim"))
    return parts


def _short(value: Any) -> str:
    text = number(value) if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} …"
