"""``full``: the model's own cache, as a plan. What every other method is compared with."""

from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import identity_layer
from kvprof.methods.plan import Plan
from kvprof.methods.soundness import refuse_latent_attention

__all__ = ["full", "full_plan"]


def full_plan(inputs: MethodInputs, method: str = "full") -> Plan:
    """Return the plan that stores everything as it is."""
    refuse_latent_attention(inputs.layout)
    layers = tuple(identity_layer(facts) for facts in inputs.layout.layers)
    return Plan(method, inputs.fingerprint, layers, made=dict(inputs.made))


def full(inputs: MethodInputs) -> PlanFamily:
    """Return the one plan of full width: rate 0."""
    plan = full_plan(inputs)
    return PlanFamily("full", "setting", lambda _: plan, settings=(0.0,))
