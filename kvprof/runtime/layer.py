"""One attention layer of a plan: attend to stored and new tokens, then evict and store.

A pass reads earlier tokens as stored and its own at the rank of their level.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprof.analysis.bases import eigenbasis
from kvprof.analysis.rotary import RotaryPairs
from kvprof.errors import UsageError
from kvprof.methods.plan import LayerPlan, Placement, Plan
from kvprof.methods.tokens import Form, level_ends, quantises, readings
from kvprof.models.interface import rotated
from kvprof.models.layout import LayerLayout
from kvprof.runtime.attention import (
    GroupStack,
    KeyBlock,
    KeySide,
    Scoring,
    ValueSide,
    attend,
    stacked,
)
from kvprof.runtime.clock import part
from kvprof.runtime.codecs import PLAIN
from kvprof.runtime.retention import EvictionPolicy, OwnTokens
from kvprof.runtime.rows import Part, RowGroup
from kvprof.runtime.tensors import concatenated, index_of, unflatten

__all__ = ["LayerRuntime"]


# A sequence's queries are read in so many slices, of so many of them at least and so many masked
# columns at most.
_SLICES, _FEWEST, _MOST = 8, 128, 1 << 26


def _read(
    ranges: NDArray[np.int64], queries: slice, device: torch.device
) -> tuple[slice, Tensor] | None:
    """Return the columns that some of these queries read, and ``[t, columns]`` bool of each."""
    starts, stops = ranges[..., queries].transpose(1, 0, 2)
    if not (stops > starts).any():
        return None
    columns = slice(int(starts[stops > starts].min()), int(stops.max()))
    at = torch.arange(columns.start, columns.stop, device=device)
    begin, end = (torch.from_numpy(x)[..., None].to(device) for x in (starts, stops))
    mask = (at >= begin[0]) & (at < end[0])
    for more in range(1, len(begin)):
        mask |= (at >= begin[more]) & (at < end[more])
    return columns, mask


def _kind(plan: Plan, layer: LayerPlan) -> tuple[Any, ...]:
    return layer.sliding_window, layer.left_out, layer.shared, quantises(plan, layer)


@dataclass(frozen=True, eq=False)
class _Means:
    """A layer's means ``[num_kv_heads, d]`` where it runs."""

    pairs: RotaryPairs
    keys: Tensor
    values: Tensor

    @cached_property
    def rotated(self) -> Tensor:
        """What ``c_j`` becomes a rotated mean by, ``[num_kv_heads, d, 2F + 1]``."""
        return self.pairs.rotated(self.keys)


