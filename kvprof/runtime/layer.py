"""One attention layer of a plan: attend to what is stored and to a pass's own tokens, then store.

The order is the plan's: a pass sees what was stored before it at its stored quality and its own
tokens at the rank of their level; afterwards tokens are evicted, moved down levels and quantised.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvprof.analysis.bases import eigenbasis
from kvprof.errors import UsageError
from kvprof.methods.plan import LayerPlan, Placement, Plan
from kvprof.methods.tokens import level_ends
from kvprof.models.layout import LayerLayout
from kvprof.runtime.attention import KeyBlock, KeySide, Scoring, ValueSide, attend
from kvprof.runtime.clock import part
from kvprof.runtime.cohort import Cohort
from kvprof.runtime.heads import Bundle, bundled
from kvprof.runtime.indices import index_of
from kvprof.runtime.keeping import Keeper
from kvprof.runtime.passes import OwnTokens
from kvprof.runtime.rotary import rotated
from kvprof.runtime.shapes import unflatten

__all__ = ["LayerRuntime"]


class LayerRuntime:
    """Executes one layer of a plan.

    Parameters
    ----------
    plan : Plan
    index : int
        Which layer.
    facts : LayerLayout
        The model's layer.
    """

    def __init__(self, plan: Plan, index: int, facts: LayerLayout) -> None:
        self.plan = plan
        self.layer: LayerPlan = plan.layers[index]
        self.facts = facts
        self.keeper = Keeper(plan, self.layer, facts)
        if plan.lazy and (self.layer.keys.fold_down or self.layer.keys.fold_up):
            raise UsageError(
                f"layer {index}: a lazy prefill needs exact Q and K, so nothing can be folded into "
                "W_Q or W_K; leave fold_down and fold_up of the keys out"
            )
        self._bundles: dict[Any, tuple[list[Bundle], list[Bundle]]] = {}

    @property
    def rebuilds(self) -> bool:
        """Whether keys are stored before RoPE in a layer that has RoPE."""
        return self.layer.keys.placement is Placement.PRE_ROPE and self.facts.rotary_dim > 0

    def exact(self, several: bool) -> bool:
        """Whether a pass attends to its own tokens exactly because the plan is lazy (TALE)."""
        return self.plan.lazy and several

    def run(self, cohort: Cohort, own: OwnTokens) -> Tensor:
        """Attend and store; returns the heads' outputs side by side, ``[rows, t, Σ_h w_h]``."""
        keys, values = self.bundles(own.query.device, own.query.dtype)
        first = self.plan.online_bases and cohort.seen == 0
        exact = first or self.exact(own.several)
        if first:
            with part("basis"):
                self._decompose(cohort, "keys", keys, own.key)
                self._decompose(cohort, "values", values, own.value)
        keys = self._with_bases(cohort, "keys", keys)
        values = self._with_bases(cohort, "values", values)
        pre = self.layer.keys.placement is Placement.PRE_ROPE
        source = own.unrotated if pre and own.unrotated is not None else self._copied(own.key)
        key_latents = [bundle.latent(source) for bundle in keys]
        value_latents = [bundle.latent(own.value) for bundle in values]

        key_sides = [
            self._key_side(cohort, place, bundle, latent, own, exact)
            for place, (bundle, latent) in enumerate(zip(keys, key_latents, strict=True))
        ]
        value_sides = [
            self._value_side(cohort, place, bundle, latent, own, exact)
            for place, (bundle, latent) in enumerate(zip(values, value_latents, strict=True))
        ]
        scoring = Scoring(
            scaling=self._scaling(own.options), softcap=own.options.get("softcap"),
            sinks=own.options.get("s_aux"), visible=own.visible, group=self.facts.group,
        )  # fmt: skip
        if self.keeper.scoring:
            scoring = self.keeper.scored(cohort, own, key_sides, scoring, exact)
        output = attend(key_sides, value_sides, scoring, own.query.dtype)
        self.keeper.store(cohort, own, keys, key_latents, values, value_latents)
        return output

    # What a pass attends to.

    def _key_side(
        self, cohort: Cohort, place: int, bundle: Bundle, latent: Tensor, own: OwnTokens,
        exact: bool,
    ) -> KeySide:  # fmt: skip
        query = bundle.by_group(
            unflatten(own.query, 1, (-1, self.facts.group // self.layer.key_copies))
        )
        stored = [kept.rows() for kept in cohort.keys[place]] if cohort.keys else []
        latents = [*stored, *([] if exact else self._by_level(cohort, bundle, latent))]
        own_block = KeyBlock(query, bundle.by_group(self._copied(own.key)))
        if self.rebuilds or bundle.online or not bundle.projected:
            heads = [bundle.rebuilt(rows) for rows in latents]
            if self.rebuilds and heads:
                with part("decompress"):
                    heads = [self._rotated(cohort, bundle, torch.cat(heads, dim=3), own)]
            blocks = [KeyBlock(query, head) for head in heads]
        else:
            turned = query
            if latents and not self.layer.keys.fold_up:
                with part("compress"):
                    turned = query.flatten(3, 4) @ bundle.up_by_head()
                    turned = unflatten(turned, 3, query.shape[3:5])
            blocks = [KeyBlock(turned, rows.unsqueeze(2)) for rows in latents]
        return KeySide(bundle, [*blocks, own_block] if exact else blocks)

    def _copied(self, keys: Tensor) -> Tensor:
        """Give each query head a key of its own where the plan stores one for each."""
        copies = self.layer.key_copies
        return keys if copies == 1 else keys.repeat_interleave(copies, dim=1)

    def _value_side(
        self, cohort: Cohort, place: int, bundle: Bundle, latent: Tensor, own: OwnTokens,
        exact: bool,
    ) -> ValueSide:  # fmt: skip
        stored = [kept.rows() for kept in cohort.values[place]] if cohort.values else []
        blocks = [*stored, *([] if exact else self._by_level(cohort, bundle, latent))]
        if bundle.online or not bundle.projected:
            blocks = [bundle.rebuilt(rows) for rows in blocks]
        if exact:
            blocks.append(bundle.by_group(own.value))
        folded = self.layer.values.fold_up and bundle.projected and not exact
        return ValueSide(bundle, blocks, in_latents=folded)

    def _by_level(self, cohort: Cohort, bundle: Bundle, latent: Tensor) -> list[Tensor]:
        """Cut a pass's own latents to the ranks that their levels have after the pass."""
        tokens = latent.shape[2]
        if self.layer.sliding_window is not None or len(set(bundle.ranks)) == 1:
            return [latent]
        # Levels before eviction: which tokens it takes is known only after the pass.
        sink, total = self.plan.levels.sink, cohort.seen + tokens
        ends = level_ends(self.plan.levels, max(0, total - sink))
        bounds = [*(min(sink, total) + end for end in ends)]
        cuts, start = [], cohort.seen
        if start < min(sink, total):
            cuts.append((start, min(sink, total), bundle.ranks[-1]))
            start = min(sink, total)
        for end, rank in zip(bounds, bundle.ranks, strict=True):
            if end > start:
                cuts.append((start, end, rank))
                start = end
        return [latent[:, :, a - cohort.seen : b - cohort.seen, :r] for a, b, r in cuts]

    def _rotated(self, cohort: Cohort, bundle: Bundle, keys: Tensor, own: OwnTokens) -> Tensor:
        assert own.rotation is not None
        assert own.angles is not None
        assert self.facts.rotary_offset is not None  # check_fits has seen to it
        rows = index_of(tuple(cohort.rows), keys.device)
        tokens, groups = keys.shape[3], bundle.groups
        stored = cohort.stored
        fresh = torch.arange(own.place, own.place + tokens - stored, device=keys.device)
        if cohort.places is None:
            old = torch.arange(own.place - stored, own.place, device=keys.device)
            places = torch.cat([old, fresh]).expand(len(cohort.rows), groups, -1)
        else:
            old = cohort.places[:, self.keeper.units_of(bundle)].long()
            places = torch.cat([old, fresh.expand(*old.shape[:2], -1)], dim=-1)
        cos, sin = own.angles.at(rows, places)
        return rotated(
            own.rotation, keys, cos, sin, self.facts.rotary_offset, self.facts.rotary_transposed
        )

    def _scaling(self, options: dict[str, Any]) -> float:
        scaling = options.get("scaling")
        return self.facts.scaling if scaling is None else float(scaling)

    # The strawman's bases.

    def _decompose(self, cohort: Cohort, side: str, bundles: list[Bundle], states: Tensor) -> None:
        for place, bundle in enumerate(bundles):
            if bundle.online:
                rows = bundle.joined(states).double()
                basis = eigenbasis(rows.mT @ rows)[1][..., : bundle.ranks[-1]]
                cohort.bases[side, place] = basis.to(states.dtype).contiguous()

    def _with_bases(self, cohort: Cohort, side: str, bundles: list[Bundle]) -> list[Bundle]:
        return [
            replace(bundle, down=cohort.bases[side, place], up=cohort.bases[side, place])
            if bundle.online
            else bundle
            for place, bundle in enumerate(bundles)
        ]

    def bundles(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[list[Bundle], list[Bundle]]:
        """Return the head groups of the keys and of the values, put together."""
        key = (device, dtype)
        if key not in self._bundles:
            online = self.plan.online_bases
            sides = ((self.layer.keys, self.layer.key_copies), (self.layer.values, 1))
            keys, values = (
                bundled(
                    side.groups, device, dtype, folded=side.fold_down, online=online,
                    copies=copies,
                )
                for side, copies in sides
            )  # fmt: skip
            self._bundles[key] = keys, values
        return self._bundles[key]
