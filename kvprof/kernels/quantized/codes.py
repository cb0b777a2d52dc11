"""Numbers as rows of them are stored: affine codes of 8, 4, 3 or 2 bits, e4m3, full precision.

The affine rule is that of `kvprof.runtime.codecs`, ``x = zero + scale · code`` with the minimum as
zero and the range over ``2^bits - 1`` as scale for a group of columns of one token; but counted
from the middle, ``x = middle + scale · (stored - c / 2)`` with ``middle = zero + scale ·
2^(bits - 1)`` and c the numbers that a container holds. Sums over a long context then have terms of
either sign; counted from the minimum they would be large numbers that cancel, and what tensor cores
round away would be larger than what is left. Middle and scale are rounded to float16 before codes
are made.

Other layouts have their own formats and arithmetic (`kvprof.kernels.quantized.layout_registry`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BITS_PER_COLUMN",
    "COLUMNS",
    "COLUMN_BITS",
    "COLUMN_FORMATS",
    "E4M3_TINY",
    "E4M3_TO_F32_BIAS",
    "FORMATS",
    "FP8",
    "FULL",
    "ROW_FORMATS",
    "Bits",
    "NumberFormat",
    "Quantised",
    "e4m3",
    "encode",
    "from_bytes",
    "in_bytes",
    "numbers",
    "quantise",
    "restored",
    "spread",
]

#: Bits of a code, ``"fp8"`` for e4m3 without a scale, the name of another layout's format, None
#: for the run's dtype.
Bits = int | str | None

#: What stands for full precision and for e4m3 where a kernel takes a number.
FULL = 0
FP8 = -8

#: What refusals call a format with bits of each column's own.
BITS_PER_COLUMN = "bits per column"
#: What stands for bits by column where a kernel takes the number of a format.
COLUMNS = -1
#: What a column can have, in the order of runs.
COLUMN_BITS = (8, 4, 3, 2)

#: Scale of the exponent bias from e4m3 to float32, and the least normal number of e4m3.
E4M3_TO_F32_BIAS, E4M3_TINY = 2.0**120, 2.0**-6


@dataclass(frozen=True)
class NumberFormat:
    """How the numbers of a side are stored."""

    #: What stands for it among the whole numbers that operators and compiled kernels take.
    number: int
    #: Bits of a stored code; 0 at full precision. A byte holds 1, 2 or 4 codes, so 3 bits lie in
    #: the container of 4. The fewest that there are, where columns differ in them.
    container: int
    #: What a group of columns of a token has beside its codes, in the order of a block.
    kept: tuple[str, ...] = ()
    kept_dtype: str | None = None  # of that, as quantisers name it

    @property
    def counted(self) -> bool:
        """Whether its codes are whole numbers about the middle of their container."""
        return self.number > 0

    @property
    def read_as(self) -> int:
        """What stands for it where codes are read: containers of one width are read alike."""
        return self.container if self.counted else self.number


#: Those of rows; `encode` and `numbers` are their arithmetic, and `kvprof.kernels.quantized.move`
#: and `unpack` the same in Triton.
ROW_FORMATS: dict[Bits, NumberFormat] = {
    None: NumberFormat(FULL, 0),
    "fp8": NumberFormat(FP8, 8),
    **{
        bits: NumberFormat(bits, 4 if bits == 3 else bits, ("scale", "middle"), "float16")
        for bits in (2, 3, 4, 8)
    },
}

#: Those of columns with bits of their own (`kvprof.kernels.quantized.columns`): four tokens to a
#: place whatever bits there are, as many as in a byte of the fewest.
COLUMN_FORMATS: dict[Bits, NumberFormat] = {
    "uniform-rms": NumberFormat(COLUMNS, 2, ("scale",), "float8_e4m3fn")
}

#: All formats that the kernels have. No two have the same number.
FORMATS = ROW_FORMATS | COLUMN_FORMATS

_E4M3_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Quantised(NamedTuple):
    """Rows as codes."""

    codes: Tensor  # `[..., width]` uint8, about the middle of their container
    scale: Tensor  # `[..., groups]` float16
    middle: Tensor


def encode(rows: Tensor, bits: Bits, columns: int | None) -> tuple[Tensor, ...]:
    """Return rows ``[..., width]`` as uint8 codes, then what `NumberFormat.kept` names.

    Parameters
    ----------
    rows : Tensor
    bits : int or "fp8"
    columns : int or None
        That share a scale; None for the whole row.
    """
    if bits == "fp8":
        return (e4m3(rows),)
    assert isinstance(bits, int)
    return quantise(rows, bits, columns)


def numbers(codes: Tensor, bits: Bits) -> Tensor:
    """Return codes as float32 numbers, which a scale and a middle make values of where kept."""
    if bits == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    half: int = 2 ** (ROW_FORMATS[bits].container - 1)
    return codes.float() - half


def restored(found: Tensor, scale: Tensor | None, middle: Tensor | None) -> Tensor:
    """Return the values of `numbers`, given what their columns keep; None for what they do not."""
    if scale is None:
        return found
    scaled = scale * found
    return scaled if middle is None else middle + scaled


def spread(scales: Tensor, columns: int | None, width: int) -> Tensor:
    """Give every column its group's scale: ``[..., groups]`` to ``[..., width]``."""
    if scales.shape[-1] == 1:
        return scales.expand(*scales.shape[:-1], width)
    return scales.repeat_interleave(columns or width, dim=-1)[..., :width]


