"""ZACK §3.2's strawman: an exact prefill, bases of the prompt's own, everything rebuilt later."""

from dataclasses import replace

import torch
from torch import Tensor

from kvprof.methods.accounting import bytes_at
from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, Plan, ValuePlan
from kvprof.models.load import LoadedModel
from kvprof.runtime.compressed import compressed
from tests.models.tiny import token_ids
from tests.runtime.test_formula import (
    LENGTH,
    PREFILL,
    attention_outputs,
    heads_out,
    one_layer,
    relative,
    taps,
)

RANK = 5


def strawman(model: LoadedModel) -> Plan:
    layers = []
    for facts in model.layout.layers:
        groups = tuple(
            HeadGroup(head, 1, facts.qk_head_dim, (RANK,)) for head in range(facts.num_kv_heads)
        )
        layers.append(
            LayerPlan(KeyPlan(Placement.POST_ROPE, groups), ValuePlan(groups), facts.sliding_window)
        )
    return Plan("strawman", model.fingerprint, tuple(layers), online_bases=True)


def projected(states: Tensor) -> Tensor:
    """Project on the leading right singular vectors of the prompt, per sequence and head."""
    basis = torch.linalg.svd(states[:, :, :PREFILL], full_matrices=False)[2][..., :RANK, :].mT
    return states @ basis @ basis.mT


def test_decoding_sees_the_prompts_own_subspace() -> None:
    model, ids = one_layer("Llama"), token_ids(2, LENGTH)
    tap = taps(model, ids, pre_rope=False)
    exact = heads_out(model, tap.q, tap.k, tap.v)
    lossy = heads_out(model, tap.q, projected(tap.k), projected(tap.v))
    found = attention_outputs(model, strawman(model), ids, prefill=PREFILL)
    assert relative(found[:, :PREFILL], exact[:, :PREFILL]) < 1e-9
    assert relative(found[:, PREFILL:], lossy[:, PREFILL:]) < 1e-9
    assert relative(exact[:, PREFILL:], lossy[:, PREFILL:]) > 1e-2


def test_its_bases_count_as_cache() -> None:
    model = one_layer("Llama")
    plan = strawman(model)
    with compressed(model, plan) as session, torch.inference_mode():
        model.model(token_ids(3, 9), use_cache=False)
    assert session.cache is not None
    assert session.cache.nbytes == bytes_at(plan, 9, itemsize=8, batch=3).total


def test_rows_keep_their_own_bases_when_reordered() -> None:
    model = one_layer("Llama")
    ids = token_ids(2, 9)
    with compressed(model, replace(strawman(model))) as session, torch.inference_mode():
        cache, swapped = session.new_cache(), session.new_cache()
        model.model(ids, past_key_values=cache)
        wanted = model.model(token_ids(2, 1, seed=4), past_key_values=cache).logits
        model.model(ids.flip(0), past_key_values=swapped)
        swapped.reorder_cache(torch.tensor([1, 0]))
        found = model.model(token_ids(2, 1, seed=4), past_key_values=swapped).logits
    assert torch.allclose(found, wanted, atol=1e-10)
