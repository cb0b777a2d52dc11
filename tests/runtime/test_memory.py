"""A compressed cache stores the bytes that its plan accounts for."""

import gc
import weakref
from typing import Any

import pytest
import torch

from kvprof.methods.accounting import bytes_at
from kvprof.methods.plan import Placement, Plan
from kvprof.methods.quantisers import QUANTISERS, kivi, kvquant, per_token
from kvprof.methods.storage import Eviction, Levels, Quantiser, SideQuantiser
from kvprof.models.load import LoadedModel
from kvprof.runtime.compressed import compressed
from tests.models.tiny import token_ids
from tests.runtime.plans import loaded, make_plan, ragged

_TWO = Levels(sink=4, shares=(0.8, 0.2), batch=4)
_INT4 = SideQuantiser((4,))
_FP8 = SideQuantiser((8,))
PLANS: dict[str, dict[str, Any]] = {
    "ragged": {"ranks": ragged},
    "grouped_latents": {"ranks": ragged, "heads": 2, "placement": Placement.PRE_ROPE},
    "folded": {"ranks": ragged, "placement": Placement.PRE_ROPE, "fold_keys": True},
    "fp8": {"quantiser": Quantiser("fp8", _FP8, _FP8)},
    "per_token_4": {"ranks": ragged, "quantiser": per_token((4,), group=None)},
    "per_token_3_groups": {"ranks": ragged, "quantiser": per_token((3,), group=4)},
    "kivi_2": {"quantiser": kivi((2,), group=4, window=6, block=8)},
    "kvquant_3": {"quantiser": kvquant((3,), outliers=0.1, block=4), "levels": Levels(sink=1)},
    "values_only": {"quantiser": Quantiser("affine", None, SideQuantiser((8,)))},
    "tale": {"placement": Placement.NONE, "heads": 2, "levels": _TWO, "lazy": True,
             "ranks": lambda *a: (a[3] // 2, a[3]), "fold_values": (False, True)},
    "tale_quantised": {"placement": Placement.NONE, "heads": 2, "levels": _TWO, "lazy": True,
                       "ranks": lambda *a: (a[3] // 2, a[3]), "fold_values": (False, True),
                       "quantiser": per_token((2, 4), group=4)},
    "recent": {"eviction": Eviction("recent", 0.5)},
    "h2o": {"ranks": ragged, "eviction": Eviction("h2o", 0.5, recent_share=0.5)},
    "keyformer_quantised": {"eviction": Eviction("keyformer", 0.4, recent_share=0.3),
                            "quantiser": per_token((4,), group=None)},
    "h2o_quantised_behind_a_window": {"eviction": Eviction("h2o", 0.6, recent_share=0.5),
                                      "levels": Levels(sink=2),
                                      "quantiser": Quantiser("affine", _INT4, _INT4, 3, 2)},
    "h2o_under_rebuilt_keys": {"ranks": ragged, "heads": 2, "placement": Placement.PRE_ROPE,
                               "eviction": Eviction("h2o", 0.5, recent_share=0.5)},
}  # fmt: skip


def run(model: LoadedModel, plan: Plan, *, prompt: int, new: int, **options: Any) -> Any:
    with compressed(model, plan) as session:
        model.model.generate(
            token_ids(3, prompt),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
    return session.cache


@pytest.mark.parametrize("arch", ["Llama", "Gemma3"])
@pytest.mark.parametrize("name", PLANS)
def test_stored_bytes_are_the_accounts(arch: str, name: str) -> None:
    model = loaded(arch)
    plan = make_plan(model, **PLANS[name])
    for prompt, new in ((5, 2), (50, 5)):  # the last step fills another block of 8
        cache = run(model, plan, prompt=prompt, new=new)
        account = bytes_at(plan, prompt + new - 1, itemsize=4, batch=3).total
        assert cache.nbytes == account
        assert cache.allocated_bytes == pytest.approx(account, rel=0.01)


def test_padding_is_not_stored() -> None:
    model = loaded("Llama")
    plan = make_plan(model, **PLANS["tale_quantised"])
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[1, :10] = 0
    mask[2, :25] = 0
    cache = run(model, plan, prompt=40, new=6, attention_mask=mask)
    account = sum(bytes_at(plan, n, itemsize=4).total for n in (45, 35, 20))
    assert cache.nbytes == account


def test_padding_that_fills_a_whole_pass_is_not_stored() -> None:
    model = loaded("Llama")
    plan = make_plan(model, **PLANS["tale_quantised"])
    ids, mask = token_ids(3, 40), torch.ones(3, 40, dtype=torch.long)
    mask[1, :10] = 0
    mask[2, :25] = 0
    with compressed(model, plan) as session, torch.inference_mode():
        cache = session.new_cache()
        for start in range(0, 40, 8):
            part = slice(start, start + 8)
            model.model(ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=cache)
    assert cache.nbytes == sum(bytes_at(plan, n, itemsize=4).total for n in (40, 30, 15))


def test_a_static_cache_reports_its_capacity() -> None:
    model = loaded("Llama")
    plan = make_plan(model, **PLANS["tale_quantised"])
    with compressed(model, plan) as session, torch.inference_mode():
        cache, allocated = session.new_cache(capacity=24), set()
        model.model(token_ids(2, 9), past_key_values=cache)
        for step in range(9, 24):
            model.model(token_ids(2, 1, seed=step), past_key_values=cache)
            assert cache.nbytes == bytes_at(plan, step + 1, itemsize=4, batch=2).total
            allocated.add(cache.allocated_bytes)
            assert cache.allocated_bytes > cache.nbytes or step == 23
    # levels grow by batches, so the parts' largest sizes may add up to a little more
    largest = bytes_at(plan, 24, itemsize=4, batch=2).total
    assert largest <= max(allocated) < 1.3 * largest


def test_every_named_quantiser_stores_what_it_accounts_for() -> None:
    model = loaded("Llama")
    for make, bits, _ in (QUANTISERS[n] for n in ("per-token", "kivi", "kvquant")):
        for width in bits:
            plan = make_plan(model, quantiser=make((width,)))
            with compressed(model, plan) as session, torch.inference_mode():
                model.model(token_ids(1, 100), use_cache=False)
                account = bytes_at(plan, 100, itemsize=4).total
                assert session.cache is not None
                assert session.cache.nbytes == account


def test_a_static_cache_takes_its_room_at_once() -> None:
    model = loaded("Llama")
    plan = make_plan(model, ranks=ragged)
    with compressed(model, plan) as session, torch.inference_mode():
        cache = session.new_cache(capacity=24)
        for step in range(24):
            model.model(token_ids(2, 1, seed=step), past_key_values=cache)
            assert cache.nbytes == bytes_at(plan, step + 1, itemsize=4, batch=2).total
            assert cache.allocated_bytes == bytes_at(plan, 24, itemsize=4, batch=2).total
        assert cache.get_max_length() == 24


@pytest.mark.parametrize("kernels", [None, "on"])
def test_a_cache_goes_with_the_next_requests_first_pass(kernels: str | None) -> None:
    """Its tensors must not wait for Python to look for cycles: on a GPU there is room for one."""
    model = loaded("Llama")
    plan = make_plan(model, ranks=lambda *_: (16,))
    with compressed(model, plan, kernels) as session, torch.no_grad():
        gc.collect()
        gc.disable()
        try:
            first = session.new_cache()
            model.model(token_ids(2, 20), past_key_values=first)
            model.model(token_ids(2, 1), past_key_values=first)
            left = weakref.ref(first)
            del first
            model.model(token_ids(2, 20), past_key_values=session.new_cache())
            assert left() is None
        finally:
            gc.enable()
