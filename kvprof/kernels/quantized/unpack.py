# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""From stored bytes to numbers that tensor cores take, in as few instructions as possible.

Converting an integer costs as much as four multiplications. So a code is put behind the high byte
of a number whose mantissa has room for it: 0x4300 | x is 128 + x in bfloat16 while x < 128, and
0x6400 | x is 1024 + x in float16 while x < 1024; one byte permutation makes two of them. What was
put there is subtracted with half the container's numbers, two at a time and exactly, so that codes
come out about 0: left for the end, it would dwarf the sums of a long context, which tensor cores
truncate. 8 bits do not fit bfloat16's mantissa: there the low seven are put behind 128, and the top
bit chooses between -256 and -128, which is added: the code less 128, exactly. e4m3 is shifted into
place and comes out 2^120 (bfloat16) or 2^8 (float16) times too small, denormals included. Who
multiplies takes that factor out again, outside of the loop over elements (`missing_factor`).

Triton's interpreter knows no inline assembly: there the same bits are made the long way.
"""

import triton
import triton.language as tl

from kvprof.kernels.quantized.codes import E4M3_TO_F32_BIAS, FP8, FULL

__all__ = ["codes", "half", "halves", "missing_factor", "rounded", "top_codes"]

_FULL = tl.constexpr(FULL)
_FP8 = tl.constexpr(FP8)
_F32_BIAS = tl.constexpr(E4M3_TO_F32_BIAS)


def missing_factor(container: int, dtype: str) -> float:
    """Return by how much what `codes` returns is too small: 1 but for e4m3."""
    if container == FP8:
        return {"bf16": E4M3_TO_F32_BIAS, "fp16": 2.0**8, "fp32": 1.0}[dtype]
    return 1.0


_BF16, _FP16 = "0x43434343", "0x64646464"


def _nibbles(shift: int, mask: str, high: str) -> str:
    """Return assembly for four bytes: a code of each, about the middle of its container."""
    kind, one, less = {
        # -(128 + 8), -(128 + 2), -(1024 + 8), -(1024 + 2), twice each
        (_BF16, "0x0f0f0f0f"): ("bf16x2", "0x3f803f80", "0xc308c308"),
        (_BF16, "0x03030303"): ("bf16x2", "0x3f803f80", "0xc302c302"),
        (_FP16, "0x0f0f0f0f"): ("f16x2", "0x3c003c00", "0xe408e408"),
        (_FP16, "0x03030303"): ("f16x2", "0x3c003c00", "0xe402e402"),
    }[high, mask]
    return (
        "{ .reg .b32 x, y, one, less; "
        + f"mov.b32 one, {one}; mov.b32 less, {less}; "
        + (
            f"shr.b32 x, $2, {shift}; and.b32 x, x, {mask}; "
            if shift
            else f"and.b32 x, $2, {mask}; "
        )
        + f"prmt.b32 y, x, {high}, 0x4140; fma.rn.{kind} $0, y, one, less; "
        + f"prmt.b32 y, x, {high}, 0x4342; fma.rn.{kind} $1, y, one, less; }}"
    )


_4_0_BF16 = tl.constexpr(_nibbles(0, "0x0f0f0f0f", _BF16))
_4_1_BF16 = tl.constexpr(_nibbles(4, "0x0f0f0f0f", _BF16))
_4_0_FP16 = tl.constexpr(_nibbles(0, "0x0f0f0f0f", _FP16))
_4_1_FP16 = tl.constexpr(_nibbles(4, "0x0f0f0f0f", _FP16))
_2_0_BF16 = tl.constexpr(_nibbles(0, "0x03030303", _BF16))
_2_1_BF16 = tl.constexpr(_nibbles(2, "0x03030303", _BF16))
_2_2_BF16 = tl.constexpr(_nibbles(4, "0x03030303", _BF16))
_2_3_BF16 = tl.constexpr(_nibbles(6, "0x03030303", _BF16))
_2_0_FP16 = tl.constexpr(_nibbles(0, "0x03030303", _FP16))
_2_1_FP16 = tl.constexpr(_nibbles(2, "0x03030303", _FP16))
_2_2_FP16 = tl.constexpr(_nibbles(4, "0x03030303", _FP16))
_2_3_FP16 = tl.constexpr(_nibbles(6, "0x03030303", _FP16))
_8_FP16 = tl.constexpr(
    "{ .reg .b32 y, one, less; mov.b32 one, 0x3c003c00; mov.b32 less, 0xe480e480; "  # -1152
    + f"prmt.b32 y, $2, {_FP16}, 0x4140; fma.rn.f16x2 $0, y, one, less; "
    + f"prmt.b32 y, $2, {_FP16}, 0x4342; fma.rn.f16x2 $1, y, one, less; }}"
)


def _pairs(selectors: tuple[str, str], body: str) -> str:
    """Return assembly for four bytes, two at a time: `body` makes register o of x."""
    parts = [
        f"prmt.b32 x, $2, 0, {selector}; " + body.replace("OUT", f"${number}")
        for number, selector in enumerate(selectors)
    ]
    return "{ .reg .b32 x, y, z; " + "".join(parts) + "}"


_8_BF16 = tl.constexpr(
    _pairs(
        ("0x4140", "0x4342"),
        # 0xea is (a & b) | c, and 0x6a (a & b) ^ c.
        "lop3.b32 y, x, 0x007f007f, 0x43004300, 0xea; "
        "lop3.b32 z, x, 0x00800080, 0xc380c380, 0x6a; "
        "fma.rn.bf16x2 OUT, y, 0x3f803f80, z; ",
    )
    .replace("0x3f803f80", "one")
    .replace("{ .reg .b32 x, y, z; ", "{ .reg .b32 x, y, z, one; mov.b32 one, 0x3f803f80; ")
)
_E4M3 = "and.b32 z, x, 0x80008000; shr.b32 y, x, SHIFT; lop3.b32 OUT, y, MASK, z, 0xea; "
_FP8_BF16 = tl.constexpr(
    _pairs(("0x1404", "0x3424"), _E4M3.replace("SHIFT", "4").replace("MASK", "0x07f007f0"))
)
_FP8_FP16 = tl.constexpr(
    _pairs(("0x1404", "0x3424"), _E4M3.replace("SHIFT", "1").replace("MASK", "0x3f803f80"))
)
_ROUND_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_ROUND_FP16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_LOW_HALF = tl.constexpr("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, a; }")
_HIGH_HALF = tl.constexpr("{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, b; }")


@triton.jit
def _four(octets, ASSEMBLY: tl.constexpr, BF16: tl.constexpr):
    # "&": the second result is made of the same register after the first, which must not lie there.
    if BF16:
        found = tl.inline_asm_elementwise(
            ASSEMBLY, "=&r,=&r,r", [octets], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        found = tl.inline_asm_elementwise(
            ASSEMBLY, "=&r,=&r,r", [octets], dtype=tl.float16, is_pure=True, pack=4
        )
    return found


@triton.jit
def _fast(octets, SLOT: tl.constexpr, FORMAT: tl.constexpr, BF16: tl.constexpr):
    if FORMAT == _FP8:
        found = _four(octets, _FP8_BF16 if BF16 else _FP8_FP16, BF16)
    elif FORMAT == 8:
        found = _four(octets, _8_BF16 if BF16 else _8_FP16, BF16)
    elif FORMAT == 4:
        if SLOT == 0:
            found = _four(octets, _4_0_BF16 if BF16 else _4_0_FP16, BF16)
        else:
            found = _four(octets, _4_1_BF16 if BF16 else _4_1_FP16, BF16)
    elif SLOT == 0:
        found = _four(octets, _2_0_BF16 if BF16 else _2_0_FP16, BF16)
    elif SLOT == 1:
        found = _four(octets, _2_1_BF16 if BF16 else _2_1_FP16, BF16)
    elif SLOT == 2:
        found = _four(octets, _2_2_BF16 if BF16 else _2_2_FP16, BF16)
    else:
        found = _four(octets, _2_3_BF16 if BF16 else _2_3_FP16, BF16)
    return found


@triton.jit
def _plain(octets, SLOT: tl.constexpr, FORMAT: tl.constexpr, FP16: tl.constexpr):
    """Make the numbers of `_fast` the long way, or float32."""
    if FORMAT == _FP8:
        if FP16:
            word = octets.to(tl.uint16)
            found = (((word & 0x7F) << 7) | ((word & 0x80) << 8)).to(tl.float16, bitcast=True)
        else:
            word = octets.to(tl.uint32)
            found = (((word & 0x7F) << 20) | ((word & 0x80) << 24)).to(tl.float32, bitcast=True)
            found = found * _F32_BIAS
    else:
        word = (octets >> (FORMAT * SLOT)) & ((1 << FORMAT) - 1)
        found = word.to(tl.float32) - (1 << (FORMAT - 1))
        if FP16:
            found = found.to(tl.float16)
    return found


@triton.jit
def codes(
    octets, SLOT: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr
):
    """Return the codes of one slot of a byte as numbers of DTYPE about 0.

    Those of e4m3 lack `missing_factor`.
    """
    if FORMAT == _FULL:
        found = octets
    elif FAST:
        found = _fast(octets, SLOT, FORMAT, tl.bfloat16 == DTYPE)
    else:
        found = _plain(octets, SLOT, FORMAT, tl.float16 == DTYPE)
    return found


@triton.constexpr_function
def _top_assembly(bits, slot):
    """Return assembly for four bytes: a slot's code of each in the highest bits, less 128."""
    shift = 8 - bits * (slot + 1)
    mask = f"{(256 - (1 << 8 - bits)) * 0x01010101:#010x}"
    # 0x6a is (a & b) ^ c.
    last = f"lop3.b32 $0, {'x' if shift else '$1'}, {mask}, 0x80808080, 0x6a;"
    return f"{{ .reg .b32 x; shl.b32 x, $1, {shift}; {last} }}" if shift else last


