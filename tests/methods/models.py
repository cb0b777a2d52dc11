"""Tiny models with everything that methods ask for, made once each."""

from dataclasses import replace
from functools import cache

from kvprof.methods.family import MethodInputs
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.moments.collect import CollectOptions, collect_moments
from kvprof.sources.grammar import parse_source
from tests.models.tiny import tiny


@cache
def model(arch: str) -> LoadedModel:
    return wrap_model(tiny(arch))


@cache
def inputs(arch: str, *, joint_heads: int = 2, tokens: int = 512) -> MethodInputs:
    loaded = model(arch)
    settings = CollectOptions(
        tokens,
        64,
        pre_rope=True,
        joint_heads=joint_heads,
        magnitudes=True,
        outputs=True,
        across=(0, 4),
    )
    *_, moments = collect_moments(loaded, parse_source(f"random:{tokens}"), settings)
    return MethodInputs(loaded.layout, loaded.fingerprint, moments, made={"model": arch})


def with_weights(arch: str, **weights: dict[str, list[list[float]]]) -> MethodInputs:
    return replace(inputs(arch), **weights)


#: Methods that hand out what was measured before, and have nothing to plan without it.
OF_A_RESULT = ("budget",)

#: Ranks of any size, for heads of 16.
FINE = {"grid": 1, "minimum": 1}
