"""Tiny models with everything that methods ask for, made once each."""

from dataclasses import replace
from functools import cache, partial

from kvprof.methods.family import MethodInputs
from kvprof.methods.named import ENGINE_FORMATS
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.moments.collect import CollectOptions, collect_moments
from kvprof.sources.grammar import parse_source
from tests.models.tiny import tiny, two_layers


@cache
def model(arch: str, layers: int = 2) -> LoadedModel:
    """Return a model of two layers, or of the three that `tiny` has."""
    return wrap_model(tiny(arch, **(two_layers(arch) if layers == 2 else {})))


@cache
def inputs(arch: str, *, layers: int = 2, joint_heads: int = 2, tokens: int = 512) -> MethodInputs:
    loaded = model(arch, layers)
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


#: For tests that count three layers.
deep_model, deep_inputs = partial(model, layers=3), partial(inputs, layers=3)


def with_weights(
    arch: str, *, layers: int = 3, **weights: dict[str, list[list[float]]]
) -> MethodInputs:
    return replace(inputs(arch, layers=layers), **weights)


#: What engines cut into blocks of 32 columns, which heads of 16 do not have.
BLOCKS = [name for name, (engine, _) in ENGINE_FORMATS.items() if engine == "llama.cpp"]

#: Ranks of any size, for heads of 16.
FINE = {"grid": 1, "minimum": 1}
