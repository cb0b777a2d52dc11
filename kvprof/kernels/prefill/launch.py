"""Launches the Triton kernel over the blocks of a schedule; nothing here waits for the device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvprof.errors import FailedError, UsageError
from kvprof.kernels.dispatch import launching, multiprocessors_of
from kvprof.kernels.planes import MOST_CHUNKS, RaggedLayout, chunks, row_stride
from kvprof.kernels.prefill.kernel import prefill_blocks
from kvprof.kernels.prefill.schedules import Blocks, Work, cut_blocks
from kvprof.kernels.prefill.tuning import (
    HOPPER_WIDEST,
    SHARED_MEMORY,
    Head,
    Kind,
    Tile,
    TiledWidths,
    Tuning,
    head_tiles,
)
from kvprof.kernels.tables import chunk_columns, joined_rows

__all__ = [
    "Launch",
    "PrefillStep",
    "head_table",
    "kind_columns",
    "prefill_step",
    "side_by_side",
    "tiles_on",
]

# --- Runs pieces of work side by side on a GPU's streams, so that a CUDA graph may hold them.


@lru_cache(maxsize=64)
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def side_by_side(jobs: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Run jobs on parallel streams after the current one, and make it wait for all.

    A job must not retain what another stream allocated.
    """
    if device.type != "cuda" or len(jobs) < 2:
        for job in jobs:
            job()
        return
    current = torch.cuda.current_stream(device)
    begun = current.record_event()
    done = []
    for number, job in enumerate(jobs[1:]):
        stream = _stream(device, number)
        stream.wait_event(begun)
        with torch.cuda.stream(stream):
            job()
            done.append(stream.record_event())
    # Last, so that waiting for the host to launch the others does not hold it up.
    jobs[0]()
    for event in done:
        current.wait_event(event)


class Launch(NamedTuple):
    """Neighbouring blocks of the table that one launch runs."""

    first: int
    blocks: int
    kind: tuple[int, ...]  # from `kind_columns`
    tile: Tile


@lru_cache(maxsize=256)
def kind_columns(kind: TiledWidths) -> tuple[int, ...]:
    """Return a head configuration as the kernel takes it."""
    key_width, value_width, tile = kind
    return joined_rows([Kind(chunk_columns(key_width, value_width), tile.rows, tile.keys)])


