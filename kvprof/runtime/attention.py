"""Attention over blocks of keys and values that are stored in different ways.

One function multiplies queries with a block of keys, one multiplies probabilities with a block of
values; everything else is the same for every way to store. Shapes: ``g`` groups of ``n`` KV heads,
``G`` query heads per KV head, ``t`` queries, ``N`` keys.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvprof.methods.plan import HeadGroup
from kvprof.runtime.clock import part
from kvprof.runtime.tensors import concatenated, index_of, inverse_of, unflatten

__all__ = [
    "GroupStack",
    "KeyBlock",
    "KeySide",
    "Scoring",
    "ValueSide",
    "applied",
    "attend",
    "logits",
    "slices",
    "softmax",
    "stacked",
]

# --- Head groups of one layer that are alike in shape, computed together.


@dataclass(frozen=True, eq=False)
class GroupStack:
    """``g`` head groups of one side, stacked: each has ``n`` heads, the same ranks and own bits."""

    kv_heads: tuple[int, ...]  # their KV heads, group after group, `g * n`
    heads: int  # KV heads of a group, n
    head_dim: int
    ranks: tuple[int, ...]  # as in `HeadGroup`
    #: `[g, n * d, r]`, or `[rows, g, n * d, r]` for bases of a sequence's own, float32 or wider, in
    #: which they are applied; None for the identity.
    down: Tensor | None
    up: Tensor | None
    #: Whether the model's projection puts out the latent already, in the group's first columns.
    folded: bool
    online: bool  # whether each sequence gets a basis of its own
    #: `[g, 1, 1]` of a group's own, where rows are stored over it: queries and outputs take it
    #: back.
    scale: Tensor | None = None
    #: Keys that are stored for one of the model's: above 1 (a key per query head) `kv_heads` counts
    #: them, number h being of KV head `h // copies`.
    copies: int = 1
    column_bits: tuple[tuple[int, int], ...] = ()
    quantised: bool = True  # as in `HeadGroup`

    @property
    def groups(self) -> int:
        """Number of groups, g."""
        return len(self.kv_heads) // self.heads

    @property
    def projected(self) -> bool:
        """Whether latents are stored instead of heads."""
        return self.up is not None or self.online

    def by_group(self, states: Tensor) -> Tensor:
        """Take the stack's heads out of ``[rows, Hkv, t, d]``: ``[rows, g, n, t, d]``."""
        first, count = self.kv_heads[0], len(self.kv_heads)
        if self.kv_heads == tuple(range(first, first + count)):
            states = states[:, first : first + count]
        else:
            states = states.index_select(1, index_of(self.kv_heads, states.device))
        return unflatten(states, 1, (self.groups, self.heads))

    def joined(self, states: Tensor) -> Tensor:
        """Lay a group's heads side by side: ``[rows, g, t, n * d]``."""
        return self.by_group(states).transpose(2, 3).flatten(3)

    def latent(self, states: Tensor) -> Tensor:
        """Return what is stored for ``[rows, Hkv, t, d]`` at the top rank: ``[rows, g, t, r]``."""
        joined = self.joined(states)
        if self.folded:
            return joined[..., : self.ranks[-1]]
        if self.down is None:
            return joined if self.scale is None else joined / self.scale
        with part("compress"):
            return applied(joined, self.down)

    def split(self, joined: Tensor) -> Tensor:
        """Part the heads of ``[rows, g, N, n * d]`` again: ``[rows, g, n, N, d]``."""
        return unflatten(joined, -1, (self.heads, self.head_dim)).transpose(2, 3)

    def rebuilt(self, latent: Tensor) -> Tensor:
        """Return heads ``[rows, g, n, N, d]`` from latents ``[rows, g, N, r']``, descaled."""
        if self.up is None:
            return self.split(latent)
        with part("decompress"):
            return self.split(applied(latent, self.up[..., : latent.shape[-1]].mT))

    def up_by_head(self) -> Tensor:
        """Return ``up_j`` per head, ``[..., g, n, d, r]``."""
        assert self.up is not None  # asked for projected groups only
        return unflatten(self.up, -2, (self.heads, self.head_dim))


def applied(rows: Tensor, basis: Tensor) -> Tensor:
    """Multiply rows with a basis in its wider dtype, for large channels; return the rows' dtype."""
    return (rows.to(basis.dtype) @ basis).to(rows.dtype)


