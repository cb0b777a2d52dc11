"""TALE's published setting: tokens, widths and bits of its levels (TALE §2.2, appendix A)."""

import math

from kvprof.errors import UsageError
from kvprof.kernels.planes import widened

__all__ = ["tale_levels", "tale_paper_ratio", "tale_widths"]

Level = tuple[int, tuple[int, ...], int | None]

_SINK, _RECENT, _MIDDLE_SHARE = 4, 0.1, 0.5
# Of the middle and of the recent level; sinks stay as they are.
_BITS = (2, 4)
_FULL_BITS = 16


def tale_levels(seq: int, widths: tuple[int, ...], *, quantised: bool) -> list[Level]:
    """Return tokens, value widths and bits of the sink, the middle and the recent level.

    Keys have full width in all of them. The newest tokens, which would stay at full precision until
    a group of 32 is complete, are counted in the recent level.

    Parameters
    ----------
    seq : int
        Tokens.
    widths : tuple of int
        Of V, per KV head: full width.
    quantised : bool
        2 and 4 bits as published; or values of the run's dtype.

    Raises
    ------
    UsageError
        When the sequence is too short to have all three.
    """
    recent = math.floor(_RECENT * (seq - _SINK) + 1e-9)
    middle = seq - _SINK - recent
    if min(middle, recent) < 1:
        raise UsageError(
            f"TALE's levels need more than {seq:,} tokens: {_SINK} sinks and {_RECENT:.0%} of the "
            "others"
        )
    low, high = _BITS if quantised else (None, None)
    return [(_SINK, widths, None), (middle, tale_widths(widths), low), (recent, widths, high)]


def tale_widths(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the widths of V in the middle level, r_0 of `widths`."""
    return tuple(widened(round(_MIDDLE_SHARE * width)) for width in widths)


def tale_paper_ratio(*, quantised: bool) -> float:
    """Return the compression ratio as the paper counts: no scales, zero points or sinks."""
    middle, recent = _BITS if quantised else (_FULL_BITS, _FULL_BITS)
    keys = (1 - _RECENT) * middle + _RECENT * recent
    values = (1 - _RECENT) * _MIDDLE_SHARE * middle + _RECENT * recent
    return 2 * _FULL_BITS / (keys + values)
