"""Decode on a CPU: each thread takes blocks of tokens, and log sums combine their results.

Products are float32: widening a block costs less than products with 16-bit results.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout

__all__ = ["decode_cpu"]

#: Most and fewest values of K and V in a block: megabytes, so that Python's part is small.
_LARGEST = 2**21
_SMALLEST = 2**17
#: Blocks that each thread should have, so that none waits for long.
_EACH = 4
#: Values of 16 bits that are widened at a time.
_CACHED = 2**18
#: Tokens side by side in softmax.
_FOLD = 8

_Part = tuple[Tensor, Tensor, Tensor]

_pools: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_pools.clear)


def decode_cpu(
    query: Tensor,  # `[rows, Σ_g G·dk_g]` on the CPU
    buffer: Tensor,  # the layer's cache, of the same dtype
    layout: RaggedLayout,
    #: Tokens of each row, and the first that it sees; clamped to what there is room for.
    lengths: Tensor | Sequence[int],
    scaling: float,  # factor of `q · k`
    *,
    softcap: float = 0.0,  # scores become `softcap · tanh(score / softcap)`; 0 leaves them
    sinks: Tensor | None = None,  # `[heads, G]` float32: a further logit per query head
    starts: Tensor | Sequence[int] | None = None,
    table: Tensor | None = None,  # `[rows, most pages]` int32, where the layout is of a pool
) -> Tensor:
    """Return one decoding step's attention, ``[rows, Σ_g G·dv_g]`` in the dtype of `query`."""
    begins, ends = _bounds(layout, lengths, starts, table)
    if len(ends) != len(query):
        raise UsageError(f"{len(ends)} lengths for {len(query)} rows of queries")
    queries = query.float() * scaling
    size = sum(end - begin for begin, end in zip(begins, ends, strict=True))
    size *= sum(layout.key_widths) + sum(layout.value_widths)
    threads = torch.get_num_threads()
    values_each = max(_SMALLEST, min(_LARGEST, size // (_EACH * threads)))
    blocks: list[tuple[int, int, int, int]] = []
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        for head, widths in enumerate(zip(layout.key_widths, layout.value_widths, strict=True)):
            most = values_each // sum(widths) // _FOLD * _FOLD
            blocks += [(row, head, at, min(end, at + most)) for at in range(begin, end, most)]

    def work(block: tuple[int, int, int, int]) -> _Part:
        row, head, start, stop = block
        own = queries[row, slice(*layout.query_offsets[head : head + 2])].view(layout.group, -1)
        keys, values = layout.planes(buffer, head)
        rows = _picker(layout, row, start, stop, None if table is None else table[row])
        return _block(own, [rows(k) for k in keys], [rows(v) for v in values], softcap)

    if threads == 1 or len(blocks) == 1:
        parts = [work(block) for block in blocks]
    else:
        parts = list(_pool(threads).map(work, blocks))
    output = torch.zeros(len(query), layout.output_offsets[-1])
    by_head: dict[tuple[int, int], list[_Part]] = {}
    for (row, head, _, _), part in zip(blocks, parts, strict=True):
        by_head.setdefault((row, head), []).append(part)
    for (row, head), own in by_head.items():
        joined = _joined(own, None if sinks is None else sinks[head])
        output[row, slice(*layout.output_offsets[head : head + 2])] = joined.flatten()
    return output.to(query.dtype)


def _bounds(
    layout: RaggedLayout,
    lengths: Tensor | Sequence[int],
    starts: Tensor | Sequence[int] | None,
    table: Tensor | None,
) -> tuple[list[int], list[int]]:
    """Return each row's first visible token and the one behind its last, within its room."""
    room = layout.capacity * (1 if table is None else table.shape[1])
    listed: list[int] = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    ends = [min(max(length, 0), room) for length in listed]
    if starts is None:
        return [0] * len(ends), ends
    first: list[int] = starts.tolist() if isinstance(starts, Tensor) else list(starts)
    return [min(max(start, 0), end) for start, end in zip(first, ends, strict=True)], ends


def _picker(
    layout: RaggedLayout, row: int, start: int, stop: int, pages: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Return what takes a block's tokens out of a plane, as ``[tokens, chunk]``."""
    if pages is None:
        return lambda plane: plane[row, start:stop]
    tokens = torch.arange(start, stop)
    page = pages[tokens // layout.capacity].long()
    place = tokens % layout.capacity
    return lambda plane: plane[page, place]


class _Scratch(threading.local):
    """Memory that a thread keeps: allocating megabytes anew costs as much as filling them."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int) -> Tensor:
        """Return ``[rows, columns]`` float32 of whatever was there."""
        found = self.kept.get(name)
        if found is None or found.numel() < rows * columns:
            # A tensor made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                found = self.kept[name] = torch.empty(rows * columns)
        return found[: rows * columns].view(rows, columns)


_scratch = _Scratch()


def _widened(plane: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Give a plane of 16 bits in float32, as many tokens at a time as stay in a core's cache."""
    tokens, width = plane.shape
    height = _CACHED // width
    for start in range(0, tokens, height):
        some = slice(start, min(tokens, start + height))
        yield some, _scratch.take("plane", some.stop - start, width).copy_(plane[some])


def _scores(query: Tensor, keys: list[Tensor]) -> Tensor:
    """Return scores ``[tokens, G]``: token-major in float32, else head-major, which is faster."""
    tokens, group = len(keys[0]), len(query)
    own = torch.split(query, [plane.shape[-1] for plane in keys], dim=-1)
    if query.dtype == keys[0].dtype:
        scores = _scratch.take("scores", tokens, group)
        torch.mm(keys[0], own[0].T, out=scores)
        for plane, part in zip(keys[1:], own[1:], strict=True):
            scores.addmm_(plane, part.T)
        return scores
    scores = _scratch.take("scores", group, tokens).zero_()
    for plane, part in zip(keys, own, strict=True):
        for some, wide in _widened(plane):
            scores[:, some].addmm_(part, wide.T)
    return scores.T


def _weighted(weights: Tensor, plane: Tensor) -> Tensor:
    """Return ``[G, chunk]``, a plane of V weighted by ``[G, tokens]``."""
    if weights.dtype == plane.dtype:
        return torch.mm(weights, plane)
    result = weights.new_zeros(len(weights), plane.shape[-1])
    for some, wide in _widened(plane):
        result.addmm_(weights[:, some], wide)
    return result


def _block(query: Tensor, keys: list[Tensor], values: list[Tensor], softcap: float) -> _Part:
    """Return a block's greatest scores, sums of weights and weighted values, per query head."""
    scores = _scores(query, keys)
    if softcap > 0.0:
        scores.div_(softcap).tanh_().mul_(softcap)
    tokens, group = scores.shape
    # Several tokens' scores side by side, so that the operations run along whole registers.
    fold = _FOLD if scores.is_contiguous() and tokens % _FOLD == 0 else 1
    folded = scores.view(-1, fold * group) if fold > 1 else scores
    top = folded.amax(0)
    if fold > 1:
        top = top.view(fold, group).amax(0)
    folded.sub_(top.repeat(fold) if fold > 1 else top).exp_()
    total = folded.sum(0)
    if fold > 1:
        total = total.view(fold, group).sum(0)
    results = [_weighted(scores.T, plane) for plane in values]
    return top, total, torch.cat(results, dim=-1)


def _joined(parts: list[_Part], sinks: Tensor | None) -> Tensor:
    """Return the attention over all parts of a row's head, ``[G, dv]``."""
    tops, sums, results = (torch.stack(each) for each in zip(*parts, strict=True))
    top = tops.amax(0)
    fade = (tops - top).exp()
    total = (sums * fade).sum(0)
    if sinks is not None:
        total = total + (sinks.float() - top).exp()
    return (results * fade[..., None]).sum(0) / total[:, None]


def _pool(threads: int) -> ThreadPoolExecutor:
    """Return workers in each of which torch has one thread."""
    pool = _pools.get(threads)
    if pool is None:
        together = threading.Barrier(threads + 1)

        def begin() -> None:
            torch.set_num_threads(1)
            together.wait()

        pool = ThreadPoolExecutor(threads, "kvprof-decode")
        for _ in range(threads):
            pool.submit(begin)
        together.wait()
        # The number of threads is each thread's own, but new threads begin with the last one set.
        torch.set_num_threads(threads)
        _pools[threads] = pool
    return pool
