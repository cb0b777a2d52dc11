"""``budget``: bits and ranks for single heads or layers, by what they were measured to cost.

``kvprof sensitivity`` measures every part of a cache at every setting, and hands the settings out
at a rate so that the divergences, summed, are least.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvprof.analysis.rank_allocation import Choice, cheapest
from kvprof.errors import UsageError
from kvprof.methods.accounting import SERVED_BYTES, full_bytes
from kvprof.methods.family import MethodInputs
from kvprof.methods.low_rank import full_plan
from kvprof.methods.plan import HeadGroup, LayerPlan, Placement, Plan
from kvprof.methods.settings import (
    FULL,
    SIDES,
    HeadSide,
    Part,
    Setting,
    bytes_per_token,
)
from kvprof.methods.storage import Levels, SideQuantiser
from kvprof.models.layout import ModelLayout

__all__ = [
    "BitAllocation",
    "CandidateSet",
    "allocation",
    "candidates_of",
    "heads_in",
    "in_one_plan",
    "parts_of_layers",
    "plan_of",
]

_METHOD = "budget"


@dataclass(frozen=True, eq=False)
class BitAllocation:
    """Settings that were handed out.

    Attributes
    ----------
    chosen : dict of Part to Setting or None
        None as the model stores it.
    predicted_kl : float
        Divergence in nats per token, summed over the parts.
    plan : Plan
    """

    chosen: dict[Part, Setting | None]
    predicted_kl: float
    plan: Plan


def parts_of_layers(layout: ModelLayout, layers: Sequence[int], *, by_head: bool) -> list[Part]:
    """Return the parts of layers, keys before values, layer by layer."""
    return [
        Part(layer, side, head)
        for layer in layers
        for side in SIDES
        for head in (range(layout.layers[layer].num_kv_heads) if by_head else (None,))
    ]


def heads_in(layout: ModelLayout, part: Part) -> list[HeadSide]:
    """Return the heads of a part."""
    every = range(layout.layers[part.layer].num_kv_heads)
    chosen = every if part.kv_head is None else (part.kv_head,)
    return [HeadSide(part.layer, part.side, head) for head in chosen]


def in_one_plan(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Return the settings that one plan can hold side by side, as few sets as there have to be.

    First tokens that are exact in some heads alone are in none, and a cast to FP8 is another
    arithmetic than a quantiser's bits: a plan has one of the two.
    """
    plain = [one for one in settings if not one.spec.exact_first]
    cast = [one for one in plain if one.spec.bits is None or one.spec.name == "fp8"]
    bits = [one for one in plain if one.spec.name != "fp8"]
    return [one for one in (bits, cast) if any(x.spec.bits is not None for x in one)] or [plain]


def allocation(
    costs: Mapping[tuple[Part, str], float],
    parts: Sequence[Part],
    settings: Sequence[Setting],
    sizes: Mapping[tuple[Part, str], float],
    size: float,
) -> tuple[dict[Part, Setting | None], float] | None:
    """Choose a setting for each part, by measured divergence per byte saved."""
    named = {one.spec.name: one for one in settings}
    options = [
        [
            Choice(FULL, sizes[part, FULL], 0.0),
            *(
                Choice(name, sizes[part, name], costs[part, name])
                for name in named
                if (part, name) in costs
            ),
        ]
        for part in parts
    ]
    found = cheapest(options, size)
    if found is None:
        return None
    chosen = {part: named.get(choice.name) for part, choice in zip(parts, found, strict=True)}
    return chosen, sum(choice.cost for choice in found)


