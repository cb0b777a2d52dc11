"""What a layer keeps after a pass: eviction, token levels, quantisation."""

from dataclasses import replace

import torch
from torch import Tensor

from kvprof.methods.plan import LayerPlan, Placement, Plan
from kvprof.methods.tokens import Segment, eviction_units, segments
from kvprof.models.layout import LayerLayout
from kvprof.runtime.attention import KeyBlock, KeySide, Scoring, logits, slices, softmax
from kvprof.runtime.clock import part as marked
from kvprof.runtime.codecs import PLAIN, Codec, codec_for
from kvprof.runtime.cohort import Cohort
from kvprof.runtime.eviction import gumbel, survivors, token_scores
from kvprof.runtime.heads import Bundle
from kvprof.runtime.indices import index_of
from kvprof.runtime.parts import Part, joined, picked, plain_part
from kvprof.runtime.passes import OwnTokens
from kvprof.runtime.shapes import unflatten

__all__ = ["Keeper"]


class Keeper:
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
        self.eviction = plan.eviction if layer.sliding_window is None else None
        self.units = (
            [(0, facts.num_kv_heads)]
            if self.eviction is None or self.eviction.kind == "recent"
            else eviction_units(layer)
        )
        # To which part of job completion time it belongs to store tokens.
        self._storing = "attention"
        if self.eviction is not None:
            self._storing = "evict"
        elif layer.sliding_window is None and len(plan.levels.shares) > 1:
            self._storing = "compress"
        # Made at once, so that a quantiser that does not exist is found out before anything runs.
        self._codecs: dict[tuple[str, int], Codec] = {
            (side, level): codec_for(plan.quantiser, getattr(plan.quantiser, side), level)
            for side in ("keys", "values")
            for level in range(len(plan.levels.shares))
            if plan.quantiser is not None
        }

    @property
    def scoring(self) -> bool:
        """Whether tokens are evicted by their scores."""
        return self.eviction is not None and self.eviction.kind != "recent"

    def units_of(self, bundle: Bundle) -> list[int]:
        """Return each group's place among what is evicted together."""
        first_heads = bundle.kv_heads[:: bundle.heads]
        return [
            next(i for i, (first, heads) in enumerate(self.units) if first <= head < first + heads)
            for head in (stored // bundle.copies for stored in first_heads)
        ]

    def _chosen(self, index: Tensor, bundle: Bundle) -> Tensor:
        """Take each group's tokens out of those of all that is evicted together."""
        units = tuple(self.units_of(bundle))
        if units == tuple(range(index.shape[1])):
            return index
        return index.index_select(1, index_of(units, index.device))

    def scored(
        self, cohort: Cohort, own: OwnTokens, sides: list[KeySide], scoring: Scoring, exact: bool
    ) -> Scoring:
        """Let the pass add to the scores that decide what is evicted."""
        with marked("evict"):
            return self._scored(cohort, own, sides, scoring, exact)

    def _scored(
        self, cohort: Cohort, own: OwnTokens, sides: list[KeySide], scoring: Scoring, exact: bool
    ) -> Scoring:
        eviction = self.eviction
        assert eviction is not None
        rows, units, tokens = len(cohort.rows), len(self.units), own.tokens
        device = own.query.device
        fresh = torch.zeros(rows, units, tokens, device=device)
        cohort.scores = fresh if cohort.scores is None else torch.cat([cohort.scores, fresh], -1)
        if eviction.kind == "keyformer":
            stop = cohort.seen + tokens
            drawn = gumbel(eviction, self._index, units, cohort.seen, stop, device)
            drawn = drawn.expand(rows, -1, -1)
            cohort.noise = drawn if cohort.noise is None else torch.cat([cohort.noise, drawn], -1)
        steps = torch.arange(cohort.seen, cohort.seen + tokens, device=device)
        progress = (steps / max(1, own.reach - 1)).clamp(max=1)

        def add(scores: Tensor, probabilities: Tensor, queries: slice) -> None:
            assert cohort.scores is not None
            with marked("evict"):
                cohort.scores += token_scores(
                    eviction, scores, probabilities, cohort.noise, progress[queries], self.units
                )

        if eviction.order == "compress_first" or exact or not own.several:
            return replace(scoring, observe=add)
        exactly = [KeySide(side.bundle, self._exactly(cohort, side, own)) for side in sides]
        for queries in slices(exactly):
            scores = logits(exactly, scoring, queries)
            add(scores, softmax(scores, scoring.sinks), queries)
        return scoring

    def _exactly(self, cohort: Cohort, side: KeySide, own: OwnTokens) -> list[KeyBlock]:
        """Put the pass's own exact keys in place of its compressed ones."""
        copies = side.bundle.copies
        query = side.bundle.by_group(unflatten(own.query, 1, (-1, self._group // copies)))
        keys = own.key if copies == 1 else own.key.repeat_interleave(copies, dim=1)
        left, blocks = cohort.stored, []
        for block in side.blocks:
            if left > 0:
                blocks.append(KeyBlock(block.query, block.key[..., :left, :]))
                left -= block.key.shape[-2]
        return [*blocks, KeyBlock(query, side.bundle.by_group(keys))]

    def store(
        self, cohort: Cohort, own: OwnTokens, keys: list[Bundle], key_latents: list[Tensor],
        values: list[Bundle], value_latents: list[Tensor],
    ) -> None:  # fmt: skip
        """Evict, move down levels and quantise, after the pass has attended."""
        candidates = cohort.stored + own.tokens
        cohort.seen += own.tokens
        index = None
        if self.eviction is not None:
            device = own.query.device
            with marked("evict"):
                index = survivors(self.eviction, cohort.seen, candidates, cohort.scores, device)
                index = index.expand(len(cohort.rows), len(self.units), -1)
                self._keep_beside(cohort, own, index, candidates)
        with marked(self._storing):
            cohort.keys = self._kept(cohort, "keys", cohort.keys, keys, key_latents, index)
            cohort.values = self._kept(
                cohort, "values", cohort.values, values, value_latents, index
            )

    def _keep_beside(self, cohort: Cohort, own: OwnTokens, index: Tensor, candidates: int) -> None:
        if cohort.scores is not None:
            cohort.scores = cohort.scores.gather(-1, index)
        if cohort.noise is not None:
            cohort.noise = cohort.noise.gather(-1, index)
        if self.layer.keys.placement is Placement.PRE_ROPE:
            fresh = torch.arange(own.place, own.place + own.tokens, device=index.device)
            fresh = fresh.expand(*index.shape[:2], -1).to(torch.int32)
            every = fresh if cohort.places is None else torch.cat([cohort.places, fresh], dim=-1)
            cohort.places = every.gather(-1, index)

    def _kept(
        self, cohort: Cohort, side: str, old: list[list[Part]], bundles: list[Bundle],
        latents: list[Tensor], index: Tensor | None,
    ) -> list[list[Part]]:  # fmt: skip
        result = []
        wanted = segments(self.plan, self.layer, cohort.seen)
        for place, (bundle, latent) in enumerate(zip(bundles, latents, strict=True)):
            parts = [*(old[place] if old else []), plain_part(latent)]
            candidates = sum(part.tokens for part in parts)
            if cohort.record and self.layer.sliding_window is not None:
                wanted = [Segment(0, candidates, wanted[-1].level, quantised=False)]
            dropped = candidates - wanted[-1].stop
            chosen = None if index is None else self._chosen(index, bundle)
            kept = []
            for segment in wanted:
                codec = self._codecs[side, segment.level] if segment.quantised else PLAIN
                width = bundle.ranks[segment.level]
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
    for part in parts:
        end = begin + part.tokens
        if start < end and stop > begin:
            found.append((part, max(start - begin, 0), min(stop, end) - begin))
        begin = end
    return found