def stacked(
    groups: Sequence[HeadGroup],
    device: torch.device,
    dtype: torch.dtype,
    *,
    folded: bool,
    online: bool,
    copies: int = 1,
) -> list[GroupStack]:
    """Put head groups of the same shape together."""
    alike: dict[tuple[object, ...], list[HeadGroup]] = {}
    for group in groups:
        based = group.down is not None
        key = (group.heads, group.ranks, based, group.column_bits, group.quantised)
        alike.setdefault(key, []).append(group)
    stacks = []
    for members in alike.values():
        first = members[0]
        down = up = scale = None
        if any(group.scale != 1 for group in members):
            scales = torch.tensor([group.scale for group in members], dtype=torch.float64)
            scale = scales.view(-1, 1, 1).to(device, dtype)
        if first.down is not None:
            downs = [group.down for group in members if group.down is not None]
            ups = [group.up for group in members if group.up is not None]
            wide = torch.promote_types(dtype, torch.float32)
            down = torch.stack(downs).to(device, wide)
            up = torch.stack(ups).to(device, wide)
        stacks.append(
            GroupStack(
                kv_heads=tuple(h for g in members for h in range(g.first, g.first + g.heads)),
                heads=first.heads,
                head_dim=first.head_dim,
                ranks=first.ranks,
                down=down,
                up=up,
                folded=folded and first.down is not None,
                online=online and first.down is None and not first.identity,
                scale=scale,
                copies=copies,
                column_bits=first.column_bits,
                quantised=first.quantised,
            )
        )
    return stacks


# Scores held at once, in values; longer prefills are computed in slices of queries.
_SCORES = 1 << 26


@dataclass(frozen=True)
class KeyBlock:
    """Keys and the queries in the same coordinates.

    ``query`` is ``[rows, g, n, G, t, w]``; ``key`` is ``[rows, g, n or 1, N, w]``: per head, or one
    latent for all heads of a group.
    """

    query: Tensor
    key: Tensor


@dataclass(frozen=True)
class KeySide:
    """All keys of a stack of KV heads, oldest first."""

    stack: GroupStack
    blocks: list[KeyBlock]


@dataclass(frozen=True)
class ValueSide:
    """All values of a stack, oldest first.

    They are latents ``[rows, g, N, r']`` or whole heads ``[rows, g, n, N, d]``. With `in_latents`
    the result stays in the latents' coordinates, ``[…, r]``, for a folded W_O; otherwise latents
    are turned back into heads. `mean`, ``[g * n, d]``, is what all of them lack.
    """

    stack: GroupStack
    blocks: list[Tensor]
    in_latents: bool
    mean: Tensor | None = None


@dataclass(frozen=True)
class Scoring:
    """What happens between products and probabilities."""

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None  # `[H]` logits of the learned sinks
    visible: Tensor | None = None  # `[rows, 1, t, N]` bool
    #: Query heads per KV head, where keys may be stored per query head; None leaves heads as the
    #: keys have them.
    group: int | None = None
    #: From a slice of queries to what their products with all keys lack, `[rows, Hkv, G, t', N]`
    #: float32 or wider (`kvprof.methods.plan`, centre).
    offset: Callable[..., Tensor] | None = field(default=None)
    #: Gets the masked logits and the probabilities (both `[rows, Hkv, G, t', N]` float32) and the
    #: slice of queries that they belong to.
    observe: Callable[[Tensor, Tensor, slice], None] | None = field(default=None)


def block_scores(block: KeyBlock, queries: slice) -> Tensor:
    """Return ``q @ k.T``, ``[rows, g, n, G, t', N]``, in float32 or wider."""
    query = block.query[..., queries, : block.key.shape[-1]]
    wide = torch.promote_types(query.dtype, torch.float32)
    flat = query.flatten(3, 4).to(wide) @ block.key.to(wide).mT
    return unflatten(flat, 3, query.shape[3:5])


def block_output(probabilities: Tensor, value: Tensor) -> Tensor:
    """Return ``p @ v`` of a block: ``[rows, g, n, G, t', w]``."""
    return unflatten((probabilities.flatten(3, 4) @ value), 3, probabilities.shape[3:5])


def logits(sides: Sequence[KeySide], scoring: Scoring, queries: slice) -> Tensor:
    """Return scaled, capped and masked scores, ``[rows, Hkv, G, t', N]``, float32 or wider."""
    parts = [
        concatenated([block_scores(block, queries) for block in side.blocks], -1).flatten(1, 2)
        for side in sides
    ]
    result = _in_head_order(parts, [side.stack for side in sides], 1)
    if scoring.group is not None and result.shape[2] != scoring.group:
        result = unflatten(result.flatten(1, 2), 1, (-1, scoring.group))  # a key per query head
    # The products are this function's own, and as large as anything that a pass holds.
    if scoring.offset is not None:
        result += scoring.offset(queries)
    result *= scoring.scaling
    if scoring.softcap is not None:
        result = torch.tanh(result / scoring.softcap) * scoring.softcap
    if scoring.visible is not None:
        hidden = ~scoring.visible[:, :, queries].unsqueeze(1)
        result.masked_fill_(hidden, torch.finfo(result.dtype).min)
    return result


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return probabilities of ``[rows, Hkv, G, t, N]``; learned sinks take their share away."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    learned = sinks.to(scores.dtype).view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, learned], dim=-1), dim=-1)[..., :-1]


