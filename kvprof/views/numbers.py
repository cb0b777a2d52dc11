"""Numbers as reports print them: significant digits, per cent, intervals, ranges."""

import math
from collections.abc import Iterable, Sequence
from math import isfinite

from kvprof.sizes import format_count

__all__ = [
    "MISSING",
    "axis_number",
    "change",
    "count",
    "duration",
    "interval",
    "kept",
    "number",
    "percent",
    "rate_in_bytes",
    "rate_text",
    "shared",
    "signed_percent",
    "span",
    "unit_of",
]

#: Stands where a figure was not measured; a zero or a blank would read as one.
MISSING = "n/a"


def number(value: float | None, digits: int = 3) -> str:
    """Write a figure with `digits` significant digits; None and NaN as `MISSING`.

    Examples
    --------
    >>> number(0.040123), number(61.26), number(12345.6), number(3.1e-7)
    ('0.0401', '61.3', '12,346', '3.1e-07')
    """
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    # Round first: 9.996 with three digits is 10.0, one digit more in front of the point.
    magnitude = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if magnitude < -4 or magnitude >= 9:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{exponent}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def percent(value: float | None, decimals: int = 1) -> str:
    """Write a share (0.053) as per cent (``5.3 %``); None and NaN as `MISSING`."""
    if value is None or math.isnan(value):
        return MISSING
    return f"{100 * value:.{decimals}f} %"


def rate_text(rate: float) -> str:
    """Write a removal rate as it was asked for: 0.05 as ``5 %``, 0.0025 as ``0.25 %``."""
    return f"{100 * rate:.6g} %"


def rate_in_bytes(value: float | None) -> str:
    """Write a compression rate: ``0.497``; one that is 0 in bytes must not print as -0.000."""
    if value is None:
        return MISSING
    return f"{value:.3f}" if abs(value) >= 5e-4 else "0"


def axis_number(value: float) -> str:
    """Write a tick's value as short as it can be read back: ``0.25``, ``1e-05``, ``120``."""
    return "0" if value == 0 else f"{value:.6g}"


def count(value: int | None) -> str:
    """Write a count as `kvprof.sizes.format_count` does (8192 as ``8k``)."""
    return MISSING if value is None else format_count(value)


def interval(value: float | None, bounds: Sequence[float | None] | None, digits: int = 3) -> str:
    """Write a figure with the interval it lies in: ``1.49 [1.41, 1.58]``."""
    if bounds is None:
        return number(value, digits)
    low, high = bounds
    return f"{number(value, digits)} [{number(low, digits)}, {number(high, digits)}]"


def kept(share: float | None, bounds: Sequence[float | None] | None = None) -> str:
    """Write a share of accuracy with its interval, if any: ``0.984 [0.981, 0.986]``."""
    ends = [end for end in bounds or () if end is not None]
    interval = f" [{ends[0]:.3f}, {ends[1]:.3f}]" if len(ends) == 2 else ""
    return MISSING if share is None else f"{share:.3f}{interval}"


def shared(width: str, heads: int | None, stored: int) -> str:
    """Write a width and how many heads share it: ``256 / 4 heads``; none of its own is said."""
    each = heads // stored if heads and stored else 1
    return f"{width} / {each} heads" if each > 1 else width


def span(values: Sequence[float], digits: int = 3) -> str:
    """Write the range of `values`: ``12–96``, or the one value when all print alike.

    Whole ends are written in full, others with `digits` significant digits.
    """
    if not values:
        return MISSING
    ends = min(values), max(values)
    whole = all(float(end).is_integer() for end in ends)
    low, high = (f"{end:,.0f}" if whole else number(end, digits) for end in ends)
    return low if low == high else f"{low}–{high}"


# --- Times and differences as reports of job completion time write them.


_UNITS = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))


def unit_of(seconds: Iterable[float | None]) -> tuple[float, str]:
    """Return what to multiply times with and their unit, by the largest of them."""
    known = [abs(value) for value in seconds if value is not None and isfinite(value)]
    most = max(known, default=0.0)
    return next((factor, unit) for least, factor, unit in _UNITS if most >= least)


def duration(seconds: float | None) -> str:
    """Write a time with the unit that suits it: ``412 µs``, ``1.24 s``, ``2,310 s``."""
    if seconds is None:
        return MISSING
    if seconds == 0:
        return "0 s"
    factor, unit = unit_of([seconds])
    return f"{number(seconds * factor)} {unit}".replace("-", "−")


def change(value: float | None, base: float | None) -> float | None:
    """Return by what share `value` differs from `base`; None where that means nothing."""
    if value is None or base is None or base <= 0:
        return None
    return value / base - 1


def signed_percent(share: float | None) -> str:
    """Write a difference with its sign: ``−34.0 %``, ``+2.1 %``, ``0.0 %``."""
    if share is None:
        return MISSING
    text = f"{abs(100 * share):,.1f} %"
    if text == "0.0 %":
        return text
    return f"{'+' if share > 0 else '−'}{text}"
