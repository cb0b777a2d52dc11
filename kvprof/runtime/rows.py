"""What a layer stores for rows of a batch: parts of tokens stored alike, by group of rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvprof.errors import UsageError
from kvprof.runtime.clock import part as marked
from kvprof.runtime.codecs import PLAIN, Codec
from kvprof.runtime.tensors import unflatten

__all__ = [
    "Part",
    "RowGroup",
    "SharedLatents",
    "SharedPart",
    "joined",
    "picked",
    "plain_part",
    "remembered_rows",
]

# --- Adjacent tokens that are stored alike, as dense tensors: cut, picked, joined, recoded.

_REMEMBERING: ContextVar[bool] = ContextVar("remembering", default=False)


@contextmanager
def remembered_rows() -> Iterator[None]:
    """Keep dequantised rows of stored tokens, to speed up evaluations; not counted as cache."""
    token = _REMEMBERING.set(True)
    try:
        yield
    finally:
        _REMEMBERING.reset(token)


@dataclass(frozen=True, eq=False)
class Part:
    """Tokens of one segment, for head groups of equal width."""

    codec: Codec
    width: int  # columns of a row, r
    tokens: int
    dtype: torch.dtype  # of the rows that come out
    stored: dict[str, Tensor]  # `[rows, groups, entries, columns]` each
    remembered: Tensor | None = None  # what `rows` returns, within `remembered_rows`

    def rows(self) -> Tensor:
        """Return the latents, ``[rows, groups, tokens, width]``, in `dtype`."""
        if self.codec is PLAIN:
            return self.codec.decode(self.stored, self.width, self.dtype)
        if self.remembered is not None:
            return self.remembered
        with marked("quantise"):
            return self.codec.decode(self.stored, self.width, self.dtype)

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
        remembered = None if self.remembered is None else self.remembered[:, :, start:stop]
        return Part(self.codec, self.width, stop - start, self.dtype, result, remembered)

    def recoded(self, codec: Codec, width: int) -> "Part":
        """Return the same tokens kept by another codec, at their first `width` columns."""
        if codec == self.codec and width == self.width:
            return self
        rows = self.rows()[..., :width]
        rows = pad(rows, (0, width - rows.shape[-1]))
        return plain_part(rows) if codec == PLAIN else _encoded(rows, codec)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Part":
        """Return the part with every tensor changed alike."""
        changed = {name: change(tensor) for name, tensor in self.stored.items()}
        remembered = None if self.remembered is None else change(self.remembered)
        return Part(self.codec, self.width, self.tokens, self.dtype, changed, remembered)


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
        part = Part(codec, rows.shape[-1], rows.shape[-2], rows.dtype, codec.encode(rows))
    return replace(part, remembered=part.rows()) if _REMEMBERING.get() else part


def joined(pieces: Sequence[tuple[Part, int, int]], codec: Codec, width: int) -> Part:
    """Join parts, oldest first, into one part of `codec`; quantise no part twice."""
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
    """Pick tokens out of adjacent parts, other ones for every row and head group."""
    if all(part.codec == codec and part.width == width for part in parts):
        # Nothing to recode, so no need to know which parts are meant: asking would make a GPU wait.
        candidates, skipped = list(parts), 0
    else:
        candidates, skipped = _within(parts, int(index.min()), int(index.max()), codec, width)
    whole = _concatenated(candidates) if len(candidates) > 1 else candidates[0]
    own = (index - skipped).unsqueeze(-1)

    def pick(tensor: Tensor) -> Tensor:
        return tensor.gather(-2, own.expand(*own.shape[:-1], tensor.shape[-1]))

    return replace(whole.mapped(pick), tokens=index.shape[-1])


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
    known = [part.remembered for part in parts if part.remembered is not None]
    remembered = torch.cat(known, dim=-2) if len(known) == len(parts) else None
    tokens = sum(part.tokens for part in parts)
    return Part(first.codec, first.width, tokens, first.dtype, stored, remembered)


# --- Rows of a batch that have seen the same number of real tokens: what one layer stores for
# them.
#
# Left padding makes the rows of a batch start at different tokens. Sinks, windows, levels and
# eviction count from a row's first real token, so rows that start together are stored together,
# each tensor dense, and no padding is stored at all.


@dataclass(eq=False)
class SharedLatents:
    """Tokens that a group of layers stores together."""

    latents: dict[str, Tensor]  # by side, `[rows, tokens, r]`
    bases: dict[str, Tensor]  # by side, `[rows or 1, w, r]`, of all the group's layers
    own: bool  # whether the bases are the sequences', and count as cache

    @property
    def tokens(self) -> int:
        """How many."""
        return self.latents["keys"].shape[1]


@dataclass(frozen=True)
class SharedPart:
    """A layer's share of such tokens."""

    shared: SharedLatents  # one object for all layers of the group
    start: int  # tokens of the layer's own before them
    columns: dict[str, slice]  # by side, the layer's rows of the bases
    first: bool  # whether the layer is the group's first, which they count for

    def rows(self, side: str, heads: int) -> Tensor:
        """Return what the latents stand for, ``[rows, heads, tokens, d]``."""
        basis = self.shared.bases[side][:, self.columns[side]]
        joined = self.shared.latents[side] @ basis.mT
        return unflatten(joined, -1, (heads, -1)).transpose(1, 2)


