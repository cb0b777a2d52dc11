"""What a layer keeps after a pass: eviction, token levels, quantisation."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvprof.methods.plan import LayerPlan, Placement, Plan
from kvprof.methods.storage import Eviction
from kvprof.methods.tokens import Segment, eviction_units, kept, quantises, segments
from kvprof.models.interface import RotaryTable, Rotation
from kvprof.models.layout import LayerLayout
from kvprof.runtime.attention import GroupStack, KeyBlock, KeySide, Scoring, logits, slices, softmax
from kvprof.runtime.clock import part as marked
from kvprof.runtime.codecs import PLAIN, Codec, codec_for
from kvprof.runtime.rows import Part, RowGroup, joined, picked, plain_part
from kvprof.runtime.tensors import index_of, unflatten

__all__ = [
    "EvictionPolicy",
    "OwnTokens",
    "gumbel",
    "kept_token_indices",
    "snapkv_scores",
    "token_scores",
]


@dataclass(frozen=True)
class OwnTokens:
    """A row group's real tokens of one pass, in one layer."""

    query: Tensor  # `[rows, heads, t, width]` as the attention function got them
    key: Tensor
    value: Tensor
    unrotated: Tensor | None  # K before RoPE, where the plan needs it
    visible: Tensor | None  # `[rows, 1, t, N]` bool, N stored tokens and the pass's own
    position: int  # where the first of them stands in the padded sequence
    several: bool  # whether the pass had more than one token
    options: dict[str, Any]  # the attention function's other arguments
    rotation: Rotation | None  # the layer's rotary call
    angles: RotaryTable | None  # of all tokens so far
    reach: int  # longest sequence that generation may reach

    @property
    def tokens(self) -> int:
        """How many."""
        return self.query.shape[2]


# --- Which tokens leave the cache, and the scores that decide it (H2O, Keyformer, SnapKV, recent).


_CHUNK = 1024


def gumbel(
    eviction: Eviction, layer: int, units: int, start: int, stop: int, device: torch.device
) -> Tensor:
    """Return standard Gumbel samples of tokens `start` … `stop`, by seed, layer and position."""
    pieces = []
    for chunk in range(start // _CHUNK, -(-stop // _CHUNK)):
        begin = chunk * _CHUNK
        samples = _gumbel_chunk(eviction.seed, layer, chunk, units, device)
        pieces.append(samples[:, max(start - begin, 0) : stop - begin])
    return torch.cat(pieces, dim=1)


@lru_cache(maxsize=512)
def _gumbel_chunk(seed: int, layer: int, chunk: int, units: int, device: torch.device) -> Tensor:
    """Draw on the CPU, the same everywhere, and once: each step wants one token of it."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer * 8191 + chunk)
    with torch.inference_mode(False):
        uniform = torch.rand(units, _CHUNK, generator=generator).clamp(1e-20, 1 - 1e-7)
        return (-(-uniform.log()).log()).to(device)


def token_scores(
    eviction: Eviction,
    logits: Tensor,
    probabilities: Tensor,
    noise: Tensor | None,
    progress: Tensor,
    units: list[tuple[int, int]],
) -> Tensor:
    """Return what a run of queries adds to each key's score."""
    totals = []
    for unit, (first, heads) in enumerate(units):
        if noise is None:
            share = probabilities[:, first : first + heads]
        else:
            low, high = eviction.tau
            tau = (low + (high - low) * progress).view(1, 1, 1, -1, 1)
            scores = logits[:, first : first + heads]
            samples = noise[:, unit].view(noise.shape[0], 1, 1, 1, -1)
            share = torch.softmax((scores + samples) / tau, dim=-1)
        totals.append(share.sum((1, 2, 3)))
    return torch.stack(totals, dim=1)


def snapkv_scores(
    eviction: Eviction, scores: Tensor, tokens: int, heads: Tensor, seen: int
) -> Tensor:
    """Return SnapKV's scores after a pass over more than one token."""
    window = min(eviction.window, tokens)
    before = scores[..., : scores.shape[-1] - window] / (window * heads[:, None])
    if before.shape[-1]:
        before = torch.nn.functional.avg_pool1d(
            before, eviction.pool, stride=1, padding=eviction.pool // 2
        )
    own = written(seen - window, seen, scores.device).expand(*scores.shape[:2], -1)
    return torch.cat([before, own], dim=-1)


def written(start: int, stop: int, device: torch.device) -> Tensor:
    """Return SnapKV's scores of a window's tokens and of those after it: above 1, by their age."""
    return torch.arange(start + 2, stop + 2, device=device, dtype=torch.float32)


def kept_token_indices(
    eviction: Eviction, seen: int, candidates: int, scores: Tensor | None, device: torch.device
) -> Tensor:
    """Return the indices of the tokens that stay."""
    count = kept(eviction, seen)
    sink = min(eviction.sink, count)
    newest = min(math.floor(eviction.recent_share * count + 1e-9), count - sink)
    if scores is None:
        newest = count - sink
        every = torch.arange(candidates, device=device)
        return torch.cat([every[:sink], every[candidates - newest :]]).view(1, 1, -1)
    ranked = scores.clone()
    ranked[..., :sink] = torch.inf
    ranked[..., candidates - newest :] = torch.inf
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :count]
    return order.sort(dim=-1).values


