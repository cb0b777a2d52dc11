"""One decoding step of attention over compressed keys and values of unlike widths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvprof.errors import LackingError, UsageError
from kvprof.kernels.decode.checks import check_run, whole_numbers
from kvprof.kernels.decode.cuts import SCHEDULES, checked_lengths, predicted_makespan_over_mean
from kvprof.kernels.decode.launch import head_table, launch_decode
from kvprof.kernels.decode.operator import cut_operator, decode_operator
from kvprof.kernels.decode.trace import Trace
from kvprof.kernels.decode.tuning import Tuning, tuning_for
from kvprof.kernels.dispatch import uses_triton
from kvprof.kernels.planes import STEP, RaggedLayout

__all__ = ["DecodeStep", "Schedule", "Trace", "Tuning", "decode_step"]


class Schedule(NamedTuple):
    """A step's work as it was cut; layers of the same widths and capacity may share it.

    Attributes
    ----------
    lengths : Tensor
        ``[rows]`` int32, tokens of each row.
    starts : Tensor or None
        ``[rows]`` int32, first visible token of each row.
    scheduled : list of Tensor
        Items, parts, lists and counts, as `kvprof.kernels.decode.launch.launch_cut` returns them;
        empty where no Triton kernel runs.
    """

    lengths: Tensor
    starts: Tensor | None
    scheduled: list[Tensor]


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """A decoding step of a layer; `cut` its work once, `run` it for every layer of its widths.

    Attributes
    ----------
    layout : RaggedLayout
    rows : int
        Sequences.
    paged : bool
    schedule : str
        ``equal`` or ``lpt``.
    tuning : Tuning
    multiprocessors : int
    heads : Tensor
        From `kvprof.kernels.decode.launch.head_table`.
    """

    layout: RaggedLayout
    rows: int
    paged: bool
    schedule: str
    tuning: Tuning
    multiprocessors: int
    heads: Tensor

    @property
    def capacity(self) -> int:
        """Most tokens that a row can have."""
        if not self.paged:
            return self.layout.capacity
        return min(self.layout.batch * self.layout.capacity, 2**31 - 1)

    def cut(
        self, lengths: Tensor | Sequence[int], starts: Tensor | Sequence[int] | None = None
    ) -> Schedule:
        """Cut the step's work on the device; a CUDA graph may hold it.

        Parameters
        ----------
        lengths : Tensor or sequence of int
            ``[rows]`` int32, tokens of each row. A tensor is not read on the host: the kernel
            clamps what it finds to 0 … `capacity`, and a row without tokens gets zeros. Numbers are
            checked instead.
        starts : Tensor or sequence of int, optional
            ``[rows]`` int32, the first token that a row sees (sliding windows).

        Raises
        ------
        UsageError
            When a tensor's shape, dtype or device does not fit, or a number is out of range.
        """
        if not isinstance(lengths, Tensor):
            listed = None if starts is None or isinstance(starts, Tensor) else list(starts)
            checked_lengths(list(lengths), listed, self.rows, self.capacity)
        device = self.heads.device
        lengths = whole_numbers(lengths, "lengths", self.rows, device)
        if starts is not None:
            starts = whole_numbers(starts, "first tokens", self.rows, device)
        if not uses_triton(self.heads.device):
            return Schedule(lengths, starts, [])
        pieces = self.tuning.pieces * self.multiprocessors if self.schedule == "equal" else 0
        found = cut_operator(
            lengths, starts, self.heads, self.capacity, pieces, self.multiprocessors
        )
        return Schedule(lengths, starts, list(found))

    def run(
        self,
        query: Tensor,
        buffer: Tensor,
        schedule: Schedule,
        scaling: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Tensor:
        """Return the step's attention, ``[rows, Σ_g G·dv_g]`` in the dtype of `query`.

        Parameters
        ----------
        query : Tensor
            ``[rows, Σ_g G·dk_g]``.
        buffer : Tensor
            The layer's cache, `RaggedLayout.elements` values of the same dtype.
        schedule : Schedule
            From `cut`, of this step or of one with the same widths, rows, capacity and tuning.
        scaling : float
            Factor of ``q · k``.
        softcap : float
            Scores become ``softcap · tanh(score / softcap)``; 0 leaves them.
        sinks : Tensor, optional
            ``[heads, G]`` float32: a further logit per query head that takes weight and gives
            nothing.
        table : Tensor, optional
            ``[rows, most pages]`` int32, for a paged step. What it names is not checked; a row's
            tokens behind its last page are left out.

        Raises
        ------
        UsageError
            When shapes or dtypes do not fit together, or bf16 is to be interpreted.
        """
        check_run(self.layout, self.rows, self.paged, query, buffer, softcap, sinks, table)
        layout, tuning = self.layout, self.tuning
        output: Tensor = decode_operator(
            query, buffer, schedule.lengths, schedule.starts, self.heads, schedule.scheduled,
            sinks, table, scaling, softcap, layout.key_widths, layout.value_widths,
            (layout.group, layout.batch, layout.capacity),
            (tuning.pieces, tuning.tile, tuning.stages, tuning.warps),
        )  # fmt: skip
        return output

    def trace(
        self,
        query: Tensor,
        buffer: Tensor,
        schedule: Schedule,
        scaling: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Trace:
        """Run a step and tell when each item ran on which multiprocessor.

        Unlike `run` it waits for the device. Parameters are those of `run`.

        Raises
        ------
        LackingError
            Without a GPU.
        UsageError
            As `run` does.
        """
        if query.device.type != "cuda":
            raise LackingError("what runs where on a GPU can be told on a GPU only")
        check_run(self.layout, self.rows, self.paged, query, buffer, softcap, sinks, table)
        items = schedule.scheduled[0]
        seen = torch.zeros(len(items), 3, dtype=torch.int64, device=query.device)
        output = launch_decode(
            query.contiguous(), buffer, self.layout, self.tuning, self.heads, schedule.scheduled,
            scaling, softcap=softcap, sinks=sinks, table=table, trace=seen,
        )  # fmt: skip
        real = items[:, 4] >= 0
        row, head = items[real, :2].long().unbind(1)
        multiprocessor, begin, end = seen[real].unbind(1)
        return Trace(row, head, multiprocessor, begin, end, output)

    def predicted_makespan_over_mean(
        self, lengths: Sequence[int], starts: Sequence[int] | None = None
    ) -> float:
        """Return `kvprof.kernels.decode.cuts.predicted_makespan_over_mean` of this step."""
        return predicted_makespan_over_mean(
            self.layout, lengths, self.multiprocessors, schedule=self.schedule,
            pieces=self.tuning.pieces, tile=self.tuning.tile, starts=starts,
        )  # fmt: skip


def decode_step(
    layout: RaggedLayout,
    device: torch.device | str,
    *,
    tuning: Tuning | None = None,
    multiprocessors: int | None = None,
    page_tokens: int | None = None,
    rows: int | None = None,
    schedule: str = "equal",
) -> DecodeStep:
    """Prepare a layer's decoding step.

    Parameters
    ----------
    layout : RaggedLayout
        In the paged form, of the pool: its batch is the pages, its capacity a page's tokens.
    device : torch.device or str
    tuning : Tuning, optional
        `tuning_for` the layout by default.
    multiprocessors : int, optional
        That the work is for; the device's own by default (on a CPU, 1).
    page_tokens : int, optional
        Tokens of a page, a multiple of 16, and the layout's capacity; contiguous by default.
    rows : int, optional
        Sequences of the paged form.
    schedule : str
        ``equal`` (pieces of equal cost) or ``lpt`` (FDC §5.3: whole heads, longest first, each to
        the least loaded multiprocessor).

    Raises
    ------
    UsageError
        For an unknown schedule, or pages or rows that do not fit the layout.
    """
    # With its index, as tensors have it.
    device = torch.empty(0, device=device).device
    if schedule not in SCHEDULES:
        raise UsageError(f"schedule {schedule!r} is none of {', '.join(SCHEDULES)}")
    paged = page_tokens is not None
    if paged and (page_tokens != layout.capacity or layout.capacity % STEP):
        raise UsageError(
            f"pages of {page_tokens} tokens do not fit a pool whose pages have {layout.capacity}: "
            f"both must be the same multiple of {STEP}"
        )
    if rows is None:
        if paged:
            raise UsageError("a paged step needs to know its rows (sequences)")
        rows = layout.batch
    if rows < 1 or (not paged and rows != layout.batch):
        raise UsageError(f"{rows} rows do not fit a cache of {layout.batch} sequences or pages")
    if multiprocessors is None:
        multiprocessors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 1
        )
    tuning = tuning or tuning_for(layout, schedule)
    return DecodeStep(
        layout, rows, paged, schedule, tuning, multiprocessors,
        head_table(layout, tuning.tile, device),
    )  # fmt: skip