@dataclass(frozen=True, eq=False)
class PrefillStep:
    """A prompt's attention with its work cut; layers of the same widths may share it."""

    layout: RaggedLayout
    tokens: int  # new tokens of every sequence
    window: int
    blocks: Blocks  # the schedule, with its predicted makespan
    table: Tensor  # on the device: rows of `BlockRow` and of `Head`
    heads: Tensor
    launches: tuple[Launch, ...]

    def jobs(
        self,
        query: Tensor,
        buffer: Tensor,
        output: Tensor,
        lengths: Tensor,
        scaling: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> list[Callable[[], None]]:
        """Return what is to be launched, each on a stream of its own (`side_by_side`)."""
        unused = self.table
        tensors = (
            query,
            buffer,
            output,
            unused,
            lengths,
            unused,
            unused if sinks is None else sinks,
            self.table,
            self.heads,
            unused,
            unused,
        )
        scale = scaling if softcap else scaling * math.log2(math.e)
        layout = self.layout
        stride = row_stride(buffer, layout.batch)
        numbers = (1, self.tokens, layout.capacity, stride, 0, query.shape[-1], output.shape[-1])
        scores = (scale, softcap, self.window)

        def job(launch: Launch) -> Callable[[], None]:
            options: dict[str, Any] = {"num_warps": launch.tile.warps}
            if launch.tile.registers:
                options["maxnreg"] = launch.tile.registers
            return lambda: launching(prefill_blocks, (launch.blocks,))(
                *tensors,
                launch.first,
                *numbers,
                *scores,
                KIND=launch.kind,
                STAGES=launch.tile.stages,
                GROUP=layout.group,
                PAGE=0,
                UNLIKE=False,
                SOFTCAP=softcap > 0,
                SINKS=sinks is not None,
                WINDOW=self.window > 0,
                LOGS=0,
                **options,
            )

        return [job(launch) for launch in self.launches]

    def run(
        self,
        query: Tensor,
        buffer: Tensor,
        lengths: Tensor,
        scaling: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return ``[batch, tokens, Σ_g G·dv_g]``; parameters are those of `jobs`."""
        output = query.new_empty(*query.shape[:2], self.layout.output_offsets[-1])
        jobs = self.jobs(query, buffer, output, lengths, scaling, softcap=softcap, sinks=sinks)
        side_by_side(jobs, query.device)
        return output


def _in_launches(
    blocks: Blocks, layout: RaggedLayout, tiles: Sequence[Tile]
) -> tuple[Blocks, tuple[Launch, ...]]:
    """Put the blocks of a launch together, one for each head configuration."""
    pairs = list(
        starmap(TiledWidths, zip(layout.key_widths, layout.value_widths, tiles, strict=True))
    )
    # In the order in which they first come: with heavy blocks first, the heaviest kind.
    heads = dict.fromkeys(head for _, head, *_ in blocks.items)
    kinds = list(dict.fromkeys(pairs[head] for head in heads))
    of_head = np.array([kinds.index(pair) if pair in kinds else -1 for pair in pairs])
    number = of_head[[head for _, head, *_ in blocks.items]]
    order = np.argsort(number, kind="stable").tolist()
    items = tuple(blocks.items[at] for at in order)
    launches = []
    first = 0
    for kind, count in zip(kinds, np.bincount(number).tolist(), strict=True):
        launches.append(Launch(first, count, kind_columns(kind), kind.tile))
        first += count
    costs = tuple(blocks.costs[at] for at in order)
    return Blocks(items, costs, blocks.programs), tuple(launches)


def head_table(layout: RaggedLayout, device: torch.device) -> Tensor:
    """Return what the kernel looks up of every head, rows of `Head` in int64."""
    found = []
    for head in range(layout.heads):
        widths = (layout.key_widths[head], layout.value_widths[head])
        planes: list[int] = []
        for start, width in zip(layout.offsets[head], widths, strict=True):
            own = []
            for chunk in chunks(width):
                own.append(start)
                start += layout.capacity * chunk
            planes += [*own, *(0,) * (MOST_CHUNKS - len(own))]
        found.append(Head(layout.output_offsets[head], layout.query_offsets[head], *planes))
    return torch.tensor(found, dtype=torch.int64, device=device)


def tiles_on(
    device: torch.device, layout: RaggedLayout, tuning: Tuning, element_size: int
) -> tuple[Tile, ...]:
    """Return every head's tile on a device."""
    shared = SHARED_MEMORY
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        shared = properties.shared_memory_per_multiprocessor - 1024
        if properties.major == 9 and element_size == 2 and tuning.widest == Tuning.widest:
            tuning = replace(tuning, widest=HOPPER_WIDEST)
    tiles = head_tiles(layout, tuning, element_size, shared)
    if device.type == "cuda" and properties.major < 9:
        # There queries stay in registers: with few of them they would be spilled.
        tiles = tuple(replace(tile, registers=0) for tile in tiles)
    return tiles


@lru_cache(maxsize=256)
def prefill_step(
    layout: RaggedLayout,
    tokens: int,
    device: torch.device,
    *,
    past: tuple[int, ...] | None = None,
    window: int = 0,
    schedule: str = "equal",
    tuning: Tuning | None = None,
    element_size: int = 2,
    multiprocessors: int | None = None,
    heads: tuple[int, ...] | None = None,
) -> PrefillStep:
    """Cut a prompt's work and put the table on the device; made once and remembered."""
    if layout.capacity * max(layout.key_widths + layout.value_widths) >= 2**31:
        raise UsageError(f"a capacity of {layout.capacity:,} tokens is too large for one plane")
    tuning = tuning or Tuning()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise FailedError("run this prefill once before a CUDA graph captures it")
    if multiprocessors is None:
        multiprocessors = multiprocessors_of(device)
    tiles = tiles_on(device, layout, tuning, element_size)
    work = Work(layout, tokens, past or (0,) * layout.batch, tiles, window)
    own = heads if heads is not None else tuple(range(layout.heads))
    programs = multiprocessors * max(tiles[head].programs for head in own)
    blocks = cut_blocks(schedule, work, own, programs, pieces=tuning.pieces)
    blocks, launches = _in_launches(blocks, layout, tiles)
    table = blocks.table(device)
    return PrefillStep(layout, tokens, window, blocks, table, head_table(layout, device), launches)
