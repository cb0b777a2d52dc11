"""One decoding step of attention over compressed keys and values of unlike widths."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvprof.kernels.checks import (
    check_cache,
    check_pages,
    check_pool,
    check_queries,
    check_softcap,
    checked_sinks,
    whole_numbers,
)
from kvprof.kernels.decode.cpu import decode_cpu
from kvprof.kernels.decode.cuts import (
    Item,
    Tuning,
    at_once,
    checked_lengths,
    configs,
    most_pieces,
    of_configs,
    predicted_makespan_over_mean,
    tile_height,
    tuning_for,
)
from kvprof.kernels.decode.launch import head_table, launch_cut, launch_decode
from kvprof.kernels.dispatch import (
    check_interpreter,
    layout_of,
    multiprocessors_of,
    placed,
    uses_triton,
)
from kvprof.kernels.operators import direct
from kvprof.kernels.planes import MOST_TOKENS, RaggedLayout
from kvprof.kernels.split_kv import Schedule
from kvprof.kernels.tables import Part

__all__ = [
    "DecodeStep",
    "Tuning",
    "cut_operator",
    "decode_operator",
    "decode_step",
]

# --- What a decoding step refuses before anything is launched; no tensor's values are read.


def _checked(
    layout: RaggedLayout,
    rows: int,
    paged: bool,
    query: Tensor,
    buffer: Tensor,
    softcap: float,
    sinks: Tensor | None,
    table: Tensor | None,
) -> Tensor | None:
    """Check the arguments of `DecodeStep.run`; return the sinks as the kernel takes them."""
    check_queries(query, (rows, layout.query_offsets[-1]), query.dtype)
    check_cache(buffer, layout.batch, layout.row, query.dtype)
    check_interpreter(query.dtype)
    check_softcap(softcap)
    check_pages(table, rows, paged=paged)
    return checked_sinks(sinks, layout.heads, layout.group)


# --- Decoding as operators of torch, ``kvprof::decode`` and ``kvprof::decode_cut``.
#
# So that ``torch.compile`` and CUDA graphs go through: a call is one opaque operator with
# tensors and numbers, and its workspace is allocated inside it, where nobody sees it.


@torch.library.custom_op("kvprof::decode_cut", mutates_args=())
def cut_operator(
    lengths: Tensor,
    starts: Tensor | None,
    heads: Tensor,
    capacity: int,
    pieces: int,
    whole: int,
    workers: int,
    room: int,
) -> tuple[Tensor, Tensor]:
    """Cut a step's work: `kvprof.kernels.decode.launch.launch_cut`, which says what is what."""
    return launch_cut(lengths, starts, heads, capacity, pieces, whole, workers, room)


@cut_operator.register_fake
def _(
    lengths: Tensor,
    starts: Tensor | None,
    heads: Tensor,
    capacity: int,
    pieces: int,
    whole: int,
    workers: int,
    room: int,
) -> tuple[Tensor, Tensor]:
    layers, tasks = heads.shape[0], lengths.shape[0] * heads.shape[1]
    items = lengths.new_empty(layers, room, len(Item._fields))
    return items, lengths.new_empty(layers, tasks, len(Part._fields))


@torch.library.custom_op("kvprof::decode", mutates_args=())
def decode_operator(
    query: Tensor,  # as for `DecodeStep.run` and `DecodeStep.cut`
    buffer: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    heads: Tensor,  # from `head_table` and `kvprof::decode_cut`; unused on a CPU
    scheduled: Sequence[Tensor],
    sinks: Tensor | None,
    table: Tensor | None,
    scaling: float,
    softcap: float,
    key_widths: Sequence[int],  # of the layout; the sizes are its group, batch and capacity
    value_widths: Sequence[int],
    sizes: Sequence[int],
    family: Sequence[int],  # key and value width of every kind that the kernel knows
    tuning: Sequence[int],  # pieces, tile, stages and warps
) -> Tensor:
    """Run a step: Triton on a GPU (or interpreted), blocked torch on a CPU."""
    layout = layout_of(tuple(key_widths), tuple(value_widths), tuple(sizes))
    if uses_triton(query.device):
        return launch_decode(
            query.contiguous(),
            buffer,
            layout,
            layout_of(tuple(family[::2]), tuple(family[1::2]), (layout.group, 1, 1)),
            Tuning(*tuning),
            heads,
            scheduled,
            scaling,
            softcap=softcap,
            sinks=sinks,
            table=table,
        )
    return decode_cpu(
        query,
        buffer,
        layout,
        lengths,
        scaling,
        softcap=softcap,
        sinks=sinks,
        starts=starts,
        table=table,
    )


