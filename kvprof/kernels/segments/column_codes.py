# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""From bytes of sides with bits by column to numbers that tensor cores take.

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

__all__ = ["byte_order", "column_codes", "column_factor", "row_scales"]


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
    for slot in tl.static_range(4):
        # e4m3 less its sign, and 120 less in the exponent.
        own = ((word >> (8 * slot)) & 0x7F) << 20
        found += (own.to(tl.float32, bitcast=True) * 1.329227995784916e36,)
    return found
