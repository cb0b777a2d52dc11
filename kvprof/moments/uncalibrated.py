"""Plans of a method's shape without calibration: what they store, not what they keep of a model.

How many bytes a low-rank plan stores follows from its ranks, how well it does from its bases. Where
only the former is asked for (what fits into a memory, whether anything is quantised or evicted) a
pass over calibration data would change nothing that is told. Stand-in moments are the same for all
heads, so ranks come out alike everywhere: where a method hands them out by what it measures, they
are spread evenly over its own grid, as near to a wanted rate as one step of one head.
"""

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvprof.analysis.moments import LayerMoments, Moments
from kvprof.analysis.rank_allocation import ALLOCATIONS
from kvprof.methods.family import MethodInputs, PlanFamily, by_head
from kvprof.methods.registry import METHODS, calibration_needs, plan_family
from kvprof.models.layout import LayerLayout
from kvprof.models.load import LoadedModel
from kvprof.moments.calibrator import base_method
from kvprof.moments.collect import moment_shapes

__all__ = ["follows_from_rate", "uncalibrated_family"]


def follows_from_rate(method: str, **options: Any) -> bool:
    """Whether what a method stores can be told from its rate alone, as of kvprof's own methods.

    Raises
    ------
    UsageError
        For an unknown name.
    """
    needs = calibration_needs(method, **options)
    return needs is None or base_method(method, options)[0] in METHODS


def uncalibrated_family(loaded: LoadedModel, method: str, **options: Any) -> PlanFamily | None:
    """Return plans that store what the method's own would, on bases that mean nothing.

    Parameters
    ----------
    loaded : LoadedModel
    method : str
        A method's or a combination's name.
    **options
        The method's own.

    Returns
    -------
    PlanFamily or None
        None for a method that is not kvprof's own and has to be calibrated: what its ranks hang on
        is not known here.

    Raises
    ------
    UsageError
        As `kvprof.methods.registry.plan_family`: what cannot be planned cannot be planned so
        either.
    """
    given = {key: value for key, value in options.items() if key != "fisher_form"}
    needs = calibration_needs(method, **given)
    inputs = MethodInputs(loaded.layout, loaded.fingerprint)
    if needs is None:
        return plan_family(method, inputs, **given)
    if not follows_from_rate(method, **given):
        return None
    base, own = base_method(method, given)
    layers = [_stand_in(x, needs.pre_rope, needs.joint_heads) for x in loaded.layout.layers]
    inputs = replace(inputs, moments=Moments(layers, loaded.fingerprint, tokens=1, sequences=1))
    known = inspect.signature(METHODS[base]).parameters
    allocation = own.get("allocation", known["allocation"].default)
    if allocation in ALLOCATIONS and allocation != "uniform":  # of uniform, widths say it all
        plain = {key: value for key, value in own.items() if key != "allocation"}
        targets = plan_family(base, inputs, **plain).targets
        alike = by_head(targets, [1.0 / float(target.errors[0]) for target in targets])
        inputs = replace(inputs, sensitivities=alike)
        given["allocation"] = "budget"
    return plan_family(method, inputs, **given)


def _stand_in(layer: LayerLayout, pre_rope: bool, joint_heads: int | None) -> LayerMoments:
    """Return moments whose predicted errors fall along one curve, strictly convex, for every head.

    Then the next step of the grid is worth most where fewest have been taken.
    """

    def falling(heads: int, width: int, power: float) -> Tensor:
        energies = torch.arange(width, 0, -1, dtype=torch.float64) / width
        return torch.diag(energies**power).expand(heads, width, width)

    shapes = moment_shapes(layer, pre_rope=pre_rope, joint_heads=joint_heads)
    # Of a pair the product counts, of vectors that share a latent their own energy.
    rest = {
        key: falling(heads, width, 1.0 if key.endswith("_joint") else 0.5)
        for key, (heads, width) in shapes.items()
    }
    values = falling(*shapes["v"], 0.5)
    return LayerMoments(
        rest=rest,
        first={key: torch.zeros((), dtype=torch.float64) for key in rest},
        c_o=values if layer.output_projection is not None else None,
        c_wv=values if not layer.mla and layer.value_projection is not None else None,
    )