@decode_operator.register_fake
def _(
    query: Tensor,
    buffer: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    heads: Tensor,
    scheduled: Sequence[Tensor],
    sinks: Tensor | None,
    table: Tensor | None,
    scaling: float,
    softcap: float,
    key_widths: Sequence[int],
    value_widths: Sequence[int],
    sizes: Sequence[int],
    family: Sequence[int],
    tuning: Sequence[int],
) -> Tensor:
    return query.new_empty(query.shape[0], sizes[0] * sum(value_widths))


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """A decoding step of a layer; `cut` its work once, `run` it for every layer of its widths."""

    layout: RaggedLayout
    #: One head of every kind that its kernel knows: of the layout, or of a whole model, whose
    #: layers then share one compiled kernel.
    family: RaggedLayout
    rows: int  # sequences
    paged: bool
    tuning: Tuning
    multiprocessors: int
    heads: Tensor  # from `kvprof.kernels.decode.launch.head_table`

    @property
    def capacity(self) -> int:
        """Most tokens that a row can have."""
        if not self.paged:
            return self.layout.capacity
        return min(self.layout.batch * self.layout.capacity, MOST_TOKENS)

    @cached_property
    def room(self) -> int:
        """Most items that its work is cut into; a program is launched for each."""
        tasks = self.rows * self.layout.heads
        # The same for all layers of the family, whichever head configurations each has.
        height = min(tile_height(*pair, self.tuning.tile) for pair in configs(self.family))
        tiles = tasks * max(1, -(-self.capacity // height))
        return most_pieces(tiles, self.tuning, self.multiprocessors) + tasks

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
        lengths = whole_numbers("lengths", lengths, (self.rows,), device)
        if starts is not None:
            starts = whole_numbers("first tokens", starts, (self.rows,), device)
        return self.cut_alike(self.heads[None], lengths, starts)[0]

    @property
    def cut_by(self) -> Any:
        """What steps have in common whose work may be cut together."""
        own = self.tuning, self.multiprocessors, self.room, self.heads.device
        return type(self), self.rows, self.capacity, len(self.heads), *own

    @property
    def cut_table(self) -> Tensor:
        """``[heads, columns]``: what it is cut by; `cut_alike` takes those of several steps."""
        return self.heads

    def cut_alike(
        self, tables: Tensor, lengths: Tensor, starts: Tensor | None = None
    ) -> list[Schedule]:
        """Cut the work of several layers together, as `cut` does that of one.

        Parameters
        ----------
        tables : Tensor
            ``[layers, heads, columns]``: `cut_table` of steps with the same `cut_by`.
        lengths, starts : Tensor
            As for `cut`, of all of them; not checked again.
        """
        if not uses_triton(tables.device):
            return [Schedule(lengths, starts, [])] * len(tables)
        items, parts = direct(cut_operator)(
            lengths,
            starts,
            tables,
            self.capacity,
            self.tuning.pieces * self.multiprocessors,
            at_once(self.tuning) * self.multiprocessors,
            self.multiprocessors,
            self.room,
        )
        both = zip(items.unbind(), parts.unbind(), strict=True)
        return [Schedule(lengths, starts, [own, joined]) for own, joined in both]

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
            The layer's cache in the same dtype: flat, or ``[batch, RaggedLayout.row or more]`` such
            as an engine's pool of pages.
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
        sinks = _checked(self.layout, self.rows, self.paged, query, buffer, softcap, sinks, table)
        layout, tuning = self.layout, self.tuning
        output: Tensor = direct(decode_operator)(
            query,
            buffer,
            schedule.lengths,
            schedule.starts,
            self.heads,
            schedule.scheduled,
            sinks,
            table,
            scaling,
            softcap,
            layout.key_widths,
            layout.value_widths,
            (layout.group, layout.batch, layout.capacity),
            [width for pair in configs(self.family) for width in pair],
            (tuning.pieces, tuning.tile, tuning.stages, tuning.warps),
        )
        return output

    def predicted_makespan_over_mean(
        self, lengths: Sequence[int], starts: Sequence[int] | None = None
    ) -> float:
        """Return `kvprof.kernels.decode.cuts.predicted_makespan_over_mean` of this step."""
        return predicted_makespan_over_mean(
            self.layout,
            lengths,
            self.multiprocessors,
            tuning=self.tuning,
            starts=starts,
        )


def decode_step(
    layout: RaggedLayout,
    device: torch.device | str,
    *,
    tuning: Tuning | None = None,
    multiprocessors: int | None = None,
    page_tokens: int | None = None,
    rows: int | None = None,
    pairs: Sequence[tuple[int, int]] | None = None,
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
    pairs : sequence of (key width, value width), optional
        Head configs for which the kernel is built, those of the layout among them; by default
        these alone. Layers that are given the same ones share a compiled kernel.

    Raises
    ------
    UsageError
        For pages or rows that do not fit the layout, or a head of none of the configs.
    """
    device = placed(device)
    rows = check_pool(layout, page_tokens, rows)
    if multiprocessors is None:
        multiprocessors = multiprocessors_of(device)
    family = of_configs(layout, configs(layout) if pairs is None else pairs)
    tuning = tuning or tuning_for(family)
    return DecodeStep(
        layout,
        family,
        rows,
        page_tokens is not None,
        tuning,
        multiprocessors,
        head_table(layout, tuning.tile, device, configs(family)),
    )
