"""What one part of a cache can be stored as instead: bits of a quantiser, FP8, a rank of ``kq``.

`kvprof.evaluation.sensitivity` measures what each costs, `kvprof.methods.budget` hands them out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvprof.methods.accounting import SERVED_BYTES, layer_bytes
from kvprof.methods.family import MethodInputs, PlanFamily, plan_at
from kvprof.methods.fp8 import fp8
from kvprof.methods.low_rank import full_plan
from kvprof.methods.plan import HeadGroup, Plan
from kvprof.methods.quantisers import quantised

__all__ = [
    "FULL",
    "SIDES",
    "HeadSide",
    "Part",
    "Setting",
    "SettingSpec",
    "Stored",
    "bytes_per_token",
    "settings_of",
]

#: The setting that changes nothing.
FULL = "full"
#: The two sides of a cache, as plans name them.
SIDES = ("keys", "values")


@dataclass(frozen=True, order=True)
class HeadSide:
    """One KV head's keys or values in one layer.

    Attributes
    ----------
    layer : int
        Index into the layout's layers.
    side : str
        One of `SIDES`.
    kv_head : int
    """

    layer: int
    side: str
    kv_head: int


@dataclass(frozen=True, order=True)
class Part:
    """What is stored otherwise in a cell: all KV heads of a layer's side, or one.

    Attributes
    ----------
    layer : int
    side : str
        ``keys`` or ``values``.
    kv_head : int or None
        None for all heads of the layer.
    """

    layer: int
    side: str
    kv_head: int | None = None


@dataclass(frozen=True)
class SettingSpec:
    """What a setting is, as a result says it.

    Attributes
    ----------
    name : str
        ``8 bits``, ``fp8``, ``rank 64``.
    bits : int or None
        Of a quantised value; None at a rank.
    rank : int or None
    exact_first : int
        First tokens left as they are beyond what the quantiser itself leaves.
    """

    name: str
    bits: int | None
    rank: int | None
    exact_first: int = 0


@dataclass(frozen=True, eq=False)
class Stored:
    """How a head's tokens are stored: quantised, or cut to a rank.

    Attributes
    ----------
    plan : Plan
        Its quantiser and its levels say which tokens are quantised how; one level of tokens, no
        eviction.
    groups : mapping of HeadSide to HeadGroup
        The projections of heads that are cut, each a group of its own; empty for full rank.
    """

    plan: Plan
    groups: Mapping[HeadSide, HeadGroup] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Setting:
    """A setting and how it is carried out."""

    spec: SettingSpec
    stored: Stored


def settings_of(
    inputs: MethodInputs,
    quantiser: str,
    bits: Sequence[str],
    ranks: Sequence[int],
    exact_first: int,
    family: PlanFamily | None,
) -> list[Setting]:
    """Return settings, those with exact first tokens last.

    Parameters
    ----------
    inputs : MethodInputs
        Of the model; moments are not needed.
    quantiser : str
        One of `kvprof.methods.named.MEASURED_QUANTISERS`.
    bits : sequence of str
        ``fp8``, or a number of bits of the quantiser.
    ranks : sequence of int
        Kept dimensions of a head, fewer than it has.
    exact_first : int
        How many first tokens are exact where bits below 8 stand there again; 0 for not again.
    family : PlanFamily or None
        Of `kq`, where ranks are asked for.

    Raises
    ------
    UsageError
        For bits that the quantiser does not have, or a rank that is none.
    LackingError
        When the quantiser is a library's and the library is missing.
    """
    bare = replace(inputs, moments=None)
    plain = full_plan(bare)
    found: list[Setting] = []
    for name in bits:
        if name == "fp8":
            # As an engine casts: its flags are what comes of this.
            plan, spec = plan_at(fp8(bare, scale="none"), 8.0), SettingSpec("fp8", 8, None)
        else:
            plan = quantised(plain, quantiser, int(name))
            spec = SettingSpec(f"{name} bits", int(name), None)
        found.append(Setting(spec, Stored(plan)))
    for rank in ranks:
        assert family is not None  # the caller has calibrated
        assert family.at_ranks is not None
        cut = family.at_ranks([rank] * len(family.targets))
        found.append(Setting(SettingSpec(f"rank {rank}", None, rank), Stored(cut, _groups_of(cut))))
    if exact_first:
        found += [
            _with_exact_first(one, exact_first)
            for one in found
            if one.spec.bits is not None and one.spec.bits < 8
        ]
    return found


def _with_exact_first(setting: Setting, tokens: int) -> Setting:
    plan = setting.stored.plan
    levels = replace(plan.levels, sink=plan.levels.sink + tokens)
    return Setting(replace(setting.spec, exact_first=tokens), Stored(replace(plan, levels=levels)))


def _groups_of(plan: Plan) -> dict[HeadSide, HeadGroup]:
    return {
        HeadSide(index, side, group.first): group
        for index, layer in enumerate(plan.layers)
        for side in SIDES
        for group in getattr(layer, side).groups
    }


def bytes_per_token(whole: Plan, part: Part, setting: Setting | None, tokens: int) -> float:
    """Return what a part stores per token of context.

    Parameters
    ----------
    whole : Plan
        Uncompressed.
    part : Part
    setting : Setting or None
        None as the model stores it.
    tokens : int
        Context at which bytes are counted.
    """
    plan, cut = (setting.stored.plan, setting.stored.groups) if setting else (whole, {})
    layer = whole.layers[part.layer]
    # The other side stores nothing, and a head as much as the others.
    groups = {
        side: tuple(
            cut.get(HeadSide(part.layer, side, group.first), group)
            for group in getattr(layer, side).groups
            if side == part.side
        )
        for side in SIDES
    }
    alone = replace(
        layer,
        keys=replace(layer.keys, groups=groups["keys"]),
        values=replace(layer.values, groups=groups["values"]),
    )
    own = layer_bytes(plan, alone, tokens, itemsize=SERVED_BYTES).total
    return own / tokens / (1 if part.kv_head is None else len(groups[part.side]))
