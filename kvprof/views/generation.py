"""The report of ``kvprof generate``: the text, its cache, and where the text departs."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from kvprof.sizes import format_bytes
from kvprof.views.numbers import number
from kvprof.views.page import Fitted, flow, framed, heading, paragraph, wrap
from kvprof.views.tables import Column, DataTable

__all__ = ["cache_line", "comparison", "decoding_line", "report"]

_WIDE = 100  # columns from which on two texts are put side by side
_GAP = 4
_SHOWN_STEPS = 24
_COMMON = 240  # characters of the common text that are repeated
_NAMES = {"compressed": "compressed", "full": "uncompressed"}


def cache_line(result: Mapping[str, Any]) -> str:
    """Return in one line what the cache held, measured beside the plan's account."""
    cache = result["data"]["cache"]
    if cache is None:
        return "nothing was cached"
    return (
        f"cache after {cache['tokens']:,} tokens: {format_bytes(cache['measured_bytes'])} "
        f"measured, {format_bytes(cache['account_bytes'])} by the plan's account, of "
        f"{format_bytes(cache['full_bytes'])} at full width in {result['inputs']['dtype']}; rate "
        f"{cache['rate']:.3f}"
    )


def decoding_line(result: Mapping[str, Any]) -> str | None:
    """Return how decoding steps were launched on a GPU; None where there is no choice."""
    decoding = result["data"].get("decoding")
    if decoding is None:
        return None
    if decoding["reason"] is not None:
        return f"decoding steps were launched one by one: {decoding['reason']}"
    steps, held = decoding["replayed_steps"], decoding["graph_bytes"]
    return f"{steps:,} decoding steps replayed as a CUDA graph, which holds {format_bytes(held)}"


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the text that was streamed when it was written, and what was said after it."""
    data = result["data"]
    parts: list[RenderableType] = [paragraph(data["text"])]
    if data["difference"] is not None:
        parts.append(comparison(result))
    parts += [Text(), paragraph(cache_line(result), "dim")]
    if (line := decoding_line(result)) is not None:
        parts.append(paragraph(line, "dim"))
    return framed(result, parts, repeated=False, width=width, colour=colour)


def comparison(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the comparison with the uncompressed model's text, as ``--diff`` shows it."""
    found = result["data"]["difference"]
    parts: list[RenderableType] = [heading("Compared with the uncompressed model")]
    parts.append(paragraph(_summary(result)))
    if "length" in found:
        parts.append(paragraph(_length(found["length"])))
    if found["position"] is not None:
        if common := found["common_text"].strip("\n"):
            parts += [Text(), Text("both write", style="bold"), _quoted(common)]
        parts += [Text(), _Texts(found["compressed_rest"], found["full_rest"])]
        if found["compressed_token"] is not None:
            parts += [Text(), _probabilities(found)]
    if found["kl"]:
        parts += [Text(), _Steps(found["kl"])]
    return Fitted(Group(*parts), width=width, colour=colour)


def _summary(result: Mapping[str, Any]) -> str:
    found, written = result["data"]["difference"], len(result["data"]["tokens"])
    kl = found["kl"]
    if found["position"] is None:
        text = f"All {written:,} new tokens are the uncompressed model's own."
    elif found["position"] == 0:
        text = f"The text departs at the first of {written:,} new tokens."
    else:
        text = (
            f"The text departs at new token {found['position'] + 1:,} of {written:,}; the "
            f"{found['position']:,} before it are the same."
        )
    if not kl:
        return text
    return (
        f"{text} Up to there the next token's KL divergence from the uncompressed model is "
        f"{number(sum(kl) / len(kl))} nats a step on average, {number(max(kl))} at most."
    )


def _length(found: Mapping[str, Any]) -> str:
    """Say whether the text became longer, as far as both ended."""
    own, full = found["tokens"], found["full_tokens"]
    if not found["ends"] and not found["full_ends"]:
        return f"Neither text ends within {own:,} tokens: which would be longer is not known."
    ends = f"after {own:,} tokens" if found["ends"] else f"not within {own:,} tokens"
    full_ends = f"after {full:,}" if found["full_ends"] else f"not within {full:,}"
    text = f"The text ends {ends}, the uncompressed model's {full_ends}"
    if found["ratio"] is None or own == full:
        return f"{text}."
    bound = "" if found["ends"] and found["full_ends"] else "at least "
    if not found["full_ends"]:
        bound = "at most "
    return f"{text}: {bound}{found['ratio']:.3g} times as long (one prompt, so no interval)."


def _quoted(text: str) -> Text:
    """Return the end of a text; a long one is cut at its beginning, and says so."""
    if len(text) <= _COMMON:
        return Text(text, overflow="fold")
    return Text(f"({len(text) - _COMMON:,} characters …) {text[-_COMMON:]}", overflow="fold")


def _probabilities(found: Mapping[str, Any]) -> RenderableType:
    columns = (
        Column("written by", words=True),
        Column("token", words=True),
        Column("probability, compressed"),
        Column("probability, uncompressed"),
    )
    rows = []
    for name, spoken in _NAMES.items():
        choice = found[f"{name}_token"]
        figures = (choice["compressed_probability"], choice["full_probability"])
        rows.append((spoken, repr(choice["text"]), *(f"{figure:.4f}" for figure in figures)))
    return DataTable(columns, rows, title="How probable each finds both tokens")


class _Texts:
    """Two continuations: side by side where there is room, else one below the other."""

    def __init__(self, compressed: str, full: str) -> None:
        # Empty lines at the end show nothing; those at the beginning may be the difference.
        self._texts = (compressed.rstrip("\n"), full.rstrip("\n"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        titles = [Text(f"{name} goes on", style="bold") for name in _NAMES.values()]
        if options.max_width < _WIDE:
            first, second = (Text(text, overflow="fold") for text in self._texts)
            yield from (titles[0], first, Text(), titles[1], second)
            return
        half = (options.max_width - _GAP) // 2
        columns = [
            [title, *wrap(Text(text), half)]
            for title, text in zip(titles, self._texts, strict=True)
        ]
        for left, right in zip_longest(*columns, fillvalue=Text()):
            # Not padded where nothing follows: a piped report has no trailing blanks.
            line = Text()
            line.append_text(left)
            if right.plain:
                line.append(" " * (half + _GAP - left.cell_len))
                line.append_text(right)
            yield line


class _Steps:
    """KL divergence by step; of many steps the largest, in order."""

    def __init__(self, kl: Sequence[float]) -> None:
        self._kl = kl

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        steps: Sequence[int] = range(len(self._kl))
        title = "KL divergence by step, in nats"
        if len(steps) > _SHOWN_STEPS:
            largest = sorted(steps, key=lambda step: -self._kl[step])[: _SHOWN_STEPS - 1]
            steps = sorted({*largest, len(self._kl) - 1})
            title += f" (the largest of {len(self._kl):,}, and the last)"
        yield Text(title, style="bold", overflow="fold")
        label = max(len(str(step + 1)) for step in steps)
        figures = {step: number(self._kl[step], 2) for step in steps}
        widest = max(map(len, figures.values()))
        yield from flow(
            [Text(f"{step + 1:>{label}}: {figure:<{widest}}") for step, figure in figures.items()],
            options.max_width,
        )
