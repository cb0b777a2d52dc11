"""Figures as the screens write them: short, with their unit, readable at a glance."""

from kvprof.sizes import format_bytes
from kvprof.views.numbers import MISSING, change, count, duration

__all__ = ["clock", "difference", "duration", "request_words", "share", "size"]


def share(value: float | None) -> str:
    """Write a share without digits that nobody reads: ``34 %``, ``0.4 %``."""
    if value is None:
        return MISSING
    size = abs(value) * 100
    text = f"{size:.0f}" if size >= 9.95 else f"{size:.1f}"
    return f"−{text} %" if value < 0 and float(text) else f"{text} %"


def difference(value: float | None, base: float | None) -> str:
    """Write how `value` differs from `base`: ``−34 %``, ``+2.1 %``, ``same``."""
    by = change(value, base)
    if by is None:
        return MISSING
    text = share(by)
    if float(text.removeprefix("−").removesuffix(" %")) == 0:
        return "same"
    return text if by < 0 else f"+{text}"


def size(nbytes: float | None) -> str:
    """Write bytes with a binary prefix."""
    return MISSING if nbytes is None else format_bytes(nbytes)


def clock(seconds: float) -> str:
    """Write a time of the run: ``02:31``, ``1:02:31``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def request_words(request: tuple[int, int, int]) -> str:
    """Write a request: ``batch 1 · 2k in · 64 out``."""
    batch, inputs, outputs = request
    return f"batch {batch} · {count(inputs)} in · {count(outputs)} out"