@dataclass(eq=False)
class RowGroup:
    """What a layer stores for some rows of a batch."""

    rows: list[int]  # in the batch
    seen: int = 0  # real tokens of each row so far
    #: Per stack of head groups, oldest part first.
    keys: list[list[Part]] = field(default_factory=list)
    values: list[list[Part]] = field(default_factory=list)
    #: `[rows, units, N]` int32, where each stored token stood in the padded sequence; kept when
    #: tokens are evicted from under keys that are rebuilt.
    positions: Tensor | None = None
    scores: Tensor | None = None  # `[rows, units, N]` float32, of the eviction
    noise: Tensor | None = None
    #: Whether a layer with a sliding window keeps what a pass pushes out of it, so that the pass
    #: can be taken back.
    record: bool = False
    #: A sequence's own bases (strawman), `[rows, g, n * d, r]` by side and stack.
    bases: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    #: Tokens between the layer's own that it stores together with other layers.
    shared: SharedPart | None = None

    @property
    def stored(self) -> int:
        """Tokens stored per row."""
        own = sum(part.tokens for part in self.keys[0]) if self.keys else 0
        return own if self.shared is None else own + self.shared.shared.tokens

    def stack_rows(self, side: str, index: int) -> list[Tensor]:
        """Return what is stored of a stack, oldest first, ``[rows, groups, N, r]`` each."""
        kept: list[list[Part]] = getattr(self, side)
        if not kept:
            return []
        found = [part.rows() for part in kept[index]]
        if self.shared is not None:
            # Heads of such layers are all alike, in one stack, and the sinks are a part.
            at = 1 if self.shared.start else 0
            found.insert(at, self.shared.rows(side, found[0].shape[1]))
        return found

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that counts as cache."""
        for side in (self.keys, self.values):
            for parts in side:
                for part in parts:
                    yield from part.stored.values()
        for tensor in (self.positions, self.scores, self.noise):
            if tensor is not None:
                yield tensor
        yield from self.bases.values()
        if self.shared is not None and self.shared.first:
            yield from self.shared.shared.latents.values()
            yield from self.shared.shared.bases.values() if self.shared.shared.own else ()

    def kept(self, start: int, stop: int) -> None:
        """Keep the stored tokens `start` … `stop` alone, oldest first, of plain rows."""

        def cut(parts: list[Part]) -> list[Part]:
            found, begin = [], 0
            for part in parts:
                piece = part.cut(
                    min(max(start - begin, 0), part.tokens), min(max(stop - begin, 0), part.tokens)
                )
                assert piece is not None  # nothing that is stored plainly shares scales
                if piece.tokens:
                    found.append(piece)
                begin += part.tokens
            return found

        self.keys = [cut(parts) for parts in self.keys]
        self.values = [cut(parts) for parts in self.values]

    def selected(self, members: list[int], rows: list[int]) -> "RowGroup":
        """Return some rows, by their number in the group, as the rows `rows` of a new batch."""
        if self.shared is not None:
            raise UsageError(
                "latents shared by layers cannot be reordered or repeated by row (beams, "
                "contrastive search); use greedy decoding or sampling"
            )

        def pick(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, torch.tensor(members, device=tensor.device))

        def pick_all(side: list[list[Part]]) -> list[list[Part]]:
            return [[part.mapped(pick) for part in parts] for parts in side]

        def pick_one(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else pick(tensor)

        return RowGroup(
            rows=rows,
            seen=self.seen,
            keys=pick_all(self.keys),
            values=pick_all(self.values),
            record=self.record,
            positions=pick_one(self.positions),
            scores=pick_one(self.scores),
            noise=pick_one(self.noise),
            bases={key: pick(basis) for key, basis in self.bases.items()},
        )
