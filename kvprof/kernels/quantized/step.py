"""One decoding step over quantised storage, in one or more segments of the context."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.checks import (
    check_cache,
    check_pages,
    check_pool,
    check_queries,
    check_scaling,
    check_softcap,
    checked_sinks,
    whole_numbers,
)
from kvprof.kernels.dispatch import check_interpreter, multiprocessors_of, uses_triton
from kvprof.kernels.operators import direct
from kvprof.kernels.quantized.cpu import segments_cpu
from kvprof.kernels.quantized.launch import launch_cut, launch_segments, tuning_for, unit_table
from kvprof.kernels.quantized.layout import HeadConfig, SegmentsLayout, of_configs, segment_of
from kvprof.kernels.quantized.layout_registry import bits_numbered, format_of, operand_layout_of
from kvprof.kernels.quantized.operand_layout import SideKind, Tuning, width_of
from kvprof.kernels.quantized.tables import MOST_SHARES, Counter, Item, eye
from kvprof.kernels.split_kv import Attended, Schedule
from kvprof.kernels.tables import Part

__all__ = [
    "SegmentsStep",
    "Tuning",
    "cut_operator",
    "layout_numbers",
    "segments_operator",
    "segments_step",
]

# --- Attention over segments as operators of torch, ``kvprof::segments`` and
# ``kvprof::segments_cut``.
#
# So that ``torch.compile`` and CUDA graphs go through: a call is one opaque operator with
# tensors and numbers, and its workspace is allocated inside it, where nobody sees it.


#: Numbers of a segment before its widths.
_HEADER = 4


def _kind(number: int, form: int) -> SideKind:
    """Return what a side is like, given its number and that of its format."""
    return operand_layout_of(bits_numbered(form)).numbered(number)


def _kind_numbers(layout: SegmentsLayout, configs: Sequence[HeadConfig]) -> list[int]:
    """Return the head configs of a kernel for a layout as whole numbers."""
    return [
        operand_layout_of(bits).number(side)
        for config in configs
        for segment, pair in zip(layout.segments, config, strict=True)
        for bits, side in zip((segment.key_bits, segment.value_bits), pair, strict=True)
    ]


def layout_numbers(layout: SegmentsLayout) -> list[int]:
    """Return a layout but for its dtype as whole numbers, which is what an operator takes.

    Heads, group, batch and whether there are pages; per segment the bits of K and V, the columns of
    a scale (0: the row), the capacity, what K and V of each head are like (`OperandLayout.number`).
    """
    found = [layout.heads, layout.group, layout.batch, int(layout.paged)]
    for segment in layout.segments:
        keys, values = zip(*map(segment.kind, range(layout.heads)), strict=True)
        found += [
            format_of(segment.key_bits).number,
            format_of(segment.value_bits).number,
            segment.columns or 0,
            segment.layout.capacity,
            *map(operand_layout_of(segment.key_bits).number, keys),
            *map(operand_layout_of(segment.value_bits).number, values),
        ]
    return found


@lru_cache(maxsize=1024)
def _layout(numbers: tuple[int, ...], dtype: torch.dtype) -> SegmentsLayout:
    heads, group, batch, paged, *rest = numbers
    segments = []
    step = _HEADER + 2 * heads
    for at in range(0, len(rest), step):
        keys, values, columns, capacity, *sides = rest[at : at + step]
        kinds = list(map(_kind, sides, [keys] * heads + [values] * heads))
        pairs = list(zip(kinds[:heads], kinds[heads:], strict=True))
        formats = bits_numbered(keys), bits_numbered(values), columns or None
        segments.append(segment_of(pairs, group, batch, capacity, *formats, paged=bool(paged)))
    return SegmentsLayout(tuple(segments), dtype)


@lru_cache(maxsize=1024)
def _family(layout: SegmentsLayout, widths: tuple[int, ...]) -> SegmentsLayout:
    """Return the layout by which a kernel for head configurations is built; `widths` are theirs."""
    step = len(layout.segments)
    forms = [
        format_of(bits).number for own in layout.segments for bits in (own.key_bits, own.value_bits)
    ]
    sides = [_kind(number, forms[at % (2 * step)]) for at, number in enumerate(widths)]
    pairs = list(zip(sides[::2], sides[1::2], strict=True))
    return of_configs(layout, [tuple(pairs[at : at + step]) for at in range(0, len(pairs), step)])


@torch.library.custom_op("kvprof::segments_cut", mutates_args=())
def cut_operator(
    lengths: Tensor, units: Tensor, heads: int, pieces: int, counted: int, near: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a step's work: `kvprof.kernels.quantized.launch.launch_cut`, which says what is what."""
    return launch_cut(lengths, units, heads, pieces, counted, near)


