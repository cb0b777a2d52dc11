"""The assembly that makes numbers of stored bytes, run by a small interpreter of PTX.

Triton's own interpreter knows no assembly and a machine without a GPU runs none, so this is where
each byte is shown to become the number that it stands for.
"""

import re
from functools import partial

import pytest
import torch

from kvprof.kernels.quantized import column_kernel, int8_hi_lo, unpack
from kvprof.kernels.quantized.codes import FP8
from kvprof.kernels.quantized.unpack import missing_factor

WORD = 0xFFFFFFFF


def _permuted(low: int, high: int, selector: int) -> int:
    octets = [(low >> 8 * n) & 255 for n in range(4)] + [(high >> 8 * n) & 255 for n in range(4)]
    return sum(octets[(selector >> 4 * n) & 7] << 8 * n for n in range(4))


def _bitwise(a: int, b: int, c: int, table: int) -> int:
    found = 0
    for index in range(8):
        if table >> index & 1:
            own = (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
            found |= own
    return found & WORD


def _pair(word: int, dtype: torch.dtype) -> torch.Tensor:
    halves = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16)
    return halves.view(dtype)


def _fused(a: int, b: int, c: int, dtype: torch.dtype) -> int:
    x, y, z = (_pair(word, dtype).double() for word in (a, b, c))
    low, high = (x * y + z).to(dtype).view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def _half(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.float16))


def ran(assembly: str, registers: dict[str, int]) -> dict[str, int | float]:
    """Run straight-line PTX on registers, and return what all of them are then."""
    found: dict[str, int | float] = dict(registers)

    def value(name: str) -> int | float:
        return found[name] if name in found else int(name, 0)

    for line in filter(None, (part.strip() for part in assembly.strip(" {}").split(";"))):
        if line.startswith(".reg"):
            continue
        operation, operands = line.split(" ", 1)
        if operands.startswith("{"):
            halves, source = operands[1:].split("}, ")
            assert operation == "mov.b32"
            word = int(value(source))
            for name, own in zip(halves.split(", "), (word & 0xFFFF, word >> 16), strict=True):
                found[name] = own
            continue
        target, *names = (name.strip() for name in operands.split(","))
        given = [value(name) for name in names]
        found[target] = {
            "mov.b32": lambda a: a,
            "and.b32": lambda a, b: a & b,
            "shr.b32": lambda a, b: a >> b,
            "shl.b32": lambda a, b: a << b & WORD,
            "xor.b32": lambda a, b: a ^ b,
            "prmt.b32": _permuted,
            "lop3.b32": _bitwise,
            "cvt.f32.f16": _half,
            "fma.rn.bf16x2": partial(_fused, dtype=torch.bfloat16),
            "fma.rn.f16x2": partial(_fused, dtype=torch.float16),
        }[operation](*given)
    return found


def execute(assembly: str, word: int, *further: int) -> tuple[int, int]:
    """Run straight-line PTX on ``$2``, or ``$1`` where it is given; return ``$0`` and ``$1``.

    With further words on ``$3`` and so on.
    """
    registers = {"$1": word, "$2": word}
    found = ran(assembly, registers | {f"${number}": own for number, own in enumerate(further, 3)})
    return int(found["$0"]), int(found["$1"])


def results(name: str, word: int, dtype: torch.dtype) -> torch.Tensor:
    assembly = getattr(unpack, name).value
    low, high = execute(assembly, word)
    return torch.cat([_pair(low, dtype), _pair(high, dtype)]).double()


NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
WORDS = [
    sum((n * k + 7 * s) % 256 << 8 * s for s, k in enumerate((1, 3, 5, 7))) for n in range(256)
]


