"""Times and differences as reports of job completion time write them."""

from collections.abc import Iterable
from math import isfinite

from kvprof.views.numbers import MISSING, number

__all__ = ["change", "duration", "signed_percent", "unit_of"]

_UNITS = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))


def unit_of(seconds: Iterable[float | None]) -> tuple[float, str]:
    """Return what to multiply times with and their unit, by the largest of them.

    Parameters
    ----------
    seconds : iterable of float or None
        Of one column, or of one axis.
    """
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
