"""Launches what moves a step's token into the bytes of a segment."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.dispatch import check_interpreter, launching
from kvprof.kernels.operators import direct
from kvprof.kernels.planes import RaggedLayout, chunks, row_stride
from kvprof.kernels.segments.geometries import format_of
from kvprof.kernels.segments.kernel import move_token
from kvprof.kernels.segments.layout import SegmentsLayout
from kvprof.kernels.segments.side import PLACES, Placed
from kvprof.kernels.segments.tables import MovedColumn, Stretch

__all__ = [
    "TokenMove",
    "constants",
    "full_precision",
    "move_operator",
    "token_move",
]

#: Columns of a program where no scale says how many.
_FREE = 64


def full_precision(layout: SegmentsLayout, segment: int) -> bool:
    """Tell whether tokens of a segment are stored as they are, so that they can be moved."""
    own = layout.segments[segment]
    return own.key_bits is None and own.value_bits is None


def constants(layout: SegmentsLayout, segment: int) -> dict[str, int]:
    """Return the compile-time numbers of `move_token` for a segment, but for LOW."""
    own = layout.segments[segment]
    sides = [side for head in range(layout.heads) for side in layout.sides(segment, head)]
    # A program has the whole of a scale, and at least a warp's lanes have a column.
    scaled = [min(side.width, side.columns or side.width) for side in sides if side.groups]
    width = max(32, triton.next_power_of_2(max(scaled))) if scaled else _FREE
    return {
        "KEY_BITS": format_of(own.key_bits).number,
        "VALUE_BITS": format_of(own.value_bits).number,
        "SLOTS": own.slots,
        "WIDTH": width,
        "PAGED": int(own.paged),
    }


@torch.library.custom_op("kvprof::segments_move", mutates_args={"buffer"})
def move_operator(
    buffer: Tensor,
    source: Tensor | None,
    stretches: Tensor,
    columns: Tensor,
    origins: Tensor,
    targets: Tensor,
    low: Tensor | None,
    dtype: torch.dtype,
    numbers: Sequence[int],
    fixed: Sequence[int],
) -> None:
    """Launch `move_token`; a segment of the buffer itself is the source where it is None.

    Parameters
    ----------
    buffer, source, stretches, columns, origins, targets, low
        As the kernel takes them.
    dtype
        Of the run.
    numbers, fixed
        The kernel's other arguments, and its compile-time ones, in their order.
    """
    full = buffer.view(dtype)
    key_bits, value_bits, slots, width, paged = fixed
    launching(move_token, (len(stretches), len(targets)))(
        full if source is None else source,
        buffer,
        full,
        buffer.view(torch.float16),
        stretches,
        columns,
        origins,
        targets,
        targets if low is None else low,
        *numbers,
        KEY_BITS=key_bits,
        VALUE_BITS=value_bits,
        SLOTS=slots,
        WIDTH=width,
        LOW=low is not None,
        PAGED=bool(paged),
        num_warps=1,
    )


@move_operator.register_fake
def _(buffer: Tensor, *rest: object) -> None:
    return None


@dataclass(frozen=True, eq=False)
class TokenMove:
    """How a decoding step's token of each row gets into a segment.

    Attributes
    ----------
    layout : SegmentsLayout
    segment : int
    source : RaggedLayout or int
        Planes, or the segment of the same buffer, that tokens come from.
    stretches, columns : Tensor
        Rows of `Stretch` and `MovedColumn`, int64.
    fixed : tuple of int
        As `move_operator` takes them.
    """

    layout: SegmentsLayout
    segment: int
    source: RaggedLayout | int
    stretches: Tensor
    columns: Tensor
    fixed: tuple[int, ...]

    def run(
        self,
        buffer: Tensor,
        source: Tensor | None,
        origins: Tensor,
        targets: Tensor,
        low: Tensor | None = None,
        *,
        pooled: bool = False,
    ) -> None:
        """Store the tokens; nothing waits for the device, and a CUDA graph may hold it.

        No two of them may share a byte: one of each sequence has bytes of its own.

        Parameters
        ----------
        buffer : Tensor
            The layer's; written.
        source : Tensor or None
            Planes that the tokens come from; None where they come from a segment of the buffer.
        origins, targets : Tensor
            ``[batch]`` integers, each row's slot where it comes from, and in the segment; of a pool
            of pages ``page · C + place``, for as many rows as come. A slot that there is not, below
            0 or behind the capacity, is left out.
        low : Tensor, optional
            ``[batch]`` bool: these lose the columns that the last segment has not.
        pooled : bool
            Whether rows of the planes are pages without gaps, of which an origin is ``page · C +
            place`` too.

        Raises
        ------
        UsageError
            When bf16 is to be interpreted, or there are gaps.
        """
        check_interpreter(self.layout.dtype)
        layout = self.layout
        own = layout.segments[self.segment].layout.capacity
        stride = row_stride(buffer, layout.batch)
        if isinstance(self.source, int):
            origin = layout.segments[self.source]
            height = PLACES * origin.slots
            came = (origin.layout.capacity, height, stride // layout.dtype.itemsize)
        else:
            assert source is not None
            rows, height = self.source.batch, self.source.capacity
            came = (height, height, row_stride(source, rows))
            if pooled:
                if came[2] != self.source.row:
                    raise UsageError(
                        f"pages of {self.source.row} values that begin {came[2]} apart have gaps, "
                        "and tokens are moved out of a pool without any"
                    )
                came = (rows * height, height, 0)
        direct(move_operator)(
            buffer,
            source,
            self.stretches,
            self.columns,
            origins,
            targets,
            low,
            self.layout.dtype,
            (*came, own, layout.batch, stride),
            self.fixed,
        )


# For every layer of a model: made anew, the tables would be copied to the device.
@lru_cache(maxsize=4096)
def token_move(
    layout: SegmentsLayout, segment: int, source: RaggedLayout | int, device: torch.device
) -> TokenMove:
    """Prepare moves of single tokens into a segment.

    Parameters
    ----------
    layout : SegmentsLayout
    segment : int
    source : RaggedLayout or int
        Planes of the same heads, or a segment at full precision; a narrower target takes the first
        columns.
    device : torch.device

    Raises
    ------
    UsageError
        When the source is quantised, or has fewer columns.
    """
    if isinstance(source, int):
        if not full_precision(layout, source):
            raise UsageError(f"segment {source} is quantised, and moves begin at full precision")
        planes = layout.segments[source].layout
    else:
        planes = source
    fixed = constants(layout, segment)
    stretches: list[Stretch] = []
    columns: list[MovedColumn] = []
    last = layout.segments[-1].layout
    for head in range(layout.heads):
        for values in (0, 1):
            side, start, size = layout.placed(segment, head, bool(values))
            wide = (planes.value_widths if values else planes.key_widths)[head]
            if side.width > wide:
                raise UsageError(
                    f"head {head} of segment {segment} is {side.width} wide, and comes from {wide} "
                    "columns"
                )
            lowest = (last.value_widths if values else last.key_widths)[head]
            if isinstance(source, int):
                came = _segment_places(layout.placed(source, head, bool(values)))
            else:
                came = _plane_places(source, head, values)
            begun = len(columns)
            own, rows = side.moved(start, size, came, lowest, fixed["WIDTH"])
            stretches += [each._replace(side=values, first=begun + each.first) for each in own]
            columns += rows
    # Not as inference tensors: they outlive the mode they were made in.
    with torch.inference_mode(False):
        tables = [
            torch.tensor(rows, dtype=torch.int64, device=device) for rows in (stretches, columns)
        ]
    return TokenMove(layout, segment, source, tables[0], tables[1], tuple(fixed.values()))


def _segment_places(placed: Placed) -> list[tuple[int, int, int]]:
    """Return where every column of a side at full precision lies, as `MovedColumn` has it."""
    side, start, size = placed
    unit = side.dtype.itemsize
    return [
        ((start + side.plane_at(plane)) // unit + column, size // unit, plane.width)
        for plane in side.planes
        for column in range(plane.width)
    ]


def _plane_places(layout: RaggedLayout, head: int, values: int) -> list[tuple[int, int, int]]:
    """Return where every column of a head's planes lies, as `MovedColumn` has it."""
    begin = layout.offsets[head][values]
    found = []
    for chunk in chunks((layout.value_widths if values else layout.key_widths)[head]):
        # Blocks are rows, and matter in a pool alone.
        found += [(begin + number, layout.row, chunk) for number in range(chunk)]
        begin += layout.capacity * chunk
    return found