@dataclass(frozen=True, eq=False)
class CandidateSet:
    """Parts, what each costs at each setting, and how plans of them are made.

    Attributes
    ----------
    inputs : MethodInputs
    parts : tuple of Part
    settings : tuple of Setting
        All that were measured but those with exact first tokens.
    costs : mapping
        As `allocation` takes them.
    made : dict
        JSON values that the plans carry.
    """

    inputs: MethodInputs
    parts: tuple[Part, ...]
    settings: tuple[Setting, ...]
    costs: Mapping[tuple[Part, str], float]
    made: Mapping[str, Any]

    def sizes(self, tokens: int) -> dict[tuple[Part, str], float]:
        """Return the bytes per token of each part at each setting, `FULL` among them."""
        whole = full_plan(self.inputs)
        return {
            (part, FULL if one is None else one.spec.name): bytes_per_token(
                whole, part, one, tokens
            )
            for part in self.parts
            for one in (None, *self.settings)
        }

    def within(self, sizes: Mapping[tuple[Part, str], float], size: float) -> BitAllocation | None:
        """Return what is handed out within so many bytes per token; None where nothing fits."""
        every = [
            found
            for held in in_one_plan(self.settings)
            if (found := allocation(self.costs, self.parts, held, sizes, size)) is not None
        ]
        if not every:
            return None
        chosen, predicted = min(every, key=lambda found: found[1])
        return BitAllocation(chosen, predicted, self._plan(chosen, predicted))

    def least(self, sizes: Mapping[tuple[Part, str], float]) -> float:
        """Return the bytes per token that all parts take at least."""
        every = ((FULL, *(one.spec.name for one in held)) for held in in_one_plan(self.settings))
        return min(
            sum(min(sizes[part, name] for name in names) for part in self.parts) for names in every
        )

    def at_rate(self, wanted: float, tokens: int) -> BitAllocation:
        """Return what is handed out at a rate of the whole cache."""
        self.check_reach(wanted, tokens)
        sizes = self.sizes(tokens)
        found = self.within(sizes, self._size(wanted, sizes, tokens))
        assert found is not None
        made = {**found.plan.made, "rate_asked": wanted, "context": tokens}
        return replace(found, plan=replace(found.plan, made=made))

    def check_reach(self, wanted: float, tokens: int) -> None:
        """Refuse a rate that the settings do not reach, whatever they cost."""
        sizes = self.sizes(tokens)
        if self.least(sizes) > self._size(wanted, sizes, tokens):
            everything = self._everything(tokens)
            most = (sum(sizes[part, FULL] for part in self.parts) - self.least(sizes)) / everything
            raise UsageError(
                f"{_METHOD} reaches rates from 0.000 to {most:.3f} at {tokens:,} tokens, not "
                f"{wanted:g}; no setting is smaller"
            )

    def _everything(self, tokens: int) -> float:
        return full_bytes(full_plan(self.inputs), tokens, itemsize=SERVED_BYTES) / tokens

    def _size(self, wanted: float, sizes: Mapping[tuple[Part, str], float], tokens: int) -> float:
        """Return what the parts may take so that the whole cache has a rate."""
        everything = self._everything(tokens)
        # A rate as it is written and that of the same bytes may differ in the last digit.
        return sum(sizes[part, FULL] for part in self.parts) - (wanted - 1e-12) * everything

    def _plan(self, chosen: Mapping[Part, Setting | None], predicted: float) -> Plan:
        """Return the plan of settings that were handed out."""
        return plan_of(self.inputs, chosen, {**self.made, "predicted_kl": predicted})


