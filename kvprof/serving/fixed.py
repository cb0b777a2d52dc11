"""A step of an engine in a form that a CUDA graph holds: only its room is the host's.

Which sequences decode, where each one's new tokens begin and how long it is are numbers on the
device, so the graph that was captured of one batch runs any other of no more tokens and sequences.
Every sequence has a place among those that decode and among those with several new tokens, and has
nothing to do in one of them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprof.kernels.prefill.rows import RowsCut, RowsStep
from kvprof.runtime.clock import part
from kvprof.serving.steps import EngineStep

__all__ = ["FixedStep", "fixed_step"]


@dataclass(frozen=True, eq=False)
class _Numbers:
    """What layers share of a step, worked out on the device.

    Attributes
    ----------
    lengths : Tensor
        ``[decodes]`` int32, tokens of sequences that decode, 0 for others.
    starts : Tensor
        ``[rows + 1]`` int32, where the new tokens of the others begin; those that decode have none.
    others : Tensor
        ``[tokens, 1]`` bool, whose tokens these are.
    """

    lengths: Tensor
    starts: Tensor
    others: Tensor


class FixedStep(EngineStep):
    """A step of which the host knows the room alone, no batch; see `fixed_step`."""

    @property
    def _numbers(self) -> _Numbers:
        return self.once("numbers", self._worked_out)

    def _worked_out(self) -> _Numbers:
        starts, device = self.starts, self.starts.device
        row = torch.arange(self.rows, dtype=torch.int32, device=device)
        token = torch.arange(len(self.slots), dtype=torch.int32, device=device)
        # The first sequence with more new tokens than one, or none. No number is read from the
        # host, not even one that stands here: a copy of it would not be held by a graph.
        decoding = starts[1:] - starts[:-1] == 1
        first = row.masked_fill(decoding, self.rows).amin()
        lengths = self.lengths[: self.decodes].masked_fill(row[: self.decodes] >= first, 0)
        others = (token >= first) & (token < starts[-1])
        return _Numbers(lengths, torch.maximum(starts, first), others[:, None])

    def decoding(self) -> Tensor:
        """Return the tokens of each sequence that may decode; 0 where it does not."""
        return self._numbers.lengths

    def cut_rows(self, step: RowsStep) -> RowsCut:
        """Return how the rows of several new tokens are cut, for all layers alike.

        Parameters
        ----------
        step : RowsStep
            Of as many sequences as there are.
        """

        def made() -> RowsCut:
            with part("schedule"):
                return step.cut(self._numbers.starts, self.lengths, len(self.slots))

        return self.once(step.heights, made)

    def joined(self, decoded: Tensor, attended: Tensor) -> Tensor:
        """Return each token's output, and zeros for padding.

        Parameters
        ----------
        decoded : Tensor
            ``[decodes, columns]``, zeros where a sequence does not decode.
        attended : Tensor
            ``[tokens, columns]``, anything but for tokens of sequences with several; overwritten.
        """
        others, count = self._numbers.others, len(decoded)
        front = attended[:count]
        torch.where(others[:count], front, decoded, out=front)
        if count < len(attended):
            attended[count:].masked_fill_(~others[count:], 0)
        return attended


def fixed_step(
    alike: dict[Any, tuple[list[Any], Tensor]],
    slots: Tensor,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
) -> FixedStep:
    """Return a step in the form that a graph holds.

    Parameters
    ----------
    alike, slots, table, starts, lengths
        As `EngineStep` has them. Sequences with one new token come first, those without any last;
        tokens behind those of the last sequence are padding.
    """
    rows = len(lengths)
    # A sequence that decodes has its token at its own number, so there are no more than tokens.
    return FixedStep(alike, slots, table, starts, lengths, min(rows, len(slots)), rows)
