"""One decoding step of attention over compressed keys and values of unlike widths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from kvprof.errors import UsageError
from kvprof.kernels.decode.cuts import Cut, equal_shares
from kvprof.kernels.decode.kernel import decode_pieces, merge_pieces
from kvprof.kernels.planes import RaggedLayout, chunks

__all__ = ["DecodeStep", "Tuning", "decode_step", "kinds_of"]

_MOST_CHUNKS = 4


@dataclass(frozen=True)
class Tuning:
    """What is chosen for a GPU and not for a model.

    Attributes
    ----------
    pieces : int
        Pieces of work per multiprocessor.
    tile : int
        Values of K and V in a tile.
    stages : int
        Tiles on their way at once.
    warps : int
        Of a program.
    """

    pieces: int = 8
    tile: int = 8192
    stages: int = 4
    warps: int = 1


def kinds_of(cut: Cut) -> tuple[int, ...]:
    """Return the kinds of heads of a cut as `decode_pieces` takes them, nine numbers each."""
    numbers: list[int] = []
    for key_width, value_width, height in cut.pairs:
        for width in (key_width, value_width):
            own = chunks(width)
            numbers += [*own, *(0,) * (_MOST_CHUNKS - len(own))]
        numbers.append(height)
    return tuple(numbers)


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """A decoding step with its work cut and its workspace made; `run` does it.

    Attributes
    ----------
    layout : RaggedLayout
    cut : Cut
    tuning : Tuning
    """

    layout: RaggedLayout
    cut: Cut
    tuning: Tuning
    _items: Tensor
    _parts: Tensor
    _heads: Tensor
    _places: Tensor
    _partial: Tensor
    _logs: Tensor

    def run(self, query: Tensor, buffer: Tensor, scaling: float) -> Tensor:
        """Return ``[batch, Σ_g G·dv_g]`` in the dtype of `query`.

        Parameters
        ----------
        query : Tensor
            ``[batch, Σ_g G·dk_g]``, contiguous.
        buffer : Tensor
            The layer's cache, `RaggedLayout.elements` values of the same dtype.
        scaling : float
            Factor of ``q · k``.

        Raises
        ------
        UsageError
            When shapes or dtypes do not fit together, or bf16 is to be interpreted.
        """
        layout = self.layout
        if tuple(query.shape) != (layout.batch, layout.query_offsets[-1]):
            raise UsageError(
                f"queries of shape {tuple(query.shape)} do not fit the layout, which wants "
                f"{(layout.batch, layout.query_offsets[-1])}"
            )
        if buffer.numel() != layout.elements or buffer.dtype != query.dtype:
            raise UsageError(
                f"a cache of {buffer.numel():,} values in {buffer.dtype} does not fit "
                f"{layout.elements:,} in {query.dtype}"
            )
        if query.dtype == torch.bfloat16 and isinstance(decode_pieces, InterpretedFunction):
            raise UsageError("Triton's interpreter computes bf16 wrongly; use float16 or float32")
        widest = max(layout.value_widths)
        output = query.new_empty(layout.batch, layout.output_offsets[-1])
        decode_pieces[(len(self._items),)](
            query.contiguous(), buffer, self._partial, self._logs, self._items, self._heads,
            layout.capacity, layout.batch, scaling * math.log2(math.e),
            KINDS=kinds_of(self.cut), COUNT=len(self.cut.pairs), STAGES=self.tuning.stages,
            GROUP=layout.group, WIDEST=widest, QUERY_ROW=layout.query_offsets[-1],
            num_warps=self.tuning.warps,
        )  # fmt: skip
        merge_pieces[(layout.batch * layout.heads, layout.group)](
            self._partial, self._logs, self._parts, output, self._places,
            GROUP=layout.group, WIDEST=widest, COLUMNS=triton.next_power_of_2(widest),
            MOST=triton.next_power_of_2(max(count for _, count in self.cut.parts)),
            HEADS=layout.heads, OUTPUT_ROW=layout.output_offsets[-1], num_warps=4,
        )  # fmt: skip
        return output


def decode_step(
    layout: RaggedLayout,
    lengths: Sequence[int],
    device: torch.device,
    *,
    multiprocessors: int | None = None,
    tuning: Tuning | None = None,
) -> DecodeStep:
    """Cut a step's work and make its workspace.

    Parameters
    ----------
    layout : RaggedLayout
    lengths : sequence of int
        Tokens of each sequence.
    device : torch.device
    multiprocessors : int, optional
        That the work is for; the device's own by default.
    tuning : Tuning, optional

    Raises
    ------
    UsageError
        For lengths that do not fit.
    """
    tuning = tuning or Tuning()
    if multiprocessors is None:
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    cut = equal_shares(layout, lengths, tuning.pieces * multiprocessors, tuning.tile)
    heads = [
        (at, *offsets)
        for at, offsets in zip(layout.query_offsets[:-1], layout.offsets, strict=True)
    ]
    places = list(zip(layout.output_offsets[:-1], layout.value_widths, strict=True))

    def whole(rows: object) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=device)

    pieces = len(cut.items)
    return DecodeStep(
        layout, cut, tuning,
        whole(cut.items), whole(cut.parts),
        torch.tensor(heads, dtype=torch.int64, device=device), whole(places),
        torch.empty(pieces, layout.group, max(layout.value_widths), device=device),
        torch.empty(pieces, layout.group, device=device),
    )  # fmt: skip
