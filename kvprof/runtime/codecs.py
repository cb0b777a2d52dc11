"""How rows of latents are kept as tensors: plain, affine codes, a codebook with outliers, e4m3.

A codec turns ``[..., N, r]`` into named tensors whose second to last dimension runs over tokens (or
groups of tokens), and back. `kvprof.methods.plan` has the formulas; those of libraries are in
`kvprof.runtime.library_codecs`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvprof.methods.libraries import LIBRARIES
from kvprof.methods.quantisers import codebook
from kvprof.methods.storage import Quantiser, SideQuantiser
from kvprof.runtime.packing import pack, unpack
from kvprof.runtime.shapes import unflatten

__all__ = ["PLAIN", "Codec", "Plain", "codec_for"]

_E4M3_LARGEST = torch.finfo(torch.float8_e4m3fn).max


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
    """A saturating cast to e4m3, without a scale."""

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        # As bytes: few operations know the type itself.
        codes = rows.clamp(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn)
        return {"codes": codes.view(torch.uint8)}

    def decode(self, stored: dict[str, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
        return stored["codes"].view(torch.float8_e4m3fn).to(dtype)


@dataclass(frozen=True)
class _Scaled(Codec):
    """Codes with a scale and a zero per group of columns (`token`) or of tokens (`channel`)."""

    bits: int
    by_channel: bool
    group: int | None
    scale_dtype: torch.dtype
    levels: tuple[float, ...] | None
    outliers: float

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
        """Split the dimension that shares scales: ``[..., n, group, r]`` or ``[..., N, n, group]``.

        The last group is filled up with copies, which change neither its minimum nor its maximum.
        """
        if self.by_channel:
            assert self.group is not None
            missing = -values.shape[-2] % self.group
            filler = values[..., -1:, :].expand(*values.shape[:-2], missing, values.shape[-1])
            full = unflatten(torch.cat([values, filler], dim=-2), -2, (-1, self.group))
            return full.transpose(-3, -2)  # [..., group, n, r]
        group = self.group or values.shape[-1]
        missing = -values.shape[-1] % group
        filler = values[..., -1:].expand(*values.shape[:-1], missing)
        return unflatten(torch.cat([values, filler], dim=-1), -1, (-1, group))

    def _spread(self, scales: Tensor, tokens: int, columns: int) -> Tensor:
        """Give every value its group's scale."""
        if self.by_channel:
            assert self.group is not None
            return scales.repeat_interleave(self.group, dim=-2)[..., :tokens, :]
        if scales.shape[-1] == 1:
            return scales
        return scales.repeat_interleave(self.group or columns, dim=-1)[..., :columns]


@lru_cache(maxsize=64)
def _levels_on(levels: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a codebook on a device; copying it there at every step would make each step wait."""
    with torch.inference_mode(False):
        return torch.tensor(levels, device=device)


def codec_for(quantiser: Quantiser, side: SideQuantiser | None, level: int) -> Codec:
    """Return how a side's quantised tokens of a level are kept.

    Raises
    ------
    LackingError
        When the quantiser is a library's and the library is not installed.
    """
    if side is None:
        return PLAIN
    if quantiser.kind == "fp8":
        return _Float8()
    bits = side.bits[level]
    if quantiser.kind in LIBRARIES:
        from kvprof.runtime.library_codecs import library_codec  # a cycle: they are codecs too

        return library_codec(quantiser.kind, bits, side.group)
    levels = None
    if quantiser.kind == "codebook":
        levels = tuple(float(x) for x in codebook(bits))
    return _Scaled(
        bits=bits,
        by_channel=side.axis == "channel",
        group=side.group,
        scale_dtype=getattr(torch, quantiser.scale_dtype),
        levels=levels,
        outliers=quantiser.outliers,
    )
