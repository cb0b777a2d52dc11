"""The context leaves the model as it was, and wrong use is one clear line."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvprof.errors import UsageError
from kvprof.methods.plan import Placement
from kvprof.methods.quantisers import per_token
from kvprof.methods.storage import Eviction, Levels, Quantiser, SideQuantiser
from kvprof.runtime.compressed import compressed
from tests.models.tiny import ARCHITECTURES, CHUNKED, token_ids
from tests.runtime.plans import loaded, make_plan, ragged

FOLDING: dict[str, Any] = {"ranks": ragged, "fold_keys": True}


def snapshot(model: Any) -> tuple[Any, ...]:
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    modules = [(name, id(module)) for name, module in model.named_modules()]
    return weights, modules, model.config._attn_implementation, sorted(vars(model))


def assert_same(model: Any, before: tuple[Any, ...]) -> None:
    weights, *others = snapshot(model)
    assert weights.keys() == before[0].keys()
    assert all(torch.equal(weights[name], before[0][name]) for name in weights)
    assert others == list(before[1:])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_leaving_restores_the_model_bit_for_bit(arch: str) -> None:
    model = loaded(arch)
    before, ids = snapshot(model.model), token_ids(2, 9)
    wanted = model.model(ids).logits
    with compressed(model, make_plan(model, **FOLDING)):
        assert not torch.equal(model.model(ids).logits, wanted)
    assert_same(model.model, before)
    assert torch.equal(model.model(ids).logits, wanted)


def test_an_exception_inside_restores_it_too() -> None:
    model = loaded("Llama")
    before = snapshot(model.model)
    with pytest.raises(ZeroDivisionError), compressed(model, make_plan(model, **FOLDING)):
        raise ZeroDivisionError
    assert_same(model.model, before)


def test_a_model_that_was_not_loaded_by_kvprof_will_do() -> None:
    model = loaded("Llama")
    with compressed(model.model, make_plan(model)):
        assert model.model.generate(token_ids(1, 5), max_new_tokens=2).shape[1] <= 7


def test_a_cache_that_cannot_hold_a_plan_is_refused() -> None:
    model, few = loaded("Llama"), {"max_new_tokens": 2}
    with compressed(model, make_plan(model)):
        for use, settings in ((model.model, {}), (model.model.generate, few)):
            with pytest.raises(UsageError, match="DynamicCache"):
                use(token_ids(1, 5), past_key_values=DynamicCache(), **settings)
        with pytest.raises(UsageError, match="offloaded"):
            model.model.generate(token_ids(1, 5), cache_implementation="offloaded", **few)


def test_attention_without_the_cache_is_refused() -> None:
    """A block run by itself with another cache never reaches the decoder's check."""
    model = loaded("Llama")
    with compressed(model, make_plan(model)) as session:
        model.model(token_ids(1, 5), past_key_values=session.new_cache())
        block = model.model.model.layers[0]
        hidden = torch.randn(1, 5, 48)
        angles = model.model.model.rotary_emb(hidden, torch.arange(5)[None])
        with pytest.raises(UsageError, match="attends without its compressed cache"):
            block(hidden, position_embeddings=angles, past_key_values=DynamicCache())


def test_a_compressed_cache_works_in_its_own_context_only() -> None:
    model = loaded("Llama")
    with compressed(model, make_plan(model)) as session:
        cache = session.new_cache()
    with pytest.raises(UsageError, match="inside its own"):
        model.model(token_ids(1, 5), past_key_values=cache)
    with compressed(model, make_plan(model)), pytest.raises(UsageError):
        model.model(token_ids(1, 5), past_key_values=cache)


def test_contexts_do_not_nest() -> None:
    model = loaded("Llama")
    with (
        compressed(model, make_plan(model)),
        pytest.raises(UsageError, match="already compressed"),
        compressed(model, make_plan(model)),
    ):
        pass


def test_training_mode_is_refused() -> None:
    model = loaded("GPT2")
    with compressed(model, make_plan(model)):
        model.model.train()
        try:
            with pytest.raises(UsageError, match="training mode"):
                model.model(token_ids(1, 5))
        finally:
            model.model.eval()


