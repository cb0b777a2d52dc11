"""Keys with a channel of hundreds: the mean of rotated keys leaves, and 16 bits suffice."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from kvprof.methods.family import plan_at
from kvprof.methods.plan import Plan
from kvprof.methods.registry import plan_family
from kvprof.runtime.compressed import compressed
from kvprof.runtime.layer import LayerRuntime
from kvprof.runtime.retention import OwnTokens
from kvprof.runtime.rows import RowGroup
from tests.methods.models import FINE, inputs, model
from tests.models.tiny import VOCABULARY, seeded
from tests.runtime.plans import loaded, make_plan, one_pass_logits

_TOKENS = 48


def with_means(plan: Plan, mean: Tensor | None) -> Plan:
    return replace(plan, layers=tuple(replace(layer, key_mean=mean) for layer in plan.layers))


@pytest.mark.parametrize("name", ["kq", "fdc", "zack", "kq+h2o", "kq-4bit", "palu", "tale"])
def test_it_is_taken_where_it_leaves_the_softmax_and_changes_nothing(name: str) -> None:
    own = model("Qwen2")
    family = plan_family(name, inputs("Qwen2"), **FINE)
    found = plan_at(family, 0.3) if family.at_rate is None else family.at_rate(0.3, 64)
    taken = [layer.key_mean is not None for layer in found.layers]
    assert taken == [name in ("kq", "fdc", "zack", "kq+h2o")] * 2
    if family.at_ranks is not None:  # what sensitivities are measured of
        probed = family.at_ranks([8] * len(family.targets))
        assert [layer.key_mean is not None for layer in probed.layers] == taken
    seeded(1)
    ids = torch.randint(3, VOCABULARY, (2, _TOKENS))
    outputs = []
    for plan in (found, with_means(found, None)):
        with compressed(own, plan, "off"):
            outputs.append(one_pass_logits(own, ids))
    assert torch.allclose(*outputs, atol=1e-4)


def test_softcaps_and_learned_sinks_keep_it() -> None:
    for arch in ("Gemma2", "GptOss"):
        found = plan_at(plan_family("kq", inputs(arch), **FINE), 0.3)
        assert not any(layer.key_mean is not None for layer in found.layers)


def test_16_bits_suffice_for_a_channel_of_400_among_ones() -> None:
    own = loaded("Llama")
    facts = own.layout.layers[0]
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    query, key, value = (
        draw(1, heads, _TOKENS, facts.qk_head_dim)
        for heads in (facts.num_heads, facts.num_kv_heads, facts.num_kv_heads)
    )
    key[..., 3] = 400  # which 16 bits hold
    query, key, value = (x.bfloat16() for x in (query, key, value))
    mean = key.float().mean((0, 2))

    def attended(mean: Tensor | None, dtype: torch.dtype) -> Tensor:
        runtime = LayerRuntime(with_means(make_plan(own), mean), 0, facts, {})
        states = query.to(dtype), runtime.without_mean(key.to(dtype)), value.to(dtype)
        visible = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril()[None, None]
        tokens = OwnTokens(*states, None, visible, 0, True, {}, None, None, 128)
        return runtime.run(RowGroup([0]), tokens).double()

    exact = attended(None, torch.float64)
    errors = [
        float((attended(own, torch.bfloat16) - exact).abs().max() / exact.abs().max())
        for own in (mean, None)
    ]
    assert errors[0] < 0.02 < 0.1 < errors[1]
