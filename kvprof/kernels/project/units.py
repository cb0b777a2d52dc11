"""How a pass is cut into units: blocks of a head's columns, 16 to 128 wide.

Columns and not heads, so that the kernel knows at most four widths however ragged a layer is, and
so that one token per sequence still makes work for many multiprocessors.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from kvprof.kernels.planes import chunks

__all__ = ["FIELDS", "KEYS", "QUERY", "VALUES", "Units", "units"]

#: The streams, as the kernel counts them.
QUERY, KEYS, VALUES = 0, 1, 2

#: Numbers per unit: case, head (or first column of a row of latents), where its basis begins, the
#: basis's row length, where its plane begins (per token of the pool), the row length of what it
#: writes, and its first column there.
FIELDS = 7

#: A table on the device and the cases ``(stream, width)`` in it, flat.
Units = tuple[Tensor, tuple[int, ...]]


@lru_cache(maxsize=4096)
def units(
    query: tuple[tuple[int, ...], int, int] | None,
    keys: tuple[tuple[int, ...], int] | None,
    values: tuple[tuple[int, ...], int] | None,
    planes: tuple[tuple[int, ...], tuple[int, ...]],
    widest: int,
    device: torch.device,
) -> Units:
    """Return a pass's units, made once per shape: a captured graph needs one run before it.

    Parameters
    ----------
    query : tuple or None
        Widths per KV head, d, and query heads per KV head.
    keys, values : tuple or None
        Widths per KV head, and d (0 where latents are only stored).
    planes : tuple
        Key and value widths of the layout.
    widest : int
        Most columns of a unit.
    device : torch.device
    """
    rows: list[tuple[int, ...]] = []
    cases: list[tuple[int, int]] = []

    def add(stream: int, width: int, *fields: int) -> None:
        if (stream, width) not in cases:
            cases.append((stream, width))
        rows.append((cases.index((stream, width)), *fields))

    if query is not None:
        widths, depth, group = query
        length, first = group * sum(widths), 0
        for head, (width, basis) in enumerate(zip(widths, _sums(widths), strict=True)):
            for member in range(group):
                for at, _, _, size in _blocks(width, widest):
                    add(QUERY, size, head * group + member, depth * basis + at, width,
                        0, length, first + at)  # fmt: skip
                first += width
    both = [width for pair in zip(*planes, strict=True) for width in pair]
    begins = _sums(tuple(both))
    for stream, given in ((KEYS, keys), (VALUES, values)):
        if given is None:
            continue
        widths, depth = given
        for head, (width, basis) in enumerate(zip(widths, _sums(widths), strict=True)):
            plane = begins[2 * head + stream - KEYS]
            for at, before, chunk, size in _blocks(width, widest):
                add(stream, size, head if depth else basis + at, depth * basis + at, width,
                    plane + before, chunk, at - before)  # fmt: skip
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    return table, tuple(number for case in cases for number in case)


def _sums(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Return where each head's columns begin."""
    return (0, *accumulate(widths))[:-1]


def _blocks(width: int, widest: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a head's columns: first column, columns before its chunk, the chunk, the block's size."""
    before = 0
    for chunk in chunks(width):
        size = min(chunk, widest)
        for at in range(0, chunk, size):
            yield before + at, before, chunk, size
        before += chunk
