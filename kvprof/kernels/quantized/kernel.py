# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Kernels over segments: `segment_pieces` decodes, `move_tokens` stores, `restore_tokens` reads."""

import triton
import triton.language as tl
from triton.language.extra import cuda

from kvprof.kernels.dispatch import wait_for_earlier
from kvprof.kernels.quantized.codes import COLUMNS, FULL
from kvprof.kernels.quantized.column_kernel import column_piece
from kvprof.kernels.quantized.int8_kernel import int8_piece
from kvprof.kernels.quantized.move import (
    base_of,
    column_values,
    put_columns,
    put_rows,
    row_values,
    scale_at,
    source_of,
    states_of,
    target_of,
)
from kvprof.kernels.quantized.operand_layout import PLACES
from kvprof.kernels.quantized.row_kernel import row_piece
from kvprof.kernels.quantized.tables import (
    MOST_SHARES,
    Counter,
    Item,
    Kind,
    MovedColumn,
    PlaneColumns,
    Stretch,
    Unit,
)
from kvprof.kernels.tables import Part, column

__all__ = ["move_tokens", "restore_tokens", "segment_pieces"]

_FULL = tl.constexpr(FULL)
_BY_COLUMN = tl.constexpr(COLUMNS)
_BLOCK = tl.constexpr(PLACES)
_PLANE = tl.constexpr(len(PlaneColumns._fields))
_HEADER = tl.constexpr(len(Kind._fields))
_K_FORMAT = tl.constexpr(column(Kind, "key_format"))
_K_FACTOR = tl.constexpr(column(Kind, "key_factor"))
_K_BOOST = tl.constexpr(column(Kind, "key_boost"))
_K_PARTS = tl.constexpr(column(Kind, "key_parts"))
_K_GROUPS = tl.constexpr(column(Kind, "key_groups"))
_K_PLANES = tl.constexpr(column(Kind, "key_planes"))
_K_SCALES = tl.constexpr(column(Kind, "key_scales"))
_K_MIDDLES = tl.constexpr(column(Kind, "key_middles"))
_K_BLOCK = tl.constexpr(column(Kind, "key_block"))
_V_FORMAT = tl.constexpr(column(Kind, "value_format"))
_V_FACTOR = tl.constexpr(column(Kind, "value_factor"))
_SHIFT = tl.constexpr(column(Kind, "shift"))
_V_PARTS = tl.constexpr(column(Kind, "value_parts"))
_V_GROUPS = tl.constexpr(column(Kind, "value_groups"))
_V_PLANES = tl.constexpr(column(Kind, "value_planes"))
_V_SCALES = tl.constexpr(column(Kind, "value_scales"))
_V_MIDDLES = tl.constexpr(column(Kind, "value_middles"))
_V_BLOCK = tl.constexpr(column(Kind, "value_block"))
_V_WIDTH = tl.constexpr(column(Kind, "value_width"))
_BLOCK_HALFS = tl.constexpr(column(Kind, "block_halfs"))
_SLOTS = tl.constexpr(column(Kind, "slots"))
_PLACES = tl.constexpr(column(Kind, "places"))
_STAGES = tl.constexpr(column(Kind, "stages"))
_ROWS = tl.constexpr(column(Kind, "rows"))
_INT8 = tl.constexpr(column(Kind, "int8"))
_ITEM = tl.constexpr(len(Item._fields))
_ITEM_ROW = tl.constexpr(column(Item, "row"))
_ITEM_HEAD = tl.constexpr(column(Item, "head"))
_ITEM_SEGMENT = tl.constexpr(column(Item, "segment"))
_ITEM_START = tl.constexpr(column(Item, "start"))
_ITEM_STOP = tl.constexpr(column(Item, "stop"))
_PART = tl.constexpr(len(Part._fields))
_PART_FIRST = tl.constexpr(column(Part, "first"))
_PART_COUNT = tl.constexpr(column(Part, "items"))
_UNIT = tl.constexpr(len(Unit._fields))
_QUERIES = tl.constexpr(column(Unit, "queries"))
_QUERY_WIDTH = tl.constexpr(column(Unit, "query_width"))
_OUTPUT_WIDTH = tl.constexpr(column(Unit, "output_width"))
_BEGIN = tl.constexpr(column(Unit, "begin"))
_KIND = tl.constexpr(column(Unit, "kind"))
_COUNTER = tl.constexpr(len(Counter._fields))
_MOST_SHARES = tl.constexpr(MOST_SHARES)
_SHARED = tl.constexpr(column(Counter, "shared"))
_STRETCH = tl.constexpr(len(Stretch._fields))
_SIDE = tl.constexpr(column(Stretch, "side"))
_FIRST_COLUMN = tl.constexpr(column(Stretch, "first"))
_COLUMNS = tl.constexpr(column(Stretch, "columns"))
_SOURCE_FIRST = tl.constexpr(column(MovedColumn, "source_first"))
_SOURCE_HEAD = tl.constexpr(column(MovedColumn, "source_head"))
_SOURCE_PLACE = tl.constexpr(column(MovedColumn, "source_place"))
_BLOCK_SIZE = tl.constexpr(column(MovedColumn, "block"))


