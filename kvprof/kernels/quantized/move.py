"""How tokens get into the bytes of a segment, and out of them, layout by layout.

What `kvprof.kernels.quantized.append` does with some hundred operations of torch a step, which a
GPU spends most of its time between, in one launch for both sides and all heads
(`kvprof.kernels.quantized.kernel.move_tokens` and `restore_tokens`). The bytes are those of
`append.write`, the values those of `append.read`.

A table of columns lies field by field, `pitch` columns of each, so that a warp reads its columns'
fields side by side.
"""

import triton
import triton.language as tl

from kvprof.analysis.uniform import uniform_step
from kvprof.kernels.quantized.codes import E4M3_TINY, E4M3_TO_F32_BIAS, FP8, FULL
from kvprof.kernels.quantized.columns import COLUMN_SLOTS, TURNED
from kvprof.kernels.quantized.operand_layout import PLACES
from kvprof.kernels.quantized.tables import MovedColumn, Stretch
from kvprof.kernels.tables import column

__all__ = [
    "base_of",
    "column_values",
    "put_columns",
    "put_rows",
    "row_values",
    "scale_at",
    "source_of",
    "states_of",
    "target_of",
]

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton's functions are compiled from their source; types mean nothing to its compiler.

_COLUMNS = tl.constexpr(column(Stretch, "columns"))
_SCALE_FIRST = tl.constexpr(column(Stretch, "scale_first"))
_SCALE_BLOCK = tl.constexpr(column(Stretch, "scale_block"))
_SCALE_HEAD = tl.constexpr(column(Stretch, "scale_head"))
_TO_NEXT = tl.constexpr(column(Stretch, "to_next"))
_SOURCE_FIRST = tl.constexpr(column(MovedColumn, "source_first"))
_SOURCE_HEAD = tl.constexpr(column(MovedColumn, "source_head"))
_SOURCE_BLOCK = tl.constexpr(column(MovedColumn, "source_block"))
_SOURCE_PLACE = tl.constexpr(column(MovedColumn, "source_place"))
_FIRST = tl.constexpr(column(MovedColumn, "first"))
_HEAD = tl.constexpr(column(MovedColumn, "head"))
_BLOCK = tl.constexpr(column(MovedColumn, "block"))
_PART = tl.constexpr(column(MovedColumn, "part"))
_PLACE = tl.constexpr(column(MovedColumn, "place"))
_BEHIND = tl.constexpr(column(MovedColumn, "behind"))
_BITS = tl.constexpr(column(MovedColumn, "bits"))
_BELOW = tl.constexpr(column(MovedColumn, "below"))
_SHIFT = tl.constexpr(column(MovedColumn, "shift"))
_APART = tl.constexpr(column(MovedColumn, "apart"))
_CODE = tl.constexpr(column(MovedColumn, "code"))
_MATE = tl.constexpr(column(MovedColumn, "mate"))
_TOPS = tl.constexpr(column(Stretch, "tops"))
_PLACES = tl.constexpr(PLACES)
_FULL = tl.constexpr(FULL)
_FP8 = tl.constexpr(FP8)
_COLUMN_SLOTS = tl.constexpr(COLUMN_SLOTS)
_TURNED = tl.constexpr(TURNED)
_F32_BIAS = tl.constexpr(E4M3_TO_F32_BIAS)
_TINY = tl.constexpr(E4M3_TINY)
_STEP_OF_2 = tl.constexpr(uniform_step(2))
_STEP_OF_3 = tl.constexpr(uniform_step(3))
_STEP_OF_4 = tl.constexpr(uniform_step(4))
_STEP_OF_8 = tl.constexpr(uniform_step(8))


@triton.jit
def _rounded(numbers):
    """Round to whole numbers, halves to even; for less than 2^22."""
    return (numbers + 12582912.0) - 12582912.0


@triton.jit
def _e4m3(numbers):
    """Return the bytes of a saturating cast to e4m3, for GPUs without the instruction."""
    bits = numbers.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.abs(numbers)
    inside = tl.minimum(size, 448.0)
    word = inside.to(tl.int32, bitcast=True)
    # Three bits of mantissa are left of 23, and the exponent counts from 7 instead of 127.
    normal = ((word + 0x7FFFF + ((word >> 20) & 1)) >> 20) - (120 << 3)
    small = _rounded(inside * 512.0).to(tl.int32)
    code = tl.where(inside < _TINY, small, normal)
    return tl.where(size != size, 0x7F, code) | sign


