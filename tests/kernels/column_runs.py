"""Heads of segments whose columns may have bits of their own."""

from collections.abc import Sequence

from hypothesis import strategies as st

from kvprof.kernels.quantized.codes import COLUMN_BITS
from kvprof.kernels.quantized.layout import Segment, segment_of
from kvprof.kernels.quantized.operand_layout import Runs

FORMATS = (None, "fp8", 8, 4, 3, 2, "uniform-rms")

#: Of keys and of values: bits by column both, or neither.
format_pairs = st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)).map(
    lambda pair: ("uniform-rms",) * 2 if "uniform-rms" in pair else pair
)


def spread(width: int) -> Runs:
    """Return bits by column of any width, all that there are where they find room."""
    count = width // 16
    found = dict.fromkeys(COLUMN_BITS, 0)
    for place in range(count):
        found[(3, 2, 4, 8)[place % 4]] += 16
    return tuple((found[bits], bits) for bits in COLUMN_BITS if found[bits])


@st.composite
def runs(draw, width: int) -> Runs:
    """Draw bits by column: at most four runs."""
    left, found = width // 16, []
    for bits in COLUMN_BITS[:-1]:
        own = draw(st.integers(0, left))
        left -= own
        found.append((16 * own, bits))
    found.append((16 * left, 2))
    return tuple((own, bits) for own, bits in found if own)


def segment(
    widths: Sequence[tuple[int, int]],
    key_bits,
    value_bits,
    *,
    group: int = 2,
    batch: int = 2,
    capacity: int = 100,
    columns: int | None = 32,
    of=spread,
    paged: bool = False,
) -> Segment:
    """Return a segment of heads of some widths in any formats; `of` says the bits by column."""
    kinds = [
        tuple(
            of(width) if bits == "uniform-rms" else width
            for width, bits in zip(pair, (key_bits, value_bits), strict=True)
        )
        for pair in widths
    ]
    return segment_of(kinds, group, batch, capacity, key_bits, value_bits, columns, paged=paged)