@triton.constexpr_function
def _ends(kinds, number, count, stride):
    """Tell whether a kind is of the few exact tokens at a row's ends."""
    exact = [
        all(kinds[own * stride + side] == FULL for side in (_K_FORMAT.value, _V_FORMAT.value))
        for own in range(count)
    ]
    whole = [
        kinds[own * stride + _K_FORMAT.value] == COLUMNS or kinds[own * stride + _INT8.value] == 1
        for own in range(count)
    ]
    return (
        exact[number]
        and not all(exact)
        and all(one or other for one, other in zip(exact, whole, strict=True))
    )


@triton.constexpr_function
def _row(kinds, number, stride):
    """Return what KINDS has of one head configuration."""
    return kinds[number * stride : (number + 1) * stride]


@triton.jit
def _dealt(total, shares):
    """Return a program's split such that a multiprocessor has few kinds; affects time only."""
    number = tl.program_id(0)
    own = number % shares
    found = own * (total // shares) + tl.minimum(own, total % shares) + number // shares
    return tl.where(number < total, found, total)


@triton.jit
def _taken(counters, found, total, shares, FAST: tl.constexpr):
    """Take what is to be done next: `found`, or from this multiprocessor's share where that pays.

    Neighbouring work is of one head config mostly. A multiprocessor that has all configs at once,
    which is what the order of programs would give it, reads their code again and again: it does not
    fit the instruction cache. Where a multiprocessor is given more programs than its share has
    pieces, those left over look at all shares at once and go to the nearest with something left:
    step by step, a hundred atomic operations after one another, took longer than the work. Who
    comes when there is none left gets `total` or more.
    """
    if tl.load(counters + _SHARED) > 0:
        share = tl.arange(0, _MOST_SHARES)
        there = share < shares
        size = (share + 1) * total // shares - share * total // shares
        own = (cuda.smid() if FAST else tl.program_id(0)) % shares
        found = total
        nearest = own * 0
        while nearest < shares:
            number = own * total // shares + tl.atomic_add(counters + _COUNTER + own, 1)
            if number < (own + 1) * total // shares:
                found = number
                nearest = shares
            else:
                # What others take meanwhile shows, for it is read where they count.
                gone = tl.load(counters + _COUNTER + share, mask=there, other=0, volatile=True)
                way = (share + shares - own) % shares
                nearest = tl.min(tl.where(there & (gone < size), way, shares), 0)
                own = (own + nearest) % shares
    return found


# Not inlined: for every load the compiler looks through the whole function that it is in. With all
# head configurations in one it took time that grew with the square of their number.
@triton.jit(noinline=True)
def _piece(
    octets, full, halfs, eye, partial, logs, item, query, width, at, pages, stride, start, stop,
    output_width, scale, cap, first_head, KIND: tl.constexpr, PLANES: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDEST: tl.constexpr, PAGE: tl.constexpr,
    CAPPED: tl.constexpr, CODE: tl.constexpr, MIDDLE: tl.constexpr, END: tl.constexpr,
    FAST: tl.constexpr,
):
    """Run an item; KIND is what KINDS has of its head configuration."""
    keys = octets + at
    values = octets + at
    if KIND[_K_FORMAT] == _FULL:
        keys = full + at // (full.dtype.element_ty.primitive_bitwidth // 8)
    if KIND[_V_FORMAT] == _FULL:
        values = full + at // (full.dtype.element_ty.primitive_bitwidth // 8)
    if KIND[_K_FORMAT] == _BY_COLUMN:
        column_piece(
            keys, pages, stride, eye, partial, logs, item, query, width, start, stop, output_width,
            scale, cap, first_head, KIND, _HEADER, _HEADER + PLANES * _PLANE, KIND[_K_PLANES],
            KIND[_K_SCALES], KIND[_V_PLANES], KIND[_V_SCALES], KIND[_K_BLOCK], KIND[_V_WIDTH],
            KIND[_PLACES], KIND[_STAGES], GROUP, 4 if GROUP <= 4 else HEADS, WIDEST, PAGE, CAPPED,
            FAST,
        )
    elif KIND[_INT8] == 1:
        int8_piece(
            keys, halfs + at // 2, pages, stride, partial, logs, item, query, width, start, stop,
            output_width, scale, cap, first_head, KIND, _HEADER, _HEADER + PLANES * _PLANE,
            KIND[_K_FORMAT], KIND[_K_PARTS], KIND[_K_GROUPS], KIND[_K_PLANES], KIND[_K_SCALES],
            KIND[_V_FORMAT], KIND[_V_PARTS], KIND[_V_GROUPS], KIND[_V_PLANES], KIND[_V_SCALES],
            KIND[_V_MIDDLES], KIND[_K_BLOCK], KIND[_V_WIDTH], KIND[_SLOTS], KIND[_PLACES],
            KIND[_STAGES], GROUP, 4 if GROUP <= 4 else HEADS, WIDEST, PAGE, CAPPED, FAST,
        )
    else:
        row_piece(
            keys, values, halfs + at // 2, pages, stride, eye, partial, logs, item, query, width,
            start, stop, output_width, scale, cap, first_head, KIND, _HEADER,
            _HEADER + PLANES * _PLANE, KIND[_K_FORMAT], KIND[_K_FACTOR], KIND[_K_BOOST],
            KIND[_K_PARTS], KIND[_K_GROUPS], KIND[_K_PLANES], KIND[_K_SCALES], KIND[_K_MIDDLES],
            KIND[_K_BLOCK], KIND[_V_FORMAT], KIND[_V_FACTOR], KIND[_SHIFT], KIND[_V_PARTS],
            KIND[_V_GROUPS], KIND[_V_PLANES], KIND[_V_SCALES], KIND[_V_MIDDLES], KIND[_V_BLOCK],
            KIND[_V_WIDTH], KIND[_BLOCK_HALFS], KIND[_SLOTS], KIND[_PLACES], KIND[_STAGES],
            KIND[_ROWS], GROUP, HEADS, WIDEST, PAGE, CAPPED,
            query.dtype.element_ty if KIND[_V_FORMAT] == _FULL else CODE, MIDDLE, END, FAST,
        )


# Of a layer, where the layer before ends: at 16 bytes or not.
@triton.jit(
    do_not_specialize=["tasks"], do_not_specialize_on_alignment=["counters", "items", "parts"]
)
def segment_pieces(
    queries, octets, full, halfs, eye, partial, logs, counters, items, parts, units, table, tasks,
    shares, blocks, table_row, stride, query_row, scale, cap, KINDS: tl.constexpr,
    COUNT: tl.constexpr, STRIDE: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDEST: tl.constexpr, PAGE: tl.constexpr,
    CAPPED: tl.constexpr, CODE: tl.constexpr, MIDDLE: tl.constexpr, FAST: tl.constexpr,
    NEAR: tl.constexpr, DEALT: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Run one item and block of query heads per program.

    Parameters
    ----------
    queries
        ``[rows, query_row]``.
    octets, full, halfs
        The buffer as uint8, as the run's dtype and as float16.
    eye
        uint8: `kvprof.kernels.quantized.tables.eye`.
    partial, logs
        ``[items, GROUP, WIDEST]`` and ``[items, GROUP]`` float32: results and log2 of the sums.
    items
        Rows of `kvprof.kernels.quantized.tables.Item`, int32.
    parts, tasks
        ``[tasks]`` rows of `kvprof.kernels.tables.Part`, int32: a row's head each.
    counters
        A `kvprof.kernels.quantized.tables.Counter`, then what was taken from each multiprocessor's
        share, int32: 0 but for `shared`.
    shares
        Of the work, one for each multiprocessor, `MOST_SHARES` at most.
    blocks
        Of query heads.
    units
        ``[segments * heads]`` rows of `kvprof.kernels.quantized.tables.Unit`, int64.
    table
        ``[rows, table_row]`` int32 pages, read when PAGE (tokens of a page) is not 0.
    stride
        Bytes from one row of the cache to the next.
    scale
        The model's scaling times log2(e).
    cap
        Times log2(e).
    KINDS
        STRIDE numbers per head configuration: a row of `kvprof.kernels.quantized.tables.Kind`, then
        PLANES rows of `PlaneColumns` of K, then of V.
    HEADS
        Query heads of a program, a power of two from 8 on.
    CODE, MIDDLE
        Types in which the codes of V, and its middles, are multiplied.
    FAST
        Whether inline assembly can be used.
    NEAR
        `Tuning.near`; only then the counters are read.
    DEALT
        `Tuning.dealt`.
    DEPENDENT
        Whether the launch did not wait for what comes before, nor what joins the parts for this one
        (`kvprof.kernels.dispatch.early_launch`).
    """
    wait_for_earlier(DEPENDENT)
    # The last task is the last head of the last row.
    behind = parts + _PART * tasks
    first = tl.load(behind + (_PART_FIRST - _PART))
    total = (first + tl.load(behind + (_PART_COUNT - _PART))) * blocks
    taken = _dealt(total, shares) if DEALT else tl.program_id(0)
    if NEAR:
        taken = _taken(counters, taken, total, shares, FAST)
    if taken < total:
        item = taken // blocks
        row = tl.load(items + item * _ITEM + _ITEM_ROW)
        head = tl.load(items + item * _ITEM + _ITEM_HEAD)
        segment = tl.load(items + item * _ITEM + _ITEM_SEGMENT)
        start = tl.load(items + item * _ITEM + _ITEM_START)
        stop = tl.load(items + item * _ITEM + _ITEM_STOP)
        unit = units + (segment * KV_HEADS + head) * _UNIT
        own_query = tl.multiple_of(tl.load(unit + _QUERIES), 16)
        query = queries + row.to(tl.int64) * query_row + own_query
        width = tl.multiple_of(tl.load(unit + _QUERY_WIDTH).to(tl.int32), 16)
        at = tl.load(unit + _BEGIN)
        pages = table
        if PAGE > 0:
            pages = table + row.to(tl.int64) * table_row
            stop = tl.maximum(tl.minimum(stop, table_row * PAGE), start)
        else:
            at += row.to(tl.int64) * stride
        output_width = tl.load(unit + _OUTPUT_WIDTH).to(tl.int32)
        kind = tl.load(unit + _KIND)
        for number in tl.static_range(COUNT):
            if kind == number:
                _piece(
                    octets, full, halfs, eye, partial, logs, item, query, width, at, pages, stride,
                    start, stop, output_width, scale, cap, taken % blocks * HEADS,
                    _row(KINDS, number, STRIDE), PLANES, GROUP, HEADS, WIDEST,
                    PAGE, CAPPED, CODE, MIDDLE, _ends(KINDS, number, COUNT, STRIDE), FAST,
                )


@triton.jit
def _same_place(one, other, capacity, SLOTS: tl.constexpr):
    """Tell whether targets that count on from row to row lie in one place of a row's block."""
    rows = one // capacity == other // capacity
    return rows & (one % capacity // SLOTS == other % capacity // SLOTS) & (other >= 0)


@triton.jit(
    do_not_specialize=[
        "pitch",
        "count",
        "source_capacity",
        "source_height",
        "source_first",
        "source_blocks",
        "source_row",
        "source_page",
        "pool",
        "first",
        "blocks",
        "stride",
    ]
)
def move_tokens(
    source,  # values at full precision, in the run's dtype
    octets,  # the buffer as uint8, as the run's dtype and as float16; written
    full,
    halfs,
    #: Rows of `kvprof.kernels.quantized.tables.Stretch`, and `MovedColumn` field by field, as many
    #: of each, int64.
    stretches,
    columns,
    pitch,
    #: `[count]` integers: each token's slot in the source, clamped to what there is, and in the
    #: segment; one that is not there leaves everything as it is. They are those of one token of
    #: each row; POOLED: targets of as many tokens as come, which count on from row to row (or page
    #: to page) of the segment.
    origins,
    targets,
    low,  # `[count]` bool, read with LOW: the token loses what the lowest level has lost
    count,
    source_capacity,  # slots of the source that an origin counts, and tokens of a block of it
    source_height,
    #: Values of a row before the source, and blocks of a head in it (of planes, its tokens); values
    #: from row to row, and from page to page where origins count on from page to page.
    source_first,
    source_blocks,
    source_row,
    source_page,
    #: Slots of a row (or page) in the segment, how many such rows there are, bytes of one before
    #: the segment, blocks of a head in it, and bytes from one to the next.
    capacity,
    pool,
    first,
    blocks,
    stride,
    KEY_BITS: tl.constexpr,  # 8, 4, 3 or 2, `FP8`, `COLUMNS` or `FULL`
    VALUE_BITS: tl.constexpr,
    SLOTS: tl.constexpr,  # tokens of a place
    WIDTH: tl.constexpr,  # power of two, no less than the columns of a stretch
    LOW: tl.constexpr,
    POOLED: tl.constexpr,
    DEPENDENT: tl.constexpr,  # as `segment_pieces`
):
    """Move tokens into pages; the program of the first token of a shared byte moves them all."""
    wait_for_earlier(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    first_target = tl.load(targets + row).to(tl.int64)
    room = tl.full([], capacity, tl.int64)
    if POOLED:
        room *= pool
    going = (first_target >= 0) & (first_target < room)
    MOST: tl.constexpr = SLOTS if POOLED else 1
    if MOST > 1:
        previous = row - 1
        before = tl.load(targets + previous, mask=row > 0, other=-1).to(tl.int64)
        going = going & (_same_place(first_target, before, capacity, SLOTS) == 0)
    if going:
        stretch = stretches + tl.program_id(0) * _STRETCH
        number = tl.arange(0, WIDTH)
        there = number < tl.load(stretch + _COLUMNS)
        own_columns = columns + tl.load(stretch + _FIRST_COLUMN)
        column = own_columns + number
        # Once for all tokens of a place: the compiler would read it again behind every store.
        origin = source_of(column, pitch, there, source_blocks)
        goal = target_of(column, pitch, there, blocks)
        for behind in tl.static_range(MOST):
            target = first_target
            if behind > 0:
                target = tl.load(targets + row + behind, mask=row + behind < count, other=-1)
                target = target.to(tl.int64)
                going = going & _same_place(first_target, target, capacity, SLOTS)
            if going:
                if behind > 0:
                    # What has been written is read again, perhaps by another thread.
                    tl.debug_barrier()
                own = row
                if POOLED:
                    own = target // capacity
                    target = target % capacity
                slot = tl.load(origins + row + behind).to(tl.int64)
                slot = tl.minimum(tl.maximum(slot, 0), source_capacity - 1)
                lost = slot * 0
                if LOW:
                    lost = tl.load(low + row + behind).to(tl.int64)
                came = slot // source_height
                came_place = slot % source_height
                came_row = source + source_first + (row + behind) * source_row + came * source_page
                states = states_of(
                    came_row, origin, came, came_place, column, pitch, there, lost, LOW
                )
                far = own * stride + first
                block = target // (_BLOCK * SLOTS)
                token = target % (_BLOCK * SLOTS)
                for SIDE in tl.static_range(2):
                    if tl.load(stretch + _SIDE) == SIDE:
                        if (VALUE_BITS if SIDE == 1 else KEY_BITS) == _BY_COLUMN:
                            put_columns(
                                octets + far,
                                came_row,
                                states,
                                came,
                                came_place,
                                source_blocks,
                                own_columns,
                                pitch,
                                number,
                                there,
                                stretch,
                                block,
                                blocks,
                                token,
                                lost,
                                LOW,
                            )
                        else:
                            put_rows(
                                octets + far,
                                full + far // (full.dtype.element_ty.primitive_bitwidth // 8),
                                halfs + far // 2,
                                states,
                                there,
                                goal,
                                stretch,
                                block,
                                blocks,
                                token,
                                VALUE_BITS if SIDE == 1 else KEY_BITS,
                                SIDE == 1,
                                SLOTS,
                            )


@triton.jit(do_not_specialize=["pitch", "count", "room", "blocks"])
def restore_tokens(
    planes,  # in the run's dtype; written
    octets,  # the buffer as uint8, as the run's dtype and as float16
    full,
    halfs,
    stretches,  # as `move_tokens`; a column goes where its table says that it comes from
    columns,
    pitch,
    #: `[count]` integers, which count on from row to row (or page to page) of the segment; of one
    #: that is not there nothing is written.
    slots,
    targets,  # `[count]` integers, likewise of the planes
    count,
    room,  # tokens of a row of the planes, their rows, and values of one
    rows,
    whole,
    capacity,  # as `move_tokens`
    pool,
    first,
    blocks,
    stride,
    KEY_BITS: tl.constexpr,  # as `move_tokens`
    VALUE_BITS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program
):
    """Dequantise tokens into planes; a program per TOKENS of them and stretch of columns."""
    number = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + number, mask=number < count, other=-1).to(tl.int64)
    target = tl.load(targets + number, mask=number < count, other=-1).to(tl.int64)
    known = (slot >= 0) & (slot < tl.full([], capacity, tl.int64) * pool)
    known = known & (target >= 0) & (target < tl.full([], room, tl.int64) * rows)
    slot = tl.where(known, slot, 0)
    target = tl.where(known, target, 0)
    stretch = stretches + tl.program_id(1) * _STRETCH
    each = tl.arange(0, WIDTH)
    there = each < tl.load(stretch + _COLUMNS)
    own = columns + tl.load(stretch + _FIRST_COLUMN)
    column = own + each
    within = slot % capacity
    block = within // (_BLOCK * SLOTS)
    token = (within % (_BLOCK * SLOTS)).to(tl.int32)
    row = slot // capacity * stride + first
    scales = scale_at(stretch, block, blocks)
    base = base_of(column, pitch, there, blocks)
    size = tl.load(own + _BLOCK_SIZE * pitch)
    to = tl.load(column + _SOURCE_FIRST * pitch, mask=there, other=0)
    to += tl.load(column + _SOURCE_HEAD * pitch, mask=there, other=0) * room
    apart = tl.load(column + _SOURCE_PLACE * pitch, mask=there, other=0).to(tl.int32)
    to = planes + to[None, :] + (target % room)[:, None] * apart[None, :]
    to += (target // room * whole)[:, None]
    both = known[:, None] & there[None, :]
    for SIDE in tl.static_range(2):
        if tl.load(stretch + _SIDE) == SIDE:
            BITS: tl.constexpr = VALUE_BITS if SIDE == 1 else KEY_BITS
            if BITS == _BY_COLUMN:
                found = column_values(
                    octets,
                    row + block * size,
                    base,
                    blocks,
                    column,
                    pitch,
                    there,
                    row + scales,
                    token,
                    known,
                )
            else:
                unit = full.dtype.element_ty.primitive_bitwidth // 8 if BITS == _FULL else 1
                found = row_values(
                    octets,
                    full,
                    halfs,
                    row + block * size * unit,
                    base,
                    column,
                    pitch,
                    there,
                    stretch,
                    row // 2 + scales,
                    token,
                    known,
                    BITS,
                    SIDE == 1,
                    SLOTS,
                )
            tl.store(to, found.to(planes.dtype.element_ty), mask=both)
