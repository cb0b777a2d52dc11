"""Transform coding: principal components in blocks of unlike bits, and DEFLATE behind them.

A row of coefficients is cut into blocks of adjacent columns. A block that is kept has, for every
token, a shift and a scale of 16 bits each and integers of 2, 4 or 8 bits; of one that is not,
nothing is stored and zeros come back. (KVTC, arXiv 2511.01815, has these sizes and overheads, and
8-bit floating point where here are integers.)
"""

import math
import zlib
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvprof.analysis.bases import eigenbasis

__all__ = [
    "BITS",
    "OVERHEAD",
    "SIZES",
    "BlockErrors",
    "Blocks",
    "decoded",
    "encoded",
    "packed_bytes",
    "principal_components",
]

#: Columns that a block may have; it starts at a multiple of its size.
SIZES = (1, 16, 64, 256, 1024)
#: Of an integer; 0 keeps nothing.
BITS = (0, 2, 4, 8)
#: Bytes of a block's shift and scale, per token.
OVERHEAD = 4
_LARGEST = torch.finfo(torch.float16).max
_TINY = torch.finfo(torch.float16).tiny
# zlib's own default: higher levels gain less than a percent here and take twice as long.
_LEVEL = 6

#: Adjacent blocks of a row, as (columns, bits).
Blocks = tuple[tuple[int, int], ...]


