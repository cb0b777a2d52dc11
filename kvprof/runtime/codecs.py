"""Store rows of latents as tensors: plain, affine codes, codebooks or e4m3.

A codec turns ``[..., N, r]`` into named tensors with tokens (or groups of tokens) in the second to
last dimension, and back. `kvprof.methods.plan` has the formulas.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from kvprof.analysis.uniform import uniform_step
from kvprof.methods.quantisers import codebook, lloyd_max, normal_levels
from kvprof.methods.storage import (
    LIBRARIES,
    ROW_RMS,
    Quantiser,
    SideQuantiser,
    load_library,
    row_layout,
)
from kvprof.runtime.tensors import unflatten

__all__ = ["PLAIN", "Codec", "Plain", "RowRms", "codec_for", "library_codec", "pack", "unpack"]

# --- Packs codes of 2, 3, 4 or 8 bits densely into bytes, one token's row at a time.


_GROUP = 8  # so many codes fill whole bytes at any number of bits


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack each row of codes into ``ceil(r * bits / 8)`` bytes, lowest bits first."""
    if bits == 8:
        return codes.to(torch.uint8)
    columns = codes.shape[-1]
    padded = pad(codes.to(torch.int64), (0, -columns % _GROUP))
    words = unflatten(padded, -1, (-1, _GROUP))
    shifts = bits * torch.arange(_GROUP, device=codes.device)
    words = (words << shifts).sum(-1, keepdim=True)
    octets = (words >> (8 * torch.arange(bits, device=codes.device))) & 255
    return octets.flatten(-2)[..., : math.ceil(columns * bits / 8)].to(torch.uint8)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Undo `pack`."""
    if bits == 8:
        return packed
    if 8 % bits == 0:  # no code lies in two bytes
        steps = bits * torch.arange(8 // bits, device=packed.device, dtype=torch.uint8)
        codes: Tensor = (packed.unsqueeze(-1) >> steps) & (2**bits - 1)
        return codes.flatten(-2)[..., :columns]
    octets = unflatten(pad(packed.to(torch.int64), (0, -packed.shape[-1] % bits)), -1, (-1, bits))
    words = (octets << (8 * torch.arange(bits, device=packed.device))).sum(-1, keepdim=True)
    shifts = bits * torch.arange(_GROUP, device=packed.device)
    codes = (words >> shifts) & (2**bits - 1)
    return codes.flatten(-2)[..., :columns]


class Codec(ABC):
    """One way to keep rows. Equal codecs keep them alike."""

    def tokens_per_entry(self, name: str) -> int:
        """Return how many tokens one entry of the tensor `name` is for."""
        return 1

    @abstractmethod
    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        """Turn ``[..., N, r]`` into the tensors that are stored."""

    @abstractmethod
    def decode(self, stored: dict[str, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        """Return the rows that the stored tensors stand for, ``[..., N, columns]``."""


@dataclass(frozen=True)
class Plain(Codec):
    """Full precision."""

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        """Keep the rows themselves."""
        return {"rows": rows}

    def decode(self, stored: dict[str, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        """Return the rows themselves."""
        return stored["rows"]


PLAIN = Plain()


@dataclass(frozen=True)
class _Float8(Codec):
    """A saturating cast to a type of 8 bits, without a scale."""

    kind: torch.dtype

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        # As bytes: few operations know the type itself.
        largest = torch.finfo(self.kind).max
        return {"codes": rows.clamp(-largest, largest).to(self.kind).view(torch.uint8)}

    def decode(self, stored: dict[str, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        codes = stored["codes"]
        if codes.device.type != "cpu":
            return codes.view(self.kind).to(dtype)
        # On a CPU the cast takes ten times as long as looking its 256 results up.
        found = _of_bytes(self.kind, dtype).index_select(0, codes.flatten().to(torch.int32))
        return found.view(codes.shape)


@lru_cache(maxsize=8)
def _of_bytes(kind: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return what each byte stands for."""
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8).view(kind).to(dtype)