@triton.jit
def base_of(column, pitch, there, blocks):
    """Return where columns begin in the first block of their head, one of `blocks`."""
    at = tl.load(column + _FIRST * pitch, mask=there, other=0)
    return at + tl.load(column + _HEAD * pitch, mask=there, other=0) * blocks


@triton.jit
def _block_at(column, pitch, there, block, blocks):
    """Return where columns begin in a block of their head, one of `blocks`."""
    return base_of(column, pitch, there, blocks) + block * tl.load(
        column + _BLOCK * pitch, mask=there, other=0
    )


@triton.jit
def scale_at(stretch, block, blocks):
    """Return where the scales of a block begin."""
    at = tl.load(stretch + _SCALE_FIRST) + tl.load(stretch + _SCALE_HEAD) * blocks
    return at + block * tl.load(stretch + _SCALE_BLOCK)


@triton.jit
def target_of(column, pitch, there, blocks):
    """Return where columns go: their first places, and to the next block, place and part."""
    to_block = tl.load(column + _BLOCK * pitch, mask=there, other=0)
    to_place = tl.load(column + _PLACE * pitch, mask=there, other=0)
    to_part = tl.load(column + _PART * pitch, mask=there, other=0)
    return base_of(column, pitch, there, blocks), to_block, to_place, to_part