def principal_components(gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of rows, and the eigenvectors and eigenvalues of their covariance.

    Parameters
    ----------
    gram : Tensor
        ``[w + 1, w + 1]`` float64 of the rows with a 1 behind them, as `AcrossMoments` counts it.

    Returns
    -------
    mean : Tensor
        ``[w]``.
    basis : Tensor
        ``[w, w]``, orthonormal columns, the largest eigenvalue first.
    variances : Tensor
        ``[w]``, none below 0.
    """
    count = gram[-1, -1]
    mean = gram[-1, :-1] / count
    covariance = gram[:-1, :-1] / count - torch.outer(mean, mean)
    values, basis = eigenbasis((covariance + covariance.T) / 2)
    return mean, basis, values.clamp_min(0)


def packed_bytes(blocks: Blocks) -> int:
    """Return the bytes of a token's row before DEFLATE."""
    return sum(OVERHEAD + math.ceil(width * bits / 8) for width, bits in blocks if bits)


def _quantised(values: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes ``[n, s]``, and shift and scale ``[n, 1]`` float16, of blocks ``[n, s]``."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    shift = low.clamp(-_LARGEST, _LARGEST).half()
    scale = ((high - low) / (2**bits - 1)).clamp(0, _LARGEST).half()
    steps = (values - shift.float()) / scale.float().clamp_min(_TINY)
    return steps.round().clamp(0, 2**bits - 1).to(torch.uint8), shift, scale


def _restored(codes: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return shift.float() + scale.float() * codes.float()


def encoded(rows: Tensor, blocks: Blocks, *, deflate: bool) -> bytes:
    """Return coefficients as the bytes that are stored.

    Parameters
    ----------
    rows : Tensor
        ``[n, r]``, r the columns of all blocks.
    blocks : Blocks
    deflate : bool
        Whether DEFLATE comes last; without it there are `packed_bytes` for each row.

    Notes
    -----
    Block by block: the codes column by column, each token's shift, each token's scale. DEFLATE
    counts bytes, and in this order those of a column, which are distributed alike, lie together.
    """
    values, pieces, start = rows.detach().float().cpu(), [], 0
    for width, bits in blocks:
        columns = values[:, start : start + width]
        start += width
        if not bits:
            continue
        codes, shift, scale = _quantised(columns, bits)
        # A token's codes fill whole bytes, so that a row costs the same in any company.
        filled = torch.nn.functional.pad(codes, (0, -width % (8 // bits)))
        lanes = filled.view(len(values), -1, 8 // bits).long()
        shifts = bits * torch.arange(8 // bits)
        octets = (lanes << shifts).sum(-1).to(torch.uint8)
        pieces += [octets.T.contiguous().numpy().tobytes()]
        pieces += [_split(shift), _split(scale)]
    stream = b"".join(pieces)
    return zlib.compress(stream, _LEVEL) if deflate else stream


def _split(halves: Tensor) -> bytes:
    """Return numbers of 16 bits as their lower bytes, then their upper ones."""
    octets = halves.flatten().numpy().view(np.uint8).reshape(-1, 2)
    return octets.T.tobytes()


def decoded(stored: bytes, count: int, blocks: Blocks, *, deflate: bool) -> Tensor:
    """Return the ``[count, r]`` float32 coefficients that `encoded` made bytes of.

    Parameters
    ----------
    stored : bytes
    count : int
        Rows, n.
    blocks : Blocks
    deflate : bool
    """
    stream = np.frombuffer(zlib.decompress(stored) if deflate else stored, np.uint8)
    found, start = [], 0

    def taken(size: int) -> Tensor:
        nonlocal start
        start += size
        return torch.from_numpy(stream[start - size : start].copy())

    for width, bits in blocks:
        if not bits:
            found.append(torch.zeros(count, width))
            continue
        octets = taken(math.ceil(width * bits / 8) * count).view(-1, count).T
        shifts = bits * torch.arange(8 // bits)
        codes = ((octets.unsqueeze(-1).long() >> shifts) & (2**bits - 1)).flatten(1)[:, :width]
        shift, scale = (
            torch.stack([taken(count), taken(count)], -1).flatten().view(torch.float16)[:, None]
            for _ in range(2)
        )
        found.append(_restored(codes, shift, scale))
    return torch.cat([torch.empty(count, 0), *found], dim=-1)


class BlockErrors:
    """What each block of a sample's coefficients costs at each number of bits.

    Parameters
    ----------
    rows : Tensor
        ``[n, r]`` coefficients.

    Attributes
    ----------
    columns : int
        r.
    """

    def __init__(self, rows: Tensor) -> None:
        values = rows.detach().float().cpu()
        self.columns = values.shape[1]
        # By size, [blocks, bits] each.
        self._errors, self._bytes = [], []
        for size in SIZES:
            pieces = values.split(size, dim=1)
            self._errors.append(np.array([[_error(x, bits) for bits in BITS] for x in pieces]))
            sizes = [[packed_bytes(((x.shape[1], bits),)) for bits in BITS] for x in pieces]
            self._bytes.append(np.array(sizes))
        # A byte at this price is dearer than all that it could save.
        self._top = 2.0 * float(self._errors[0][:, 0].sum()) or 1.0
        self._known: dict[int, Blocks] = {}

    def priced(self, price: float) -> Blocks:
        """Return the blocks of least ``error + price * bytes`` per token.

        A dynamic programme from the smallest blocks up: a block is kept whole at its best number of
        bits, or as the best that the smaller blocks in it can do. What it returns has the least
        error of all cuts that take no more bytes.

        Parameters
        ----------
        price : float
            Squared error that a byte per token is worth.
        """
        best, cuts = np.empty(0), []
        for level, (errors, sizes) in enumerate(zip(self._errors, self._bytes, strict=True)):
            costs = errors + price * sizes
            choice, own = costs.argmin(1), costs.min(1)
            whole = np.ones(len(own), dtype=bool)
            if level:
                ratio = SIZES[level] // SIZES[level - 1]
                parts = np.add.reduceat(best, np.arange(0, len(best), ratio))
                whole = own < parts
                own = np.where(whole, own, parts)
            best = own
            cuts.append((whole, choice))
        blocks: list[tuple[int, int]] = []

        def trace(level: int, number: int) -> None:
            whole, choice = cuts[level]
            if whole[number]:
                start = number * SIZES[level]
                width = min(SIZES[level], self.columns - start)
                blocks.append((width, BITS[choice[number]]))
                return
            ratio = SIZES[level] // SIZES[level - 1]
            for part in range(number * ratio, min((number + 1) * ratio, len(cuts[level - 1][0]))):
                trace(level - 1, part)

        for number in range(len(cuts[-1][0])):
            trace(len(SIZES) - 1, number)
        return _joined(blocks)

    def within(self, budget: float) -> Blocks:
        """Return blocks of at most `budget` bytes per token, the best of a fine ladder of prices.

        Parameters
        ----------
        budget : float
            Bytes per token before DEFLATE.
        """
        # The bytes never grow with the price: the last step has one that keeps nothing.
        steps = range(_OCTAVES * _STEPS + 1)

        def fits(step: int) -> bool:
            return packed_bytes(self._on_ladder(step)) <= budget

        return self._on_ladder(bisect_left(steps, True, key=fits))

    def _on_ladder(self, step: int) -> Blocks:
        if step not in self._known:
            self._known[step] = self.priced(self._top * 2.0 ** (step / _STEPS - _OCTAVES))
        return self._known[step]


# Prices from the whole error for a byte down, and how finely: a step moves about 1/32 of a bit.
_OCTAVES, _STEPS = 48, 16


def _error(piece: Tensor, bits: int) -> float:
    left = piece if not bits else piece - _restored(*_quantised(piece, bits))
    return float(left.double().square().sum(-1).mean())


def _joined(blocks: Sequence[tuple[int, int]]) -> Blocks:
    """Let adjacent columns without bits be one block."""
    found: list[tuple[int, int]] = []
    for width, bits in blocks:
        if found and not bits and not found[-1][1]:
            found[-1] = (found[-1][0] + width, 0)
        else:
            found.append((width, bits))
    return tuple(found)