@triton.jit
def top_codes(octets, SLOT: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr):
    """Return the codes of one slot of a byte as int8, times 2^(8 - BITS), about 0."""
    if FAST:
        TEXT: tl.constexpr = _top_assembly(BITS, SLOT)
        found = tl.inline_asm_elementwise(
            TEXT, "=r,r", [octets], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        code = (octets >> (BITS * SLOT)) & ((1 << BITS) - 1)
        found = ((code << (8 - BITS)) ^ 128).to(tl.int8, bitcast=True)
    return found


@triton.jit
def half(word, HIGH: tl.constexpr, FAST: tl.constexpr):
    """Return the low or high float16 of a 32-bit word as float32."""
    if FAST:
        found = tl.inline_asm_elementwise(
            _HIGH_HALF if HIGH else _LOW_HALF,
            "=r,r",
            [word],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        bits = (word >> 16 if HIGH else word) & 0xFFFF
        found = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return found


@triton.jit
def halves(
    pointer, places, AT: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, FAST: tl.constexpr
):
    """Load float16 numbers of all slots of some places; a tuple of float32 vectors."""
    found = ()
    block = places // 32
    place = places % 32
    if SLOTS == 1:
        found += (tl.load(pointer + (block * BLOCK + place) + AT).to(tl.float32),)
    else:
        words = pointer.to(tl.pointer_type(tl.uint32), bitcast=True)
        at = words + (block * (BLOCK // 2) + place * (SLOTS // 2))
        for pair in tl.static_range(SLOTS // 2):
            word = tl.load(at + (AT // 2 + pair))
            found += (half(word, False, FAST), half(word, True, FAST))
    return found


@triton.jit
def rounded(values, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Round float32 to DTYPE, two at a time."""
    if FAST:
        if tl.bfloat16 == DTYPE:
            found = tl.inline_asm_elementwise(
                _ROUND_BF16, "=r,r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            found = tl.inline_asm_elementwise(
                _ROUND_FP16, "=r,r,r", [values], dtype=tl.float16, is_pure=True, pack=2
            )
    else:
        found = values.to(DTYPE)
    return found