@cut_operator.register_fake
def _(
    lengths: Tensor, units: Tensor, heads: int, pieces: int, counted: int, near: int
) -> tuple[Tensor, Tensor, Tensor]:
    layers, rows = units.shape[0], lengths.shape[1] * heads
    room = pieces + lengths.shape[0] * rows
    items = lengths.new_empty(layers, room, len(Item._fields))
    parts = lengths.new_empty(layers, rows, len(Part._fields))
    return items, parts, lengths.new_empty(layers, counted)


# The counters of a schedule are used and set back again: who looks before or after sees no change,
# and one schedule must not be in use on two streams at once.
@torch.library.custom_op("kvprof::segments", mutates_args=())
def segments_operator(
    query: Tensor,  # as for `SegmentsStep.run` and `SegmentsStep.cut`
    buffer: Tensor,
    lengths: Tensor,
    units: Tensor,  # as `launch_segments` takes them; unused on a CPU
    eye: Tensor,
    scheduled: Sequence[Tensor],
    sinks: Tensor | None,
    table: Tensor | None,
    beside: Sequence[Tensor],  # an `Attended`, or nothing
    scaling: float,
    softcap: float,
    layout: Sequence[int],  # from `layout_numbers`; the dtype is that of `query`
    #: What K and V are like, segment by segment, of every head config of the kernel
    #: (`OperandLayout.number`).
    kinds: Sequence[int],
    tuning: Sequence[int],  # A `Tuning`, its fields in order
    shares: int,  # of the work, one for each multiprocessor, `MOST_SHARES` at most
) -> Tensor:
    """Run a step: Triton on a GPU (or interpreted), blocked torch on a CPU."""
    restored = _layout(tuple(layout), query.dtype)
    other = Attended(*beside) if beside else None
    if uses_triton(query.device):
        items, parts, counters = scheduled
        numbers: list[Any] = [*tuning[:-2], *map(bool, tuning[-2:])]
        return launch_segments(
            query.contiguous(),
            buffer,
            restored,
            _family(restored, tuple(kinds)),
            Tuning(*numbers),
            units,
            eye,
            items,
            parts,
            counters,
            shares,
            scaling,
            softcap=softcap,
            sinks=sinks,
            table=table,
            beside=other,
        )
    return segments_cpu(
        query,
        buffer,
        restored,
        lengths,
        scaling,
        softcap=softcap,
        sinks=sinks,
        table=table,
        beside=other,
    )


@segments_operator.register_fake
def _(
    query: Tensor,
    buffer: Tensor,
    lengths: Tensor,
    units: Tensor,
    eye: Tensor,
    scheduled: Sequence[Tensor],
    sinks: Tensor | None,
    table: Tensor | None,
    beside: Sequence[Tensor],
    scaling: float,
    softcap: float,
    layout: Sequence[int],
    kinds: Sequence[int],
    tuning: Sequence[int],
    shares: int,
) -> Tensor:
    # From the numbers alone: a layout's own checks mean nothing to a tracer.
    heads, group = layout[0], layout[1]
    step = _HEADER + 2 * heads
    starts = range(4, len(layout), step)
    columns = sum(
        max(width_of(_kind(layout[at + step - heads + head], layout[at + 1])) for at in starts)
        for head in range(heads)
    )
    return query.new_empty(query.shape[0], group * columns)


