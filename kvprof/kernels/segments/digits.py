# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Numbers as two digits of a byte, in adjacent columns of a product of whole numbers.

A number up to `MOST` is ``256 · upper + lower`` with both within an int8. A product with both
digits' columns gives two sums that lie side by side in a lane, where they are joined.
"""

import math

import triton
import triton.language as tl

__all__ = ["LOG_MOST", "MOST", "TINY", "digits", "joined", "query_digits"]

#: Largest whole number of two digits.
MOST = tl.constexpr(127 * 256.0)
LOG_MOST = tl.constexpr(math.log2(127 * 256.0))
#: Stands for the largest of numbers that are all 0.
TINY = tl.constexpr(2.0**-100)
#: A whole number is the lower bits of itself plus 1.5 · 2^23. With 128 more, its bytes are the
#: upper digit, and the lower one with its sign turned.
_MAGIC = tl.constexpr(1.5 * 2**23 + 128)
_ASSEMBLY = tl.constexpr(
    "{ .reg .b32 x, y; "
    "prmt.b32 x, $2, $3, 0x5140; prmt.b32 y, $4, $5, 0x5140; "
    "prmt.b32 $0, x, y, 0x7632; prmt.b32 x, x, y, 0x5410; xor.b32 $1, x, 0x80808080; }"
)


@triton.jit
def _biased(numbers):
    return (numbers + _MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def digits(numbers, FAST: tl.constexpr):
    """Return float32 numbers ``[n, heads]``, at most `MOST`, as int8 ``[n, 2 · heads]``."""
    whole = _biased(numbers)
    if FAST:
        upper, lower = tl.inline_asm_elementwise(
            _ASSEMBLY, "=&r,=r,r,r,r,r", [whole], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        upper = (whole >> 8).to(tl.int8)
        lower = ((whole & 255) - 128).to(tl.int8)
    return tl.reshape(tl.join(upper, lower), (numbers.shape[0], 2 * numbers.shape[1]))


@triton.jit
def query_digits(numbers, digit):
    """Return every second column of ``[n, 2 · heads]`` as upper digits, the others as lower ones.

    And the whole numbers that they make, as float32.
    """
    whole = _biased(numbers)
    own = tl.where((digit % 2 == 0)[None, :], whole >> 8, (whole & 255) - 128).to(tl.int8)
    return own, numbers + _MAGIC - _MAGIC


@triton.jit
def joined(products):
    """Return products with digits, ``[n, 2 · heads]``, as float32 ``[n, heads]``."""
    both = tl.reshape(products, (products.shape[0], products.shape[1] // 2, 2))
    upper, lower = tl.split(both)
    return ((upper << 8) + lower).to(tl.float32)
