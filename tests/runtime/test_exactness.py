"""At full rank every method says what the model says, on every architecture that it accepts.

`tests.runtime.test_generation` asks the runtime that of plans with random bases; here the plans are
the methods' own, calibrated.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kvprof.methods.accounting import dim_rate
from kvprof.methods.family import MethodInputs, plan_at
from kvprof.methods.named import ENGINE_FORMATS, PAPERS
from kvprof.methods.plan import Plan
from kvprof.methods.registry import METHODS, plan_family
from kvprof.models.load import LoadedModel, load_model
from kvprof.moments.collect import CollectOptions, collect_moments
from kvprof.runtime.compressed import compressed
from kvprof.sources.grammar import parse_source
from tests.conftest import few_layers
from tests.methods.models import FINE, inputs, model
from tests.models.tiny import ARCHITECTURES, seeded
from tests.runtime.test_generation import padded

#: Every method but those that quantise or evict, and their options that change what is computed.
METHODS_AT_FULL_RANK: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "fdc": ("fdc", FINE),
    "fdc_raw": ("fdc", {**FINE, "keys": "svd-qk-stacked", "values": "svd-vo-raw"}),
    "zack": ("zack", FINE),
    "kq": ("kq", FINE),
    "svd_kv": ("svd-kv", FINE),
    "svd_k": ("svd-k", FINE),
    "svd_v": ("svd-v", FINE),
    "palu": ("palu", {**FINE, "heads": 2}),
    "palu_alone": ("palu", {**FINE, "heads": 1}),
    "palu_hadamard": ("palu", {**FINE, "heads": 2, "hadamard": True}),
    "tale": ("tale", {**FINE, "heads": 2}),
    "tale_eager": ("tale", {**FINE, "heads": 2, "lazy": False, "sink": 0}),
    "strawman": ("strawman", FINE),
    "kq_centred": ("kq", {**FINE, "centre": True}),
    "palu_centred": ("palu", {**FINE, "heads": 2, "centre": 1}),
    "tale_centred": ("tale", {**FINE, "heads": 2, "centre": True}),
}
#: Those that store, fold or rebuild unlike others; the rest differ in the bases alone.
_UNLIKE = (
    "full",
    "fdc",
    "svd_k",
    "svd_v",
    "palu",
    "palu_hadamard",
    "tale",
    "tale_eager",
    "strawman",
    "kq_centred",
    "palu_centred",
)
_LOSSY = (
    "kq-wf",
    "fp8",
    "per-token",
    "kivi",
    "kvquant",
    "hqq",
    "quanto",
    "tale+kivi",
    # In test_rotated_formulas, without their quantisers.
    "hadamard-int4",
    "hadamard-int3",
    "hadamard-int2",
    "turboquant",
    "oscar",
    "kvtc",  # in test_kvtc
    "xkv",  # in test_xkv
    "sink-recent",
    "h2o",
    "keyformer",
    "snapkv",
    *ENGINE_FORMATS,  # in test_engine_codecs
)
_TOKENS = 3  # of the prompt, of a step, and of one behind it


@cache
def full_rank(name: str, arch: str) -> Plan:
    method, options = METHODS_AT_FULL_RANK[name]
    plan = plan_at(plan_family(method, inputs(arch), **options), 0.0)
    assert dim_rate(plan) == 0
    return plan


def generated(loaded: LoadedModel, plan: Plan | None, **options: Any) -> Any:
    ids, mask = padded()
    settings = {
        "attention_mask": mask,
        "max_new_tokens": _TOKENS,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "output_logits": True,
        "return_dict_in_generate": True,
        **options,
    }
    seeded(3)
    if plan is None:
        return loaded.model.generate(ids, **settings)
    with compressed(loaded, plan):
        return loaded.model.generate(ids, **settings)


def say_what_the_model_says(loaded: LoadedModel, plans: dict[str, Plan]) -> None:
    """Compare logits of the prompt's last token and of every step, and the tokens."""
    wanted = generated(loaded, None)
    logits = torch.stack(wanted.logits)
    for name, plan in plans.items():
        found = generated(loaded, plan)
        assert torch.equal(found.sequences, wanted.sequences), name
        error = (torch.stack(found.logits) - logits).norm() / logits.norm()
        assert error < 1e-4, (name, float(error))


def test_no_method_is_left_out() -> None:
    assert {method for method, _ in METHODS_AT_FULL_RANK.values()} | set(_LOSSY) | set(
        PAPERS
    ) == set(METHODS)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_and_logits_are_the_models_own(arch: str) -> None:
    """Batch of 3 with left padding."""
    # Whose every layer has a sliding window, which TALE leaves alone.
    names = [one for one in METHODS_AT_FULL_RANK if arch != "Mistral" or not one.startswith("tale")]
    say_what_the_model_says(model(arch), {name: full_rank(name, arch) for name in names})


@pytest.mark.parametrize("arch", ["Llama", "GPT2", "Gemma3"])
@pytest.mark.parametrize(
    "options",
    [{"do_sample": True, "temperature": 0.8}, {"num_beams": 3}, {"cache_implementation": "static"}],
    ids=["sampled", "beams", "static"],
)
def test_sampled_tokens_beams_and_static_caches_too(arch: str, options: dict[str, Any]) -> None:
    own = {key: value for key, value in options.items() if key != "cache_implementation"}
    wanted = generated(model(arch), None, **own).sequences
    for name in _UNLIKE:
        found = generated(model(arch), full_rank(name, arch), **options).sequences
        assert torch.equal(found, wanted), name


def test_on_the_reference_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same with a layer of the model that ships with kvprof, calibrated on 512 tokens."""
    few_layers(monkeypatch, tmp_path, 1)
    loaded = load_model("reference", device="cpu", dtype="float32")
    settings = CollectOptions(
        512, 128, pre_rope=True, joint_heads=loaded.layout.layers[0].num_kv_heads
    )
    *_, moments = collect_moments(loaded, parse_source("random:512"), settings)
    given = MethodInputs(loaded.layout, loaded.fingerprint, moments)
    plans = {
        name: plan_at(plan_family(method, given, **chosen), 0.0)
        for name, (method, chosen) in METHODS_AT_FULL_RANK.items()
    }
    say_what_the_model_says(loaded, plans)