def quantise(rows: Tensor, bits: int, columns: int | None) -> Quantised:
    """Quantise rows ``[..., width]`` with a scale and a middle per `columns` of a row.

    Parameters
    ----------
    rows : Tensor
    bits : int
        2, 3, 4 or 8.
    columns : int or None
        That share a scale; None for the whole row.
    """
    width = rows.shape[-1]
    group = columns or width
    values = rows.float()
    missing = -width % group
    # Copies of the last column change neither minimum nor maximum.
    filled = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], missing)], dim=-1)
    grouped = torch.unflatten(filled, -1, (-1, group))
    low, high = grouped.amin(-1), grouped.amax(-1)
    # By a tensor: for a number, a GPU multiplies by its reciprocal and so rounds twice.
    scale = ((high - low) / torch.full_like(low, 2**bits - 1)).to(torch.float16)
    middle = (low + 2 ** (bits - 1) * scale.float()).to(torch.float16)
    wide_middle, wide_scale = (spread(x.float(), columns, width) for x in (middle, scale))
    level = ((values - wide_middle) / torch.where(wide_scale > 0, wide_scale, 1.0)).round()
    half = 2 ** (bits - 1)
    codes = level.clamp(-half, half - 1) + 2 ** (ROW_FORMATS[bits].container - 1)
    return Quantised(codes.to(torch.uint8), scale, middle)


def e4m3(rows: Tensor) -> Tensor:
    """Return the bytes of a saturating cast to e4m3."""
    clamped = rows.clamp(-_E4M3_LARGEST, _E4M3_LARGEST)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8)


def in_bytes(codes: Tensor, bits: int, per_byte: int) -> Tensor:
    """Join codes along dimension -3, ``[..., n * per_byte, i, c]`` to ``[..., n, i, c]`` bytes."""
    parts = torch.unflatten(codes, -3, (-1, per_byte)).unbind(-3)
    joined = parts[0].clone()
    for number, part in enumerate(parts[1:], 1):
        joined |= part << bits * number
    return joined


def from_bytes(octets: Tensor, bits: int, per_byte: int) -> Tensor:
    """Undo `in_bytes`."""
    shifts = bits * torch.arange(per_byte, device=octets.device, dtype=torch.uint8)
    codes = (octets.unsqueeze(-3) >> shifts[:, None, None]) & (2**bits - 1)
    joined: Tensor = codes.flatten(-4, -3)
    return joined