def octets(word: int) -> torch.Tensor:
    return torch.tensor([word >> 8 * n & 255 for n in range(4)], dtype=torch.uint8)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_come_out_in_order_about_the_middle_of_their_container(bits, dtype):
    assert missing_factor(bits, NAMES[dtype]) == 1.0
    for slot in range(8 // bits):
        suffix = f"_{slot}" if bits < 8 else ""
        name = f"_{bits}{suffix}_{NAMES[dtype].upper()}"
        for word in WORDS:
            wanted = (octets(word).int() >> (bits * slot)) & (2**bits - 1)
            assert torch.equal(results(name, word, dtype), wanted.double() - 2 ** (bits - 1))


@pytest.mark.parametrize("dtype", NAMES)
def test_e4m3_comes_out_with_its_denormals(dtype):
    factor = missing_factor(FP8, NAMES[dtype])
    for word in WORDS:
        given = octets(word).view(torch.float8_e4m3fn).double()
        found = results(f"_FP8_{NAMES[dtype].upper()}", word, dtype) * factor
        number = ~given.isnan()
        assert torch.equal(found[number], given[number])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_of_columns_are_whole_numbers_where_they_lie(bits):
    for at in range(0, 8, bits):
        for word in WORDS:
            # As it is stored, with the highest bit of every byte turned.
            found, _ = execute(column_kernel._assembly(bits, at), word ^ 0x80808080)
            code = octets(word).int() >> at & (2**bits - 1)
            wanted = (code - 2 ** (bits - 1) if at + bits == 8 else code) << at
            assert torch.equal(octets(found).view(torch.int8).int(), wanted)


@pytest.mark.parametrize("mask", [0b01, 0b10, 0b11])
def test_of_every_slot_the_bits_are_left_that_a_mask_has_of_the_first(mask):
    for slot in range(4):
        text = column_kernel._masked_assembly(slot)
        for word in WORDS:
            found = ran(text, {"$1": word, "$2": mask * 0x01010101})
            assert torch.equal(octets(int(found["$0"])), octets(word) & mask << 2 * slot)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_of_rows_are_the_highest_bits_of_whole_numbers(bits):
    for slot in range(8 // bits):
        for word in WORDS:
            found, _ = execute(unpack._top_assembly(bits, slot), word)
            code = octets(word).int() >> bits * slot & (2**bits - 1)
            wanted = (code - 2 ** (bits - 1)) * 2 ** (8 - bits)
            assert torch.equal(octets(found).view(torch.int8).int(), wanted)


def test_four_numbers_come_apart_into_two_digits():
    numbers = torch.tensor([0, 1, 127, 128, 129, 255, 256, 32383, 32512, -1, -128, -129, -32512])
    for four in numbers.repeat(4)[:48].view(-1, 4):
        words = (four.float() + int8_hi_lo._MAGIC.value).view(torch.int32).tolist()
        found = execute(int8_hi_lo._ASSEMBLY.value, *words)
        upper, lower = (octets(word).view(torch.int8).long() for word in found)
        assert torch.equal(256 * upper + lower, four)


def test_of_four_numbers_one_digit_comes():
    numbers = torch.tensor([0, 1, 127, 128, 129, 255, 256, 32383, 32512, -1, -128, -129, -32512])
    for four in numbers.repeat(4)[:48].view(-1, 4):
        words = (four.float() + int8_hi_lo._MAGIC.value).view(torch.int32).tolist()
        found, turned = [], int8_hi_lo._TURNED.value & WORD
        for choice, change in ((int8_hi_lo._UPPER, 0), (int8_hi_lo._LOWER, turned)):
            # Of four numbers, four choices and four changes the first of each is read.
            given = [*words, choice.value, -1, -1, -1, change, -1, -1, -1]
            own = ran(int8_hi_lo._CHOICE.value, {f"${n}": word for n, word in enumerate(given, 1)})
            found.append(octets(int(own["$0"])).view(torch.int8).long())
        assert torch.equal(256 * found[0] + found[1], four)


def test_every_assembly_names_what_it_reads():
    # The interpreter above knows all the operations that there are.
    known = {
        "mov.b32",
        "and.b32",
        "shr.b32",
        "prmt.b32",
        "lop3.b32",
        "fma.rn.bf16x2",
        "fma.rn.f16x2",
    }
    texts = [
        text.value
        for name, text in vars(unpack).items()
        if re.match(r"_(2|4|8|FP8)_", name) and isinstance(getattr(text, "value", None), str)
    ]
    assert len(texts) == 16
    for text in texts:
        found = {line.strip(" {}").split(" ")[0] for line in text.split(";")}
        assert found - {"", ".reg"} <= known


@pytest.mark.parametrize("first", range(0, 256, 4))
def test_scales_of_a_word_are_what_e4m3_says(first: int) -> None:
    """Four of them, less their signs, over a power of two."""
    octets = torch.arange(first, first + 4, dtype=torch.uint8)
    word = int.from_bytes(bytes(octets.tolist()), "little")
    found = ran(column_kernel._SCALES.value, {"$4": word})
    bias = column_kernel._E4M3_TO_F16_BIAS.value
    wanted = (octets & 127).view(torch.float8_e4m3fn).float() / bias
    for number, own in enumerate(wanted.tolist()):
        # The largest code is no number, and no scale.
        assert found[f"${number}"] == own or own != own
