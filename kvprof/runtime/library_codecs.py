"""Rows of latents kept by HQQ and quanto, through their own functions.

Both libraries group and pack along the first dimension of a matrix, which would weave tokens
together. Here a group of columns of one token is a column of the matrix that they get, so that
every token's codes, scales and zeros are its own and a cache can append, pick and drop tokens.
Scales and zeros are kept in the rows' own dtype, as transformers' quantised cache keeps them.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

from kvprof.methods.libraries import load_library, row_layout
from kvprof.runtime.codecs import Codec

__all__ = ["library_codec"]


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
    """Keep torch from handing its memory back to the GPU's driver.

    HQQ asks for that three times in a call, which weights bear once; a cache calls for every token
    and layer, and would wait for the GPU and allocate everything anew each time.
    """
    with patch.object(torch.cuda, "empty_cache", lambda: None):
        yield


class _Hqq(_LibraryCodec):
    """Half-quadratic: zeros are fitted so that the error's p-norm is small.

    The library stops its iterations when the mean error of all that it is given stops falling, so
    what a token becomes depends a little on the tokens that are quantised together with it.
    """

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
    """Return the codec of a library.

    Parameters
    ----------
    kind : str
        ``hqq`` or ``quanto``.
    bits : int
    group : int or None
        Most columns that share a scale; None for the row.

    Raises
    ------
    LackingError
        When the library is not installed.
    """
    load_library(kind)
    return {"hqq": _Hqq, "quanto": _Quanto}[kind](bits, group)
