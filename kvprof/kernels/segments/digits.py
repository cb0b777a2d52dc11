# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Numbers as two digits of a byte, in adjacent columns of a product of whole numbers.

A number up to `MOST` is ``256 · upper + lower`` with both within an int8. A product with both
digits' columns gives two sums that lie side by side in a lane, where they are joined.
"""

import math

import triton
import triton.language as tl

from kvprof.kernels.segments.side import PLACES
from kvprof.kernels.segments.tables import PlaneColumns
from kvprof.kernels.tables import column

__all__ = [
    "MOST",
    "ZERO",
    "biased",
    "by_place",
    "by_row",
    "digits",
    "headroom",
    "joined",
    "query_digits",
    "single",
]

_PLANE = tl.constexpr(len(PlaneColumns._fields))
_START = tl.constexpr(column(PlaneColumns, "start"))
_WIDTH = tl.constexpr(column(PlaneColumns, "width"))
_DEPTH = tl.constexpr(column(PlaneColumns, "depth"))
_STEP = tl.constexpr(column(PlaneColumns, "step"))
_BLOCK = tl.constexpr(PLACES)

#: Largest whole number of two digits.
MOST = tl.constexpr(127 * 256.0)
_LOG_MOST = tl.constexpr(math.log2(127 * 256.0))
#: Stands for the largest of numbers that are all 0.
TINY = tl.constexpr(2.0**-100)
#: A whole number is the lower bits of itself plus 1.5 · 2^23. With 128 more, its bytes are the
#: upper digit, and the lower one with its sign turned.
_MAGIC = tl.constexpr(1.5 * 2**23 + 128)
#: What 0 is as such.
ZERO = tl.constexpr(0x4B400080)
_ASSEMBLY = tl.constexpr(
    "{ .reg .b32 x, y; "
    "prmt.b32 x, $2, $3, 0x5140; prmt.b32 y, $4, $5, 0x5140; "
    "prmt.b32 $0, x, y, 0x7632; prmt.b32 x, x, y, 0x5410; xor.b32 $1, x, 0x80808080; }"
)


@triton.jit
def biased(numbers):
    """Return the nearest whole numbers, `ZERO` more, as int32."""
    return (numbers + _MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def headroom(largest):
    """Return log2 of a factor by which numbers up to `largest` are at most `MOST`.

    A factor of two less than could be, at most: by the power of two behind the number's own.
    """
    behind = (largest.to(tl.int32, bitcast=True) >> 23) - 126
    return _LOG_MOST - behind.to(tl.float32)


@triton.jit
def digits(numbers, FAST: tl.constexpr):
    """Return float32 numbers ``[n, heads]``, at most `MOST`, as int8 ``[n, 2 · heads]``."""
    whole = biased(numbers)
    if FAST:
        upper, lower = tl.inline_asm_elementwise(
            _ASSEMBLY, "=&r,=r,r,r,r,r", [whole], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        upper = (whole >> 8).to(tl.int8)
        lower = ((whole & 255) - 128).to(tl.int8)
    return tl.reshape(tl.join(upper, lower), (numbers.shape[0], 2 * numbers.shape[1]))


@triton.jit
def query_digits(
    query,
    width,
    first_head,
    KINDS: tl.constexpr,
    KEYS: tl.constexpr,
    PLANES: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Load a group's queries as digits: upper ones in every second column, the lower ones between.

    A tuple of ``[DEPTH, 2 · heads]`` by plane, one of the sums over each plane of the numbers that
    they make, and the largest of each query, which is `MOST` as digits.
    """
    digit = tl.arange(0, 2 * HEADS)
    whose = first_head + digit // 2
    known = whose < GROUP
    loaded = ()
    largest = tl.zeros([2 * HEADS], tl.float32)
    for number in tl.static_range(PLANES):
        place = tl.arange(0, KINDS[KEYS + number * _PLANE + _DEPTH])
        at = query + whose[None, :] * width + KINDS[KEYS + number * _PLANE + _START]
        there = (place < KINDS[KEYS + number * _PLANE + _WIDTH])[:, None] & known[None, :]
        own = tl.load(at + place[:, None], mask=there, other=0.0).to(tl.float32)
        own *= KINDS[KEYS + number * _PLANE + _STEP]
        largest = tl.maximum(largest, tl.max(tl.abs(own), 0))
        loaded += (own,)
    largest = tl.maximum(largest, TINY)
    up = MOST / largest
    queries = ()
    totals = ()
    for number in tl.static_range(PLANES):
        own = loaded[number] * up[None, :]
        whole = biased(own)
        both = tl.where((digit % 2 == 0)[None, :], whole >> 8, (whole & 255) - 128)
        queries += (both.to(tl.int8),)
        totals += (tl.sum(own + _MAGIC - _MAGIC, 0),)
    return queries, totals, largest


@triton.jit
def joined(products):
    """Return products with digits, ``[n, 2 · heads]``, as float32 ``[n, heads]``."""
    both = tl.reshape(products, (products.shape[0], products.shape[1] // 2, 2))
    upper, lower = tl.split(both)
    return ((upper << 8) + lower).to(tl.float32)


@triton.jit
def single(twice):
    """Return a number per head of one per digit."""
    found, _ = tl.split(tl.reshape(twice, (twice.shape[0] // 2, 2)))
    return found


@triton.jit
def by_row(places: tl.constexpr):
    """Return the place that each row of the products with keys is.

    A lane has rows r, r + 8, r + 16 and r + 24 of every block: as places they are neighbours, whose
    weights are the bytes of a word in the product with values.
    """
    row = tl.arange(0, places)
    return row // _BLOCK * _BLOCK + row % 8 * 4 + row % _BLOCK // 8


@triton.jit
def by_place(weights):
    """Return ``[rows, n]`` in the order of places."""
    BLOCKS: tl.constexpr = weights.shape[0] // _BLOCK
    apart = tl.reshape(weights, (BLOCKS, 4, 8, weights.shape[1]))
    return tl.reshape(tl.permute(apart, (0, 2, 1, 3)), weights.shape)
