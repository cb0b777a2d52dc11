"""What a layer stores where tokens are cut or quantised: segments of one buffer, for all rows."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout, chunks, in_rows
from kvprof.kernels.quantized.append import Addresses, addresses_of, read, read_scales, write
from kvprof.kernels.quantized.codes import FORMATS, Bits
from kvprof.kernels.quantized.layout import Segment, SegmentsLayout, segment_of
from kvprof.kernels.quantized.layout_registry import operand_layout_of
from kvprof.kernels.quantized.operand_layout import PLACES, SideKind, width_of
from kvprof.methods.plan import HeadGroup, LayerPlan, Plan
from kvprof.methods.storage import Quantiser, SideQuantiser
from kvprof.runtime.backends.stages import NOWHERE, Stages
from kvprof.runtime.backends.state import KernelStore, next_capacity
from kvprof.runtime.cache import check_room

__all__ = [
    "Format",
    "SegmentStore",
    "cut_rows",
    "fill_rows",
    "formats_of",
    "kept_columns",
    "kinds_of",
    "rows_of",
    "shared_columns",
    "stages_of",
    "stored_as",
]

# --- Planes of several heads read and written as rows: all heads of a token side by side.


def rows_of(layout: RaggedLayout, buffer: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return slots `first` … `stop` of all heads, keys and values, ``[batch, n, Σ width]``."""
    pairs = [layout.planes(buffer, head) for head in range(layout.heads)]
    keys, values = (
        torch.cat([plane[:, first:stop] for pair in pairs for plane in pair[side]], dim=-1)
        for side in (0, 1)
    )
    return keys, values


