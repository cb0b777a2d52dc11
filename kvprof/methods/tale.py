"""``tale``: values lose rank as tokens age, keys keep theirs, prefill is exact (TALE §2)."""

from collections.abc import Sequence
from typing import Annotated

from kvprof.analysis.rank_allocation import Grid
from kvprof.analysis.width_clusters import KINDS
from kvprof.errors import UsageError
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import (
    KNOBS,
    LayerBases,
    allocator,
    low_rank_layers,
    rank_targets,
    value_folds,
)
from kvprof.methods.option_types import Allocation, Among, Count, Positive
from kvprof.methods.pair_bases import SideBases, shared_bases
from kvprof.methods.plan import Plan
from kvprof.methods.quantisers import kivi
from kvprof.methods.soundness import refuse_latent_attention
from kvprof.methods.storage import Levels, Quantiser

__all__ = [
    "PUBLISHED_BITS",
    "PUBLISHED_SHARE",
    "RECENT",
    "SINK",
    "tale",
    "tale_kivi",
]

#: The paper's r_0: half of the full rank, so this much is removed.
PUBLISHED_SHARE = 0.5
#: Tokens left intact (alpha), and the share of the others that stays at full rank (p).
SINK, RECENT = 4, 0.1
#: Of the middle and of the recent level (TALE §3).
PUBLISHED_BITS = (2, 4)
# Groups of tokens that share a key's scales move down together (appendix A).
_KIVI_GROUP = 32


def tale(
    inputs: MethodInputs,
    *,
    heads: Count = 1,
    sink: Count = SINK,
    recent: float = RECENT,
    batch: Positive = 1,
    lazy: bool = True,
    allocation: Allocation = "uniform",
    grid: Positive = 16,
    minimum: Positive = 16,
    kinds: Count = KINDS,
) -> PlanFamily:
    """Return TALE's plans without its quantiser; the knob is what the middle level loses (r_0).

    After the sinks, the newest `recent` share of tokens keep full rank, the older ones r_0; a token
    goes down by truncation of its latent (appendix B). ``up`` is folded into W_O, which grows with
    the group and with the quantised levels stays one matrix. Keys are stored as they are. Layers
    with a sliding window keep few tokens and are left alone.

    Parameters
    ----------
    inputs : MethodInputs
        With moments of V, kept jointly over a multiple of `heads` heads.
    heads : int
        KV heads that share a latent: 1 (enough with grouped queries), 4 (the paper without them),
        0 for all.
    sink : int
        First tokens left intact (alpha); 0 is the ablation of table 8.
    recent : float
        p; 0 leaves no recent level (the other ablation).
    batch : int
        Tokens that go down together (u).
    lazy : bool
        Prefill attends exactly, and only the cached copy is compressed.
    allocation : str
        Of r_0; ``uniform`` is the paper's.
    grid, minimum : int
        For r_0.
    kinds : int
        Distinct r_0 that there may be, as for ``fdc``; 0 for no limit.
    """
    return _tale(
        "tale", inputs, heads, sink, recent, batch, lazy, allocation, grid, minimum, kinds, None
    )


def tale_kivi(
    inputs: MethodInputs,
    *,
    heads: Count = 1,
    sink: Count = SINK,
    recent: float = RECENT,
    lazy: bool = True,
    allocation: Allocation = "uniform",
    grid: Positive = 16,
    minimum: Positive = 16,
    kinds: Count = KINDS,
    bits: Annotated[tuple[int, int], Among(8, 4, 3, 2)] = PUBLISHED_BITS,
    window: Count = 128,
) -> PlanFamily:
    """Return TALE's plans as published: 2 bits in the middle, 4 in the recent level (TALE §3).

    At r_0 = 50 % that is 9.14× by the paper's count and, at long contexts, 6.34× in bytes, as
    scales and zero points of groups of 32 add a bit per value. As KIVI does, the newest `window`
    tokens and those of the group of 32 that is not complete stay at full precision; the paper says
    that it takes KIVI and counts no window.

    Parameters
    ----------
    inputs, heads, sink, recent, lazy, allocation, grid, minimum, kinds
        As for ``tale``.
    bits : tuple of int
        Of the middle and of the recent level, K and V alike.
    window : int
        Newest tokens at full precision: KIVI's own 128, or 0 for the bytes that the paper counts.
    """
    quantiser = kivi(bits, group=_KIVI_GROUP, window=window, block=_KIVI_GROUP)
    return _tale(
        "tale+kivi",
        inputs,
        heads,
        sink,
        recent,
        _KIVI_GROUP,
        lazy,
        allocation,
        grid,
        minimum,
        kinds,
        quantiser,
    )


def _tale(
    method: str,
    inputs: MethodInputs,
    heads: int,
    sink: int,
    recent: float,
    batch: int,
    lazy: bool,
    allocation: str,
    grid: int,
    minimum: int,
    kinds: int,
    quantiser: Quantiser | None,
) -> PlanFamily:
    refuse_latent_attention(inputs.layout)
    if not 0 <= recent < 1:
        raise UsageError(f"{method}: recent share {recent:g} is not in [0, 1]")
    moments = inputs.calibrated(method)
    layers = [
        LayerBases(
            keys=None,
            values=None
            if facts.sliding_window or index in inputs.skip
            else shared_bases(moments, facts, "v", heads),
            fold_values=(not lazy and value_folds(facts)[0], value_folds(facts)[1]),
        )
        for index, facts in enumerate(inputs.layout.layers)
    ]
    if all(layer.values is None for layer in layers):
        raise UsageError(
            f"{method}: every layer has a sliding window, so tokens never move to an older level"
        )
    ranks = allocator(allocation, inputs, layers, Grid(grid, minimum), kinds)
    levels = Levels(sink, (1.0 - recent, recent), batch)
    made = {
        **inputs.made,
        "calibration": {**moments.info, "tokens": moments.tokens},
        "options": {
            "heads": heads,
            "sink": sink,
            "recent": recent,
            "batch": batch,
            "lazy": lazy,
            "allocation": allocation,
            "grid": grid,
            "minimum": minimum,
            "kinds": kinds,
            "bits": list(quantiser.values.bits) if quantiser and quantiser.values else None,
            "window": quantiser.window if quantiser else None,
        },
    }

    def both(bases: SideBases, rank: int) -> tuple[int, ...]:
        return rank, bases.values.shape[-1]

    def at_ranks(given: Sequence[int]) -> Plan:
        return Plan(
            method=method,
            fingerprint=inputs.fingerprint,
            layers=low_rank_layers(inputs, layers, given, levels=both),
            levels=levels,
            quantiser=quantiser,
            lazy=lazy,
            made=made,
        )

    return PlanFamily(
        method,
        KNOBS[allocation],
        lambda knob: at_ranks(ranks(knob)),
        targets=tuple(rank_targets(layers)),
        at_ranks=at_ranks,
    )