class LayerRuntime:
    """Executes one layer of a plan."""

    def __init__(
        self,
        plan: Plan,
        index: int,  # which layer
        facts: LayerLayout,
        #: Keeps how layers alike read a pass; whoever gives it empties it.
        known: dict[Any, dict[Form, NDArray[np.int64]]],
    ) -> None:
        self.plan = plan
        self.layer: LayerPlan = plan.layers[index]
        self.facts = facts  # the model's layer
        self.policy = EvictionPolicy(plan, self.layer, facts)
        if plan.lazy and (self.layer.keys.fold_down or self.layer.keys.fold_up):
            raise UsageError(
                f"layer {index}: a lazy prefill needs uncompressed Q and K; leave out fold_down "
                "and fold_up of the keys"
            )
        self._known = known
        self._stacks: dict[Any, tuple[list[GroupStack], list[GroupStack]]] = {}
        self._centres: dict[Any, _Means] = {}
        self._key_mean: Tensor | None = None

    @property
    def rebuilds(self) -> bool:
        """Whether keys are stored before RoPE in a layer that has RoPE."""
        return self.layer.rebuilds(self.facts)

    @property
    def takes_angles(self) -> bool:
        """Whether it needs the cosines and sines of every stored token."""
        return self.rebuilds or (self.layer.centre is not None and bool(self.facts.rotary_pairs))

    def without_mean(self, key: Tensor) -> Tensor:
        """Take what a layer's keys have in common from ``[B, Hkv, t, d]``."""
        if self.layer.key_mean is None:
            return key
        wide = torch.promote_types(key.dtype, torch.float32)
        if self._key_mean is None or self._key_mean.device != key.device:
            self._key_mean = self.layer.key_mean.to(key.device, wide)[:, None]
        with part("compress"):
            return (key - self._key_mean.to(wide)).to(key.dtype)

    def exact(self, several: bool) -> bool:
        """Whether a pass attends to its own tokens exactly because the plan is lazy (TALE)."""
        return self.plan.lazy and several

    def run(self, row_group: RowGroup, own: OwnTokens) -> Tensor:
        """Attend and store; returns the heads' outputs side by side, ``[rows, t, Σ_h w_h]``."""
        by_form = self.plan.by_age and own.several and quantises(self.plan, self.layer)
        own, scoring = self._centred(row_group, own)
        first = self.plan.online_bases and row_group.seen == 0
        exact = first or self.exact(own.several)
        keys, values, latents = self._latents(row_group, own, own.tokens if first else 0)
        if by_form:
            output = self._attended_by_form(row_group, own, keys, values, latents, scoring, 0)
        else:
            key_sides = [
                self._key_side(row_group, index, stack, latent, own, exact)
                for index, (stack, latent) in enumerate(zip(keys, latents[0], strict=True))
            ]
            value_sides = [
                self._value_side(row_group, index, stack, latent, own, exact)
                for index, (stack, latent) in enumerate(zip(values, latents[1], strict=True))
            ]
            if self.policy.scoring:
                scoring = self.policy.scored(row_group, own, key_sides, scoring, exact)
            output = attend(key_sides, value_sides, scoring, own.query.dtype)
        self.policy.store(row_group, own, keys, latents[0], values, latents[1])
        return output

    def run_whole(self, row_group: RowGroup, own: OwnTokens, prompt: int) -> Tensor:
        """Attend as a prefill of `prompt` tokens and decoding would; store nothing."""
        own, scoring = self._centred(row_group, own)
        keys, values, latents = self._latents(row_group, own, prompt)
        prompt = 0 if self.plan.by_age else prompt
        return self._attended_by_form(row_group, own, keys, values, latents, scoring, prompt)

    def _latents(
        self, row_group: RowGroup, own: OwnTokens, decomposed: int
    ) -> tuple[list[GroupStack], list[GroupStack], tuple[list[Tensor], list[Tensor]]]:
        """Return the head groups of keys and values, and the pass's own latents."""
        keys, values = self.stacks(own.query.device, own.query.dtype)
        if self.plan.online_bases and decomposed:
            with part("basis"):
                self._decompose(row_group, "keys", keys, own.key[:, :, :decomposed])
                self._decompose(row_group, "values", values, own.value[:, :, :decomposed])
        keys = self._with_bases(row_group, "keys", keys)
        values = self._with_bases(row_group, "values", values)
        pre = self.layer.keys.placement is Placement.PRE_ROPE
        source = own.unrotated if pre and own.unrotated is not None else self._copied(own.key)
        found = ([x.latent(source) for x in keys], [x.latent(own.value) for x in values])
        return keys, values, found

    # What a pass attends to.

    def _centred(self, row_group: RowGroup, own: OwnTokens) -> tuple[OwnTokens, Scoring]:
        """Take the means from a pass's own keys and values, and say what scores lack then."""
        scoring = Scoring(
            scaling=self._scaling(own.options),
            softcap=own.options.get("softcap"),
            sinks=own.options.get("s_aux"),
            visible=own.visible,
            group=self.facts.group,
        )
        if self.layer.centre is None:
            return own, scoring
        wide = torch.promote_types(own.key.dtype, torch.float32)
        means = self._means(own.key.device, wide)
        angles = self._angles(row_group, own, wide)
        rotated = angles[:, :1, -own.tokens :] @ means.rotated.mT
        heads, group = self.facts.num_kv_heads, self.facts.group

        def without(states: Tensor, mean: Tensor) -> Tensor:
            return (states.to(wide) - mean).to(states.dtype)

        def offset(queries: slice, keys: slice = slice(None)) -> Tensor:
            query = unflatten(own.query[:, :, queries].to(wide), 1, (heads, group))
            met = (query @ means.rotated[:, None]).flatten(2, 3)  # [rows, Hkv, G * t', 2F + 1]
            return unflatten(met @ angles[..., keys, :].mT, 2, (group, -1))

        own = replace(
            own,
            key=without(own.key, rotated),
            value=without(own.value, means.values[:, None]),
            unrotated=None
            if own.unrotated is None
            else without(own.unrotated, means.keys[:, None]),
        )
        if not self.facts.rotary_pairs and scoring.softcap is None and scoring.sinks is None:
            return own, scoring  # the same for all keys, so it leaves the softmax
        return own, replace(scoring, offset=offset)

    def _means(self, device: torch.device, dtype: torch.dtype) -> "_Means":
        """Return the layer's means, and what its keys' become when they are rotated."""
        key = (device, dtype)
        if key not in self._centres:
            assert self.layer.centre is not None
            assert self.facts.rotary_pairs is not None  # check_fits has seen to it
            centre, pairs = self.layer.centre, RotaryPairs.of(self.facts.rotary_pairs)
            keys, values = centre.keys.to(device, dtype), centre.values.to(device, dtype)
            self._centres[key] = _Means(pairs.to(device), keys, values)
        return self._centres[key]

    def _angles(self, row_group: RowGroup, own: OwnTokens, dtype: torch.dtype) -> Tensor:
        """Return ``c_j`` of all tokens, ``[rows or 1, num_kv_heads or 1, N, 2F + 1]``."""
        tokens = row_group.stored + own.tokens
        if own.angles is None:
            return torch.ones(1, 1, tokens, 1, dtype=dtype, device=own.key.device)
        pairs = self._means(own.key.device, dtype).pairs
        positions = self._positions(row_group, own, tokens, None)
        cos, sin = own.angles.at(index_of(tuple(row_group.rows), own.key.device), positions)
        angles = pairs.angles(cos.to(dtype), sin.to(dtype))
        if len(self.policy.units) > 1 and angles.shape[1] > 1:
            heads = [size for _, size in self.policy.units]
            every = torch.tensor(heads, device=angles.device)
            angles = angles.repeat_interleave(every, dim=1)
        return angles

    def _attended_by_form(
        self,
        row_group: RowGroup,
        own: OwnTokens,
        keys: list[GroupStack],
        values: list[GroupStack],
        latents: tuple[list[Tensor], list[Tensor]],
        scoring: Scoring,
        prompt: int,
    ) -> Tensor:
        """Attend to each token as stored or uncompressed, as each query reads it."""
        device, tokens = own.query.device, own.tokens
        # Layers that store tokens alike are read alike, and to say how takes longer than to read.
        key = (*_kind(self.plan, self.layer), row_group.seen, tokens, prompt)
        if key not in self._known:
            self._known[key] = readings(self.plan, self.layer, row_group.seen, tokens, prompt)
        forms = self._known[key]
        count = row_group.stored + tokens
        blocks = [
            (
                ranges,
                [
                    block
                    for stack, rows in self._in_form(row_group, "keys", keys, latents[0], form)
                    for block in self._key_blocks(row_group, stack, rows, own, form.exact)
                ],
                [
                    block
                    for stack, rows in self._in_form(row_group, "values", values, latents[1], form)
                    for block in self._value_blocks(stack, rows, own, form.exact)
                ],
            )
            for form, ranges in forms.items()
        ]
        step = max(_FEWEST, min(-(-tokens // _SLICES), _MOST // count))
        done = []
        for start in range(0, tokens, step):
            queries = slice(start, min(start + step, tokens))
            read = []  # a form's keys and values within the columns that these queries read
            masks = []
            for ranges, key_blocks, value_blocks in blocks:
                if (found := _read(ranges, queries, device)) is not None:
                    columns, mask = found
                    seen = own.visible
                    masks.append(
                        mask[None, None] if seen is None else seen[..., queries, columns] & mask
                    )
                    read.append((key_blocks, value_blocks, columns))
            visible = torch.cat(masks, dim=-1)
            key_sides = [
                KeySide(
                    stack,
                    [
                        KeyBlock(block.query[..., queries, :], block.key[..., columns, :])
                        for key_blocks, _, columns in read
                        for block in (key_blocks[index],)
                    ],
                )
                for index, stack in enumerate(keys)
            ]
            value_sides = [
                ValueSide(
                    stack,
                    [value_blocks[index][..., columns, :] for _, value_blocks, columns in read],
                    in_latents=self.layer.values.fold_up and stack.projected,
                    mean=self._value_mean(stack, own),
                )
                for index, stack in enumerate(values)
            ]
            narrowed = replace(scoring, visible=visible)
            if scoring.offset is not None:
                whole, spans = scoring.offset, [columns for *_, columns in read]

                def offset(
                    some: slice, queries: slice = queries, whole: Any = whole, spans: Any = spans
                ) -> Tensor:
                    begin, stop = queries.start, queries.stop
                    own_queries = slice(begin + some.start, min(begin + some.stop, stop))
                    return torch.cat([whole(own_queries, span) for span in spans], dim=-1)

                narrowed = replace(narrowed, offset=offset)
            done.append(attend(key_sides, value_sides, narrowed, own.query.dtype))
        return torch.cat(done, dim=1)

    def _in_form(
        self,
        row_group: RowGroup,
        side: str,
        stacks: list[GroupStack],
        latents: list[Tensor],
        form: Form,
    ) -> Iterator[tuple[GroupStack, list[Tensor]]]:
        """Yield each stack with its latents in a form, of which an exact one has none."""
        for index, (stack, latent) in enumerate(zip(stacks, latents, strict=True)):
            exact = form.exact
            yield (
                stack,
                [] if exact else [self._rows(row_group, side, index, stack, latent, form)],
            )

    def _rows(
        self,
        row_group: RowGroup,
        side: str,
        index: int,
        stack: GroupStack,
        latent: Tensor,
        form: Form,
    ) -> Tensor:
        """Return all stored and own tokens in a form, ``[rows, g, N, r']``."""
        kept = getattr(row_group, side)
        parts: list[Part] = kept[index] if kept else []
        rows = concatenated([*(x.rows() for x in parts), latent], -2)
        plain = self.layer.sliding_window is not None
        # Sinks stay, and what is stored so already is not quantised twice.
        start = 0 if plain else min(self.plan.levels.sink, rows.shape[-2])
        start += sum(x.tokens for x in parts if x.codec is not PLAIN)
        for level in form.quantised:
            codec, width = self.policy.codec(side, level, stack), stack.ranks[level]
            rows = rows[..., :width]
            new = rows[..., start:, :]
            if codec is not PLAIN and new.shape[-2]:
                coded = codec.decode(codec.encode(new), width, rows.dtype)
                rows = torch.cat([rows[..., :start, :], coded], dim=-2)
        return rows[..., : stack.ranks[form.level]]

    def _key_side(
        self,
        row_group: RowGroup,
        index: int,
        stack: GroupStack,
        latent: Tensor,
        own: OwnTokens,
        exact: bool,
    ) -> KeySide:
        stored = row_group.stack_rows("keys", index)
        latents = [*stored, *([] if exact else self._by_level(row_group, stack, latent))]
        return KeySide(stack, self._key_blocks(row_group, stack, latents, own, exact))

    def _key_blocks(
        self,
        row_group: RowGroup,
        stack: GroupStack,
        latents: list[Tensor],
        own: OwnTokens,
        exact: bool,
    ) -> list[KeyBlock]:
        """Return blocks of latents, and with `exact` of the pass's own keys as they are."""
        query = stack.by_group(
            unflatten(own.query, 1, (-1, self.facts.group // self.layer.key_copies))
        )
        own_block = KeyBlock(query, stack.by_group(self._copied(own.key)))
        if self.rebuilds or stack.online or not stack.projected:
            heads = [stack.rebuilt(rows) for rows in latents]
            if self.rebuilds and heads:
                with part("decompress"):
                    heads = [self._rotated(row_group, stack, torch.cat(heads, dim=3), own)]
            met = query if stack.scale is None else query * stack.scale[:, None, None, :, :]
            blocks = [KeyBlock(met, head) for head in heads]
        else:
            turned = query
            if latents and not self.layer.keys.fold_up:
                with part("compress"):
                    up = stack.up_by_head()
                    turned = query.flatten(3, 4).to(up.dtype) @ up
                    turned = unflatten(turned, 3, query.shape[3:5])
            blocks = [KeyBlock(turned, rows.unsqueeze(2)) for rows in latents]
        return [*blocks, own_block] if exact else blocks

    def _copied(self, keys: Tensor) -> Tensor:
        """Give each query head a key of its own where the plan stores one for each."""
        copies = self.layer.key_copies
        return keys if copies == 1 else keys.repeat_interleave(copies, dim=1)

    def _value_side(
        self,
        row_group: RowGroup,
        index: int,
        stack: GroupStack,
        latent: Tensor,
        own: OwnTokens,
        exact: bool,
    ) -> ValueSide:
        stored = row_group.stack_rows("values", index)
        latents = [*stored, *([] if exact else self._by_level(row_group, stack, latent))]
        folded = self.layer.values.fold_up and stack.projected and not exact
        blocks = self._value_blocks(stack, latents, own, exact)
        return ValueSide(stack, blocks, in_latents=folded, mean=self._value_mean(stack, own))

    def _value_blocks(
        self, stack: GroupStack, latents: list[Tensor], own: OwnTokens, exact: bool
    ) -> list[Tensor]:
        """Return blocks of latents, and with `exact` of the pass's own values as they are."""
        whole = stack.online or not stack.projected
        blocks = [stack.rebuilt(rows) for rows in latents] if whole else latents
        return [*blocks, stack.by_group(own.value)] if exact else blocks

    def _value_mean(self, stack: GroupStack, own: OwnTokens) -> Tensor | None:
        if self.layer.centre is None:
            return None
        wide = torch.promote_types(own.value.dtype, torch.float32)
        means = self._means(own.value.device, wide).values
        return means.index_select(0, index_of(stack.kv_heads, means.device))

    def _by_level(self, row_group: RowGroup, stack: GroupStack, latent: Tensor) -> list[Tensor]:
        """Cut a pass's own latents to the ranks that their levels have after the pass."""
        tokens = latent.shape[2]
        if self.layer.sliding_window is not None or len(set(stack.ranks)) == 1:
            return [latent]
        # Levels before eviction: which tokens it takes is known only after the pass.
        sink, total = self.plan.levels.sink, row_group.seen + tokens
        ends = level_ends(self.plan.levels, max(0, total - sink))
        bounds = [*(min(sink, total) + end for end in ends)]
        cuts, start = [], row_group.seen
        if start < min(sink, total):
            cuts.append((start, min(sink, total), stack.ranks[-1]))
            start = min(sink, total)
        for end, rank in zip(bounds, stack.ranks, strict=True):
            if end > start:
                cuts.append((start, end, rank))
                start = end
        return [latent[:, :, a - row_group.seen : b - row_group.seen, :r] for a, b, r in cuts]

    def _rotated(
        self, row_group: RowGroup, stack: GroupStack, keys: Tensor, own: OwnTokens
    ) -> Tensor:
        assert own.rotation is not None
        assert own.angles is not None
        assert self.facts.rotary_offset is not None  # check_fits has seen to it
        rows = index_of(tuple(row_group.rows), keys.device)
        positions = self._positions(row_group, own, keys.shape[3], stack)
        cos, sin = own.angles.at(rows, positions)
        return rotated(
            own.rotation, keys, cos, sin, self.facts.rotary_offset, self.facts.rotary_transposed
        )

    def _positions(
        self, row_group: RowGroup, own: OwnTokens, tokens: int, stack: GroupStack | None
    ) -> Tensor:
        """Return positions of stored and new tokens, ``[rows, groups, tokens]``."""
        stored, device = row_group.stored, own.key.device
        fresh = torch.arange(own.position, own.position + tokens - stored, device=device)
        if row_group.positions is None:
            old = torch.arange(own.position - stored, own.position, device=device)
            groups = 1 if stack is None else stack.groups
            return torch.cat([old, fresh]).expand(len(row_group.rows), groups, -1)
        old = row_group.positions.long()
        if stack is not None:
            old = old[:, self.policy.units_of(stack)]
        return torch.cat([old, fresh.expand(*old.shape[:2], -1)], dim=-1)

    def _scaling(self, options: dict[str, Any]) -> float:
        scaling = options.get("scaling")
        return self.facts.scaling if scaling is None else float(scaling)

    # The strawman's bases.

    def _decompose(
        self, row_group: RowGroup, side: str, stacks: list[GroupStack], states: Tensor
    ) -> None:
        for index, stack in enumerate(stacks):
            if stack.online:
                rows = stack.joined(states).double()
                basis = eigenbasis(rows.mT @ rows)[1][..., : stack.ranks[-1]]
                row_group.bases[side, index] = basis.to(states.dtype).contiguous()

    def _with_bases(
        self, row_group: RowGroup, side: str, stacks: list[GroupStack]
    ) -> list[GroupStack]:
        return [
            replace(stack, down=row_group.bases[side, index], up=row_group.bases[side, index])
            if stack.online
            else stack
            for index, stack in enumerate(stacks)
        ]

    def stacks(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[list[GroupStack], list[GroupStack]]:
        """Return the head groups of the keys and of the values, put together."""
        key = (device, dtype)
        if key not in self._stacks:
            online = self.plan.online_bases
            sides = ((self.layer.keys, self.layer.key_copies), (self.layer.values, 1))
            keys, values = (
                stacked(
                    side.groups,
                    device,
                    dtype,
                    folded=side.fold_down,
                    online=online,
                    copies=copies,
                )
                for side, copies in sides
            )
            self._stacks[key] = keys, values
        return self._stacks[key]