def fill_rows(layout: RaggedLayout, buffer: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write rows ``[batch, n, Σ width]`` into the first n slots of all heads."""
    for plane, side, columns in _columns(layout, buffer):
        rows = (keys, values)[side][..., columns]
        plane[:, : rows.shape[1]] = rows


def cut_rows(
    layout: RaggedLayout, buffer: Tensor, where: Tensor, keys: list[int], values: list[int]
) -> None:
    """Zero what lies behind the first columns of some tokens."""
    for head in range(layout.heads):
        for planes, keep in zip(
            layout.planes(buffer, head), (keys[head], values[head]), strict=True
        ):
            for plane in planes:
                behind = plane[:, : where.shape[1], max(0, keep) :]
                behind.masked_fill_(where[..., None], 0)
                keep -= plane.shape[-1]


def kept_columns(widths: tuple[int, ...], kept: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where the first `kept` columns of each head lie among rows of heads `widths` wide."""
    found: list[int] = []
    begin = 0
    for width, keep in zip(widths, kept, strict=True):
        found += range(begin, begin + keep)
        begin += width
    return torch.tensor(found, dtype=torch.int64, device=device)


def _columns(layout: RaggedLayout, buffer: Tensor) -> Iterator[tuple[Tensor, int, slice]]:
    """Yield every plane with its side and its columns among all heads'."""
    begin = [0, 0]
    for head in range(layout.heads):
        widths = layout.key_widths[head], layout.value_widths[head]
        for side, planes in enumerate(layout.planes(buffer, head)):
            for plane, width in zip(planes, chunks(widths[side]), strict=True):
                yield plane, side, slice(begin[side], begin[side] + width)
                begin[side] += width


# --- In which formats, and by which stages, a plan's tokens are stored where they change with
# age.


class Format:
    """How the tokens of a segment are stored."""

    def __init__(
        self,
        keys: Sequence[SideKind],
        values: Sequence[SideKind],
        key_bits: Bits = None,
        value_bits: Bits = None,
        columns: int | None = None,
    ) -> None:
        #: What each KV head's keys and values are like.
        self.kinds = list(zip(keys, values, strict=True))
        #: Per KV head.
        self.key_widths, self.value_widths = (tuple(map(width_of, own)) for own in (keys, values))
        #: That share a scale.
        #: Formats of the kernels.
        self.key_bits, self.value_bits, self.columns = key_bits, value_bits, columns

    def segment(self, group: int, batch: int, capacity: int) -> Segment:
        """Return the segment with room for `capacity` tokens of `batch` rows."""
        formats = self.key_bits, self.value_bits, self.columns
        return segment_of(self.kinds, group, batch, capacity, *formats)


def stages_of(plan: Plan) -> Stages:
    """Return how tokens age in a plan's layers without a window."""
    quantiser = plan.quantiser
    return Stages(plan.levels, quantiser is not None, quantiser.window if quantiser else 0)


def stored_as(
    quantiser: Quantiser | None,
    side: SideQuantiser | None,
    level: int,
    groups: Sequence[HeadGroup],
) -> Bits:
    """Return the format of the kernels in which a side's tokens of a level are stored."""
    runs = groups[0].runs(side, level)
    if quantiser is None or not runs:
        return None
    return quantiser.kind if quantiser.kind in FORMATS else runs[0][1]


def shared_columns(quantiser: Quantiser) -> int | None:
    """Return how many columns of a token share a scale; None for all, and where there is none."""
    if quantiser.kind in FORMATS:
        return None
    return next(side.group for side in (quantiser.keys, quantiser.values) if side is not None)


def kinds_of(
    groups: Iterable[HeadGroup], side: SideQuantiser | None, bits: Bits, level: int
) -> tuple[SideKind, ...]:
    """Return what the kernels' stored heads of a level are like."""
    own = side.bits[level] if side is not None and side.bits else None
    kind = operand_layout_of(bits).kind
    return tuple(kind(group.ranks[level], own, group.column_bits) for group in groups)


def formats_of(plan: Plan, layer: LayerPlan) -> list[Format]:
    """Return how a layer's segments are stored, in the order of `Stages`."""
    levels = range(len(plan.levels.shares))
    keys, values = (
        [tuple(group.ranks[level] for group in side.groups) for level in levels]
        for side in (layer.keys, layer.values)
    )
    found = [Format(keys[-1], values[-1])]
    quantiser = plan.quantiser
    if quantiser is None:
        return [*found, Format(keys[0], values[0])]
    columns = shared_columns(quantiser)
    for level in reversed(levels):
        kinds: list[tuple[SideKind, ...]] = []
        bits: list[Bits] = []
        for side, own in (
            (quantiser.keys, layer.keys.groups),
            (quantiser.values, layer.values.groups),
        ):
            bits.append(stored_as(quantiser, side, level, own))
            kinds.append(kinds_of(own, side, bits[-1], level))
        found.append(Format(kinds[0], kinds[1], bits[0], bits[1], columns))
    return found


#: Gives what the first layer that asks makes under a key.
Once = Callable[[Hashable, Callable[[], Any]], Any]
# Tokens of all rows whose addresses are held at once: 8 bytes for every value.
_AT_ONCE = 8192


class SegmentStore(KernelStore):
    """One layer's segments.

    Parameters
    ----------
    stages : Stages
    formats : sequence of Format
        Per segment.
    group : int
        Query heads per KV head.
    capacity : int or None
        Tokens per sequence to make room for at once; None grows with the sequence.

    Attributes
    ----------
    layout : SegmentsLayout or None
        None before the first token.
    capacity : int
        Tokens of a row that there is room for.
    """

    def __init__(
        self, stages: Stages, formats: Sequence[Format], group: int, capacity: int | None
    ) -> None:
        super().__init__(capacity)
        self.stages = stages
        self.formats = list(formats)
        self.layout: SegmentsLayout | None = None
        self.capacity = 0
        self._group = group
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...], torch.device], Tensor] = {}

    @property
    def rows(self) -> int:
        """Sequences."""
        return 0 if self.layout is None else self.layout.batch

    @property
    def room(self) -> float:
        """Tokens of a row that it has room for where it lies."""
        return self.capacity

    def _layout_for(self, batch: int, capacity: int, dtype: torch.dtype) -> SegmentsLayout:
        rooms = self.stages.rooms(capacity)
        return SegmentsLayout(
            tuple(
                form.segment(self._group, batch, room)
                for form, room in zip(self.formats, rooms, strict=True)
            ),
            dtype,
        )

    def make_room(
        self, batch: int, tokens: int, reach: int | None, device: torch.device, dtype: torch.dtype
    ) -> SegmentsLayout:
        """See to it that rows of `tokens` tokens have room; return the layout."""
        check_room(self._fixed, tokens)
        if self.layout is not None and self.layout.batch != batch:
            self.layout, self.capacity = None, 0
        if self.layout is not None and self.capacity >= tokens:
            return self.layout
        self._may_grow(device)
        capacity = self._fixed or next_capacity(self.capacity, tokens, reach)
        layout = self._layout_for(batch, capacity, dtype)
        with torch.inference_mode(False):
            buffer = layout.empty(device)
        if self.layout is not None:
            every = torch.arange(batch, device=device)
            _copied(self.layout, self.buffer, layout, buffer, every)
        self.layout, self.buffer, self.capacity = layout, buffer, capacity
        return layout

    def select(self, index: list[int]) -> None:
        """Make row i what row ``index[i]`` was."""
        if self.layout is None:
            return
        rows = torch.tensor(index, device=self.buffer.device)
        layout = self._layout_for(len(index), self.capacity, self.layout.dtype)
        if layout == self.layout:
            _copied(layout, self.buffer, layout, self.buffer, rows)
            return
        self._may_move()
        with torch.inference_mode(False):
            buffer = layout.empty(rows.device)
        _copied(self.layout, self.buffer, layout, buffer, rows)
        self.layout, self.buffer = layout, buffer

    def clear(self) -> None:
        """Forget all tokens; a static cache keeps its room."""
        if self._fixed is None:
            self.layout, self.buffer, self.capacity = None, torch.empty(0), 0

    def bytes_at(self, seen: list[int]) -> int:
        """Return the bytes of what is stored: codes in their containers, scales, middles."""
        if self.layout is None:
            return 0
        total = 0
        for number, segment in enumerate(self.layout.segments):
            tokens = sum(self.stages.counts(row)[number] for row in seen)
            for head in range(self.layout.heads):
                size = self.layout.block_bytes(number, head)
                total += tokens * size // (PLACES * segment.slots)
        return total

    # Tokens by their number.

    def at(self, first: int, stop: int, totals: Sequence[int]) -> list[Tensor | None]:
        """Return each segment's slots of tokens `first` … `stop`, ``[batch, n]`` or None."""
        assert self.layout is not None
        shape = (len(self.formats), len(totals), stop - first)
        slots = np.full(shape, NOWHERE, dtype=np.int64)
        for row, total in enumerate(totals):
            last = min(stop, total)
            if last > first:
                segments, own = self.stages.slots_of(first, last, total)
                slots[segments, row, np.arange(last - first)] = own
        device = self.buffer.device
        return [
            torch.from_numpy(own).to(device) if own.max(initial=NOWHERE) >= 0 else None
            for own in slots
        ]

    def rows_until(self, stop: int, totals: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return tokens before `stop`, ``[batch, stop, Σ width]``, zero where truncated."""
        layout = self.layout
        assert layout is not None
        top, device = self.formats[0], self.buffer.device
        shape = (layout.batch, stop)
        keys = torch.zeros(*shape, sum(top.key_widths), dtype=layout.dtype, device=device)
        values = torch.zeros(*shape, sum(top.value_widths), dtype=layout.dtype, device=device)
        for begin in range(0, stop, self._at_once):
            end = min(stop, begin + self._at_once)
            part = slice(begin, end)
            for number, slots in enumerate(self.at(begin, end, totals)):
                if slots is None:
                    continue
                found = read(self.buffer, addresses_of(layout, number, slots))
                there = (slots >= 0)[..., None]
                for whole, own, columns in zip(
                    (keys, values), found, self.cuts(0, number), strict=True
                ):
                    kept: Tensor | slice = slice(None) if columns is None else columns
                    before = whole[:, part, kept]
                    whole[:, part, kept] = torch.where(there, own.to(layout.dtype), before)
        return keys, values

    def scales_until(self, stop: int, totals: Sequence[int]) -> list[Tensor | None]:
        """Return float32 scales before `stop`, per side ``[batch, stop, heads]`` or None."""
        assert self.layout is not None
        number = len(self.formats) - 1
        found: list[list[Tensor]] = [[], []]
        for begin in range(0, stop, self._at_once):
            slots = self.at(begin, min(stop, begin + self._at_once), totals)[number]
            if slots is None:
                count = min(stop, begin + self._at_once) - begin
                slots = self.buffer.new_full((self.rows, count), NOWHERE, dtype=torch.int64)
            scales = read_scales(self.buffer, addresses_of(self.layout, number, slots))
            for own, more in zip(found, scales, strict=True):
                if more is not None:
                    own.append(more.masked_fill(slots[..., None] < 0, 0.0))
        return [torch.cat(own, dim=1) if own else None for own in found]

    def take(
        self, keys: Tensor, values: Tensor, first: int, old: list[int], new: list[int]
    ) -> None:
        """Store tokens from `first` on, and move those that have grown old meanwhile."""
        self.move_on(old, new)
        layout = self.layout
        assert layout is not None
        count = keys.shape[1]
        starts = torch.tensor(old, device=self.buffer.device)[:, None]
        for begin in range(0, count, self._at_once):
            part = slice(begin, min(count, begin + self._at_once))
            numbers = torch.arange(first + part.start, first + part.stop, device=starts.device)
            for number, slots in enumerate(self.at(first + part.start, first + part.stop, new)):
                if slots is None:
                    continue
                places = addresses_of(layout, number, slots.where(numbers >= starts, NOWHERE))
                self.put(places, keys[:, part], values[:, part], number)

    def take_from(
        self, planes: RaggedLayout, buffer: Tensor, old: list[int], new: list[int], once: Once
    ) -> None:
        """Store tokens that lie in planes by their number, in a few launches; as `take`."""
        from kvprof.kernels.quantized.moving import token_move  # Triton is for Linux only

        self.move_on(old, new)
        assert self.layout is not None
        for segment, origins, targets in self.launches(planes, old, new, once):
            move = token_move(self.layout, segment, planes, self.buffer.device)
            move.run(self.buffer, buffer, origins, targets, pooled=True)

    def give_to(
        self, planes: RaggedLayout, buffer: Tensor, first: list[int], new: list[int], once: Once
    ) -> None:
        """Write what is stored into planes, by token number."""
        from kvprof.kernels.dispatch import uses_triton  # Triton is for Linux only
        from kvprof.kernels.quantized.moving import token_restore

        if not uses_triton(buffer.device):
            fill_rows(planes, buffer, *self.rows_until(max(new), new))
            return
        assert self.layout is not None
        for segment, targets, slots in self.launches(planes, first, new, once):
            form = self.formats[segment]
            where = targets.new_zeros(planes.batch, planes.capacity, dtype=torch.bool)
            where.view(-1)[targets] = True
            cut_rows(planes, buffer, where, list(form.key_widths), list(form.value_widths))
            restore = token_restore(self.layout, segment, planes, buffer.device)
            restore.run(buffer, self.buffer, slots, targets, planes.batch)

    def launches(
        self, planes: RaggedLayout, old: list[int], new: list[int], once: Once
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Return segments, their slots of planes and the slots to write, row by row."""
        layout, device = self.layout, self.buffer.device
        assert layout is not None
        found: list[tuple[int, Tensor, Tensor]] = once(
            ("launches", self.stages, self.capacity, planes.capacity, *old, *new),
            lambda: self._launches(layout, planes, old, new, device),
        )
        return found

    def _launches(
        self,
        layout: SegmentsLayout,
        planes: RaggedLayout,
        old: list[int],
        new: list[int],
        device: torch.device,
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Return what `launches` says."""
        rooms = np.array([own.layout.capacity for own in layout.segments])
        found: list[list[np.ndarray]] = [[], [], []]
        for row, (begin, total) in enumerate(zip(old, new, strict=True)):
            segments, slots = self.stages.slots_of(begin, total, total)
            origins = row * planes.capacity + np.arange(begin, total)
            for each, own in zip(
                found, (segments, origins, row * rooms[segments] + slots), strict=True
            ):
                each.append(own)
        segments, origins, targets = (np.concatenate(each) for each in found)
        launches: list[tuple[int, Tensor, Tensor]] = []
        for segment in range(len(layout.segments)):
            chosen = np.flatnonzero(segments == segment)
            if len(chosen):
                # Tokens of one place share bytes, and have to stand beside one another.
                chosen = chosen[np.argsort(targets[chosen])]
                came, goes = (
                    torch.from_numpy(each[chosen]).to(device) for each in (origins, targets)
                )
                launches.append((segment, came, goes))
        return launches

    def move_on(self, old: list[int], new: list[int]) -> None:
        """Move tokens that have grown old since there were `old` of each row to where they last."""
        layout = self.layout
        assert layout is not None
        oldest = min(self.lasting(total) for total in old)
        newest = max(old)
        # Nothing but the last segment gets tokens that were stored before, into slots of its own.
        for begin in range(oldest, newest, self._at_once):
            end = min(newest, begin + self._at_once)
            before = self.at(begin, end, old)
            after = self.at(begin, end, new)[-1]
            for number, slots in enumerate(before[:-1]):
                if slots is None or after is None:
                    continue
                moving = (slots >= 0) & (after >= 0)
                if bool(moving.any()):
                    source = addresses_of(layout, number, slots.where(moving, NOWHERE))
                    target = addresses_of(layout, len(before) - 1, after.where(moving, NOWHERE))
                    self.move(source, target, number, len(before) - 1)

    def lasting(self, total: int) -> int:
        """Return from which token of a row on tokens may still move."""
        return min(total, self.stages.levels.sink + self.stages.counts(total)[-1])

    @property
    def _at_once(self) -> int:
        return max(1, _AT_ONCE // max(1, self.rows))

    def put(self, places: Addresses, keys: Tensor, values: Tensor, segment: int) -> None:
        """Store rows at the top level's widths in a segment."""
        pair = (
            given if columns is None else given.index_select(-1, columns)
            for given, columns in zip((keys, values), self.cuts(0, segment), strict=True)
        )
        write(self.buffer, places, *pair)

    def move(self, source: Addresses, target: Addresses, before: int, after: int) -> None:
        """Store tokens of a segment in a later one too."""
        assert self.layout is not None
        # A token is quantised from what its row in the run's dtype stands for.
        found = [rows.to(self.layout.dtype) for rows in read(self.buffer, source)]
        pair = (
            given if columns is None else given.index_select(-1, columns)
            for given, columns in zip(found, self.cuts(before, after), strict=True)
        )
        write(self.buffer, target, *pair)

    def _widths(self, segment: int, side: int) -> tuple[int, ...]:
        form = self.formats[segment]
        return form.value_widths if side else form.key_widths

    def cuts(self, before: int, after: int) -> list[Tensor | None]:
        """Return which columns a segment's rows keep in another, per side; None for all."""
        found: list[Tensor | None] = []
        for side in (0, 1):
            wide, narrow = self._widths(before, side), self._widths(after, side)
            if wide == narrow:
                found.append(None)
                continue
            key = (wide, narrow, self.buffer.device)
            if key not in self._known:
                self._known[key] = kept_columns(*key)
            found.append(self._known[key])
        return found


def _copied(
    old: SegmentsLayout, source: Tensor, new: SegmentsLayout, target: Tensor, rows: Tensor
) -> None:
    """Copy rows of a buffer into one with as many blocks per row or more."""
    for number in range(len(old.segments)):
        blocks = old.segments[number].blocks
        for head in range(old.heads):
            picked = _block_rows(old, source, number, head).index_select(0, rows)
            _block_rows(new, target, number, head)[:, :blocks].copy_(picked)


def _block_rows(layout: SegmentsLayout, buffer: Tensor, segment: int, head: int) -> Tensor:
    """Return a head's blocks, ``[batch, blocks, bytes]``: a view."""
    start, size = layout.offsets[segment][head], layout.block_bytes(segment, head)
    count = layout.segments[segment].blocks
    rows = in_rows(buffer, layout.batch)
    found: Tensor = rows[:, start : start + count * size].unflatten(1, (count, size))
    return found
