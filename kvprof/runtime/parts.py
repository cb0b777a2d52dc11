"""Adjacent tokens that are stored alike, as dense tensors: cut, picked, joined, recoded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvprof.runtime.clock import part as marked
from kvprof.runtime.codecs import PLAIN, Codec

__all__ = ["Part", "joined", "picked", "plain_part"]


@dataclass(frozen=True, eq=False)
class Part:
    """Tokens of one segment, for head groups of equal width.

    Attributes
    ----------
    codec : Codec
    width : int
        Columns of a row, r.
    tokens : int
    dtype : torch.dtype
        Of the rows that come out.
    stored : dict of Tensor
        ``[rows, groups, entries, columns]`` each.
    """

    codec: Codec
    width: int
    tokens: int
    dtype: torch.dtype
    stored: dict[str, Tensor]

    def rows(self) -> Tensor:
        """Return the latents, ``[rows, groups, tokens, width]``, in `dtype`."""
        if self.codec is PLAIN:
            return self.codec.decode(self.stored, self.width, self.dtype)
        with marked("quantise"):
            return self.codec.decode(self.stored, self.width, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(tensor.nbytes for tensor in self.stored.values())

    def cut(self, start: int, stop: int) -> "Part | None":
        """Return tokens `start` … `stop`; None where that would tear a shared scale apart."""
        if (start, stop) == (0, self.tokens):
            return self
        result = {}
        for name, tensor in self.stored.items():
            share = self.codec.tokens_per_entry(name)
            if start % share or (stop % share and stop != self.tokens):
                return None
            result[name] = tensor[:, :, start // share : -(-stop // share)]
        return Part(self.codec, self.width, stop - start, self.dtype, result)

    def recoded(self, codec: Codec, width: int) -> "Part":
        """Return the same tokens kept by another codec, at their first `width` columns."""
        if codec == self.codec and width == self.width:
            return self
        rows = self.rows()[..., :width]
        rows = pad(rows, (0, width - rows.shape[-1]))
        return plain_part(rows) if codec == PLAIN else _encoded(rows, codec)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Part":
        """Return the part with every stored tensor changed, tokens and columns untouched."""
        changed = {name: change(tensor) for name, tensor in self.stored.items()}
        return Part(self.codec, self.width, self.tokens, self.dtype, changed)


def plain_part(rows: Tensor) -> Part:
    """Keep ``[rows, groups, N, r]`` at full precision."""
    rows = _compact(rows)
    return Part(PLAIN, rows.shape[-1], rows.shape[-2], rows.dtype, PLAIN.encode(rows))


def _compact(tensor: Tensor) -> Tensor:
    """Copy a view of something larger: a cache must not keep the larger thing alive."""
    if tensor.untyped_storage().nbytes() > tensor.nbytes or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _encoded(rows: Tensor, codec: Codec) -> Part:
    with marked("quantise"):
        return Part(codec, rows.shape[-1], rows.shape[-2], rows.dtype, codec.encode(rows))


def joined(pieces: Sequence[tuple[Part, int, int]], codec: Codec, width: int) -> Part:
    """Join pieces of parts, oldest first, into one part kept by `codec` at `width` columns.

    What is kept that way already is taken over as it is, so that nothing is quantised twice;
    adjacent other pieces are quantised together, because they may share scales.

    Parameters
    ----------
    pieces : sequence of (part, start, stop)
    codec : Codec
    width : int
    """
    done: list[Part] = []
    raw: list[Tensor] = []

    def flush() -> None:
        if raw:
            done.append(plain_part(torch.cat(raw, dim=-2)).recoded(codec, width))
            raw.clear()

    for part, start, stop in pieces:
        same = part.codec == codec and part.width == width
        piece = part.cut(start, stop) if same else None
        if piece is not None:
            flush()
            done.append(piece)
        else:
            whole = part.cut(start, stop)
            rows = part.rows()[:, :, start:stop] if whole is None else whole.rows()
            rows = rows[..., :width]
            raw.append(pad(rows, (0, width - rows.shape[-1])))
    flush()
    return done[0].mapped(_compact) if len(done) == 1 else _concatenated(done)


def picked(parts: Sequence[Part], index: Tensor, codec: Codec, width: int) -> Part:
    """Pick tokens out of adjacent parts, other ones for every row and head group.

    Parameters
    ----------
    parts : sequence of Part
        Oldest first; none whose tokens share scales.
    index : Tensor
        ``[rows, groups, M]``, ascending places among all the parts' tokens.
    codec : Codec
    width : int
    """
    if all(part.codec == codec and part.width == width for part in parts):
        # Nothing to recode, so no need to know which parts are meant: asking would make a GPU wait.
        candidates, skipped = list(parts), 0
    else:
        candidates, skipped = _within(parts, int(index.min()), int(index.max()), codec, width)
    whole = _concatenated(candidates) if len(candidates) > 1 else candidates[0]
    place = (index - skipped).unsqueeze(-1)

    result = {
        name: tensor.gather(-2, place.expand(*place.shape[:-1], tensor.shape[-1]))
        for name, tensor in whole.stored.items()
    }
    return Part(codec, width, index.shape[-1], whole.dtype, result)


def _within(
    parts: Sequence[Part], first: int, last: int, codec: Codec, width: int
) -> tuple[list[Part], int]:
    """Return the parts that hold tokens `first` … `last`, recoded, and how many lie before them."""
    found, begin, skipped = [], 0, 0
    for part in parts:
        end = begin + part.tokens
        if end > first and begin <= last:
            found.append(part.recoded(codec, width))
        elif end <= first:
            skipped = end
        begin = end
    return found, skipped


def _concatenated(parts: Sequence[Part]) -> Part:
    first = parts[0]
    stored = {
        name: torch.cat([part.stored[name] for part in parts], dim=-2) for name in first.stored
    }
    return Part(first.codec, first.width, sum(p.tokens for p in parts), first.dtype, stored)
