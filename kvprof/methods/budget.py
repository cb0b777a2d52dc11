"""``budget``: bits and ranks for single heads or layers, by what they were measured to cost.

``kvprof sensitivity`` measures every part of a cache at every setting; this method hands the
settings out at any rate, so that the divergences, summed, are least.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from kvprof.analysis.cheapest import Choice, cheapest
from kvprof.dtypes import DTYPE_BYTES
from kvprof.errors import UsageError
from kvprof.methods.accounting import SERVED_BYTES, full_bytes
from kvprof.methods.family import CalibrationNeeds, MethodInputs, PlanFamily
from kvprof.methods.full import full_plan
from kvprof.methods.kq import kq
from kvprof.methods.low_rank import KNOBS
from kvprof.methods.named import MEASURED_QUANTISERS
from kvprof.methods.plan import HeadGroup, LayerPlan, Placement, Plan
from kvprof.methods.settings import (
    FULL,
    SIDES,
    HeadSide,
    Part,
    Setting,
    bytes_per_token,
    settings_of,
)
from kvprof.methods.storage import Levels, SideQuantiser
from kvprof.models.layout import ModelLayout
from kvprof.records.files import RESULT_NAME, read_result
from kvprof.records.schema import refuse_first

__all__ = [
    "Handout",
    "Offer",
    "allocation",
    "budget",
    "budget_needs",
    "heads_in",
    "in_one_plan",
    "offer_of",
    "parts_of_layers",
]

_METHOD = "budget"
_LACKING = (
    "budget hands out what kvprof sensitivity measured: option cells names its result, as in "
    "cells=result.json"
)
# Of kq's bases where a result does not say: what kvprof sensitivity calibrates on.
_SOURCE = "calibration"
_COUNT = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_DATA = {
    "type": "object",
    "required": ["source", "tokens", "seq_len"],
    "properties": {
        "source": {"type": "string"},
        "tokens": _COUNT,
        "seq_len": _COUNT,
        "digest": {"type": "string"},
        "sketch": {"type": "string", "pattern": "^([0-9a-f]{8})*$"},
    },
}
_INPUTS = Draft202012Validator(
    {
        "type": "object",
        "required": ["fingerprint", "by", "layers", "bits", "quantiser", "ranks", "context"],
        "properties": {
            "model": {"type": "string"},
            "fingerprint": {"type": "string"},
            "dtype": {"enum": [*DTYPE_BYTES]},
            "by": {"enum": ["layer", "head"]},
            "layers": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "bits": {"type": "array", "items": {"enum": ["fp8", "2", "3", "4", "8"]}},
            "quantiser": {"enum": [*MEASURED_QUANTISERS]},
            "ranks": {"type": "array", "items": _COUNT},
            "context": _COUNT,
            "calibration": {"anyOf": [{"type": "null"}, _DATA]},
            "measured_on": {"type": "object", "additionalProperties": _DATA},
        },
    }
)


@dataclass(frozen=True, eq=False)
class Handout:
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
    cells: Mapping[tuple[Part, str], float],
    parts: Sequence[Part],
    settings: Sequence[Setting],
    sizes: Mapping[tuple[Part, str], float],
    size: float,
) -> tuple[dict[Part, Setting | None], float] | None:
    """Choose a setting for each part, by measured divergence per byte saved.

    Parameters
    ----------
    cells : mapping
        Divergence of a part at a setting's name.
    parts : sequence of Part
    settings : sequence of Setting
        One set from `in_one_plan`; those of which a part has no cell are not chosen for it.
    sizes : mapping
        Bytes of a part at a setting's name, `FULL` among them.
    size : float
        Bytes of all parts, at most.

    Returns
    -------
    tuple or None
        Part to setting (None: as the model stores it), and the summed divergence; None where
        the parts cannot be made that small.
    """
    named = {one.spec.name: one for one in settings}
    offered = [
        [
            Choice(FULL, sizes[part, FULL], 0.0),
            *(
                Choice(name, sizes[part, name], cells[part, name])
                for name in named
                if (part, name) in cells
            ),
        ]
        for part in parts
    ]
    found = cheapest(offered, size)
    if found is None:
        return None
    chosen = {part: named.get(choice.name) for part, choice in zip(parts, found, strict=True)}
    return chosen, sum(choice.cost for choice in found)


@dataclass(frozen=True, eq=False)
class Offer:
    """Parts, what each costs at each setting, and how plans of them are made.

    Attributes
    ----------
    inputs : MethodInputs
    parts : tuple of Part
    settings : tuple of Setting
        All that were measured but those with exact first tokens.
    cells : mapping
        As `allocation` takes them.
    made : dict
        JSON values that the plans carry.
    """

    inputs: MethodInputs
    parts: tuple[Part, ...]
    settings: tuple[Setting, ...]
    cells: Mapping[tuple[Part, str], float]
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

    def within(self, sizes: Mapping[tuple[Part, str], float], size: float) -> Handout | None:
        """Return what is handed out within so many bytes per token; None where nothing fits."""
        every = [
            found
            for held in in_one_plan(self.settings)
            if (found := allocation(self.cells, self.parts, held, sizes, size)) is not None
        ]
        if not every:
            return None
        chosen, predicted = min(every, key=lambda found: found[1])
        return Handout(chosen, predicted, self._plan(chosen, predicted))

    def least(self, sizes: Mapping[tuple[Part, str], float]) -> float:
        """Return the bytes per token that all parts take at least."""
        every = ((FULL, *(one.spec.name for one in held)) for held in in_one_plan(self.settings))
        return min(
            sum(min(sizes[part, name] for name in names) for part in self.parts) for names in every
        )

    def at_rate(self, wanted: float, tokens: int) -> Handout:
        """Return what is handed out at a rate of the whole cache.

        Parameters
        ----------
        wanted : float
            ``1 - bytes / bytes(full width)``; layers without a part stay as they are.
        tokens : int
            Context at which bytes are counted.

        Raises
        ------
        UsageError
            As `check_reach`.
        """
        self.check_reach(wanted, tokens)
        sizes = self.sizes(tokens)
        found = self.within(sizes, self._size(wanted, sizes, tokens))
        assert found is not None
        made = {**found.plan.made, "rate_asked": wanted, "context": tokens}
        return replace(found, plan=replace(found.plan, made=made))

    def check_reach(self, wanted: float, tokens: int) -> None:
        """Refuse a rate that the settings do not reach, whatever they cost.

        Raises
        ------
        UsageError
            With the range.
        """
        sizes = self.sizes(tokens)
        if self.least(sizes) > self._size(wanted, sizes, tokens):
            everything = self._everything(tokens)
            most = (sum(sizes[part, FULL] for part in self.parts) - self.least(sizes)) / everything
            raise UsageError(
                f"{_METHOD} reaches rates from 0.000 to {most:.3f} at {tokens:,} tokens, not "
                f"{wanted:g}: of the settings none is smaller"
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
        heads = {
            head: setting
            for part, setting in chosen.items()
            if setting is not None
            for head in heads_in(self.inputs.layout, part)
        }
        whole = full_plan(self.inputs, _METHOD)
        made = {**self.made, "predicted_kl": predicted}
        found = [one for one in heads.values() if one.spec.bits is not None]
        if not found:
            layers = tuple(_layer(i, x, heads, dict.fromkeys(SIDES)) for i, x in _numbered(whole))
            return replace(whole, layers=layers, made=made)
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
            made=made,
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
    if cut is not None:
        like = cut.stored.plan.layers[index]
        if based["keys"]:
            keys = replace(
                like.keys, placement=Placement.POST_ROPE, groups=keys.groups, per_query_head=False
            )
        if based["values"]:
            values = replace(like.values, groups=values.groups)
    return replace(layer, keys=keys, values=values)


# --- The method: cells from a result.


def budget(inputs: MethodInputs, *, cells: str | None = None) -> PlanFamily:
    """Return plans whose heads or layers have bits and ranks by what they were measured to cost.

    Parameters
    ----------
    inputs : MethodInputs
        With moments where ranks are among the settings.
    cells : str or None
        A result of ``kvprof sensitivity``, or the folder of one.

    Raises
    ------
    UsageError
        Without a result; for one of another model, or that is interrupted.
    FailedError
        For a file that is none.
    """
    result = _result(cells)
    asked = result["inputs"]
    if asked["fingerprint"] != inputs.fingerprint:
        raise UsageError(
            f"budget: the cells are those of {asked.get('model', 'another model')} "
            f"({asked['fingerprint'][:12]}), not of the model given ({inputs.fingerprint[:12]})"
        )
    settings = settings_of(
        inputs, asked["quantiser"], asked["bits"], asked["ranks"], 0, _bases(inputs, asked)
    )
    offer = offer_of(inputs, asked, settings, result["data"]["cells"], Path(cells or "").name)
    for part in offer.parts:
        for one in offer.settings:
            if (part, one.spec.name) not in offer.cells:
                head = "" if part.kv_head is None else f", KV head {part.kv_head}"
                raise UsageError(
                    f"budget: the result has no cell of layer {part.layer}'s {part.side}{head} at "
                    f"{one.spec.name}: it was interrupted; measure again"
                )
    return _family(offer, asked["context"])


def offer_of(
    inputs: MethodInputs,
    asked: Mapping[str, Any],
    settings: Sequence[Setting],
    cells: Sequence[Mapping[str, Any]],
    name: str | None = None,
) -> Offer:
    """Return what a result of ``kvprof sensitivity`` offers.

    Parameters
    ----------
    inputs : MethodInputs
        With moments where ranks are among the settings.
    asked : mapping
        The result's inputs.
    settings : sequence of Setting
        That were measured.
    cells : sequence of mapping
        The result's cells, as far as there are any.
    name : str or None
        Of the result's file.

    Raises
    ------
    UsageError
        For layers that the model does not have.
    """
    if max(asked["layers"]) >= len(inputs.layout.layers):
        raise UsageError(f"budget: the model has no layer {max(asked['layers'])}, the cells do")
    layers = sorted({*asked["layers"]} - inputs.skip)
    held = [one for one in settings if not one.spec.exact_first]
    told = {
        "by": asked["by"],
        "quantiser": asked["quantiser"],
        "settings": [one.spec.name for one in held],
        "measured_on": asked.get("measured_on", {}),
    }
    return Offer(
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
            **_calibrated(inputs, asked),
            "options": {} if name is None else {"cells": name},
            "cells": told,
        },
    )


def _family(offer: Offer, tokens: int) -> PlanFamily:
    """Return the plans of an offer; the knob is the share of bytes that the parts save.

    Parameters
    ----------
    offer : Offer
    tokens : int
        At which the knob counts bytes.
    """
    sizes = offer.sizes(tokens)
    total = sum(sizes[part, FULL] for part in offer.parts)

    def build(value: float) -> Plan:
        found = offer.within(sizes, (1.0 - value) * total)
        assert found is not None  # the bounds are what can be saved
        return found.plan

    most = 1.0 - offer.least(sizes) / total if total else 0.0
    return PlanFamily(
        _METHOD,
        KNOBS["budget"],
        build,
        bounds=(0.0, max(0.0, most)),
        at_rate=lambda wanted, at: offer.at_rate(wanted, at).plan,
    )


def budget_needs(options: Mapping[str, Any]) -> CalibrationNeeds | None:
    """Return what ``budget`` has to be calibrated with: nothing, unless ranks were measured."""
    if options.get("cells") is None:
        return None  # the method itself says what is lacking
    asked = _result(options["cells"])["inputs"]
    if not asked["ranks"]:
        return None
    return CalibrationNeeds((asked.get("calibration") or {}).get("source", _SOURCE))


def _bases(inputs: MethodInputs, asked: Mapping[str, Any]) -> PlanFamily | None:
    if not asked["ranks"]:
        return None
    facts = inputs.layout.layers
    width = min(min(layer.qk_head_dim, layer.v_head_dim) for layer in facts)
    if max(asked["ranks"]) >= width:
        raise UsageError(f"budget: rank {max(asked['ranks'])} keeps all of heads of {width}")
    # Layers that are left out have no bases; no part of them is handed anything.
    return kq(replace(inputs, skip=frozenset()), grid=1, minimum=1)


def _calibrated(inputs: MethodInputs, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what plans say of their bases, and where these are not those that were measured."""
    if not asked["ranks"] or inputs.moments is None:
        return {}
    info, tokens = inputs.moments.info, inputs.moments.tokens
    found: dict[str, Any] = {"calibration": {**info, "tokens": tokens}}
    keys = ("source", "tokens", "seq_len", "seed")
    own, other = (
        {key: one.get(key) for key in keys}
        for one in (found["calibration"], asked.get("calibration") or {})
    )
    if info and any(other.values()) and own != other:
        told = (
            f"{one['source']}, {one['tokens']:,} tokens in sequences of {one['seq_len']:,}"
            for one in (own, other)
        )
        note = "budget: bases are of {}; what ranks cost was measured with those of {}"
        found["notes"] = [*inputs.made.get("notes", []), note.format(*told)]
    return found


def _result(cells: str | None) -> dict[str, Any]:
    if cells is None:
        raise UsageError(_LACKING)
    path = Path(cells)
    path = path / RESULT_NAME if path.is_dir() else path
    # A command asks several times; reading says what is wrong where there is none.
    return _read(path, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=4)
def _read(path: Path, _changed: int) -> dict[str, Any]:
    result: dict[str, Any] = read_result(path)
    if result["kind"] != "sensitivity":
        raise UsageError(f"{path.name}: a result of kvprof {result['kind']}; {_LACKING}")
    try:
        refuse_first(_INPUTS.iter_errors(result["inputs"]), "inputs")
    except ValueError as problem:
        raise UsageError(f"{path.name}: {problem}; {_LACKING}") from None
    return result
