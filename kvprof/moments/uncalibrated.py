"""Plans of a method's shape without calibration: what they store, not what they keep of a model.

How many bytes a low-rank plan stores follows from its ranks, how well it does from its bases.
Where only the former is asked for (what fits into a memory, whether anything is quantised or
evicted) a pass over calibration data would change no figure. Stand-in moments are the same for
all heads, so ranks come out alike everywhere: where a method hands them out by what it measures,
they are spread evenly over its own grid, as near to a wanted rate as one step of one head.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kvprof.analysis.moments import LayerMoments, Moments
from kvprof.analysis.outliers import magnitude_counts
from kvprof.analysis.rank_allocation import ALLOCATIONS
from kvprof.methods.family import CalibrationNeeds, MethodInputs, PlanFamily, by_head
from kvprof.methods.registry import (
    allocation_of,
    base_method,
    calibration_needs,
    follows_from_rate,
    plan_family,
    skips_layers,
    without_allocation,
)
from kvprof.models.layout import LayerLayout, ModelLayout
from kvprof.moments.collect import moment_shapes

__all__ = ["Laid", "stand_in_family", "uncalibrated_family"]


class Laid(Protocol):
    """What has a layout: a loaded model, or a shape without weights."""

    @property
    def layout(self) -> ModelLayout:
        """Heads and widths of every layer."""

    @property
    def fingerprint(self) -> str:
        """Of its weights; empty without."""


def uncalibrated_family(loaded: Laid, method: str, **options: Any) -> PlanFamily | None:
    """Return plans that store what the method's own would, on bases that mean nothing."""
    given = {key: value for key, value in options.items() if key != "fisher_form"}
    return stand_in_family(loaded, method, **given) if follows_from_rate(method, **given) else None


def stand_in_family(loaded: Laid, method: str, **options: Any) -> PlanFamily:
    """Return the plans that a method makes of moments which are the same for all heads."""
    if skips_layers(method):
        options["centre"] = False  # there are no means, and they cost no byte
    needs = calibration_needs(method, **options)
    inputs = MethodInputs(loaded.layout, loaded.fingerprint)
    if needs is None:
        return plan_family(method, inputs, **options)
    base, own = base_method(method, options)
    allocation = allocation_of(base, own)
    layers = _stand_ins(loaded.layout, needs)
    if allocation == "loss":  # whose pairs need no W_O, which stands in for it below
        for layer in layers:
            layer.c_o = layer.rest["v"]
    inputs = replace(inputs, moments=Moments(layers, loaded.fingerprint, tokens=1, sequences=1))
    if allocation in ALLOCATIONS and allocation != "uniform":  # of uniform, widths say it all
        targets = plan_family(base, inputs, **without_allocation(base, own)).targets
        alike = by_head(targets, [1.0 / float(target.errors[0]) for target in targets])
        inputs = replace(inputs, sensitivities=alike)
        options["allocation"] = "budget"
    elif allocation == "loss":
        options["allocation"] = "output"
    return plan_family(method, inputs, **options)


def _stand_ins(layout: ModelLayout, needs: CalibrationNeeds) -> list[LayerMoments]:
    """Return moments for every layer; layers that are built alike have the same."""
    made: dict[Any, LayerMoments] = {}
    layers = []
    for layer in layout.layers:
        shapes = moment_shapes(
            layer, pre_rope=needs.pre_rope, joint_heads=needs.joint_heads, outputs=needs.outputs
        )
        output, value = layer.output_projection, layer.value_projection
        kind = (*shapes.items(), layer.num_kv_heads, layer.mla, output is None, value is None)
        if kind not in made:
            made[kind] = _stand_in(layer, shapes)
        layers.append(made[kind])
    return layers


def _stand_in(layer: LayerLayout, shapes: Mapping[str, tuple[int, int]]) -> LayerMoments:
    """Return moments with the same strictly convex error curve for every head."""

    def falling(heads: int, width: int, power: float) -> Tensor:
        energies = torch.arange(width, 0, -1, dtype=torch.float64) / width
        return torch.diag(energies**power).expand(heads, width, width)

    # Of a pair the product counts, of vectors that share a latent their own energy.
    rest = {
        key: falling(heads, width, 1.0 if key.endswith("_joint") else 0.5)
        for key, (heads, width) in shapes.items()
    }
    values = falling(*shapes["v"], 0.5)
    ones = torch.ones(1, layer.num_kv_heads, 1, 1)
    return LayerMoments(
        rest=rest,
        first={key: torch.zeros((), dtype=torch.float64) for key in rest},
        c_o=values if layer.output_projection is not None else None,
        c_wv=values if not layer.mla and layer.value_projection is not None else None,
        magnitudes={key: magnitude_counts(ones) for key in ("k", "v")},
    )