def test_a_static_cache_that_is_too_small_says_so() -> None:
    model = loaded("Llama")
    with compressed(model, make_plan(model)) as session:
        cache = session.new_cache(capacity=6)
        model.model(token_ids(1, 6), past_key_values=cache)
        with pytest.raises(UsageError, match="room for 6 tokens"):
            model.model(token_ids(1, 1), past_key_values=cache)


def test_a_latent_that_has_no_room_in_a_query_head_is_refused() -> None:
    model = loaded("GPT2")
    plan = make_plan(model, heads=2, fold_keys=True)
    with pytest.raises(UsageError), compressed(model, plan):
        pass


def test_lazy_prefill_refuses_folded_queries() -> None:
    model = loaded("GPT2")
    plan = make_plan(model, fold_values=(False, False))
    keys = [replace(layer.keys, fold_up=True) for layer in plan.layers]
    layers = tuple(replace(x, keys=k) for x, k in zip(plan.layers, keys, strict=True))
    with (
        pytest.raises(UsageError),
        compressed(model, replace(plan, layers=layers, lazy=True)),
    ):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"quantiser": Quantiser("fp8", SideQuantiser((8,)), SideQuantiser((8,)))},
        {"quantiser": per_token((4,), group=None), "ranks": ragged},
        {"eviction": Eviction("h2o", 0.6, recent_share=0.5), "placement": Placement.PRE_ROPE},
        {
            "levels": Levels(2, (0.7, 0.3), 2),
            "ranks": lambda *a: (a[3] // 2, a[3]),
            "placement": Placement.NONE,
            "quantiser": per_token((2, 4), group=None),
        },
    ],
    ids=["fp8", "int4", "h2o", "levels"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_beams_and_padding_run(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Lossy plans through everything at once: what comes out is finite and reproducible."""
    from kvprof.models.load import wrap_model
    from tests.models.tiny import tiny

    model = wrap_model(tiny("Gemma2").to(dtype))
    ids, mask = token_ids(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    with compressed(model, make_plan(model, **options)):
        runs = [
            model.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=6,
                num_beams=2,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
            for _ in range(2)
        ]
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert runs[0].sequences_scores.isfinite().all()


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *CHUNKED])
def test_texts_packed_into_a_row_do_not_see_each_other(arch: str) -> None:
    model = loaded(arch)
    ids = token_ids(2, 17)
    positions = torch.tensor([[*range(9), *range(8)], [*range(3), *range(12), *range(2)]])
    packed = {"position_ids": positions, "use_cache": False}
    wanted, plain = model.model(ids, **packed).logits, model.model(ids).logits
    with compressed(model, make_plan(model)):
        found = model.model(ids, **packed).logits
        # a mask of the caller's, or a cache to be returned, and transformers does not part them
        masked = model.model(ids, **packed, attention_mask=torch.ones_like(ids)).logits
        cached = model.model(ids, position_ids=positions).logits
        again = model.model(ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(again, plain, rtol=1e-3, atol=1e-3)
    for other, same in ((masked, {**packed, "attention_mask": torch.ones_like(ids)}),
                        (cached, {"position_ids": positions})):  # fmt: skip
        torch.testing.assert_close(other, model.model(ids, **same).logits, rtol=1e-3, atol=1e-3)


def test_packed_texts_leave_the_kernels() -> None:
    model = loaded("Llama")
    packed = {"position_ids": torch.arange(16)[None] % 8, "use_cache": False}
    with compressed(model, make_plan(model), "on"), pytest.raises(UsageError):
        model.model(token_ids(1, 16), **packed)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q"])
def test_texts_packed_for_flash_attention_are_refused(name: str) -> None:
    model = loaded("Llama")
    ids = token_ids(1, 8)
    with compressed(model, make_plan(model)), pytest.raises(UsageError) as refused:
        model.model(ids, use_cache=False, **{name: torch.tensor([0, 4, 8])})
    assert name in str(refused.value)
