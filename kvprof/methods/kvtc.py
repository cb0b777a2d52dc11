"""``kvtc``: a prompt's cache coded to be stored or moved, not decoded from (arXiv 2511.01815)."""

from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor

from kvprof.analysis.across import AcrossMoments
from kvprof.analysis.transform_coding import BlockErrors, encoded, principal_components
from kvprof.errors import UsageError
from kvprof.methods.across import Across, LayerGroup
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import has_rope, identity_layer
from kvprof.methods.option_types import Count
from kvprof.methods.plan import LayerPlan, Placement, Plan
from kvprof.methods.soundness import refuse_latent_attention
from kvprof.methods.storage import Levels
from kvprof.models.layout import LayerLayout

__all__ = ["AT_REST", "kvtc"]

#: What every plan says of itself.
AT_REST = (
    "kvtc is for storing and moving a cache, not for decoding from it: its bytes are those at "
    "rest, and decoding goes on at full width from what comes back"
)
# Eigenvectors of more columns than this take longer than anybody waits for, and 2 GiB a matrix.
_WIDEST = 16384
# Bits per value before DEFLATE where nothing is saved but by the integers: 8, and overhead.
_MOST_BITS = 9.0
# How finely budgets differ: each is a plan whose bytes are measured.
_STEPS = 512


@dataclass(frozen=True, eq=False)
class _Group:
    """A group's bases, and what its sample's coefficients cost."""

    side: str
    layers: tuple[int, ...]
    basis: Tensor
    mean: Tensor
    sample: Tensor
    errors: BlockErrors


def kvtc(
    inputs: MethodInputs,
    *,
    layers: Count = 0,
    sink: Count = 4,
    window: Count = 128,
    deflate: bool = True,
) -> PlanFamily:
    """Return KVTC's plans: principal components across layers, blocks of unlike bits, DEFLATE.

    Keys before RoPE, and values, of all KV heads of a group of layers are one row per token; its
    mean and principal components are found on calibration data. Blocks of adjacent components get
    integers of 0, 2, 4 or 8 bits by a dynamic programme over the squared error that a held-out
    sequence of that data has at each (`kvprof.analysis.transform_coding`), keys and values as many
    bytes each before DEFLATE; then that sequence is coded, and what it takes per token is what the
    plan counts.

    Parameters
    ----------
    inputs : MethodInputs
        With moments across layers.
    layers : int
        Adjacent layers that are coded together, 0 for all as in the paper. Layers with a sliding
        window stay as they are.
    sink, window : int
        First tokens, and newest ones of a prompt, that stay exact.
    deflate : bool
        False leaves the integers as they are packed; then the bytes of any text are the same.

    Raises
    ------
    UsageError
        For MLA, moments that are not across these layers, or rows that are too wide.
    """
    refuse_latent_attention(inputs.layout)
    moments = inputs.calibrated("kvtc")
    known = moments.across
    if known is None:
        raise UsageError(
            "kvtc: the moments hold nothing of several layers together; calibrate anew, from "
            "tokens or text"
        )
    if not known.groups:
        raise UsageError("kvtc: every layer has a sliding window; there is nothing to code")
    facts = inputs.layout.layers
    groups = [
        _group(known, side, number, inputs)
        for side in ("keys", "values")
        for number, own in enumerate(known.groups)
        if not inputs.skip.issuperset(own)
    ]
    notes = [AT_REST]
    if few := [x for x in groups if known.tokens(x.side, 0) < len(x.mean)]:
        notes.append(
            f"kvtc: {known.tokens(few[0].side, 0):,} tokens do not span rows of "
            f"{len(few[0].mean):,} columns; calibrate on more, or take fewer layers together"
        )
    coded = {layer for group in groups for layer in group.layers}
    plain = tuple(_layer(own, own.index in coded) for own in facts)
    info = moments.info
    sample = {"source": info.get("source"), "tokens": len(groups[0].sample)}
    made = {
        **inputs.made,
        "notes": [*inputs.made.get("notes", []), *notes],
        "calibration": {**info, "tokens": moments.tokens},
        "options": {"layers": layers, "sink": sink, "window": window, "deflate": deflate},
    }

    @cache
    def across(step: int) -> Across:
        bits = _MOST_BITS * (1 - step / _STEPS)
        return Across(tuple(_coded(x, bits, deflate) for x in groups), window, deflate, sample)

    def build(knob: float) -> Plan:
        # The last step keeps something: a mean alone is no cache.
        step = min(round(knob * _STEPS), _STEPS - 2)
        return Plan(
            "kvtc",
            inputs.fingerprint,
            plain,
            levels=Levels(sink),
            made=made,
            across=across(step),
        )

    return PlanFamily("kvtc", "saved_bits", build)


def _layer(facts: LayerLayout, coded: bool) -> LayerPlan:
    """Return a layer at full width, its keys before RoPE as long as they may still be coded."""
    layer = identity_layer(facts)
    if not coded or not has_rope(facts):
        return layer
    return replace(layer, keys=replace(layer.keys, placement=Placement.PRE_ROPE))


def _group(known: AcrossMoments, side: str, number: int, inputs: MethodInputs) -> _Group:
    gram, rows = known.grams[side, number].cpu(), known.samples[side, number].cpu().float()
    layers: list[int] = []
    columns: list[int] = []
    start = 0
    for layer in known.groups[number]:
        facts = inputs.layout.layers[layer]
        head_dim = facts.qk_head_dim if side == "keys" else facts.v_head_dim
        stop = start + facts.num_kv_heads * head_dim
        if layer not in inputs.skip:
            layers.append(layer)
            columns += range(start, stop)
        start = stop
    if len(columns) > _WIDEST:
        raise UsageError(
            f"kvtc: {len(layers)} layers together have {side} of {len(columns):,} columns, and "
            f"components of at most {_WIDEST:,} are found; take fewer, as with layers=4"
        )
    if gram[-1, -1] < 1 or not len(rows):
        raise UsageError(
            "kvtc takes one sequence of its calibration data to measure bytes on, and there is no "
            "other; calibrate on more tokens"
        )
    if len(columns) < start:
        rows = rows[:, columns]
        gram = gram[[*columns, start]][:, [*columns, start]]
    mean, basis, _ = principal_components(gram)
    sample = ((rows.double() - mean) @ basis).float()
    return _Group(side, tuple(layers), basis.float(), mean.float(), sample, BlockErrors(sample))


def _coded(group: _Group, bits: float, deflate: bool) -> LayerGroup:
    width = len(group.mean)
    blocks = group.errors.within(max(bits * width / 8, 1.0))
    if blocks and not blocks[-1][1]:
        blocks = blocks[:-1]  # of columns at the end that nothing is kept of, no basis is needed
    rank = sum(columns for columns, _ in blocks)
    measured: tuple[int, ...] = ()
    if deflate:
        stored = encoded(group.sample[:, :rank], blocks, deflate=True)
        measured = (len(stored), len(group.sample))
    basis = group.basis[:, :rank].contiguous()
    return LayerGroup(group.side, group.layers, basis, group.mean, blocks, measured)
