"""``kq-wf``: ``kq``'s latents with bits by column, handed out by reverse water-filling."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated

import torch

from kvprof.analysis.bases import GAUGE_FLOOR, walsh_hadamard
from kvprof.analysis.bit_allocation import few_column_bits, water_filled
from kvprof.analysis.rank_allocation import RankTarget
from kvprof.analysis.uniform import uniform_distortion
from kvprof.errors import UsageError
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import identity_layer, projected
from kvprof.methods.option_types import Among, Count, Positive
from kvprof.methods.plan import HeadGroup, LayerPlan, Plan
from kvprof.methods.quantisers import normal_distortion
from kvprof.methods.storage import ARITHMETICS, Levels, Quantiser, SideQuantiser

__all__ = ["kq_wf"]


def kq_wf(
    inputs: MethodInputs,
    *,
    heads: Count = 1,
    allocation: Annotated[str, Among("loss", "budget", "output")] = "loss",
    grid: Positive = 16,
    kinds: Count = 0,
    alike: bool = False,
    sink: Count = 4,
    window: Count = 32,
    hadamard: bool = True,
    levels: Annotated[str, Among("uniform", "lloyd-max")] = "uniform",
) -> PlanFamily:
    """Return plans of the optimal pairs with 0, 2, 3, 4 or 8 bits by column.

    A latent's columns have the singular values σ_i of ``Q Kᵀ``, or of ``V W_O`` (with the
    allocation ``loss``, of K and V times a root of their Fisher information): what a column's
    relative squared error D adds to the product's squared error is ``σ_i² D``. Bits are handed out
    over all layers, heads and both sides to what loses least by that
    (`kvprof.analysis.bit_allocation.water_filled`). Columns of equal bits are mixed by a Hadamard
    matrix, scaled to a mean square of 1 on the calibration data, both inside ``down`` and ``up``,
    and quantised to levels that are best for a normal variable, with one scale of 8 bits for a
    token's row (``uniform-rms`` and ``lloyd-max-rms``, `kvprof.methods.plan`).

    Parameters
    ----------
    inputs : MethodInputs
        With moments; with ``sensitivities`` for ``budget``.
    heads : int
        KV heads whose values share a latent (their keys have one each): more go further where heads
        hold alike things, but W_O grows with them as for ``palu``; 0 for all.
    allocation : str
        What a unit of a head's squared error weighs. ``loss``: pairs are those of the next token's
        loss itself (`kvprof.analysis.moments.LossMoments`) instead of ``Q Kᵀ`` and ``V W_O``, and
        all weigh alike. ``budget``: what was measured of it. ``output``:
        its share of the layer's output, by a rule of thumb that needs no measurement: an error of
        1 in a score moves what a head puts out about as much as an error of the size of the values
        themselves, and all query heads put out alike.
    grid : int
        Columns that get their bits together.
    kinds : int
        Distinct pairs of K's and V's bits by column that the heads of all layers may have; 0 for
        no limit. They are chosen among those that heads have without the limit.
    alike : bool
        Give the heads of a layer the same bits by column, those that are best for them together,
        so that a launch of a kernel meets one head config.
    sink, window : int
        First and newest tokens that stay exact, all columns at full precision.
    hadamard : bool
        Mix columns of equal bits.
    levels : str
        ``uniform``, at equal distances, which kernels run, or ``lloyd-max``, the best ones.

    Raises
    ------
    UsageError
        Without moments; for ``loss`` without its moments; and plans for ``budget`` without
        sensitivities.
    """
    if allocation == "loss" and inputs.loss is None:
        raise UsageError("--allocation loss requires moments of the loss; calibrate with them")
    base = projected(
        "kq-wf",
        inputs,
        keys="kq",
        values="vo-opt",
        allocation="uniform",
        grid=1,
        minimum=1,
        fold_keys=True,
        value_heads=heads,
        by_loss=inputs.loss if allocation == "loss" else None,
    )
    assert base.at_ranks is not None
    facts = inputs.layout.layers
    # Layers that a sliding window keeps short are quantised only where no window is exact.
    left = {x.index for x in facts if x.shared or (x.sliding_window is not None and window)}
    left |= inputs.skip
    whole = base.at_ranks([target.width for target in base.targets])
    whole = replace(
        whole,
        layers=tuple(
            replace(identity_layer(facts[index]), left_out=index in inputs.skip)
            if index in left
            else layer
            for index, layer in enumerate(whole.layers)
        ),
    )
    targets = [target for target in base.targets if target.layer not in left]
    if not targets:
        raise UsageError("kq-wf: every layer has a sliding window; take window=0")
    kind = f"{levels}-rms"
    lost = uniform_distortion if levels == "uniform" else normal_distortion
    distortion = {bits: lost(bits) for bits in (0, *ARITHMETICS[kind].bits)}
    together = [(x.layer, x.side) for x in targets] if alike else None
    index_of = {(x.layer, x.side, x.group): number for number, x in enumerate(targets)}
    side = SideQuantiser(())
    quantiser = Quantiser(kind, side, side, window=window, scale_dtype="float8_e4m3fn")
    made = {
        **whole.made,
        "options": {
            "heads": heads,
            "allocation": allocation,
            "grid": grid,
            "kinds": kinds,
            "alike": alike,
            "sink": sink,
            "window": window,
            "hadamard": hadamard,
            "levels": levels,
        },
    }

    def changed(plan: Plan, change: Callable[[HeadGroup, int], HeadGroup]) -> tuple[LayerPlan, ...]:
        """Change every quantised group, given with its index among the targets."""
        layers = []
        for index, layer in enumerate(plan.layers):
            if index in left:
                layers.append(layer)
                continue
            keys, values = (
                tuple(
                    change(group, index_of[index, name, x]) for x, group in enumerate(side.groups)
                )
                for name, side in (("keys", layer.keys), ("values", layer.values))
            )
            layers.append(
                replace(
                    layer,
                    keys=replace(layer.keys, groups=keys),
                    values=replace(layer.values, groups=values),
                )
            )
        return tuple(layers)

    @cache
    def weights_of() -> list[float]:
        # Not before a plan is wanted: what is measured is measured of this family's targets.
        return _weights(allocation, inputs, targets)

    def build(knob: float) -> Plan:
        weights = weights_of()
        given = water_filled(targets, knob, grid, weights, distortion, together)
        if kinds:
            given = few_column_bits(targets, given, kinds, weights, distortion)
        layers = changed(whole, lambda group, index: replace(group, column_bits=given[index]))
        return replace(whole, layers=layers, levels=Levels(sink), quantiser=quantiser, made=made)

    def finish(plan: Plan) -> Plan:
        evened = changed(plan, lambda group, index: _evened(group, targets[index], hadamard))
        return replace(plan, layers=evened)

    return PlanFamily(
        "kq-wf",
        "saved_bits",
        build,
        finish=finish,
        targets=base.targets,
        at_ranks=base.at_ranks,
    )


def _weights(allocation: str, inputs: MethodInputs, targets: Sequence[RankTarget]) -> list[float]:
    if allocation == "loss":
        return [1.0] * len(targets)
    if allocation == "budget":
        known = inputs.sensitivities
        if known is None:
            raise UsageError("--allocation budget requires measured sensitivities")
        try:
            return [known[x.side][x.layer][x.group] for x in targets]
        except (KeyError, IndexError):
            raise UsageError(
                "budget: measured sensitivities must cover every head of every layer"
            ) from None
    wholes: dict[int, float] = {}
    for target in targets:
        if target.side == "values":
            whole = wholes.get(target.layer, 0.0) + float(target.errors[0])
            wholes[target.layer] = whole
    counts = [x.num_heads for x in inputs.layout.layers]
    return [
        1.0 / (counts[x.layer] if x.side == "keys" else wholes[x.layer] or 1.0) for x in targets
    ]


def _evened(group: HeadGroup, target: RankTarget, hadamard: bool) -> HeadGroup:
    """Mix the columns of each run and scale them to a mean square of 1.

    The latents of the optimal pair are uncorrelated and have the energy σ_i per column (or its
    gauge's floor), so that of a mixed column is ``Σ_i H_ij² σ_i``.
    """
    assert group.down is not None
    assert group.up is not None
    down, up = group.down.double(), group.up.double()
    largest = float(target.values[0])
    energies = target.values.double().clamp_min(GAUGE_FLOOR * largest if largest > 0 else 1.0)
    start = 0
    for width, bits in group.column_bits:
        columns = slice(start, start + width)
        start += width
        if not bits:
            continue
        rotation = torch.eye(width, dtype=torch.float64)
        if hadamard:
            rotation = walsh_hadamard(width)
        lengths = (rotation.square().mT @ energies[columns]).sqrt()
        down[:, columns] = down[:, columns] @ rotation / lengths
        up[:, columns] = up[:, columns] @ rotation * lengths
    return replace(group, down=down.float(), up=up.float())
