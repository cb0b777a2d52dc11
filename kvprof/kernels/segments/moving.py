"""Launches what moves a step's token into the bytes of a segment."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.dispatch import check_interpreter, launching
from kvprof.kernels.planes import RaggedLayout, chunks, row_stride
from kvprof.kernels.segments.append import column_places, scale_places
from kvprof.kernels.segments.codes import format_of
from kvprof.kernels.segments.columns import ColumnSide
from kvprof.kernels.segments.layout import SegmentsLayout
from kvprof.kernels.segments.move import move_token
from kvprof.kernels.segments.side import PLACES
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

        Raises
        ------
        UsageError
            When bf16 is to be interpreted.
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
            rows = self.source.batch
            came = (self.source.capacity, self.source.capacity, row_stride(source, rows))
        move_operator(
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
    own = layout.segments[segment]
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
        for values, side in enumerate(layout.sides(segment, head)):
            wide = (planes.value_widths if values else planes.key_widths)[head]
            if side.width > wide:
                raise UsageError(
                    f"head {head} of segment {segment} is {side.width} wide, and comes from {wide} "
                    "columns"
                )
            lowest = (last.value_widths if values else last.key_widths)[head]
            if isinstance(source, int):
                from_segment = column_places(layout, source, head, bool(values))
                came = [(first, block, place) for first, block, _, place in from_segment]
            else:
                came = _plane_places(source, head, values)
            if isinstance(side, ColumnSide):
                stretch, rows = _pieces(layout, segment, head, values, side, came, lowest)
                stretches.append(stretch._replace(first=len(columns)))
                columns += rows
                continue
            scales = scale_places(layout, segment, head, bool(values))
            step = (own.columns or side.width) if scales else fixed["WIDTH"]
            for begin in range(0, side.width, step):
                scale = scales[begin // step] if scales else (0, 0, 0)
                count = min(step, side.width - begin)
                stretches.append(Stretch(values, len(columns) + begin, count, *scale))
            goes = column_places(layout, segment, head, bool(values))
            columns += [
                MovedColumn(*came[number], *goes[number], int(number >= lowest))
                for number in range(side.width)
            ]
    # Not as inference tensors: they outlive the mode they were made in.
    with torch.inference_mode(False):
        tables = [
            torch.tensor(rows, dtype=torch.int64, device=device) for rows in (stretches, columns)
        ]
    return TokenMove(layout, segment, source, tables[0], tables[1], tuple(fixed.values()))


def _pieces(
    layout: SegmentsLayout,
    segment: int,
    head: int,
    values: int,
    side: ColumnSide,
    came: list[tuple[int, int, int]],
    lowest: int,
) -> tuple[Stretch, list[MovedColumn]]:
    """Return a side with bits by column, but for where its rows begin in the table."""
    start = layout.offsets[segment][head] + values * layout.sides(segment, head)[0].nbytes
    size = layout.block_bytes(segment, head)
    codes = {
        column: side.bits_of(plane)
        for plane in side.planes
        for column in range(plane.start, plane.start + plane.width)
    }
    tops = {piece.column: number for number, piece in enumerate(side.pieces) if piece.below}
    halves = {plane.start: plane.width // 2 for plane in side.planes}
    rows = []
    for number, own in enumerate(side.pieces):
        mate = 0
        if own.below:
            begin = max(start for start in halves if start <= own.column)
            half = halves[begin]
            other = own.column + (half if own.column < begin + half else -half)
            mate = tops[other] - number
        rows.append(
            MovedColumn(
                *came[own.column],
                start + own.at,
                size,
                own.part,
                own.place,
                int(own.column >= lowest),
                own.bits,
                own.below,
                own.shift,
                own.apart,
                codes[own.column],
                mate,
            )
        )
    scale = start + side.code_bytes
    return Stretch(values, 0, side.width, scale, size, 0, len(tops)), rows


def _plane_places(layout: RaggedLayout, head: int, values: int) -> list[tuple[int, int, int]]:
    """Return where every column of a head's planes lies, as `MovedColumn` has it."""
    begin = layout.offsets[head][values]
    found = []
    for chunk in chunks((layout.value_widths if values else layout.key_widths)[head]):
        found += [(begin + number, 0, chunk) for number in range(chunk)]
        begin += layout.capacity * chunk
    return found
