"""Launches what moves tokens into the bytes of a segment, and what reads them into planes.

Both go by the same tables, which say of a column where it lies here and there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.dispatch import check_interpreter, early_launch, launching
from kvprof.kernels.operators import direct
from kvprof.kernels.planes import RaggedLayout, chunks, row_stride
from kvprof.kernels.quantized.kernel import move_tokens, restore_tokens
from kvprof.kernels.quantized.layout import SegmentsLayout
from kvprof.kernels.quantized.layout_registry import format_of
from kvprof.kernels.quantized.operand_layout import PLACES
from kvprof.kernels.quantized.tables import MovedColumn, Stretch

__all__ = [
    "RESTORE_WARPS",
    "TokenMove",
    "TokenRestore",
    "constants",
    "full_precision",
    "move_operator",
    "restore_constants",
    "restore_operator",
    "token_move",
    "token_restore",
]

#: Columns of a program where no scale says how many.
_FREE = 64
#: Warps of a program that reads tokens, and its values.
RESTORE_WARPS = 2
_VALUES = 256
#: Tokens of a launch: CUDA counts no more programs in a grid's second direction.
_MOST = 65_535


def full_precision(layout: SegmentsLayout, segment: int) -> bool:
    """Tell whether tokens of a segment are stored as they are, so that they can be moved."""
    own = layout.segments[segment]
    return own.key_bits is None and own.value_bits is None


def constants(layout: SegmentsLayout, segment: int) -> dict[str, int]:
    """Return the compile-time numbers of `move_tokens` for a segment, but for LOW and POOLED."""
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
    """Launch `move_tokens`; a segment of the buffer itself is the source where it is None."""
    full = buffer.view(dtype)
    key_bits, value_bits, slots, width, pooled = fixed
    for begin in range(0, len(targets), _MOST):
        part = slice(begin, begin + _MOST)
        some = targets[part]
        launching(move_tokens, (len(stretches), len(some)))(
            full if source is None else source,
            buffer,
            full,
            buffer.view(torch.float16),
            stretches,
            columns,
            columns.shape[1],
            origins[part],
            some,
            some if low is None else low[part],
            len(some),
            *numbers,
            KEY_BITS=key_bits,
            VALUE_BITS=value_bits,
            SLOTS=slots,
            WIDTH=width,
            LOW=low is not None,
            POOLED=bool(pooled),
            num_warps=1,
            **early_launch(buffer.device, len(some)),
        )


@move_operator.register_fake
def _(buffer: Tensor, *rest: object) -> None:
    return None


@dataclass(frozen=True, eq=False)
class TokenMove:
    """How tokens get into a segment: one of each row, or several."""

    layout: SegmentsLayout
    segment: int
    source: RaggedLayout | int  # planes, or the segment of the same buffer, that tokens come from
    stretches: Tensor  # rows of `Stretch`, and `MovedColumn` field by field, int64
    columns: Tensor
    fixed: tuple[int, ...]  # `constants`, in their order

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
        """Store the tokens; nothing waits for the device, and a CUDA graph may hold it."""
        check_interpreter(self.layout.dtype)
        layout = self.layout
        own = layout.segments[self.segment]
        stride = row_stride(buffer, layout.batch)
        page = 0
        if isinstance(self.source, int):
            origin, unit = layout.segments[self.source], layout.dtype.itemsize
            capacity, height = origin.layout.capacity, PLACES * origin.slots
            blocks, row = origin.blocks, stride // unit
            before = layout.offsets[self.source][0] // unit
        else:
            assert source is not None
            capacity = height = blocks = self.source.capacity
            row, before = row_stride(source, self.source.batch), 0
            if pooled:
                capacity, row, page = self.source.batch * height, 0, row
        direct(move_operator)(
            buffer,
            source,
            self.stretches,
            self.columns,
            origins,
            targets,
            low,
            layout.dtype,
            (
                *(capacity, height, before, blocks, row, page),
                *(own.layout.capacity, layout.batch, layout.offsets[self.segment][0]),
                *(own.blocks, stride),
            ),
            (*self.fixed, int(pooled or own.paged)),
        )


@lru_cache(maxsize=4096)
def token_move(
    layout: SegmentsLayout, segment: int, source: RaggedLayout | int, device: torch.device
) -> TokenMove:
    """Prepare moves of tokens into a segment."""
    if isinstance(source, int) and not full_precision(layout, source):
        raise UsageError(f"segment {source} is quantised; moves start from uncompressed segments")
    planes = source if isinstance(source, int) else replace(source, batch=1, capacity=1)
    tables = _tables(_roomless(layout), segment, planes, device)
    return TokenMove(layout, segment, source, *tables)


def restore_constants(layout: SegmentsLayout, segment: int) -> dict[str, int]:
    """Return the compile-time numbers of `restore_tokens` for a segment."""
    found = constants(layout, segment)
    return {**found, "TOKENS": max(1, _VALUES // found["WIDTH"])}


@torch.library.custom_op("kvprof::segments_restore", mutates_args={"planes"})
def restore_operator(
    planes: Tensor,
    buffer: Tensor,
    stretches: Tensor,
    columns: Tensor,
    slots: Tensor,
    targets: Tensor,
    numbers: Sequence[int],
    fixed: Sequence[int],
) -> None:
    """Launch `restore_tokens`."""
    key_bits, value_bits, count, width, tokens = fixed
    launching(restore_tokens, (-(-len(slots) // tokens), len(stretches)))(
        planes,
        buffer,
        buffer.view(planes.dtype),
        buffer.view(torch.float16),
        stretches,
        columns,
        columns.shape[1],
        slots,
        targets,
        len(slots),
        *numbers,
        KEY_BITS=key_bits,
        VALUE_BITS=value_bits,
        SLOTS=count,
        WIDTH=width,
        TOKENS=tokens,
        num_warps=RESTORE_WARPS,
    )


@restore_operator.register_fake
def _(planes: Tensor, *rest: object) -> None:
    return None


@dataclass(frozen=True, eq=False)
class TokenRestore:
    """How tokens of a segment get into planes."""

    layout: SegmentsLayout
    segment: int
    planes: RaggedLayout  # of any batch and capacity
    stretches: Tensor  # as `TokenMove`
    columns: Tensor
    fixed: tuple[int, ...]  # `restore_constants`, in their order

    def run(
        self, planes: Tensor, buffer: Tensor, slots: Tensor, targets: Tensor, rows: int = 1
    ) -> None:
        """Write tokens into planes; nothing waits for the device, and a CUDA graph may hold it."""
        check_interpreter(self.layout.dtype)
        own, layout = self.layout.segments[self.segment], self.layout
        if not len(slots):
            return
        widths = sum(self.planes.key_widths) + sum(self.planes.value_widths)
        direct(restore_operator)(
            planes,
            buffer,
            self.stretches,
            self.columns,
            slots,
            targets,
            (
                *(len(planes) // rows // widths, rows, len(planes) // rows),
                *(own.layout.capacity, layout.batch),
                *(layout.offsets[self.segment][0], own.blocks, row_stride(buffer, layout.batch)),
            ),
            self.fixed,
        )


def token_restore(
    layout: SegmentsLayout, segment: int, planes: RaggedLayout, device: torch.device
) -> TokenRestore:
    """Prepare what brings tokens of a segment back into planes.

    Columns of planes that the segment does not have are left as they are.
    """
    return _token_restore(layout, segment, replace(planes, batch=1, capacity=1), device)


# For every layer of a model, chunk after chunk.
@lru_cache(maxsize=4096)
def _token_restore(
    layout: SegmentsLayout, segment: int, planes: RaggedLayout, device: torch.device
) -> TokenRestore:
    stretches, columns, _ = _tables(_roomless(layout), segment, planes, device)
    fixed = tuple(restore_constants(layout, segment).values())
    return TokenRestore(layout, segment, planes, stretches, columns, fixed)


def _roomless(layout: SegmentsLayout) -> SegmentsLayout:
    """Return a layout of one row that has as little room as can be, whatever room there is."""
    segments = (
        replace(own, layout=replace(own.layout, batch=1, capacity=PLACES * own.slots))
        for own in layout.segments
    )
    return SegmentsLayout(tuple(segments), layout.dtype)


# For every layer of a model and every room that its caches have: made anew, they would be copied to
# the device.
@lru_cache(maxsize=4096)
def _tables(
    layout: SegmentsLayout, segment: int, source: RaggedLayout | int, device: torch.device
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return what `TokenMove` has of a layout without room: tables, and compile-time numbers."""
    planes = layout.segments[source].layout if isinstance(source, int) else source
    fixed = constants(layout, segment)
    stretches: list[Stretch] = []
    columns: list[MovedColumn] = []
    last = layout.segments[-1].layout
    before = 0
    for head in range(layout.heads):
        size = layout.block_bytes(segment, head)
        start = 0
        for values, side in enumerate(layout.sides(segment, head)):
            wide = (planes.value_widths if values else planes.key_widths)[head]
            if side.width > wide:
                raise UsageError(
                    f"head {head} of segment {segment} has {side.width} columns, but its source "
                    f"{wide}"
                )
            lowest = (last.value_widths if values else last.key_widths)[head]
            if isinstance(source, int):
                came = _segment_places(layout, source, head, values)
            else:
                came = _plane_places(source, head, values)
            begun = len(columns)
            own, rows = side.moved(start, size, came, lowest, fixed["WIDTH"])
            stretches += [
                each._replace(
                    side=values,
                    first=begun + each.first,
                    # Counted as a block is: in values, bytes or float16.
                    scale_head=before * each.scale_block // size,
                )
                for each in own
            ]
            columns += [each._replace(head=before * each.block // size) for each in rows]
            start += side.nbytes
        before += size
    # Not as inference tensors: they outlive the mode they were made in.
    with torch.inference_mode(False):
        own_rows = torch.tensor(stretches, dtype=torch.int64, device=device)
        fields = torch.tensor(columns, dtype=torch.int64).T.contiguous().to(device)
    return own_rows, fields, tuple(fixed.values())


def _segment_places(
    layout: SegmentsLayout, segment: int, head: int, values: int
) -> list[tuple[int, int, int, int]]:
    """Return where every column of a side at full precision lies, as `MovedColumn` has it."""
    sides, unit = layout.sides(segment, head), layout.dtype.itemsize
    side, start = sides[values], sides[0].nbytes * values
    before = sum(layout.block_bytes(segment, other) for other in range(head)) // unit
    size = layout.block_bytes(segment, head) // unit
    return [
        ((start + side.plane_at(plane)) // unit + column, before, size, plane.width)
        for plane in side.planes
        for column in range(plane.width)
    ]


def _plane_places(layout: RaggedLayout, head: int, values: int) -> list[tuple[int, int, int, int]]:
    """Return where every column of a head's planes lies, as `MovedColumn` has it."""
    assert layout.capacity == 1
    begin = layout.offsets[head][values]
    found = []
    for chunk in chunks((layout.value_widths if values else layout.key_widths)[head]):
        # Blocks are rows, and matter in a pool alone, whose pages are as far apart as they are.
        found += [(number, begin, 0, chunk) for number in range(chunk)]
        begin += chunk
    return found
