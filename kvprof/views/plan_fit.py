"""The part of ``kvprof plan``'s report that says what fits into a memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from kvprof.sizes import format_bytes, format_count
from kvprof.views.page import bullets, heading, paragraph
from kvprof.views.tables import Column, DataTable, key_values

__all__ = ["fit_parts"]

_OVER = "*"
_SOURCES = {"itself": "", "recorded": "99 %", "given": "--rate", "plan": "--plan"}


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
        [(row["label"], f"{row['rate']:.3f}", _source(row), *cells(row)) for row in fit["rows"]],
    )


def _source(row: Mapping[str, Any]) -> str:
    doubt = " ?" if row.get("rate_sure") is False else ""
    return f"{_SOURCES[row['rate_from']]}{doubt}"


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


def _legend(fit: Mapping[str, Any]) -> str:
    rows = fit["rows"]
    found = {row["rate_from"] for row in rows}
    text = [f"Rates are bytes saved of full width in {fit['dtype']}."]
    if "recorded" in found:
        records = sorted({row["rate_record"] for row in rows if row["rate_from"] == "recorded"})
        text.append(
            "99 %: the largest rate that a frontier of this model measured to keep 99 % of the "
            f"accuracy ({', '.join(records)})."
        )
    if any(row.get("rate_sure") is False for row in rows):
        text.append(
            "?: by its point estimate; the interval of the sample does not keep 99 % that far."
        )
    if "given" in found:
        contexts = {row["rate_context"] for row in rows if row["rate_from"] == "given"}
        text.append(
            f"--rate: the rate given, at {min(contexts):,} tokens; what accuracy it keeps is not "
            "known."
        )
    if any(
        entry["over_model_context"]
        for row in rows
        for entry in (*row["longest_context"], *row["largest_batch"])
    ):
        text.append(f"{_OVER} longer than the model's own context.")
    return " ".join(text)
