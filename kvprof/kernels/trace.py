"""When each item of a schedule ran on a GPU, and where."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from kvprof.errors import LackingError
from kvprof.kernels.tables import column

__all__ = [
    "MARK",
    "Mark",
    "Trace",
    "empty_marks",
    "mark",
    "traced",
]


class Mark(NamedTuple):
    """What a kernel leaves of an item.

    Attributes
    ----------
    multiprocessor : int
    begin, end : int
        The GPU's clock in nanoseconds.
    """

    multiprocessor: int
    begin: int
    end: int


MARK = tl.constexpr(len(Mark._fields))
_MULTIPROCESSOR = tl.constexpr(column(Mark, "multiprocessor"))
_BEGIN = tl.constexpr(column(Mark, "begin"))
_END = tl.constexpr(column(Mark, "end"))


@triton.jit
def mark(at, begun):  # type: ignore[no-untyped-def]
    """Leave an item's `Mark` when it ends."""
    tl.store(at + _MULTIPROCESSOR, cuda.smid().to(tl.int64))
    tl.store(at + _BEGIN, begun)
    tl.store(at + _END, cuda.globaltimer())


class Trace(NamedTuple):
    """What each item did, ``[items]`` int64 each.

    Attributes
    ----------
    row, head : Tensor
    multiprocessor : Tensor
    begin, end : Tensor
        The GPU's clock in nanoseconds.
    output : Tensor
        What the step's `run` returns.
    """

    row: Tensor
    head: Tensor
    multiprocessor: Tensor
    begin: Tensor
    end: Tensor
    output: Tensor


def empty_marks(scheduled: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return room for the `Mark` of each item, the first of the tables that were `scheduled`.

    Raises
    ------
    LackingError
        Without a GPU.
    """
    if device.type != "cuda":
        raise LackingError("what runs where on a GPU can be told on a GPU only")
    return torch.zeros(len(scheduled[0]), len(Mark._fields), dtype=torch.int64, device=device)


def traced(row: Tensor, head: Tensor, marks: Tensor, output: Tensor) -> Trace:
    """Return a trace of the items ``[items]`` of `row` and `head`; waits for the device."""
    where, begin, end = (
        marks[:, column(Mark, name)] for name in ("multiprocessor", "begin", "end")
    )
    return Trace(row.long(), head.long(), where, begin, end, output)
