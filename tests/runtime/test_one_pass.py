"""One pass reads what decoding reads: equal logits, for every way to store that it can show."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprof.evaluation.decode import baseline_logits, decoded_logits, prefill_length
from kvprof.methods.family import MethodInputs
from kvprof.methods.plan import Plan, reads_by_age
from kvprof.methods.registry import plan_family
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.moments.collect import CollectOptions, collect_moments
from kvprof.runtime.compressed import compressed
from kvprof.sources.grammar import parse_source
from tests.methods.models import FINE
from tests.models.tiny import VOCABULARY, seeded, tiny

_TOKENS = 60
#: A method, its options, and where its knob stands.
PLANS: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "kq": ("kq", FINE, 0.4),
    "palu": ("palu", {**FINE, "heads": 2}, 0.4),
    "svd-qk-literal": ("fdc", {**FINE, "keys": "svd-qk-literal"}, 0.4),
    "fdc-4bit": ("fdc-4bit", FINE, 0.3),
    "per-token": ("per-token", {"bits": 3}, None),
    "hadamard": ("hadamard-int3", {"bits": "k3v2"}, None),
    "turboquant": ("turboquant", {"bits": 3}, None),
    "fp8": ("fp8", {}, None),
    "kivi": ("kivi", {"bits": 2}, None),
    "kvquant": ("kvquant", {"bits": 3}, None),
    "tale": ("tale", {**FINE, "heads": 2}, 0.5),
    "tale+kivi": ("tale+kivi", {**FINE, "heads": 2, "window": 4}, 0.5),
    "strawman": ("strawman", FINE, 0.5),
}


@pytest.fixture(scope="module", params=["Llama", "Gemma3"])
def calibrated(request: pytest.FixtureRequest) -> tuple[LoadedModel, MethodInputs]:
    loaded = wrap_model(tiny(request.param).double())
    settings = CollectOptions(512, 64, pre_rope=True, joint_heads=2, magnitudes=True)
    *_, moments = collect_moments(loaded, parse_source("random:512"), settings)
    return loaded, MethodInputs(loaded.layout, loaded.fingerprint, moments)


def logits(loaded: LoadedModel, plan: Plan, ids: Tensor, *, one_pass: bool) -> Tensor:
    start = prefill_length(ids.shape[1])
    with compressed(loaded, plan, "off", prompt=start if one_pass else None) as session:
        if one_pass:
            return baseline_logits(loaded, ids)
        return torch.stack([*decoded_logits(loaded, ids, session.new_cache())], dim=1)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("centre", [False, True], ids=["whole", "centred"])
def test_logits_are_those_of_decoding(
    calibrated: tuple[LoadedModel, MethodInputs], name: str, centre: bool
) -> None:
    loaded, inputs = calibrated
    method, options, knob = PLANS[name]
    family = plan_family(method, inputs, **options, centre=centre)
    plan = family.build(family.settings[0] if knob is None else knob)
    if plan.quantiser is not None and plan.quantiser.block == 1 and len(plan.levels.shares) == 1:
        # Sinks and a window are read in another form than what lies between.
        plan = replace(
            plan,
            levels=replace(plan.levels, sink=3),
            quantiser=replace(plan.quantiser, window=5),
        )
    seeded(1)
    ids = torch.randint(3, VOCABULARY, (2, _TOKENS))
    for by_age in (False, True) if reads_by_age(plan) else (plan.by_age,):
        own = replace(plan, by_age=by_age)
        wanted = logits(loaded, own, ids, one_pass=False)
        found = logits(loaded, own, ids, one_pass=True)
        assert float((found - wanted).abs().max()) < 1e-9, by_age


@pytest.mark.parametrize("method", ["per-token", "hadamard-int3"])
def test_no_border_of_a_pass_changes_what_reads_by_age(
    calibrated: tuple[LoadedModel, MethodInputs], method: str
) -> None:
    loaded, inputs = calibrated
    family = plan_family(method, inputs)
    plan = family.build(family.settings[-1])
    assert plan.by_age
    seeded(2)
    ids = torch.randint(3, VOCABULARY, (2, 24))
    found = []
    for borders in ([24], [1, 2, 24], [7, 8, 19, 24]):
        with compressed(loaded, plan, "off") as session, torch.inference_mode():
            cache = session.new_cache()
            rows, start = [], 0
            for stop in borders:
                output = loaded.model(
                    input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True
                )
                rows.append(output.logits)
                start = stop
        found.append(torch.cat(rows, dim=1))
    for other in found[1:]:
        assert float((other - found[0]).abs().max()) < 1e-9
