# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Split integers up to `MOST` into ``256 · upper + lower``, int8 digits in adjacent columns."""

import math

import triton
import triton.language as tl

from kvprof.analysis.uniform import uniform_step
from kvprof.kernels.quantized.operand_layout import PLACES
from kvprof.kernels.quantized.tables import PlaneColumns
from kvprof.kernels.tables import column

__all__ = [
    "MOST",
    "ZERO",
    "biased",
    "bits_of",
    "by_place",
    "by_row",
    "digits",
    "headroom",
    "in_lanes",
    "joined",
    "query_digits",
    "single",
    "summed",
    "without_end",
]

_PLANE = tl.constexpr(len(PlaneColumns._fields))
_START = tl.constexpr(column(PlaneColumns, "start"))
_WIDTH = tl.constexpr(column(PlaneColumns, "width"))
_BITS = tl.constexpr(column(PlaneColumns, "bits"))
_DEPTH = tl.constexpr(column(PlaneColumns, "depth"))
_BLOCK = tl.constexpr(PLACES)
#: Of codes, by their bits; rows of codes have none.
_STEPS = {0: 1.0} | {bits: uniform_step(bits) for bits in (2, 3, 4, 8)}

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
#: Which byte of each of two words is a digit, and by what four lower ones are changed then.
_UPPER, _LOWER = tl.constexpr(0x51), tl.constexpr(0x40)
_TURNED = tl.constexpr(0x80808080 - 2**32)
#: One byte of each of four words, of all the upper digit or of all the lower one.
_CHOICE = tl.constexpr(
    "{ .reg .b32 x, y; prmt.b32 x, $1, $2, $5; prmt.b32 y, $3, $4, $5; "
    "prmt.b32 x, x, y, 0x5410; xor.b32 $0, x, $9; }"
)


