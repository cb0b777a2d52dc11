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
from kvprof.runtime.attention import (
    Bundle,
    KeyBlock,
    KeySide,
    Scoring,
    ValueSide,
    attend,
    bundled,
)
from kvprof.runtime.clock import part
from kvprof.runtime.keeping import Keeper, OwnTokens
from kvprof.runtime.rotary import rebuilds, rotated
from kvprof.runtime.rows import RowGroup
from kvprof.runtime.tensors import index_of, unflatten

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
        return rebuilds(self.layer, self.facts)

    def exact(self, several: bool) -> bool:
        """Whether a pass attends to its own tokens exactly because the plan is lazy (TALE)."""
        return self.plan.lazy and several

    def run(self, row_group: RowGroup, own: OwnTokens) -> Tensor:
        """Attend and store; returns the heads' outputs side by side, ``[rows, t, Σ_h w_h]``."""
        keys, values = self.bundles(own.query.device, own.query.dtype)
        first = self.plan.online_bases and row_group.seen == 0
        exact = first or self.exact(own.several)
        if first:
            with part("basis"):
                self._decompose(row_group, "keys", keys, own.key)
                self._decompose(row_group, "values", values, own.value)
        keys = self._with_bases(row_group, "keys", keys)
        values = self._with_bases(row_group, "values", values)
        pre = self.layer.keys.placement is Placement.PRE_ROPE
        source = own.unrotated if pre and own.unrotated is not None else self._copied(own.key)
        key_latents = [bundle.latent(source) for bundle in keys]
        value_latents = [bundle.latent(own.value) for bundle in values]

        key_sides = [
            self._key_side(row_group, index, bundle, latent, own, exact)
            for index, (bundle, latent) in enumerate(zip(keys, key_latents, strict=True))
        ]
        value_sides = [
            self._value_side(row_group, index, bundle, latent, own, exact)
            for index, (bundle, latent) in enumerate(zip(values, value_latents, strict=True))
        ]
        scoring = Scoring(
            scaling=self._scaling(own.options),
            softcap=own.options.get("softcap"),
            sinks=own.options.get("s_aux"),
            visible=own.visible,
            group=self.facts.group,
        )
        if self.keeper.scoring:
            scoring = self.keeper.scored(row_group, own, key_sides, scoring, exact)
        output = attend(key_sides, value_sides, scoring, own.query.dtype)
        self.keeper.store(row_group, own, keys, key_latents, values, value_latents)
        return output

    # What a pass attends to.

    def _key_side(
        self,
        row_group: RowGroup,
        index: int,
        bundle: Bundle,
        latent: Tensor,
        own: OwnTokens,
        exact: bool,
    ) -> KeySide:
        query = bundle.by_group(
            unflatten(own.query, 1, (-1, self.facts.group // self.layer.key_copies))
        )
        stored = row_group.bundle_rows("keys", index)
        latents = [*stored, *([] if exact else self._by_level(row_group, bundle, latent))]
        own_block = KeyBlock(query, bundle.by_group(self._copied(own.key)))
        if self.rebuilds or bundle.online or not bundle.projected:
            heads = [bundle.rebuilt(rows) for rows in latents]
            if self.rebuilds and heads:
                with part("decompress"):
                    heads = [self._rotated(row_group, bundle, torch.cat(heads, dim=3), own)]
            met = query if bundle.scale is None else query * bundle.scale[:, None, None, :, :]
            blocks = [KeyBlock(met, head) for head in heads]
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
        self,
        row_group: RowGroup,
        index: int,
        bundle: Bundle,
        latent: Tensor,
        own: OwnTokens,
        exact: bool,
    ) -> ValueSide:
        stored = row_group.bundle_rows("values", index)
        blocks = [*stored, *([] if exact else self._by_level(row_group, bundle, latent))]
        if bundle.online or not bundle.projected:
            blocks = [bundle.rebuilt(rows) for rows in blocks]
        if exact:
            blocks.append(bundle.by_group(own.value))
        folded = self.layer.values.fold_up and bundle.projected and not exact
        return ValueSide(bundle, blocks, in_latents=folded)

    def _by_level(self, row_group: RowGroup, bundle: Bundle, latent: Tensor) -> list[Tensor]:
        """Cut a pass's own latents to the ranks that their levels have after the pass."""
        tokens = latent.shape[2]
        if self.layer.sliding_window is not None or len(set(bundle.ranks)) == 1:
            return [latent]
        # Levels before eviction: which tokens it takes is known only after the pass.
        sink, total = self.plan.levels.sink, row_group.seen + tokens
        ends = level_ends(self.plan.levels, max(0, total - sink))
        bounds = [*(min(sink, total) + end for end in ends)]
        cuts, start = [], row_group.seen
        if start < min(sink, total):
            cuts.append((start, min(sink, total), bundle.ranks[-1]))
            start = min(sink, total)
        for end, rank in zip(bounds, bundle.ranks, strict=True):
            if end > start:
                cuts.append((start, end, rank))
                start = end
        return [latent[:, :, a - row_group.seen : b - row_group.seen, :r] for a, b, r in cuts]

    def _rotated(self, row_group: RowGroup, bundle: Bundle, keys: Tensor, own: OwnTokens) -> Tensor:
        assert own.rotation is not None
        assert own.angles is not None
        assert self.facts.rotary_offset is not None  # check_fits has seen to it
        rows = index_of(tuple(row_group.rows), keys.device)
        tokens, groups = keys.shape[3], bundle.groups
        stored = row_group.stored
        fresh = torch.arange(own.position, own.position + tokens - stored, device=keys.device)
        if row_group.positions is None:
            old = torch.arange(own.position - stored, own.position, device=keys.device)
            positions = torch.cat([old, fresh]).expand(len(row_group.rows), groups, -1)
        else:
            old = row_group.positions[:, self.keeper.units_of(bundle)].long()
            positions = torch.cat([old, fresh.expand(*old.shape[:2], -1)], dim=-1)
        cos, sin = own.angles.at(rows, positions)
        return rotated(
            own.rotation, keys, cos, sin, self.facts.rotary_offset, self.facts.rotary_transposed
        )

    def _scaling(self, options: dict[str, Any]) -> float:
        scaling = options.get("scaling")
        return self.facts.scaling if scaling is None else float(scaling)

    # The strawman's bases.

    def _decompose(
        self, row_group: RowGroup, side: str, bundles: list[Bundle], states: Tensor
    ) -> None:
        for index, bundle in enumerate(bundles):
            if bundle.online:
                rows = bundle.joined(states).double()
                basis = eigenbasis(rows.mT @ rows)[1][..., : bundle.ranks[-1]]
                row_group.bases[side, index] = basis.to(states.dtype).contiguous()

    def _with_bases(self, row_group: RowGroup, side: str, bundles: list[Bundle]) -> list[Bundle]:
        return [
            replace(bundle, down=row_group.bases[side, index], up=row_group.bases[side, index])
            if bundle.online
            else bundle
            for index, bundle in enumerate(bundles)
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
                    side.groups,
                    device,
                    dtype,
                    folded=side.fold_down,
                    online=online,
                    copies=copies,
                )
                for side, copies in sides
            )
            self._bundles[key] = keys, values
        return self._bundles[key]
