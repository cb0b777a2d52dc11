"""``fp8``: full width in FP8 (e4m3), what most people would use instead of a low rank.

A saturating cast without scales, as serving systems store it by default: K after RoPE, V as it is.
"""

from dataclasses import replace

from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.full import full_plan
from kvprof.methods.storage import Quantiser, SideQuantiser

__all__ = ["fp8"]


def fp8(inputs: MethodInputs) -> PlanFamily:
    """Return the one plan of full width in 8 bits: half the bytes of bfloat16."""
    side = SideQuantiser((8,))
    plan = replace(full_plan(inputs, "fp8"), quantiser=Quantiser("fp8", side, side))
    return PlanFamily("fp8", "bits", lambda _: plan, settings=(8.0,))