# --- What a layer keeps after a pass: eviction, token levels, quantisation.


class EvictionPolicy:
    """Decides, for one layer, which tokens stay and how they are stored.

    Parameters
    ----------
    plan : Plan
    layer : LayerPlan
        One of its layers.
    facts : LayerLayout
        The model's layer.
    """

    def __init__(self, plan: Plan, layer: LayerPlan, facts: LayerLayout) -> None:
        self.plan = plan
        self.layer = layer
        self._index = facts.index
        self._group = facts.group
        aged = layer.sliding_window is None and not layer.left_out
        self.eviction = plan.eviction if aged else None
        self.units = (
            [(0, facts.num_kv_heads)]
            if self.eviction is None or self.eviction.kind == "recent"
            else eviction_units(layer)
        )
        # To which part of job completion time it belongs to store tokens.
        self._storing = "attention"
        if self.eviction is not None:
            self._storing = "evict"
        elif aged and len(plan.levels.shares) > 1:
            self._storing = "compress"
        # Made at once, so that a quantiser that does not exist is found out before anything runs.
        self._codecs: dict[tuple[str, int, tuple[tuple[int, int], ...]], Codec] = {
            (side, level, bits): codec_for(
                plan.quantiser, getattr(plan.quantiser, side), level, bits
            )
            for side in ("keys", "values")
            for level in range(len(plan.levels.shares))
            if plan.quantiser is not None and quantises(plan, layer)
            for bits in {x.column_bits for x in getattr(layer, side).groups if x.quantised}
        }

    def codec(self, side: str, level: int, stack: GroupStack) -> Codec:
        """Return how quantised tokens of a level are kept."""
        return self._codecs[side, level, stack.column_bits] if stack.quantised else PLAIN

    @property
    def scoring(self) -> bool:
        """Whether tokens are evicted by their scores."""
        return self.eviction is not None and self.eviction.kind != "recent"

    def units_of(self, stack: GroupStack) -> list[int]:
        """Return each group's index among what is evicted together."""
        first_heads = stack.kv_heads[:: stack.heads]
        return [
            next(i for i, (first, heads) in enumerate(self.units) if first <= head < first + heads)
            for head in (stored // stack.copies for stored in first_heads)
        ]

    def _chosen(self, index: Tensor, stack: GroupStack) -> Tensor:
        """Take each group's tokens out of those of all that is evicted together."""
        units = tuple(self.units_of(stack))
        if units == tuple(range(index.shape[1])):
            return index
        return index.index_select(1, index_of(units, index.device))

    def scored(
        self,
        row_group: RowGroup,
        own: OwnTokens,
        sides: list[KeySide],
        scoring: Scoring,
        exact: bool,
    ) -> Scoring:
        """Let the pass add to the scores that decide what is evicted."""
        with marked("evict"):
            return self._scored(row_group, own, sides, scoring, exact)

    def _scored(
        self,
        row_group: RowGroup,
        own: OwnTokens,
        sides: list[KeySide],
        scoring: Scoring,
        exact: bool,
    ) -> Scoring:
        eviction = self.eviction
        assert eviction is not None
        rows, units, tokens = len(row_group.rows), len(self.units), own.tokens
        device = own.query.device
        fresh = torch.zeros(rows, units, tokens, device=device)
        observed = tokens
        if eviction.kind == "snapkv":
            observed = min(eviction.window, tokens)
            if not own.several:
                fresh = written(row_group.seen, row_group.seen + 1, device).expand(rows, units, -1)
            elif row_group.scores is not None:
                row_group.scores = torch.zeros_like(row_group.scores)
        row_group.scores = (
            fresh if row_group.scores is None else torch.cat([row_group.scores, fresh], -1)
        )
        if eviction.kind == "keyformer":
            stop = row_group.seen + tokens
            drawn = gumbel(eviction, self._index, units, row_group.seen, stop, device)
            drawn = drawn.expand(rows, -1, -1)
            row_group.noise = (
                drawn if row_group.noise is None else torch.cat([row_group.noise, drawn], -1)
            )
        steps = torch.arange(row_group.seen, row_group.seen + tokens, device=device)
        progress = (steps / max(1, own.reach - 1)).clamp(max=1)

        if eviction.kind == "snapkv" and not own.several:
            return scoring

        def add(scores: Tensor, probabilities: Tensor, queries: slice) -> None:
            assert row_group.scores is not None
            start, stop, _ = queries.indices(tokens)
            last = slice(max(0, tokens - observed - start), stop - start)
            if last.start >= last.stop:
                return
            with marked("evict"):
                row_group.scores += token_scores(
                    eviction,
                    scores[..., last, :],
                    probabilities[..., last, :],
                    row_group.noise,
                    progress[queries][last],
                    self.units,
                )

        if eviction.order == "compress_first" or exact or not own.several:
            return replace(scoring, observe=add)
        exactly = [KeySide(side.stack, self._exactly(row_group, side, own)) for side in sides]
        for queries in slices(exactly):
            if queries.indices(tokens)[1] <= tokens - observed:
                continue
            scores = logits(exactly, scoring, queries)
            add(scores, softmax(scores, scoring.sinks), queries)
        return scoring

    def _exactly(self, row_group: RowGroup, side: KeySide, own: OwnTokens) -> list[KeyBlock]:
        """Put the pass's own exact keys in place of its compressed ones."""
        copies = side.stack.copies
        query = side.stack.by_group(unflatten(own.query, 1, (-1, self._group // copies)))
        keys = own.key if copies == 1 else own.key.repeat_interleave(copies, dim=1)
        left, blocks = row_group.stored, []
        for block in side.blocks:
            if left > 0:
                blocks.append(KeyBlock(block.query, block.key[..., :left, :]))
                left -= block.key.shape[-2]
        return [*blocks, KeyBlock(query, side.stack.by_group(keys))]

    def store(
        self,
        row_group: RowGroup,
        own: OwnTokens,
        keys: list[GroupStack],
        key_latents: list[Tensor],
        values: list[GroupStack],
        value_latents: list[Tensor],
    ) -> None:
        """Evict, move down levels and quantise, after the pass has attended."""
        candidates = row_group.stored + own.tokens
        row_group.seen += own.tokens
        index = None
        if self.eviction is not None:
            device = own.query.device
            with marked("evict"):
                if self.eviction.kind == "snapkv" and own.several:
                    assert row_group.scores is not None
                    heads = [heads * self._group for _, heads in self.units]
                    row_group.scores = snapkv_scores(
                        self.eviction,
                        row_group.scores,
                        own.tokens,
                        torch.tensor(heads, device=device),
                        row_group.seen,
                    )
                index = kept_token_indices(
                    self.eviction, row_group.seen, candidates, row_group.scores, device
                )
                index = index.expand(len(row_group.rows), len(self.units), -1)
                self._keep_beside(row_group, own, index)
        with marked(self._storing):
            row_group.keys = self._kept(row_group, "keys", row_group.keys, keys, key_latents, index)
            row_group.values = self._kept(
                row_group, "values", row_group.values, values, value_latents, index
            )

    def _keep_beside(self, row_group: RowGroup, own: OwnTokens, index: Tensor) -> None:
        if row_group.scores is not None:
            row_group.scores = row_group.scores.gather(-1, index)
        if row_group.noise is not None:
            row_group.noise = row_group.noise.gather(-1, index)
        if self.layer.keys.placement is Placement.PRE_ROPE or self.layer.centre is not None:
            fresh = torch.arange(own.position, own.position + own.tokens, device=index.device)
            fresh = fresh.expand(*index.shape[:2], -1).to(torch.int32)
            every = (
                fresh
                if row_group.positions is None
                else torch.cat([row_group.positions, fresh], dim=-1)
            )
            row_group.positions = every.gather(-1, index)

    def _kept(
        self,
        row_group: RowGroup,
        side: str,
        old: list[list[Part]],
        stacks: list[GroupStack],
        latents: list[Tensor],
        index: Tensor | None,
    ) -> list[list[Part]]:
        result = []
        wanted = segments(self.plan, self.layer, row_group.seen)
        for number, (stack, latent) in enumerate(zip(stacks, latents, strict=True)):
            parts = [*(old[number] if old else []), plain_part(latent)]
            if row_group.shared is not None:
                # What is stored with other layers lies between the sinks and the rest.
                last = [(part, 0, part.tokens) for part in parts[-2:]]
                result.append([*parts[:-2], joined(last, PLAIN, stack.ranks[-1])])
                continue
            candidates = sum(part.tokens for part in parts)
            if row_group.record and self.layer.sliding_window is not None:
                wanted = [Segment(0, candidates, wanted[-1].level, quantised=False)]
            dropped = candidates - wanted[-1].stop
            chosen = None if index is None else self._chosen(index, stack)
            kept = []
            for segment in wanted:
                codec = self.codec(side, segment.level, stack) if segment.quantised else PLAIN
                width = stack.ranks[segment.level]
                if chosen is None:
                    pieces = _pieces(parts, dropped + segment.start, dropped + segment.stop)
                    kept.append(joined(pieces, codec, width))
                else:
                    where = chosen[..., segment.start : segment.stop]
                    kept.append(picked(parts, where, codec, width))
            result.append(kept)
        return result


def _pieces(parts: list[Part], start: int, stop: int) -> list[tuple[Part, int, int]]:
    """Return where tokens `start` … `stop` lie in adjacent parts."""
    found, begin = [], 0
    for piece in parts:
        end = begin + piece.tokens
        if start < end and stop > begin:
            found.append((piece, max(start - begin, 0), min(stop, end) - begin))
        begin = end
    return found
