"""``kvtc``: a prompt's cache coded to be stored or moved, not decoded from (arXiv 2511.01815)."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor

from kvprof.errors import UsageError
from kvprof.methods.across import Across, LayerGroup
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.layer_rows import gathered, together, unrotated_layers
from kvprof.methods.option_types import Count
from kvprof.methods.plan import Plan
from kvprof.methods.soundness import refuse_latent_attention
from kvprof.methods.storage import Levels

if TYPE_CHECKING:
    from kvprof.analysis.transform_coding import BlockErrors, Blocks

__all__ = ["AT_REST", "kvtc"]

#: What every plan says of itself.
AT_REST = (
    "kvtc is for storing and moving a cache, not for decoding from it: its bytes are those at "
    "rest, and decoding continues uncompressed"
)
# Bits per value before DEFLATE where nothing is saved but by the integers: 8, and overhead.
_MOST_BITS = 9.0
# How finely budgets differ: each is a plan whose bytes are measured.
_STEPS = 512


@dataclass(frozen=True, eq=False)
class _Group:
    """A group's bases, and what its sample's coefficients cost."""

    side: str
    layers: tuple[int, ...]
    tokens: int
    basis: Tensor
    mean: Tensor
    sample: Tensor
    errors: "BlockErrors"


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
    groups = [
        _group(inputs, side, own)
        for side in ("keys", "values")
        for own in together(inputs, "kvtc", layers)
    ]
    notes = [AT_REST]
    if few := [x for x in groups if x.tokens < len(x.mean)]:
        notes.append(
            f"kvtc: {few[0].tokens:,} tokens do not span rows of {len(few[0].mean):,} columns; "
            "calibrate on more, or take fewer layers together"
        )
    coded = {layer for group in groups for layer in group.layers}
    plain = unrotated_layers(inputs.layout.layers, coded)
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
        coded = tuple(_coded(x, _blocks(x, step), deflate) for x in groups)
        return Across(coded, window, deflate=deflate, sample=sample)

    # The last step keeps something: means alone are no cache.
    steps = range(1, _STEPS)
    last = bisect_left(steps, True, key=lambda step: not any(_blocks(x, step) for x in groups))

    def build(knob: float) -> Plan:
        step = min(round(knob * _STEPS), last)
        return Plan(
            "kvtc",
            inputs.fingerprint,
            plain,
            levels=Levels(sink),
            made=made,
            across=across(step),
        )

    return PlanFamily("kvtc", "saved_bits", build)


def _group(inputs: MethodInputs, side: str, layers: tuple[int, ...]) -> _Group:
    from kvprof.analysis.transform_coding import BlockErrors, principal_components

    gram, rows = gathered(inputs, "kvtc", side, layers)
    tokens = int(gram[-1, -1])
    if not tokens or not len(rows):
        raise UsageError(
            "kvtc measures bytes on one calibration sequence and requires others to calibrate; "
            "use several, such as --calibrate calibration"
        )
    mean, basis, _ = principal_components(gram)
    sample = ((rows.double() - mean) @ basis).float()
    return _Group(side, layers, tokens, basis.float(), mean.float(), sample, BlockErrors(sample))


def _blocks(group: _Group, step: int) -> "Blocks":
    """Return the blocks of a step: at the last ones none, whose group keeps its mean alone."""
    bits = _MOST_BITS * (1 - step / _STEPS)
    blocks = group.errors.within(max(bits * len(group.mean) / 8, 1.0))
    # Of columns at the end that nothing is kept of, no basis is needed.
    return blocks[:-1] if blocks and not blocks[-1][1] else blocks


def _coded(group: _Group, blocks: "Blocks", deflate: bool) -> LayerGroup:
    width = len(group.mean)
    rank = sum(columns for columns, _ in blocks)
    measured: tuple[int, ...] = ()
    if deflate:
        from kvprof.analysis.transform_coding import encoded

        stored = encoded(group.sample[:, :rank], blocks, deflate=True)
        measured = (len(stored), len(group.sample))
    basis = group.basis[:, :rank].contiguous()
    return LayerGroup(group.side, group.layers, width, rank, basis, group.mean, blocks, measured)