def _in_groups(values: Tensor, group: int | None) -> Tensor:
    """Split rows into groups of columns, ``[..., n, group]``, padding the last with copies."""
    group = group or values.shape[-1]
    filler = values[..., -1:].expand(*values.shape[:-1], -values.shape[-1] % group)
    return unflatten(torch.cat([values, filler], dim=-1), -1, (-1, group))


@dataclass(frozen=True)
class _Scaled(Codec):
    """Codes with a scale and a zero per group of columns (`token`) or of tokens (`channel`)."""

    bits: int
    by_channel: bool
    group: int | None
    scale_dtype: torch.dtype
    levels: tuple[float, ...] | None
    outliers: float
    clip: float | None = None

    def tokens_per_entry(self, name: str) -> int:
        if self.by_channel and name in ("scale", "zero"):
            assert self.group is not None  # check_plan has seen to it
            return self.group
        return 1

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        values = rows.float()
        count = math.ceil(self.outliers * rows.shape[-1] - 1e-9)
        if count:
            columns = values.abs().topk(count, dim=-1).indices
            stored["outlier_columns"] = columns.to(torch.int16)
            stored["outliers"] = rows.gather(-1, columns)
            values = values.scatter(-1, columns, 0.0)
        if self.clip is not None:
            place = math.floor(self.clip * rows.shape[-1] + 1e-9)
            most = values.abs().sort(dim=-1).values[..., place : place + 1]
            values = values.clamp(-most, most)
        grouped = self._grouped(values)
        # The range of group by group; the scales' own rounding is taken into account below.
        dim = -3 if self.by_channel else -1
        low, high = grouped.amin(dim), grouped.amax(dim)
        steps = 1 if self.levels is not None else 2**self.bits - 1
        stored["zero"] = low.to(self.scale_dtype)
        stored["scale"] = ((high - low) / steps).to(self.scale_dtype)
        columns_in = rows.shape[-1]
        zero = self._spread(stored["zero"].float(), rows.shape[-2], columns_in)
        scale = self._spread(stored["scale"].float(), rows.shape[-2], columns_in)
        level = (values - zero) / torch.where(scale > 0, scale, torch.ones_like(scale))
        if self.levels is None:
            codes = level.round().clamp(0, 2**self.bits - 1)
        else:
            known = _levels_on(self.levels, rows.device)
            codes = torch.bucketize(level, (known[1:] + known[:-1]) / 2)
        stored["codes"] = pack(codes.to(torch.int64), self.bits)
        return stored

    def decode(self, stored: dict[str, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        codes = unpack(stored["codes"], self.bits, columns)
        tokens = codes.shape[-2]
        if self.levels is None:
            level = codes.float()
        else:
            level = _levels_on(self.levels, codes.device)[codes.long()]
        zero = self._spread(stored["zero"].float(), tokens, columns)
        rows = zero + self._spread(stored["scale"].float(), tokens, columns) * level
        rows = rows.to(dtype)
        if "outliers" in stored:
            where = stored["outlier_columns"].to(torch.int64) & 0xFFFF
            rows = rows.scatter(-1, where, stored["outliers"].to(dtype))
        return rows

    def _grouped(self, values: Tensor) -> Tensor:
        """Split what shares scales: ``[..., n, group, r]`` or ``[..., N, n, group]``."""
        if self.by_channel:
            assert self.group is not None
            missing = -values.shape[-2] % self.group
            filler = values[..., -1:, :].expand(*values.shape[:-2], missing, values.shape[-1])
            full = unflatten(torch.cat([values, filler], dim=-2), -2, (-1, self.group))
            return full.transpose(-3, -2)  # [..., group, n, r]
        return _in_groups(values, self.group)

    def _spread(self, scales: Tensor, tokens: int, columns: int) -> Tensor:
        """Give every value its group's scale."""
        if self.by_channel:
            assert self.group is not None
            return scales.repeat_interleave(self.group, dim=-2)[..., :tokens, :]
        if scales.shape[-1] == 1:
            return scales
        return scales.repeat_interleave(self.group or columns, dim=-1)[..., :columns]


# iq4_nl's levels, over a scale that is the largest magnitude's share of the first.
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class _Engine(Codec):
    """Codes as llama.cpp and vLLM make them: by a scale that is rounded only when it is stored."""

    kind: str
    bits: int
    group: int | None
    scale_dtype: torch.dtype

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        grouped = _in_groups(rows.float(), self.group)
        codes, *kept = self._coded(grouped)
        codes = codes.flatten(-2)[..., : rows.shape[-1]].to(torch.int64)
        names = ("scale", "zero")[: len(kept)]
        stored = {
            name: one.squeeze(-1).to(self.scale_dtype)
            for name, one in zip(names, kept, strict=True)
        }
        return {"codes": pack(codes, self.bits), **stored}

    def decode(self, stored: dict[str, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        codes = _in_groups(unpack(stored["codes"], self.bits, columns), self.group)
        scale = stored["scale"].float().unsqueeze(-1)
        if self.kind == "iq4_nl":
            rows = scale * _levels_on(_IQ4_NL, codes.device)[codes.long()]
        elif self.kind == "minimum":
            rows = scale * codes + stored["zero"].float().unsqueeze(-1)
        elif self.kind == "hidden-zero":
            hidden = scale.view(torch.int32)
            rows = (hidden & -16).view(torch.float32) * (codes - (hidden & 15)).float()
        else:
            rows = scale * (codes.float() - 2 ** (self.bits - 1))
        return rows.flatten(-2)[..., :columns].to(dtype)

    def _coded(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return the codes of groups of columns, their scales and, of ``minimum``, their zeros."""
        most, half = 2**self.bits - 1, 2 ** (self.bits - 1)
        low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
        if self.kind == "absmax":
            scale = torch.maximum(high, -low) / (half - 1)
            return _rounded(values * _inverse(scale)) + half, scale
        if self.kind == "minimum":
            scale = (high - low) / most
            return ((values - low) * _inverse(scale) + 0.5).floor().clamp(0, most), scale, low
        if self.kind == "hidden-zero":
            scale = ((high - low) / most).clamp(min=1e-6)
            zero = _rounded(-low / scale).clamp(0, most)
            codes = _rounded(values * _inverse(scale) + zero).clamp(0, most)
            # In the four lowest bits of the scale's float32.
            return codes, (scale.view(torch.int32) & -16 | zero.int()).view(torch.float32)
        signed = values.gather(-1, values.abs().argmax(-1, keepdim=True))
        if self.kind == "signed-max":
            scale = signed / -half
            return (values * _inverse(scale) + half + 0.5).floor().clamp(0, most), scale
        levels = _levels_on(_IQ4_NL, values.device)
        met = values * _inverse(signed / levels[0])
        codes = torch.bucketize(met, (levels[1:] + levels[:-1]) / 2, right=True)
        # The scale that loses least of those codes, errors weighed by the values' squares.
        weights, found = values.square(), levels[codes]
        parts = weights * found * torch.stack([values, found])
        shares = parts.sum(-1, keepdim=True)
        return codes, torch.where(shares[1] > 0, shares[0] / shares[1], shares[1])


def _inverse(scale: Tensor) -> Tensor:
    """Return ``1 / scale``, and 0 where it is 0."""
    return torch.where(scale == 0, scale, 1 / scale)


def _rounded(values: Tensor) -> Tensor:
    """Round to the nearest whole number, halves away from 0."""
    size = values.abs().floor()
    return values.sign() * (size + (2 * (values.abs() - size)).floor())


@dataclass(frozen=True)
class _LloydMax(Codec):
    """A row's norm, and for each column the level nearest to it in the row of norm 1."""

    bits: int
    scale_dtype: torch.dtype
    unit: bool

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        values = rows.float()
        known = _levels_on(lloyd_max(self.bits, rows.shape[-1]), rows.device)
        norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        # By a tensor of ones where a row is zero: it has no direction, and its norm says so.
        codes = torch.bucketize(
            values / torch.where(norm > 0, norm, torch.ones_like(norm)),
            (known[1:] + known[:-1]) / 2,
        )
        if self.unit:
            norm = norm / torch.linalg.vector_norm(known[codes], dim=-1, keepdim=True)
        return {"codes": pack(codes, self.bits), "norm": norm.to(self.scale_dtype)}

    def decode(self, stored: dict[str, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        known = _levels_on(lloyd_max(self.bits, columns), stored["codes"].device)
        codes = unpack(stored["codes"], self.bits, columns).long()
        return (stored["norm"].float() * known[codes]).to(dtype)


@lru_cache(maxsize=64)
def _levels_on(levels: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a codebook on a device; copying it there at every step would make each step wait."""
    with torch.inference_mode(False):
        return torch.tensor(levels, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class RowRms(Codec):
    """Levels for normal variables, a scale per row, and perhaps bits by column."""

    runs: tuple[tuple[int | None, int], ...]
    scale_dtype: torch.dtype
    uniform: bool

    def encode(self, rows: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        """Quantise rows, those that were before with the scale ``[..., 1]`` that they had."""
        pieces = [
            (piece.float(), bits)
            for piece, bits in zip(self._cut(rows), self._bits, strict=True)
            if bits
        ]
        if scale is None:
            kept = sum(piece.shape[-1] for piece, _ in pieces)
            squares = [piece.square().sum(-1, keepdim=True) for piece, _ in pieces]
            mean = torch.cat(squares, dim=-1).sum(-1, keepdim=True) / kept
            limits = torch.finfo(self.scale_dtype)
            scale = mean.sqrt().clamp(limits.tiny, limits.max)
        scale = scale.to(self.scale_dtype)
        # The rounded scale divides, so that its rounding costs next to nothing.
        divisor = scale.float()
        codes = [pack(self._nearest(piece / divisor, bits), bits) for piece, bits in pieces]
        if self.scale_dtype.itemsize == 1:
            scale = scale.view(torch.uint8)  # few operations know the type itself
        return {"codes": torch.cat(codes, dim=-1), "scale": scale}

    def decode(self, stored: dict[str, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        """Return the rows, zeros where a column has no bits."""
        codes, scale = stored["codes"], stored["scale"]
        if self.scale_dtype.itemsize == 1:
            scale = scale.view(self.scale_dtype)
        scale, start, rows = scale.float(), 0, []
        for width, bits in self.runs:
            width = columns if width is None else width
            if not bits:
                rows.append(scale.new_zeros(*scale.shape[:-1], width))
                continue
            stop = start + math.ceil(width * bits / 8)
            words = _words(codes[..., start:stop], bits)
            found = embedding(words, _normal_words(bits, self.uniform, codes.device)).flatten(-2)
            rows.append(scale * found[..., :width])
            start = stop
        return torch.cat(rows, dim=-1).to(dtype)

    @property
    def _bits(self) -> list[int]:
        return [bits for _, bits in self.runs]

    def _cut(self, rows: Tensor) -> Sequence[Tensor]:
        widths = [rows.shape[-1] if width is None else width for width, _ in self.runs]
        pieces: Sequence[Tensor] = torch.split(rows, widths, dim=-1)
        return pieces

    def _nearest(self, values: Tensor, bits: int) -> Tensor:
        known = _levels_on(_normal(bits, self.uniform), values.device)
        return torch.bucketize(values.contiguous(), (known[1:] + known[:-1]) / 2)


@lru_cache(maxsize=8)
def _normal(bits: int, uniform: bool) -> tuple[float, ...]:
    if uniform:
        step, middle = uniform_step(bits), (2**bits - 1) / 2
        return tuple(step * (code - middle) for code in range(2**bits))
    return tuple(normal_levels(bits).tolist())


def _words(packed: Tensor, bits: int) -> Tensor:
    """Return the bytes of packed codes, or halves of 24 bits where a code may lie in two bytes."""
    if 8 % bits == 0:
        return packed.int()
    low, middle, high = unflatten(
        pad(packed, (0, -packed.shape[-1] % 3)).int(), -1, (-1, 3)
    ).unbind(-1)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=-1).flatten(-2)


@lru_cache(maxsize=64)
def _normal_words(bits: int, uniform: bool, device: torch.device) -> Tensor:
    """Return the levels that each of `_words` stands for: far fewer look-ups than codes."""
    size = 8 if 8 % bits == 0 else 12
    with torch.inference_mode(False):
        words = torch.arange(2**size, device=device).unsqueeze(-1)
        codes = words >> torch.arange(0, size, bits, device=device) & 2**bits - 1
        return _levels_on(_normal(bits, uniform), device)[codes]


_FLOATS = {"fp8": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}
_ENGINE = ("absmax", "signed-max", "minimum", "hidden-zero", "iq4_nl")


def codec_for(
    quantiser: Quantiser,
    side: SideQuantiser | None,
    level: int,
    column_bits: tuple[tuple[int, int], ...] = (),
) -> Codec:
    """Return how a side's quantised tokens of a level are kept."""
    if side is None:
        return PLAIN
    kind = quantiser.kind_of(side)
    if kind in _FLOATS:
        return _Float8(_FLOATS[kind])
    if kind in ROW_RMS:
        runs = column_bits or ((None, side.bits[level]),)
        scales = getattr(torch, quantiser.scale_dtype)
        return RowRms(runs, scales, kind == "uniform-rms")
    # Of these a group of heads has one run.
    bits = column_bits[0][1] if column_bits else side.bits[level]
    if kind in LIBRARIES:
        return library_codec(kind, bits, side.group)
    scale_dtype = getattr(torch, quantiser.scale_dtype)
    if kind in ("lloyd-max", "lloyd-max-unit"):
        return _LloydMax(bits, scale_dtype, unit=kind == "lloyd-max-unit")
    if kind in _ENGINE:
        return _Engine(kind, bits, side.group, scale_dtype)
    levels = None
    if kind == "codebook":
        levels = tuple(float(x) for x in codebook(bits))
    return _Scaled(
        bits=bits,
        by_channel=side.axis == "channel",
        group=side.group,
        scale_dtype=scale_dtype,
        levels=levels,
        outliers=quantiser.outliers,
        clip=side.clip,
    )


# --- Rows of latents kept by HQQ and quanto, through their own functions.
#
# Both libraries group and pack along the first dimension of a matrix, which would weave tokens
# together. Here a group of columns of one token is a column of the matrix that they get, so
# that every token's codes, scales and zeros are its own and a cache can append, pick and drop
# tokens. Scales and zeros are kept in the rows' own dtype, as transformers' quantised cache
# keeps them.


@dataclass(frozen=True)
class _LibraryCodec(Codec):
    """What both share: groups of columns become the columns of a matrix, and rows again."""

    kind: ClassVar[str]
    bits: int
    group: int | None

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        layout = row_layout(self.kind, self.bits, rows.shape[-1], self.group)
        # Filled up with copies, which change neither the smallest nor the largest value.
        missing = layout.groups * layout.width - rows.shape[-1]
        filler = rows[..., -1:].expand(*rows.shape[:-1], missing)
        matrix = torch.cat([rows, filler], dim=-1).reshape(-1, layout.width).T.contiguous()
        return {
            name: tensor.T.reshape(*rows.shape[:-1], -1).contiguous()
            for name, tensor in self._quantised(matrix).items()
        }

    def decode(self, stored: dict[str, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        layout = row_layout(self.kind, self.bits, columns, self.group)
        matrices = {
            name: tensor.reshape(-1, tensor.shape[-1] // layout.groups).T.contiguous()
            for name, tensor in stored.items()
        }
        matrix = self._restored(matrices, layout.width)
        shape = (*stored["codes"].shape[:-1], layout.groups * layout.width)
        return matrix.T.reshape(shape)[..., :columns].to(dtype)

    @abstractmethod
    def _quantised(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return what the library makes of each column of ``[width, M]``: ``[…, M]`` tensors."""

    @abstractmethod
    def _restored(self, stored: dict[str, Tensor], width: int) -> Tensor:
        """Return the ``[width, M]`` that the library rebuilds."""


@contextmanager
def _memory_kept() -> Iterator[None]:
    """Keep torch from returning GPU memory to the driver, which HQQ asks for in every call."""
    with patch.object(torch.cuda, "empty_cache", lambda: None):
        yield


class _Hqq(_LibraryCodec):
    """Half-quadratic quantisation: fit zero points to a small p-norm of the error, per batch."""

    kind = "hqq"

    def _quantised(self, matrix: Tensor) -> dict[str, Tensor]:
        quantizer = load_library(self.kind).Quantizer
        with _memory_kept():
            codes, meta = quantizer.quantize(
                matrix,
                nbits=self.bits,
                group_size=matrix.shape[0],
                axis=0,
                compute_dtype=matrix.dtype,
                device=matrix.device,
            )
        return {
            "codes": codes,
            "scale": meta["scale"].to(matrix.dtype),
            "zero": meta["zero"].to(matrix.dtype),
        }

    def _restored(self, stored: dict[str, Tensor], width: int) -> Tensor:
        quantizer = load_library(self.kind).Quantizer
        packing = quantizer.bit_to_packing[self.bits]
        meta = {
            "nbits": self.bits,
            "group_size": width,
            "shape": (width, stored["scale"].shape[-1]),
            "scale": stored["scale"],
            "zero": stored["zero"],
            "axis": 0,
            "packing": packing,
            "unpack_view_dtype": quantizer.unpack_view_dtype[packing],
            "view_as_float": False,
            "compute_dtype": stored["scale"].dtype,
        }
        rebuilt: Tensor = quantizer.dequantize(stored["codes"], meta)
        return rebuilt


class _Quanto(_LibraryCodec):
    """Asymmetric by minimum and maximum at 2 and 4 bits, symmetric at 8."""

    kind = "quanto"

    def _quantised(self, matrix: Tensor) -> dict[str, Tensor]:
        quanto = load_library(self.kind)
        kind = getattr(quanto, f"qint{self.bits}")
        if self.bits == 8:
            scale = quanto.AbsmaxOptimizer()(matrix, kind, -1)
            made = quanto.quantize_weight(matrix, kind, -1, scale, optimized=False)
            return {"codes": made._data, "scale": scale.reshape(1, -1)}
        width = matrix.shape[0]
        scale, shift = quanto.MaxOptimizer()(matrix, kind, -1, width)
        made = quanto.quantize_weight(matrix, kind, -1, scale, shift, width, optimized=False)
        return {"codes": made._data._data, "scale": scale, "zero": shift}

    def _restored(self, stored: dict[str, Tensor], width: int) -> Tensor:
        quanto = load_library(self.kind)
        kind = getattr(quanto, f"qint{self.bits}")
        codes, scale = stored["codes"], stored["scale"]
        size = torch.Size((width, scale.shape[-1]))
        stride = (size[1], 1)
        rebuilt: Tensor
        if self.bits == 8:
            whole = quanto.WeightQBytesTensor(kind, -1, size, stride, codes, scale, None)
            rebuilt = whole.dequantize()
            return rebuilt
        packed = quanto.tensor.packed.PackedTensor(codes, self.bits, size, stride)
        grouped = quanto.WeightQBitsTensor(
            kind, -1, width, size, stride, packed, scale, stored["zero"]
        )
        # Unpacked here, because its own operator has a compiler build a kernel at first use (nvcc
        # on a GPU), which few machines that only run models have. The packing: rows i, i + w, … of
        # the codes lie in one byte, w being the number of rows of bytes.
        shifts = range(0, 8, self.bits)
        grouped._data = torch.cat([(codes >> shift) & (2**self.bits - 1) for shift in shifts])
        rebuilt = grouped.dequantize()
        return rebuilt


def library_codec(kind: str, bits: int, group: int | None) -> Codec:
    """Return the codec of a library."""
    load_library(kind)
    return {"hqq": _Hqq, "quanto": _Quanto}[kind](bits, group)