@dataclass(frozen=True, eq=False)
class SegmentsStep:
    """A decoding step of a layer; `cut` its work once, `run` it for every layer of its layout."""

    layout: SegmentsLayout
    rows: int  # sequences
    configs: tuple[HeadConfig, ...]  # that the kernel is built for
    tuning: Tuning
    multiprocessors: int
    units: Tensor  # from `kvprof.kernels.quantized.launch.unit_table`
    eye: Tensor  # `kvprof.kernels.quantized.tables.eye`

    @property
    def _counted(self) -> int:
        """Counters that the kernel needs, or 0 (`kvprof.kernels.quantized.cuts.share_units`)."""
        return len(Counter._fields) + self._shares if self.tuning.near else 0

    @property
    def _shares(self) -> int:
        """Shares of the work that multiprocessors may have."""
        return min(self.multiprocessors, MOST_SHARES)

    def cut(self, lengths: Tensor | Sequence[Sequence[int]]) -> Schedule:
        """Cut the step's work on the device; a CUDA graph may hold it.

        Parameters
        ----------
        lengths : Tensor or sequence of sequence of int
            ``[segments, rows]`` int32, tokens of each segment and row; 0 is allowed. A tensor is
            not read on the host: the kernel clamps what it finds, and a row without any token gets
            zeros. Numbers are checked instead.

        Raises
        ------
        UsageError
            When the shape, dtype or device does not fit, or a number is out of range.
        """
        layout = self.layout
        wanted = (len(layout.segments), self.rows)
        if not isinstance(lengths, Tensor):
            self._check_numbers(lengths)
        lengths = whole_numbers("lengths", lengths, wanted, self.units.device)
        return self.cut_alike(self.units[None], lengths)[0]

    @property
    def cut_by(self) -> Any:
        """What steps have in common whose work may be cut together."""
        own = self.tuning, self.multiprocessors, self.units.device
        return type(self), self.rows, self.layout.heads, len(self.units), *own

    @property
    def cut_table(self) -> Tensor:
        """``[segments * heads, columns]``: what it is cut by; `cut_alike` takes several."""
        return self.units

    def cut_alike(self, tables: Tensor, lengths: Tensor) -> list[Schedule]:
        """Cut the work of several layers together, as `cut` does that of one.

        Parameters
        ----------
        tables : Tensor
            ``[layers, segments * heads, columns]``: `cut_table` of steps with the same `cut_by`.
        lengths : Tensor
            As for `cut`, of all of them; not checked again.
        """
        if not uses_triton(tables.device):
            return [Schedule(lengths, None, [])] * len(tables)
        pieces = self.tuning.pieces * self.multiprocessors
        found = direct(cut_operator)(
            lengths, tables, self.layout.heads, pieces, self._counted, self.tuning.near
        )
        layers = zip(*(each.unbind() for each in found), strict=True)
        return [Schedule(lengths, None, list(own)) for own in layers]

    def _check_numbers(self, lengths: Sequence[Sequence[int]]) -> None:
        layout = self.layout
        if len(lengths) != len(layout.segments) or any(len(x) != self.rows for x in lengths):
            raise UsageError(
                f"lengths {list(map(list, lengths))} must have {self.rows} entries for each of "
                f"{len(layout.segments)} segments"
            )
        for number, (tokens, segment) in enumerate(zip(lengths, layout.segments, strict=True)):
            room = segment.layout.capacity * (layout.batch if layout.paged else 1)
            for length in tokens:
                if not 0 <= length <= room:
                    raise UsageError(f"segment {number} cannot have {length} tokens (0 to {room})")
        for row in range(self.rows):
            if not any(tokens[row] for tokens in lengths):
                raise UsageError(f"row {row} has a context of 0 tokens in all segments")

    def _check_beside(self, query: Tensor, beside: Attended) -> None:
        layout = self.layout
        wanted = (
            ("output", beside.output, query.dtype, layout.widest.output_offsets[-1]),
            ("logs", beside.logs, torch.float32, layout.heads * layout.group),
        )
        for name, own, dtype, columns in wanted:
            if own.shape != (self.rows, columns) or own.dtype != dtype or not own.is_contiguous():
                raise UsageError(
                    f"the other attention's {name} is {tuple(own.shape)} in {own.dtype}; required "
                    f"is contiguous {(self.rows, columns)} in {dtype}"
                )

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
        beside: Attended | None = None,
    ) -> Tensor:
        """Return the step's attention, ``[rows, Σ_g G·dv_g]`` in the dtype of `query`.

        Parameters
        ----------
        query : Tensor
            ``[rows, Σ_g G·dk_g]``, dk of the widest segment; one with narrower keys uses the first
            columns.
        buffer : Tensor
            The layer's cache in uint8: flat, or ``[batch, SegmentsLayout.row or more]`` such as an
            engine's pool of pages.
        schedule : Schedule
            From `cut`, of this step or of one with the same layout and tuning; not in use on
            another stream at the same time.
        scaling : float
            Factor of ``q · k``, above 0.
        softcap : float
            Scores become ``softcap · tanh(score / softcap)``; 0 leaves them.
        sinks : Tensor, optional
            ``[heads, G]`` float32: a further logit per query head that takes weight and gives
            nothing.
        table : Tensor, optional
            ``[rows, most pages]`` int32, for a pool of pages. What it names is not checked; a row's
            tokens behind its last page are left out.
        beside : Attended, optional
            What each row sees beside its segments, combined by the logarithms: a row without any
            tokens in these has it alone.

        Returns
        -------
        Tensor
            dv is that of the widest segment; a narrower one adds to the first columns.

        Raises
        ------
        UsageError
            When shapes or dtypes do not fit together, or the dtype cannot run.
        """
        layout = self.layout
        check_scaling(scaling)
        check_softcap(softcap)
        check_queries(query, (self.rows, layout.widest.query_offsets[-1]), layout.dtype)
        check_cache(buffer, layout.batch, layout.row, torch.uint8)
        if query.device.type == "cuda" and layout.dtype == torch.float32:
            raise UsageError("segments require bfloat16 or float16 on a GPU, not float32")
        check_interpreter(layout.dtype)
        sinks = checked_sinks(sinks, layout.heads, layout.group)
        check_pages(table, self.rows, paged=layout.paged)
        if beside is not None:
            self._check_beside(query, beside)
        if schedule.scheduled and len(schedule.scheduled[2]) != self._counted:
            raise UsageError(
                f"the work was partitioned for {len(schedule.scheduled[2])} counters, but this "
                f"step has {self._counted}; use a step with the same tuning on the same GPU"
            )
        tuning = self.tuning
        output: Tensor = direct(segments_operator)(
            query,
            buffer,
            schedule.lengths,
            self.units,
            self.eye,
            schedule.scheduled,
            sinks,
            table,
            [] if beside is None else list(beside),
            scaling,
            softcap,
            layout_numbers(self.layout),
            _kind_numbers(self.layout, self.configs),
            [int(own) for own in astuple(tuning)],
            self._shares,
        )
        return output


