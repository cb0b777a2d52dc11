"""What fits into a memory and what moving a cache takes: parts of the report of ``kvprof plan``."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from kvprof.sizes import format_bytes, format_count
from kvprof.views.numbers import MISSING, duration, number, rate_in_bytes
from kvprof.views.page import bullets, heading, paragraph
from kvprof.views.tables import Column, DataTable, SplitTable, columns, key_values

__all__ = ["fit_parts", "transfer_parts"]

# --- What fits into a memory.


_OVER = "*"
_BORROWED = "~"
_SOURCES = {"itself": "", "given": "--rate", "plan": "--plan"}
# Of earlier results, which do not name it.
_ONE_TARGET: Sequence[Mapping[str, Any]] = ({"metric": "accuracy", "target": 0.99},)


def fit_parts(result: Mapping[str, Any]) -> list[RenderableType]:
    """Return what the report says about a fit.

    Parameters
    ----------
    result : mapping
        A result of kind ``plan`` that has a ``fit``.
    """
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
    if fit["missing"]:
        parts += [
            heading("Not planned"),
            bullets(f"{entry['label']}: {entry['reason']}" for entry in fit["missing"]),
        ]
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
        Column(f"rate of {fit['dtype']}"),
        Column("from", words=True),
        *(Column(title) for title in titles),
    ]
    return DataTable(
        columns,
        [
            (row["label"], f"{row['rate']:.3f}", _source(row, fit), *cells(row))
            for row in fit["rows"]
        ],
    )


def _source(row: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    words = _SOURCES.get(row["rate_from"], _kept(part)[0])
    return f"{words} {_marks(row)}".rstrip()


def _marks(row: Mapping[str, Any]) -> str:
    """Return the signs that the legend explains."""
    signs = [_BORROWED] if row["rate_from"] == "borrowed" else []
    return " ".join(signs + ["?"] * (row.get("rate_sure") is False))


def _kept(part: Mapping[str, Any]) -> tuple[str, str]:
    """Return what recorded rates keep, for a column and in words."""
    targets: Sequence[Mapping[str, Any]] = part.get("targets") or _ONE_TARGET
    words = [f"{100 * one['target']:g} % of the {one['metric']}" for one in targets]
    short = f"{100 * targets[0]['target']:g} %" if len(targets) == 1 else "targets"
    return short, " and ".join(words)


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


def _rates_said(part: Mapping[str, Any]) -> list[str]:
    """Say what rates are, and where those of a fit's or a transfer's rows come from."""
    rows, (short, kept) = part["rows"], _kept(part)
    found = {row["rate_from"] for row in rows}
    text = [f"Rates are bytes saved of full width in {part['dtype']}."]
    if "recorded" in found:
        records = sorted({row["rate_record"] for row in rows if row["rate_from"] == "recorded"})
        text.append(
            f"{short}: the largest rate that a frontier of this model measured to keep {kept} "
            f"({', '.join(records)})."
        )
    if "borrowed" in found:
        taken = part["shipped"]
        text.append(
            f"{_BORROWED}: the rate at which {taken['model']} kept {kept}, borrowed because "
            f"{taken['why']} (shipped record of {taken['model']}); nobody measured it "
            "on this model."
        )
    shipped = part.get("shipped")
    if shipped is not None and shipped["model"] is None and part["missing"]:
        text.append(f"No record was taken: {shipped['why']}. --rates NAME borrows one of them.")
    # Records of before do not tell.
    if shipped is not None and shipped["model"] is not None and shipped.get("others"):
        others = shipped["others"]
        own = (
            ""
            if "borrowed" in found
            else f"Of the records that ship that of {shipped['model']} is taken, because "
            f"{shipped['why']}. "
        )
        text.append(
            f"{own}Rates of {' and '.join(others)} ship too: --rates {others[0]} borrows them."
        )
    if any(row.get("rate_sure") is False for row in rows):
        text.append(
            "?: by its point estimate; the interval of the sample does not keep it that far."
        )
    if "given" in found:
        contexts = {row["rate_context"] for row in rows if row["rate_from"] == "given"}
        text.append(
            f"--rate: the rate given, at {min(contexts):,} tokens; what accuracy it keeps is not "
            "known."
        )
    return text


def _legend(fit: Mapping[str, Any]) -> str:
    rows = fit["rows"]
    text = _rates_said(fit)
    if any(
        entry["over_model_context"]
        for row in rows
        for entry in (*row["longest_context"], *row["largest_batch"])
    ):
        text.append(f"{_OVER} longer than the model's own context.")
    return " ".join(text)


# --- What moving a cache takes, against computing its context again.


_SLOWER = "!"
_LINKS_AT_ONCE = 4  # columns


def transfer_parts(result: Mapping[str, Any]) -> list[RenderableType]:
    """Return what the report says about moving caches.

    Parameters
    ----------
    result : mapping
        A result of kind ``plan`` that has a ``transfer``.
    """
    moved = result["data"]["transfer"]
    parts: list[RenderableType] = []
    if said := _pays(moved):
        parts.append(paragraph(said))
    for index, at in enumerate(moved["contexts"]):
        over = _OVER if at["over_model_context"] else ""
        parts += [
            heading(f"Moving the cache of {at['context']:,} tokens{over}"),
            paragraph(f"Computing it again: {_again(moved, at)}", "dim"),
            _moving(moved, index),
        ]
    parts += [
        heading("Links"),
        key_values({one["link"]: _speed_said(one) for one in moved["links"]}),
        paragraph(" ".join(_moving_legend(moved)), "dim"),
    ]
    if moved["measure"] is not None:
        parts += [
            heading("Not measured"),
            paragraph(
                "What computing these contexts again takes has to be measured on the machine that "
                "would do it; --prefill prefill.json then takes it:"
            ),
            paragraph(moved["measure"]),
        ]
    if moved["missing"]:
        parts += [
            heading("Not planned"),
            bullets(f"{entry['label']}: {entry['reason']}" for entry in moved["missing"]),
        ]
    return parts


def _pays(moved: Mapping[str, Any]) -> str:
    """Say at the longest context that was measured from which speed on moving pays."""
    known = [i for i, at in enumerate(moved["contexts"]) if at["recompute_seconds"] is not None]
    if not known or not moved["rows"]:
        return ""
    at = moved["contexts"][known[-1]]
    least = [(row["at"][known[-1]]["least_bytes_per_s"], row["label"]) for row in moved["rows"]]
    most, fewest = max(least), min(least)
    text = (
        f"Computing {at['context']:,} tokens again takes {duration(at['recompute_seconds'])}; "
        f"moving their cache takes less from {_speed(most[0])} on with {most[1]}"
    )
    return f"{text}, from {_speed(fewest[0])} on with {fewest[1]}."


def _again(moved: Mapping[str, Any], at: Mapping[str, Any]) -> str:
    prefill, seconds = moved["prefill"], at["recompute_seconds"]
    if seconds is None:
        if prefill is None:
            return f"{MISSING} (no prefill of this model is at hand)"
        return f"{MISSING} ({prefill['source']} has no prefill of this length)"
    return f"{duration(seconds)} at full width"


def _moving(moved: Mapping[str, Any], index: int) -> SplitTable:
    names = [one["link"] for one in moved["links"]]
    heads = columns("method", figures=("rate", "bytes", "pays from", *names))
    again = moved["contexts"][index]["recompute_seconds"]
    rows = []
    for row in moved["rows"]:
        at = row["at"][index]
        times = [
            f"{duration(seconds)}{_SLOWER if again is not None and seconds > again else ''}"
            for seconds in at["seconds"]
        ]
        rows.append(
            [
                row["label"],
                f"{rate_in_bytes(at['rate'])}{' ' + mark if (mark := _marks(row)) else ''}",
                format_bytes(at["bytes"]),
                _speed(at["least_bytes_per_s"]),
                *times,
            ]
        )
    few = [min(_LINKS_AT_ONCE, len(names) - at) for at in range(0, len(names), _LINKS_AT_ONCE)]
    return SplitTable(heads, rows, (3, *few))


def _speed(per_s: float | None) -> str:
    if per_s is None:
        return MISSING
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
        *_rates_said(moved),
        "Seconds: bytes over the speed of one direction; latency, packing and a busy host come on "
        "top. A GB is 10⁹ bytes. Nominal: what the standard says of the wires.",
    ]
    prefill = moved["prefill"]
    if prefill is not None:
        several = f" on {prefill['devices']} of" if prefill["devices"] > 1 else " on"
        where = "shipped with kvprof" if prefill["origin"] == "shipped" else "--prefill"
        text.append(
            f"Computing again: prefill of one sequence of {prefill['model']} at full width in "
            f"{prefill['dtype']}{several} {prefill['device']}, {prefill['mode']}, as "
            f"{prefill['source']} has it ({where}, {prefill['created'][:10]})."
        )
        text.append("Pays from: over a faster link moving takes less time than that.")
    if any(
        seconds > again["recompute_seconds"]
        for row in moved["rows"]
        for at, again in zip(row["at"], moved["contexts"], strict=True)
        if again["recompute_seconds"] is not None
        for seconds in at["seconds"]
    ):
        text.append(f"{_SLOWER} longer than computing it again.")
    if any(at["over_model_context"] for at in moved["contexts"]):
        text.append(f"{_OVER} longer than the model's own context.")
    return text