@triton.jit
def biased(numbers):
    """Return the nearest whole numbers, `ZERO` more, as int32."""
    return (numbers + _MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def headroom(largest):
    """Return log2 of a power of two by which numbers up to `largest` stay within `MOST`."""
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
def _one_digit(whole, upper, FAST: tl.constexpr):
    """Return one digit of whole numbers, as `biased` has them, as int8: the upper or lower one."""
    if FAST:
        # The four words of an operation are of one row, and so of one digit: they are neighbours in
        # a thread, whose columns are the columns of a query.
        choice = tl.broadcast_to(tl.where(upper, _UPPER, _LOWER), whole.shape)
        change = tl.broadcast_to(tl.where(upper, 0, _TURNED), whole.shape)
        found = tl.inline_asm_elementwise(
            _CHOICE,
            "=r,r,r,r,r,r,r,r,r,r,r,r,r",
            [whole, choice, change],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        found = tl.where(upper, whole >> 8, (whole & 255) - 128).to(tl.int8)
    return found


@triton.constexpr_function
def bits_of(kinds, at, planes, start):
    """Return the bits of a K column's codes (3 bits: two planes together), 0 for rows of codes."""
    found = 0
    for number in range(planes):
        own = at + number * _PLANE.value
        first = kinds[own + _START.value]
        if first <= start < first + kinds[own + _WIDTH.value]:
            found += kinds[own + _BITS.value]
    return found


@triton.constexpr_function
def _block(kinds, at, number, part):
    """Return which sixteen columns of K those of a plane are."""
    return kinds[at + number * _PLANE.value + _START.value] // 16 + part


@triton.constexpr_function
def _step_of(kinds, at, planes, number, part):
    """Return the step of the codes of sixteen columns of a plane of K."""
    return _STEPS[bits_of(kinds, at, planes, 16 * _block(kinds, at, number, part))]


@triton.constexpr_function
def _lower(kinds, at, planes, number, part):
    """Return whether sixteen columns of a plane are the lower bits of 3."""
    bits = bits_of(kinds, at, planes, 16 * _block(kinds, at, number, part))
    return bits == 3 and kinds[at + number * _PLANE.value + _BITS.value] == 2


@triton.constexpr_function
def _columns(kinds, at, planes):
    """Return the columns of K."""
    ends = [at + number * _PLANE.value for number in range(planes)]
    return max(kinds[own + _START.value] + kinds[own + _WIDTH.value] for own in ends)


@triton.jit
def _top_factor(place, WIDTH: tl.constexpr, PART: tl.constexpr):
    """Return the factor of queries for the highest of 3 bits: 4, or 2 in a plane's second half."""
    if WIDTH == 16:
        found = tl.where(place < 8, 4.0, 2.0)
    else:
        found = tl.full([1, 16], 4.0 if 32 * PART < WIDTH else 2.0, tl.float32)
    return found


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
    FAST: tl.constexpr,
):
    """Load a group's queries as digits: upper ones in every second column, the lower ones between.

    By 16 columns, of which a thread has four neighbours: as bytes they are the word that it needs
    in a product, and no thread asks another for any. A thread with a column of every query took
    three times the instructions, which every program reads anew.
    """
    digit = tl.arange(0, 2 * HEADS)
    whose = first_head + digit // 2
    known = (whose < GROUP)[:, None]
    place = tl.arange(0, 16)[None, :]
    at = query + (whose * width)[:, None] + place
    loaded = ()
    for begin in tl.static_range(0, _columns(KINDS, KEYS, PLANES), 16):
        loaded += (tl.load(at + begin, mask=known, other=0.0).to(tl.float32),)
    most = tl.zeros([2 * HEADS, 16], tl.float32)
    for number in tl.static_range(PLANES):
        for part in tl.static_range(KINDS[KEYS + number * _PLANE + _WIDTH] // 16):
            # The lower bits of 3 meet smaller ones than the highest.
            if not _lower(KINDS, KEYS, PLANES, number, part):
                size = tl.abs(loaded[_block(KINDS, KEYS, number, part)])
                size *= _step_of(KINDS, KEYS, PLANES, number, part)
                if KINDS[KEYS + number * _PLANE + _BITS] % 2 == 1:
                    size *= _top_factor(place, KINDS[KEYS + number * _PLANE + _WIDTH], part)
                most = tl.maximum(most, size)
    largest = tl.maximum(tl.max(most, 1), TINY)
    up = 1.0 / largest * MOST
    upper = (digit % 2 == 0)[:, None]
    nothing = tl.zeros([2 * HEADS, 16], tl.int8)
    queries = ()
    parts = ()
    for number in tl.static_range(PLANES):
        whole = ()
        own = ()
        for part in tl.static_range(KINDS[KEYS + number * _PLANE + _WIDTH] // 16):
            factor = (up * _step_of(KINDS, KEYS, PLANES, number, part))[:, None]
            if KINDS[KEYS + number * _PLANE + _BITS] == 1:
                factor *= _top_factor(place, KINDS[KEYS + number * _PLANE + _WIDTH], part)
            whole += (biased(loaded[_block(KINDS, KEYS, number, part)] * factor),)
            own += (_one_digit(whole[part], upper, FAST),)
        low = own
        for _ in tl.static_range(len(own), KINDS[KEYS + number * _PLANE + _DEPTH] // 16):
            low += (nothing,)
        both = (_row(low),)
        if KINDS[KEYS + number * _PLANE + _BITS] == 1:
            parts += (_apart(whole, own, place, upper, nothing, FAST),)
        elif KINDS[KEYS + number * _PLANE + _BITS] == 3:
            factor = (up * _step_of(KINDS, KEYS, PLANES, number, 0))[:, None]
            larger = loaded[_block(KINDS, KEYS, number, 0)] * factor * _top_factor(place, 16, 0)
            whole = (biased(larger),)
            tops = (_one_digit(whole[0], upper, FAST),)
            parts += (both + _apart(whole, tops, place, upper, nothing, FAST),)
            both = (_row(own + tops),)
        else:
            parts += (both,)
            if len(own) == 1:
                both += (_row((nothing, own[0])),)
        queries += (both,)
    return queries, parts, largest


@triton.jit
def _apart(whole, tops, place, upper, nothing, FAST: tl.constexpr):
    """Return the digits of a plane's first half and of its second, 32 columns or more each."""
    HALF: tl.constexpr = len(tops) // 2
    if HALF == 0:
        first = (_one_digit(tl.where(place < 8, whole[0], ZERO), upper, FAST), nothing)
        second = (_one_digit(tl.where(place < 8, ZERO, whole[0]), upper, FAST), nothing)
    elif HALF == 1:
        first = (tops[0], nothing)
        second = (tops[1], nothing)
    else:
        first = ()
        second = ()
        for number in tl.static_range(HALF):
            first += (tops[number],)
            second += (tops[HALF + number],)
    return _row(first), _row(second)


@triton.jit
def _row(blocks):
    """Return two, four or eight blocks of columns beside each other, and turned."""
    found = blocks
    for _ in tl.static_range(_halvings(len(blocks))):
        pairs = ()
        for number in tl.static_range(len(found) // 2):
            pairs += (_beside(found[2 * number], found[2 * number + 1]),)
        found = pairs
    return tl.trans(found[0])


@triton.constexpr_function
def _halvings(count):
    """Return how often a power of two can be halved."""
    return count.bit_length() - 1


@triton.jit
def _beside(left, right):
    """Return ``[rows, 2 · columns]``: the columns of one behind those of the other."""
    both = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(both, (left.shape[0], 2 * left.shape[1]))


@triton.jit
def summed(query, sums, worth):
    """Add a plane's digits, times `worth`, to ``[16, 2 · heads]``; a product avoids shuffles."""
    return tl.dot(worth, query, sums, out_dtype=tl.int32)


@triton.jit
def joined(products, WHOLE: tl.constexpr = True):
    """Return products with digits, ``[n, 2 · heads]``, as float32 ``[n, heads]``."""
    both = tl.reshape(products, (products.shape[0], products.shape[1] // 2, 2))
    upper, lower = tl.split(both)
    if WHOLE:
        found = ((upper << 8) + lower).to(tl.float32)
    else:
        found = upper.to(tl.float32) * 256.0 + lower.to(tl.float32)
    return found


@triton.jit
def single(twice):
    """Return a number per head of one per digit."""
    found, _ = tl.split(tl.reshape(twice, (twice.shape[0] // 2, 2)))
    return found


@triton.jit
def in_lanes(numbers):
    """Sum ``[rows, heads]`` over the rows that a lane has: ``[8, heads]``."""
    apart = tl.reshape(numbers, (numbers.shape[0] // 8, 8, numbers.shape[1]))
    return tl.sum(apart, 0)


@triton.jit
def by_row(places: tl.constexpr):
    """Return each row's place in the products with keys, so that a lane's weights fill a word."""
    row = tl.arange(0, places)
    return row // _BLOCK * _BLOCK + row % 8 * 4 + row % _BLOCK // 8


@triton.jit
def by_place(weights):
    """Return ``[rows, n]`` in the order of places."""
    BLOCKS: tl.constexpr = weights.shape[0] // _BLOCK
    apart = tl.reshape(weights, (BLOCKS, 4, 8, weights.shape[1]))
    return tl.reshape(tl.permute(apart, (0, 2, 1, 3)), weights.shape)


@triton.jit
def without_end(numbers, left, OTHER: tl.constexpr, SLOTS: tl.constexpr):
    """Return numbers by slot with OTHER where a row has ended, `left` tokens from there on."""
    found = ()
    for slot in tl.static_range(SLOTS):
        found += (tl.where(left > slot, numbers[slot], OTHER),)
    return found
