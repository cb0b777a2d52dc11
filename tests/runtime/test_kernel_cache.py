"""Caches on the kernels: rows picked and repeated, tokens taken back, models compiled."""

from typing import Any

import pytest
import torch

from kvprof.errors import UsageError
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.runtime.compressed import compressed
from tests.models.tiny import token_ids
from tests.runtime.plans import loaded, make_plan
from tests.runtime.test_kernel_generation import half, model_of


def rows_move(model: LoadedModel, plan: Plan, kernels: str, mask: torch.Tensor) -> None:
    """Reorder, pick and repeat the rows of a batch of 3, go on decoding, and empty the cache."""
    tokens, every = mask.shape[1], [0, 1, 2]

    def prefilled(session: Any, order: list[int], capacity: int | None) -> Any:
        made = session.new_cache(capacity)
        ids = token_ids(3, tokens)[order]
        model.model(ids, attention_mask=mask[order], past_key_values=made)
        return made

    def decoded(cache: Any, order: list[int]) -> torch.Tensor:
        longer, found = mask, []
        for step in range(3):
            longer = torch.cat([longer, torch.ones(3, 1, dtype=torch.long)], dim=1)
            ids = token_ids(3, 1, seed=step)[order]
            output = model.model(ids, attention_mask=longer[order], past_key_values=cache)
            found.append(output.logits)
        return torch.cat(found, dim=1)

    with compressed(model, plan, kernels) as session, torch.inference_mode():
        for capacity in (None, tokens + 10):
            wanted = decoded(prefilled(session, every, capacity), every)
            moved = prefilled(session, [2, 0, 1], capacity)
            moved.reorder_cache(torch.tensor([1, 2, 0]))
            assert torch.allclose(decoded(moved, every), wanted, atol=1e-5)
            some = prefilled(session, every, capacity)
            some.batch_select_indices(torch.tensor([2, 1]))
            some.batch_repeat_interleave(2)
            found = decoded(some, [2, 2, 1, 1])
            assert torch.allclose(found, wanted[[2, 2, 1, 1]], atol=1e-5)
            some.reset()
            assert (some.get_seq_length(), some.nbytes) == (0, 0)
            again = model.model(token_ids(2, 7), past_key_values=some).logits
            fresh = model.model(token_ids(2, 7), past_key_values=session.new_cache()).logits
            assert torch.allclose(again, fresh, atol=1e-5)


def holes_go_on(model: LoadedModel, plan: Plan) -> None:
    """Decode with tokens left out in the middle, which no kernel runs, from what kernels stored."""
    ids, mask = token_ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, :3] = 0
    holes = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    holes[0, 7:9] = 0
    logits = []
    for kernels in ("auto", "off"):
        with compressed(model, plan, kernels) as session, torch.inference_mode():
            session.route.least_tokens = 0
            cache = session.new_cache()
            model.model(ids, attention_mask=mask, past_key_values=cache)
            assert (cache.kernels is not None) == (kernels == "auto")
            output = model.model(token_ids(2, 1), attention_mask=holes, past_key_values=cache)
            assert cache.kernels is None
            logits.append(output.logits)
    assert torch.allclose(*logits, atol=1e-5)


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_rows_take_everything_with_them(kernels: str) -> None:
    model = model_of("Gemma2")
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, :6] = 0
    rows_move(model, make_plan(model, ranks=half), kernels, mask)


def test_rolling_back_is_whole_or_refused() -> None:
    model = model_of("Gemma2")  # windows of 6
    ids = token_ids(2, 12)
    with compressed(model, make_plan(model, ranks=half), "on") as session, torch.inference_mode():
        cache = session.new_cache()
        wanted = model.model(ids[:, :5], past_key_values=session.new_cache()).logits
        model.model(ids[:, :6], past_key_values=cache)
        cache.crop(-4)
        assert cache.get_seq_length() == 2
        found = model.model(ids[:, 2:5], past_key_values=cache).logits
        assert torch.allclose(found, wanted[:, 2:], atol=1e-5)
        with pytest.raises(UsageError):
            cache.crop(-9)
        model.model(ids[:, 5:], past_key_values=cache)
        before = cache.nbytes
        with pytest.raises(UsageError, match="cannot be rolled back"):
            cache.crop(-1)
        assert (cache.get_seq_length(), cache.nbytes) == (12, before)


def test_only_what_the_kernels_keep_can_be_replayed() -> None:
    model = model_of("Llama")
    for kernels in ("on", "off"):
        with compressed(model, make_plan(model), kernels) as session, torch.inference_mode():
            cache = session.new_cache(capacity=8)
            model.model(token_ids(1, 6), past_key_values=cache)
            if kernels == "off":
                with pytest.raises(UsageError):
                    cache.replayed()
                continue
            cache.replayed(2)
            assert cache.get_seq_length() == 8
            with pytest.raises(UsageError, match="room for 8 tokens, not for 9"):
                cache.replayed()


@pytest.mark.slow
def test_one_compiled_model_goes_through_every_plan() -> None:
    """Compiled once, uncompressed, then run with plans of other widths, on the kernels and off.

    With Dynamo alone, which is fast and decides what is compiled anew.
    """
    model = loaded("Gemma2", head_dim=32, num_hidden_layers=2)
    ids = token_ids(2, 12)
    compiled = torch.compile(model.model, backend="eager")

    def run(forward: Any, cache: Any, prompt: Any) -> torch.Tensor:
        found = []
        with torch.no_grad():
            for start, stop in ((0, 9), (9, 10), (10, 11), (11, 12)):
                output = (forward if start else prompt)(ids[:, start:stop], past_key_values=cache)
                found.append(output.logits)
        return torch.cat(found, 1)

    with torch.no_grad():
        assert torch.allclose(compiled(ids).logits, model.model(ids).logits, atol=1e-5)
    narrow = make_plan(model, ranks=half)
    folded = make_plan(model, ranks=half, fold_values=(True, False))
    for plan, kernels in ((narrow, "on"), (narrow, "off"), (folded, "on")):
        with compressed(model, plan, kernels) as session:
            wanted = run(model.model, session.new_cache(32), model.model)
            cache = session.new_cache(32)
            # A prompt is compiled for each set of widths; off the kernels steps are enough.
            prompt = model.model if kernels == "off" else compiled
            assert torch.allclose(run(compiled, cache, prompt), wanted, atol=1e-5)
            assert cache.get_seq_length() == 12


def test_a_compiled_model_breaks_at_no_layer() -> None:
    model = model_of("Llama")
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with compressed(model, make_plan(model, ranks=half), "on"), torch.no_grad():
        torch.compile(model.model, backend="eager")(token_ids(2, 9))
    assert sum(counters["graph_break"].values()) <= 2  # where a pass begins
    assert counters["stats"]["unique_graphs"] <= 2