@triton.jit
def put_rows(
    octets,
    full,
    halfs,
    states,
    there,
    goal,
    stretch,
    block,
    blocks,
    token,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Store one token's columns of a stretch; `goal` is of `target_of`."""
    at, to_block, step, to_part = goal
    at += block * to_block
    if BITS == _FULL:
        tl.store(full + at + token * step, states, mask=there)
    else:
        CONTAINER: tl.constexpr = 8 if BITS == _FP8 else 4 if BITS == 3 else BITS
        PER_BYTE: tl.constexpr = 8 // CONTAINER
        place = token // SLOTS
        slot = token % SLOTS
        at += place * step
        at += slot // PER_BYTE * to_part
        wide = states.to(tl.float32)
        if BITS == _FP8:
            codes = _e4m3(wide)
        else:
            # As `kvprof.kernels.quantized.codes.quantise` has it, to the last bit.
            HALF: tl.constexpr = 1 << (BITS - 1)
            low = tl.min(tl.where(there, wide, float("inf")), 0)
            high = tl.max(tl.where(there, wide, float("-inf")), 0)
            scale = tl.div_rn(high - low, (2 * HALF - 1) * 1.0).to(tl.float16)
            middle = (low + HALF * scale.to(tl.float32)).to(tl.float16)
            stored = scale_at(stretch, block, blocks)
            tl.store(halfs + stored + token, scale)
            beside = slot * _PLACES + place if VALUES else token
            tl.store(halfs + stored + tl.load(stretch + _TO_NEXT) + beside, middle)
            unit = tl.where(scale > 0.0, scale.to(tl.float32), 1.0)
            level = tl.div_rn(wide - middle.to(tl.float32), tl.broadcast_to(unit, wide.shape))
            # Clamped first: what is far outside could not be rounded.
            level = _rounded(tl.minimum(tl.maximum(level, -1.0 * HALF), HALF - 1.0))
            codes = level.to(tl.int32) + (1 << (CONTAINER - 1))
        if PER_BYTE > 1:
            shift = (CONTAINER * (slot % PER_BYTE)).to(tl.int32)
            old = tl.load(octets + at, mask=there, other=0).to(tl.int32)
            codes = (old & ~(((1 << CONTAINER) - 1) << shift)) | (codes << shift)
        tl.store(octets + at, codes.to(tl.uint8), mask=there)


@triton.jit
def source_of(column, pitch, there, came_blocks):
    """Return where columns come from: their first places, and to the next block and place."""
    first = tl.load(column + _SOURCE_FIRST * pitch, mask=there, other=0)
    first += tl.load(column + _SOURCE_HEAD * pitch, mask=there, other=0) * came_blocks
    to_block = tl.load(column + _SOURCE_BLOCK * pitch, mask=there, other=0)
    return first, to_block, tl.load(column + _SOURCE_PLACE * pitch, mask=there, other=0)


@triton.jit
def states_of(
    source,
    origin,
    came,
    came_place,
    column,
    pitch,
    there,
    lost,
    LOW: tl.constexpr,
):
    """Load one token's columns of a stretch, or those of them that rows of the table name.

    The token lies at a place of block `came` of the row at `source`; `origin` is of `source_of`.
    """
    first, to_block, to_place = origin
    found = tl.load(source + first + came * to_block + came_place * to_place, mask=there, other=0.0)
    if LOW:
        behind = tl.load(column + _BEHIND * pitch, mask=there, other=0) * lost
        found = tl.where(behind != 0, 0.0, found)
    return found


@triton.jit
def _steps(bits):
    """Return the step of columns that have so many bits."""
    return tl.where(
        bits == 2,
        _STEP_OF_2,
        tl.where(bits == 3, _STEP_OF_3, tl.where(bits == 4, _STEP_OF_4, _STEP_OF_8)),
    )


@triton.jit
def _column_codes(states, scale, column, pitch, there, slot):
    """Return the bits of a piece of codes, where they go in their byte."""
    code = tl.load(column + _CODE * pitch, mask=there, other=2)
    step = _steps(code)
    half = tl.exp2((code - 1).to(tl.float32))
    # As `kvprof.kernels.quantized.columns.quantise_columns` has it, to the last bit.
    level = tl.floor(tl.div_rn(states.to(tl.float32), scale * step))
    found = (tl.minimum(tl.maximum(level, -half), half - 1.0) + half).to(tl.int32)
    found = found >> tl.load(column + _BELOW * pitch, mask=there, other=0).to(tl.int32)
    apart = tl.load(column + _APART * pitch, mask=there, other=8).to(tl.int32)
    shift = tl.load(column + _SHIFT * pitch, mask=there, other=0).to(tl.int32)
    shift += slot.to(tl.int32) // (apart // 2) * apart
    mask = (1 << tl.load(column + _BITS * pitch, mask=there, other=0).to(tl.int32)) - 1
    return ((found & mask) << shift) ^ ((mask << shift) & _TURNED), mask << shift


@triton.jit
def _column_bytes(octets, column, pitch, there, block, blocks, place, slot):
    """Return the addresses of a piece's bytes."""
    at = _block_at(column, pitch, there, block, blocks)
    apart = tl.load(column + _APART * pitch, mask=there, other=8)
    at += slot % (apart // 2) * tl.load(column + _PART * pitch, mask=there, other=0)
    at += place * tl.load(column + _PLACE * pitch, mask=there, other=0)
    return octets + at


@triton.jit
def put_columns(
    octets,
    source,
    states,
    came,
    came_place,
    came_blocks,
    columns,
    pitch,
    number,
    there,
    stretch,
    block,
    blocks,
    token,
    lost,
    LOW: tl.constexpr,
):
    """Store one token's columns with bits of their own, and their scale."""
    place = token // _COLUMN_SLOTS
    slot = token % _COLUMN_SLOTS
    count = tl.load(stretch + _COLUMNS)
    wide = states.to(tl.float32)
    size = tl.div_rn(tl.sum(tl.where(there, wide * wide, 0.0), 0), count.to(tl.float32))
    # From the smallest that is not denormal to the largest.
    word = _e4m3(tl.maximum(tl.sqrt_rn(size), _TINY))
    at = scale_at(stretch, block, blocks) + token
    tl.store(octets + at, word.to(tl.uint8))
    scale = (word << 20).to(tl.float32, bitcast=True) * _F32_BIAS
    column = columns + number
    codes, mask = _column_codes(wide, scale, column, pitch, there, slot)
    to = _column_bytes(octets, column, pitch, there, block, blocks, place, slot)
    old = tl.load(to, mask=there, other=0).to(tl.int32)
    tl.store(to, ((old & ~mask) | codes).to(tl.uint8), mask=there)
    # Both that share a byte write the whole of it, whoever comes first.
    there = number < tl.load(stretch + _TOPS)
    column = columns + (count + number)
    mate = column + tl.load(column + _MATE * pitch, mask=there, other=0)
    origin = source_of(column, pitch, there, came_blocks)
    own = states_of(source, origin, came, came_place, column, pitch, there, lost, LOW)
    origin = source_of(mate, pitch, there, came_blocks)
    other = states_of(source, origin, came, came_place, mate, pitch, there, lost, LOW)
    codes, mask = _column_codes(own, scale, column, pitch, there, slot)
    more, beside = _column_codes(other, scale, mate, pitch, there, slot)
    to = _column_bytes(octets, column, pitch, there, block, blocks, place, slot)
    old = tl.load(to, mask=there, other=0).to(tl.int32)
    tl.store(to, ((old & ~(mask | beside)) | codes | more).to(tl.uint8), mask=there)


@triton.jit
def _e4m3_value(word):
    """Return the float32 of e4m3 in the lowest bits of int32."""
    found = (((word & 0x7F) << 20) | ((word & 0x80) << 24)).to(tl.float32, bitcast=True) * _F32_BIAS
    return tl.where((word & 0x7F) == 0x7F, float("nan"), found)


@triton.jit
def row_values(
    octets,
    full,
    halfs,
    far,
    base,
    column,
    pitch,
    there,
    stretch,
    scales,
    token,
    known,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Return ``[tokens, columns]`` float32 of rows: codes and what is kept, or full precision."""
    step = tl.load(column + _PLACE * pitch, mask=there, other=0).to(tl.int32)
    both = known[:, None] & there[None, :]
    if BITS == _FULL:
        unit: tl.constexpr = full.dtype.element_ty.primitive_bitwidth // 8
        at = full + (far // unit)[:, None] + base[None, :] + token[:, None] * step[None, :]
        found = tl.load(at, mask=both, other=0.0).to(tl.float32)
    else:
        CONTAINER: tl.constexpr = 8 if BITS == _FP8 else 4 if BITS == 3 else BITS
        PER_BYTE: tl.constexpr = 8 // CONTAINER
        place = token // SLOTS
        slot = token % SLOTS
        part = tl.load(column + _PART * pitch, mask=there, other=0).to(tl.int32)
        at = place[:, None] * step[None, :] + (slot // PER_BYTE)[:, None] * part[None, :]
        word = tl.load(octets + far[:, None] + base[None, :] + at, mask=both, other=0).to(tl.int32)
        if BITS == _FP8:
            found = _e4m3_value(word)
        else:
            code = (word >> (CONTAINER * (slot % PER_BYTE))[:, None]) & ((1 << CONTAINER) - 1)
            found = (code - (1 << (CONTAINER - 1))).to(tl.float32)
            stored = halfs + scales
            scale = tl.load(stored + token, mask=known, other=0.0).to(tl.float32)
            beside = slot * _PLACES + place if VALUES else token
            beside += tl.load(stretch + _TO_NEXT).to(tl.int32)
            middle = tl.load(stored + beside, mask=known, other=0.0).to(tl.float32)
            # The product is exact: it does not matter whether it is rounded before it is added.
            found = middle[:, None] + scale[:, None] * found
    return found


@triton.jit
def _piece(octets, far, base, column, pitch, there, known, place, slot):
    """Return the bits that a piece has of each token's code, where they go in it."""
    apart = tl.load(column + _APART * pitch, mask=there, other=8).to(tl.int32)[None, :]
    part = tl.load(column + _PART * pitch, mask=there, other=0).to(tl.int32)[None, :]
    step = tl.load(column + _PLACE * pitch, mask=there, other=0).to(tl.int32)[None, :]
    shift = tl.load(column + _SHIFT * pitch, mask=there, other=0).to(tl.int32)[None, :]
    below = tl.load(column + _BELOW * pitch, mask=there, other=0).to(tl.int32)[None, :]
    bits = tl.load(column + _BITS * pitch, mask=there, other=0).to(tl.int32)[None, :]
    at = slot[:, None] % (apart // 2) * part + place[:, None] * step
    word = tl.load(
        octets + far[:, None] + base[None, :] + at, mask=known[:, None] & there[None, :], other=0
    ).to(tl.int32)
    turned = (word ^ _TURNED) >> (shift + slot[:, None] // (apart // 2) * apart)
    return (turned & ((1 << bits) - 1)) << below


@triton.jit
def column_values(octets, far, base, blocks, column, pitch, there, scales, token, known):
    """Return ``[tokens, columns]`` float32 of columns with bits of their own."""
    place = token // _COLUMN_SLOTS
    slot = token % _COLUMN_SLOTS
    code = _piece(octets, far, base, column, pitch, there, known, place, slot)
    beyond = tl.load(column + _MATE * pitch, mask=there, other=0)
    top = column + beyond
    more = there & (beyond > 0)
    start = base_of(top, pitch, more, blocks)
    code += _piece(octets, far, start, top, pitch, more, known, place, slot)
    word = tl.load(octets + scales + token, mask=known, other=0).to(tl.int32)
    bits = tl.load(column + _CODE * pitch, mask=there, other=2)
    half = tl.exp2((bits - 1).to(tl.float32)) - 0.5
    level = (code.to(tl.float32) - half[None, :]) * _steps(bits)[None, :]
    return _e4m3_value(word)[:, None] * level
