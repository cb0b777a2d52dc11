"""The report of ``kvprof generate``: the text, its cache, and where the text departs."""

from collections.abc import Mapping
from typing import Any

from kvprof.report.blocks import (
    Block,
    Column,
    Curves,
    Heading,
    Paragraph,
    Report,
    Series,
    Table,
    framed,
)
from kvprof.results.generate import Difference, GenerateResult, Length
from kvprof.sizes import format_bytes
from kvprof.views.numbers import number

__all__ = ["cache_line", "compared", "decoding_line", "report"]

_COMPARED = Heading("Compared with the uncompressed model")
_COMMON = 240  # characters of the common text that are repeated
_SIZES = ("measured", "account", "full")


def cache_line(cache: Mapping[str, Any] | None, dtype: str) -> str:
    """Return in one line what the cache held, measured and by the plan."""
    if cache is None:
        return "Nothing was cached."
    measured, planned, full = (format_bytes(cache[f"{x}_bytes"]) for x in _SIZES)
    return (
        f"The cache takes {measured} for {cache['tokens']:,} tokens (plan: {planned}; "
        f"uncompressed: {full} in {dtype}): compression rate {cache['rate']:.3f}."
    )


def decoding_line(decoding: Mapping[str, Any] | None) -> str | None:
    """Return how decoding steps were launched on a GPU; None where there is no choice."""
    if decoding is None:
        return None
    if decoding["reason"] is not None:
        return f"Decoding ran without CUDA graphs: {decoding['reason']}."
    steps, held = decoding["replayed_steps"], format_bytes(decoding["graph_bytes"])
    return f"{steps:,} decoding steps were replayed as a CUDA graph of {held}."


def report(result: GenerateResult) -> Report:
    """Return the report."""
    data, inputs = result.data, result.inputs
    plain = data.model_dump()
    told = [cache_line(plain["cache"], inputs.dtype), decoding_line(plain["decoding"])]
    body: list[Block] = [Heading("Text"), Paragraph(data.text)]
    if data.difference is not None:
        told.insert(0, _departure(result, data.difference))
        body += [_COMPARED, *_compared(data.difference, inputs.method)]
    verdict, *others = (line for line in told if line is not None)
    if others:
        body += [Heading("Cache"), *map(Paragraph, others)]
    return framed(
        result,
        body,
        verdict=verdict,
        subject=f"{inputs.model}, {inputs.method}",
        measured_with={
            "model": inputs.model,
            "method": inputs.method,
            "prompt": f"{data.prompt_tokens:,} tokens",
        },
    )


def compared(result: GenerateResult) -> Report:
    """Return what ``--diff`` shows below the text."""
    found = result.data.difference
    assert found is not None
    verdict = Paragraph(_departure(result, found), "verdict")
    return Report([_COMPARED, verdict, *_compared(found, result.inputs.method)])


def _departure(result: GenerateResult, found: Difference) -> str:
    written = len(result.data.tokens)
    if found.position is None:
        return f"All {written:,} new tokens equal the uncompressed model's."
    if found.position == 0:
        return f"The texts differ from the first of {written:,} new tokens on."
    return f"The texts differ from new token {found.position + 1:,} of {written:,} on."


def _compared(found: Difference, method: str) -> list[Block]:
    blocks: list[Block] = []
    if found.length is not None:
        blocks.append(Paragraph(_length(found.length)))
    if found.position is not None:
        if common := found.common_text.strip("\n"):
            cut = f"({len(common) - _COMMON:,} characters …) " if len(common) > _COMMON else ""
            blocks += [Heading("Common text"), Paragraph(cut + common[-_COMMON:])]
        # Empty lines at the end show nothing; those at the beginning may be the difference.
        rests = (found.compressed_rest.rstrip("\n"), found.full_rest.rstrip("\n"))
        titles = ("compressed goes on", "uncompressed goes on")
        columns = [Column(i, title, words=True) for i, title in enumerate(titles)]
        blocks += [Paragraph(""), Table(columns, [rests])]
    if found.compressed_token is not None and found.full_token is not None:
        rows = [("compressed", found.compressed_token), ("uncompressed", found.full_token)]
        columns = [
            Column(0, "model", words=True),
            Column(lambda row: repr(row[1].text), "token", words=True),
            Column(lambda row: f"{row[1].compressed_probability:.4f}", "probability, compressed"),
            Column(lambda row: f"{row[1].full_probability:.4f}", "probability, uncompressed"),
        ]
        blocks += [Paragraph(""), Table(columns, rows, "Probability of the first differing tokens")]
    if kl := found.kl:
        mean, most = number(sum(kl) / len(kl)), number(max(kl))
        title = f"KL divergence by step: {mean} nats on average, at most {most}"
        steps = Series(method, range(1, len(kl) + 1), kl, method=method)
        curve = Curves([steps], title, "new token", "nats", height=10)
        blocks.append(curve if len(kl) > 1 else Paragraph(f"{title}."))
    return blocks


def _length(found: Length) -> str:
    """Say whether the text became longer, as far as both ended."""
    own, full = found.tokens, found.full_tokens
    if not found.ends and not found.full_ends:
        return f"Neither text ends within {own:,} tokens, so their lengths cannot be compared."
    ends = f"after {own:,} tokens" if found.ends else f"not within {own:,} tokens"
    full_ends = f"after {full:,}" if found.full_ends else f"not within {full:,}"
    text = f"The text ends {ends}, the uncompressed model's {full_ends}"
    if found.ratio is None or own == full:
        return f"{text}."
    bound = "" if found.ends and found.full_ends else "at least "
    if not found.full_ends:
        bound = "at most "
    return f"{text}: {bound}{found.ratio:.3g}× as long (one prompt, so no interval)."
