# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""From bytes of sides with bits by column to numbers for tensor cores, and to a tile's products.

The eight lowest bits of a bfloat16 whose others are 0 are a whole number, times 2^-133: seven bits
of mantissa, and the lowest of the exponent, which goes on from where denormals end. So a code that
lies anywhere in them is a number as it is, 2^p times as large behind p bits, and all that is left
to do is to put away what lies around it. The codes of two neighbours lie in the halves of a word:
one operation for both, and one shift for the other two of four bytes, whatever the number of codes
in them. In float16 there are eleven such bits, times 2^-24.

Who multiplies takes the powers of two out again, outside of the loop over elements, and takes half
of the largest code from each: it is done once for many of them. Sums over a tile of codes that are
not counted from their middle are small enough for nothing to be lost by that.

Triton's interpreter knows no inline assembly: there the same numbers are made the long way, and
the order of bytes (`kvprof.kernels.segments.columns`) is made good where they are loaded.
"""

import triton
import triton.language as tl

from kvprof.kernels.segments.codes import E4M3_LACK
from kvprof.kernels.segments.columns import COLUMN_SLOTS
from kvprof.kernels.segments.side import PLACES
from kvprof.kernels.segments.tables import PlaneColumns
from kvprof.kernels.segments.unpack import rounded
from kvprof.kernels.tables import column

__all__ = [
    "byte_order",
    "column_codes",
    "column_factor",
    "column_scores",
    "row_scales",
    "value_columns",
    "value_weights",
    "with_top",
]

_PLANE = tl.constexpr(len(PlaneColumns._fields))
_WIDTH = tl.constexpr(column(PlaneColumns, "width"))
_DEPTH = tl.constexpr(column(PlaneColumns, "depth"))
_GROUP = tl.constexpr(column(PlaneColumns, "group"))
_FIRST = tl.constexpr(column(PlaneColumns, "first"))
_LAST = tl.constexpr(column(PlaneColumns, "last"))
_AT = tl.constexpr(column(PlaneColumns, "at"))
_BITS = tl.constexpr(column(PlaneColumns, "bits"))
_BITS_BELOW = tl.constexpr(column(PlaneColumns, "shift"))
_STEP = tl.constexpr(column(PlaneColumns, "step"))
_BLOCK = tl.constexpr(PLACES)
_SLOTS = tl.constexpr(COLUMN_SLOTS)
_LACK = tl.constexpr(E4M3_LACK)


def column_factor(dtype: str) -> float:
    """Return by how much what `column_codes` returns is too small.

    Parameters
    ----------
    dtype : str
        ``bf16``, ``fp16`` or ``fp32``.
    """
    return {"bf16": 2.0**133, "fp16": 2.0**24, "fp32": 1.0}[dtype]


def _assembly(at: int, bits: int) -> str:
    """Return assembly for four bytes: a code of each, behind `at` bits."""
    mask = (2**bits - 1) << at
    mask = f"{mask | mask << 16:#010x}"
    return f"{{ .reg .b32 x; and.b32 $0, $2, {mask}; shr.b32 x, $2, 8; and.b32 $1, x, {mask}; }}"


# Codes of 1 bit (eight to a byte), of 2 bits, 4 and 8.
_TEXTS = tl.constexpr(
    tuple(_assembly(at, bits) for bits in (1, 2, 4, 8) for at in range(0, 8, bits))
)


@triton.jit
def column_codes(
    octets, AT: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr
):
    """Return the codes behind AT bits of bytes as numbers of DTYPE, from 0, times 2^AT.

    They lack `column_factor`.

    Parameters
    ----------
    octets
        uint8.
    AT
        A multiple of BITS.
    BITS
        1, 2, 4 or 8.
    FAST
        Inline assembly; only for bfloat16 and float16, and for bytes in the order of memory.
    """
    if FAST:
        TEXT: tl.constexpr = _TEXTS[(16 - 16 // BITS if BITS > 1 else 0) + AT // BITS]
        # "&": the second result is made of the same register after the first.
        if tl.bfloat16 == DTYPE:
            found = tl.inline_asm_elementwise(
                TEXT, "=&r,=&r,r", [octets], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            found = tl.inline_asm_elementwise(
                TEXT, "=&r,=&r,r", [octets], dtype=tl.float16, is_pure=True, pack=4
            )
    else:
        found = (octets & (((1 << BITS) - 1) << AT)).to(tl.float32)
        if tl.float16 == DTYPE:
            found = (found * 5.960464477539063e-08).to(tl.float16)  # 2^-24
    return found


@triton.jit
def byte_order(numbers, FAST: tl.constexpr):
    """Return at which bytes of words of four columns (of V, places) lie.

    With inline assembly those of memory as they are: it gives the second of them third.
    """
    if FAST:
        found = numbers
    else:
        low = numbers % 4
        found = numbers - low + low // 2 + low % 2 * 2
    return found


@triton.jit
def row_scales(pointer, places, AT: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Load the scales of four tokens of some places; a tuple of float32 vectors.

    Parameters
    ----------
    pointer
        uint8, to the first place's block.
    AT
        Where the scales begin in a block.
    BLOCK_BYTES
        From block to block.
    """
    words = pointer.to(tl.pointer_type(tl.uint32), bitcast=True)
    at = words + (places // 32 * (BLOCK_BYTES // 4) + places % 32)
    word = tl.load(at + AT // 4)
    found = ()
    for slot in tl.static_range(_SLOTS):
        # e4m3 less its sign, with its exponent.
        own = ((word >> (8 * slot)) & 0x7F) << 20
        found += (own.to(tl.float32, bitcast=True) * _LACK,)
    return found


@triton.jit
def _key_columns(
    raws,
    query,
    tile_at,
    places,
    AT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    FIRST: tl.constexpr,
    FAST: tl.constexpr,
):
    """Add a plane of bits to the products of a run, one per slot."""
    column = tl.arange(0, DEPTH)
    lane = places // _BLOCK * BLOCK_BYTES + places % _BLOCK * WIDTH
    APART: tl.constexpr = 2 if BITS == 1 else BITS
    found = ()
    for part in tl.static_range(APART // 2):
        pointer = tile_at + (lane[:, None] + byte_order(column, FAST)[None, :])
        pointer += AT + part * (_BLOCK * WIDTH)
        if DEPTH > WIDTH:
            octets = tl.load(pointer, mask=(column < WIDTH)[None, :], other=0)
        else:
            octets = tl.load(pointer)
        for number in tl.static_range(8 // APART):
            raw = column_codes(octets, SHIFT + APART * number, BITS, query.dtype, FAST)
            if FIRST:
                product = tl.dot(raw, query, input_precision="ieee")
            else:
                before = raws[part * (8 // APART) + number]
                product = tl.dot(raw, query, before, input_precision="ieee")
            found += (product,)
    return found


@triton.jit
def _stepped(scores, raws, total, STEP: tl.constexpr, APART: tl.constexpr, FIRST: tl.constexpr):
    """Add a run's share to the scores of each slot, and what all runs have in common once."""
    found = ()
    for slot in tl.static_range(_SLOTS):
        # Behind how many bits of its byte a slot's code lies.
        own = raws[slot] * (STEP / (1 << slot % (8 // APART) * APART))
        if FIRST:
            found += (own - total,)
        else:
            found += (own + scores[slot],)
    return found


@triton.jit
def column_scores(
    queries,
    total,
    keys,
    places,
    FACTOR: tl.constexpr,
    KINDS: tl.constexpr,
    KEYS: tl.constexpr,
    PLANES: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Return the products of a tile where columns have bits of their own."""
    scores = ()
    raws = ()
    for number in tl.static_range(PLANES):
        raws = _key_columns(
            raws,
            queries[number],
            keys,
            places,
            KINDS[KEYS + number * _PLANE + _AT],
            BLOCK_BYTES,
            KINDS[KEYS + number * _PLANE + _BITS],
            KINDS[KEYS + number * _PLANE + _BITS_BELOW],
            KINDS[KEYS + number * _PLANE + _WIDTH],
            KINDS[KEYS + number * _PLANE + _DEPTH],
            KINDS[KEYS + number * _PLANE + _FIRST],
            FAST,
        )
        if KINDS[KEYS + number * _PLANE + _LAST] == 1:
            scores = _stepped(
                scores,
                raws,
                total,
                FACTOR * KINDS[KEYS + number * _PLANE + _STEP],
                2
                if KINDS[KEYS + number * _PLANE + _BITS] == 1
                else KINDS[KEYS + number * _PLANE + _BITS],
                KINDS[KEYS + number * _PLANE + _GROUP] == 0,
            )
    scales = row_scales(keys, places, SCALES_AT, BLOCK_BYTES)
    found = ()
    for slot in tl.static_range(_SLOTS):
        found += (scores[slot] * scales[slot][:, None],)
    return found


@triton.jit
def value_weights(weights, scales, APART: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Return the weights of each slot's codes, which lie behind some bits of their bytes."""
    found = ()
    for slot in tl.static_range(_SLOTS):
        scale = scales[slot] * (1.0 / (1 << slot % (8 // APART) * APART))
        found += (rounded(weights[slot] * scale[:, None], DTYPE, FAST),)
    return found


@triton.jit
def value_columns(
    weights,
    tile_at,
    places,
    AT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    FAST: tl.constexpr,
):
    """Return weighted values of a plane of bits, ``[DEPTH, heads]``; from WIDTH on columns again.

    Of this tile alone: tensor cores cut off what does not fit beside a sum, and over a long context
    the sum of codes that are not counted from their middle is large.
    """
    column = tl.arange(0, DEPTH) % WIDTH
    lane = places // _BLOCK * BLOCK_BYTES + byte_order(places % _BLOCK, FAST)
    APART: tl.constexpr = 2 if BITS == 1 else BITS
    for part in tl.static_range(APART // 2):
        pointer = tile_at + (column[:, None] * _BLOCK + lane[None, :])
        octets = tl.load(pointer + (AT + part * (_BLOCK * WIDTH)))
        for number in tl.static_range(8 // APART):
            weight = weights[part * (8 // APART) + number]
            raw = column_codes(octets, SHIFT + APART * number, BITS, weight.dtype, FAST)
            if (part == 0) and (number == 0):
                sums = tl.dot(raw, weight, input_precision="ieee")
            else:
                sums = tl.dot(raw, weight, sums, input_precision="ieee")
    return sums


@triton.jit
def with_top(low, first, second, WIDTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Add the halves of a plane of highest bits, WIDTH columns each, to the lower ones."""
    first = first * FIRST
    second = second * SECOND
    if WIDTH < 16:
        row = tl.arange(0, 16)
        top = tl.where((row < WIDTH)[:, None], first, second)
    else:
        top = tl.permute(tl.join(first, second), (2, 0, 1))
        top = tl.reshape(top, (2 * WIDTH, first.shape[1]))
    return low + top