def segments_step(
    layout: SegmentsLayout,
    device: torch.device,
    *,
    tuning: Tuning | None = None,
    multiprocessors: int | None = None,
    rows: int | None = None,
    configs: Sequence[HeadConfig] | None = None,
) -> SegmentsStep:
    """Prepare decoding steps of a layout.

    Parameters
    ----------
    layout : SegmentsLayout
    device : torch.device
    tuning : Tuning, optional
        What the head configs ask for by default.
    multiprocessors : int, optional
        That the work is cut for; the device's own by default (1 without a GPU).
    rows : int, optional
        Sequences of a layout of pages.
    configs : sequence of HeadConfig, optional
        Head configs for which the kernel is built, those of the layout among them; by default
        these alone. Layers in the same formats that are given the same ones share a compiled
        kernel.

    Raises
    ------
    UsageError
        For a head of none of the configs, or rows that do not fit the layout.
    """
    own = layout.segments[0].layout
    rows = check_pool(own, own.capacity if layout.paged else None, rows)
    family = of_configs(layout, layout.configs if configs is None else configs)
    tuning = tuning or tuning_for(family)
    if multiprocessors is None:
        multiprocessors = multiprocessors_of(device)
    units = unit_table(layout, family, tuning, device)
    return SegmentsStep(layout, rows, family.configs, tuning, multiprocessors, units, eye(device))