def plan_of(
    inputs: MethodInputs, chosen: Mapping[Part, Setting | None], made: Mapping[str, Any]
) -> Plan:
    """Return the plan in which parts have their settings, and all else stays as it is.

    Parameters
    ----------
    inputs : MethodInputs
        Of the model.
    chosen : mapping of Part to Setting or None
        Settings that one plan can hold (`in_one_plan`), or all with as many exact first tokens.
    made : mapping
        JSON values that the plan carries.
    """
    heads = {
        head: setting
        for part, setting in chosen.items()
        if setting is not None
        for head in heads_in(inputs.layout, part)
    }
    whole = replace(full_plan(inputs, _METHOD), made=dict(made))
    found = [one for one in heads.values() if one.spec.bits is not None]
    if not found:
        layers = tuple(_layer(i, x, heads, dict.fromkeys(SIDES)) for i, x in _numbered(whole))
        return replace(whole, layers=layers)
    # Settings of one quantiser differ in their bits alone.
    like = found[0].stored.plan
    assert like.quantiser is not None
    sides: dict[str, SideQuantiser | None] = {}
    for side in SIDES:
        bits = {
            one.spec.bits
            for head, one in heads.items()
            if head.side == side and one.spec.bits is not None
        }
        own: SideQuantiser = getattr(like.quantiser, side)
        said = tuple(bits) if len(bits) == 1 else ()
        sides[side] = replace(own, bits=said) if bits else None
    return replace(
        whole,
        layers=tuple(_layer(index, layer, heads, sides) for index, layer in _numbered(whole)),
        levels=Levels(sink=like.levels.sink),
        quantiser=replace(like.quantiser, keys=sides["keys"], values=sides["values"]),
    )


def _numbered(plan: Plan) -> enumerate[LayerPlan]:
    return enumerate(plan.layers)


def _layer(
    index: int,
    layer: LayerPlan,
    heads: Mapping[HeadSide, Setting],
    sides: Mapping[str, SideQuantiser | None],
) -> LayerPlan:
    """Return a layer whose heads have their settings."""
    cut: Setting | None = None
    groups: dict[str, list[HeadGroup]] = {side: [] for side in SIDES}
    chosen = {head: one for head, one in heads.items() if head.layer == index}
    if not chosen:
        return replace(layer, left_out=True) if any(sides.values()) else layer
    based = dict.fromkeys(SIDES, False)
    for side in SIDES:
        for group in getattr(layer, side).groups:
            one = chosen.get(HeadSide(index, side, group.first))
            own, quantiser = group, sides[side]
            if one is not None and one.spec.rank is not None:
                own, cut = one.stored.groups[HeadSide(index, side, group.first)], one
                based[side] = True
            if quantiser is not None:
                bits = None if one is None else one.spec.bits
                if bits is None:
                    own = replace(own, quantised=False)
                elif not quantiser.bits:
                    own = replace(own, column_bits=((own.rank, bits),))
            groups[side].append(own)
    keys = replace(layer.keys, groups=tuple(groups["keys"]))
    values = replace(layer.values, groups=tuple(groups["values"]))
    mean = None
    if cut is not None:
        like = cut.stored.plan.layers[index]
        if based["keys"]:
            mean = None if any(sides.values()) else like.key_mean
            keys = replace(
                like.keys, placement=Placement.POST_ROPE, groups=keys.groups, per_query_head=False
            )
        if based["values"]:
            values = replace(like.values, groups=values.groups)
    return replace(layer, keys=keys, values=values, key_mean=mean)


def candidates_of(
    inputs: MethodInputs,
    asked: Mapping[str, Any],
    settings: Sequence[Setting],
    cells: Sequence[Mapping[str, Any]],
) -> CandidateSet:
    """Return what the cells of ``kvprof sensitivity`` offer."""
    layers = sorted({*asked["layers"]} - inputs.skip)
    held = [one for one in settings if not one.spec.exact_first]
    told = {
        "by": asked["by"],
        "quantiser": asked["quantiser"],
        "settings": [one.spec.name for one in held],
        "measured_on": asked.get("measured_on", {}),
    }
    moments = inputs.moments
    calibration = (
        {"calibration": {**moments.info, "tokens": moments.tokens}}
        if asked["ranks"] and moments is not None
        else {}
    )
    return CandidateSet(
        inputs,
        tuple(parts_of_layers(inputs.layout, layers, by_head=asked["by"] == "head")),
        tuple(held),
        {
            (Part(row["layer"], row["side"], row["kv_head"]), row["setting"]): float(row["kl"])
            for row in cells
            if not row["exact_first"]
        },
        {
            **inputs.made,
            **calibration,
            "options": {},
            "cells": told,
        },
    )