def slices(sides: Sequence[KeySide]) -> Iterator[slice]:
    """Cut the queries so that their scores fit the memory set aside."""
    query = sides[0].blocks[0].query
    heads = sum(len(side.stack.kv_heads) for side in sides)
    keys = sum(block.key.shape[-2] for block in sides[0].blocks)
    step = max(1, _SCORES // max(1, query.shape[0] * heads * query.shape[3] * keys))
    for start in range(0, query.shape[4], step):
        yield slice(start, start + step)


def attend(
    keys: Sequence[KeySide], values: Sequence[ValueSide], scoring: Scoring, dtype: torch.dtype
) -> Tensor:
    """Return the heads' outputs, concatenated, ``[rows, t, Σ_h w_h]``."""
    done = []
    for queries in slices(keys):
        scores = logits(keys, scoring, queries)
        probabilities = softmax(scores, scoring.sinks)
        if scoring.observe is not None:
            scoring.observe(scores, probabilities, queries)
        shares = None  # they add up to 1 but for what learned sinks take
        if scoring.sinks is not None and values[0].mean is not None:
            shares = probabilities.sum(-1, keepdim=True)
        probabilities = probabilities.to(dtype)
        outputs = [_with_mean(side, _output(side, probabilities), shares) for side in values]
        done.append(_side_by_side(outputs, [side.stack for side in values]))
    return concatenated(done, 1)


def _with_mean(side: ValueSide, output: Tensor, shares: Tensor | None) -> Tensor:
    """Give ``[rows, g * n, G, t', d]`` back what the values lack."""
    if side.mean is None:
        return output
    mean = side.mean[:, None, None]
    if shares is not None:
        mean = mean * shares.index_select(1, index_of(side.stack.kv_heads, shares.device))
    return (output + mean).to(output.dtype)


def _output(side: ValueSide, probabilities: Tensor) -> Tensor:
    """Return ``[rows, g * n, G, t', w]`` of one stack."""
    own = unflatten(side.stack.by_group(probabilities.flatten(2, 3)), 3, probabilities.shape[2:4])
    latent = heads = None
    start = 0
    for block in side.blocks:
        share = own[..., start : start + block.shape[-2]]
        start += block.shape[-2]
        if block.dim() == 5:
            product = block_output(share, block)
            heads = product if heads is None else heads + product
            continue
        product = block_output(share, block.unsqueeze(2))
        if latent is None:
            shape = (*product.shape[:-1], side.stack.ranks[-1])
            latent = product if product.shape == shape else product.new_zeros(shape)
            if latent is product:
                continue
        # A lower level keeps the first columns.
        latent[..., : product.shape[-1]] += product
    if latent is not None and not side.in_latents:
        # [..., g, n, d, r] against [rows, g, n, G, t', r]
        with part("decompress"):
            turned = applied(latent.flatten(3, 4), side.stack.up_by_head().mT)
            turned = unflatten(turned, 3, latent.shape[3:5])
            heads = turned if heads is None else heads + turned
        latent = None
    result = latent if latent is not None else heads
    if side.stack.scale is not None and result is not None:
        result = result * side.stack.scale[:, None, None, :, :]
    assert result is not None  # a pass has tokens of its own
    return result.flatten(1, 2)


def _in_head_order(parts: Sequence[Tensor], stacks: Sequence[GroupStack], dim: int) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    order = tuple(head for stack in stacks for head in stack.kv_heads)
    inverse = inverse_of(order, parts[0].device)
    return torch.cat(list(parts), dim=dim).index_select(dim, inverse)


def _side_by_side(outputs: Sequence[Tensor], stacks: Sequence[GroupStack]) -> Tensor:
    """Lay ``[rows, heads, G, t, w]`` of all stacks side by side in the order of the heads."""
    if len(outputs) == 1:
        return outputs[0].permute(0, 3, 1, 2, 4).flatten(2)
    placed = {
        head: output[:, index]
        for stack, output in zip(stacks, outputs, strict=True)
        for index, head in enumerate(stack.kv_heads)
    }
    heads = [placed[head].permute(0, 2, 1, 3).flatten(2) for head in sorted(placed)]
    return torch.cat(heads, dim=-1)
