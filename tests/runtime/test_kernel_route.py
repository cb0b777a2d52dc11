"""What runs on the kernels and what does not, and why: never silently otherwise."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvprof.errors import FailedError, UsageError
from kvprof.methods.plan import Placement
from kvprof.methods.quantisers import kivi, kvquant
from kvprof.methods.storage import Eviction, Levels
from kvprof.runtime.backends.support import LayerSpec, kernel_reasons, why_not
from kvprof.runtime.compressed import compressed
from tests.models.tiny import token_ids
from tests.runtime.plans import loaded, make_plan
from tests.runtime.test_kernel_generation import half, model_of

CPU = torch.device("cpu")
TWO = Levels(sink=2, shares=(0.8, 0.2), batch=4)
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "before RoPE": ({"placement": Placement.PRE_ROPE, "eviction": Eviction("recent", 0.5)},
                    "evicted"),
    "online bases": ({"online_bases": True, "placement": Placement.NONE,
                      "project_values": False}, "online"),
    "lazy": ({"lazy": True, "placement": Placement.NONE, "fold_values": (False, True)}, "lazy"),
    "quantised": ({"quantiser": kivi((4,), window=0)}, "blocks of 32"),
    "a codebook": ({"quantiser": kvquant((4,), block=1)}, "quantised by codebook"),
    "evicted": ({"eviction": Eviction("recent", 0.5)}, "evicted"),
    "levels": ({"levels": TWO, "placement": Placement.NONE, "fold_values": (False, True),
                "ranks": lambda *a: (a[3] // 2, a[3])}, "batches of 4"),
    "grouped": ({"heads": 2, "placement": Placement.NONE}, "shared by 1 and 2 KV heads"),
    "odd width": ({"key_ranks": lambda *a: (24,)}, "keeps 24 columns of its keys"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_kernels_do_not_know_is_named(name: str) -> None:
    options, reason = UNSUPPORTED[name]
    model = model_of("Llama")
    plan = make_plan(model, **options)
    found = kernel_reasons(plan, model.layout, CPU, torch.float32)
    assert all(text is not None and reason in text for text in found)
    with (
        pytest.raises(UsageError, match=f"layer 0 cannot run on the kernels: .*{reason}"),
        compressed(model, plan, "on"),
    ):
        pass
    with compressed(model, plan, "auto") as session, torch.inference_mode():
        assert None not in session.kernel_reasons
        model.model(token_ids(1, 5))


def test_machines_and_dtypes_without_kernels_are_named() -> None:
    model = model_of("Llama")
    plan = make_plan(model)
    layer, facts = plan.layers[0], model.layout.layers[0]
    for device, dtype, reason in (
        (torch.device("mps"), torch.float16, "mps"),
        (CPU, torch.float64, "not in float64"),
    ):
        assert reason in str(why_not(LayerSpec(plan, layer, facts, device, dtype)))
    assert why_not(LayerSpec(plan, layer, facts, CPU, torch.bfloat16)) is None
    alibi = replace(facts, position="alibi")
    assert "ALiBi" in str(why_not(LayerSpec(plan, layer, alibi, CPU, torch.float32)))


def test_levels_and_eviction_stop_at_a_sliding_window() -> None:
    model = model_of("Gemma2")
    for options in UNSUPPORTED["levels"][0], UNSUPPORTED["evicted"][0]:
        found = kernel_reasons(make_plan(model, **options), model.layout, CPU, torch.float32)
        windows = [layer.sliding_window is not None for layer in model.layout.layers]
        assert [reason is None for reason in found] == windows
        assert True in windows
        assert False in windows


def test_layers_on_the_kernels_run_beside_layers_that_are_not() -> None:
    model = model_of("Gemma2")
    plan = make_plan(model, eviction=Eviction("recent", 0.5), ranks=half)
    outputs = []
    for mixed in (False, True):
        with compressed(model, plan, "auto" if mixed else "off") as session, torch.inference_mode():
            session.route.least_tokens = 0
            cache = session.new_cache()
            found = [model.model(token_ids(2, 9), past_key_values=cache).logits]
            for step in range(4):
                found.append(model.model(token_ids(2, 1, seed=step), past_key_values=cache).logits)
            assert any(layer.planes is not None for layer in cache.layers) == mixed
            assert any(layer.row_groups for layer in cache.layers)
            outputs.append((torch.cat(found, 1), cache.nbytes))
    (wanted, nbytes), (found_, stored) = outputs
    assert (found_ - wanted).norm() / wanted.norm() < 1e-5
    assert stored == nbytes


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("Llama")
    plan = make_plan(model)

    def reasons(kernels: str | None = None) -> list[str | None]:
        with compressed(model, plan, kernels) as session:
            return session.kernel_reasons

    assert reasons("on") == [None] * 2
    assert reasons("off") == ["the kernels are switched off"] * 2
    assert reasons("auto") == [None] * 2
    monkeypatch.setenv("KVPROF_KERNELS", "on")
    assert reasons() == [None] * 2
    assert reasons("off")[0] is not None
    monkeypatch.setenv("KVPROF_KERNELS", "yes")
    with pytest.raises(UsageError, match="KVPROF_KERNELS is 'yes'"):
        reasons()
    with pytest.raises(UsageError, match="kernels is 'maybe'"):
        reasons("maybe")


def test_on_a_cpu_short_prompts_and_16_bits_stay_on_torch() -> None:
    from kvprof.models.load import wrap_model
    from tests.models.tiny import tiny

    model = model_of("Llama")
    plan = make_plan(model)
    with compressed(model, plan, "auto") as session, torch.inference_mode():
        session.route.least_tokens = 6
        for tokens, on_kernels in ((5, False), (6, True)):
            cache = session.new_cache()
            model.model(token_ids(1, tokens), past_key_values=cache)
            # The first pass decides.
            model.model(token_ids(1, 1), past_key_values=cache)
            assert all((layer.planes is not None) == on_kernels for layer in cache.layers)
            assert all((reason is None) == on_kernels for reason in session.kernel_reasons)
    narrow = wrap_model(tiny("Llama", head_dim=32).to(torch.bfloat16))
    with compressed(narrow, make_plan(narrow), "auto") as session:
        assert all("16-bit" in str(reason) for reason in session.kernel_reasons)


@pytest.mark.parametrize("arch", ["Llama", "Gemma2"])
@pytest.mark.parametrize("late", [False, True], ids=["first_pass", "later"])
def test_a_mask_with_holes_leaves_the_kernels(arch: str, late: bool) -> None:
    model = model_of(arch)
    plan = make_plan(model, ranks=half)
    ids, mask = token_ids(3, 24), torch.ones(3, 24, dtype=torch.long)
    mask[1, :4] = 0
    torn = mask.clone()
    torn[0, 8:11] = 0

    def run(kernels: str) -> tuple[Any, Any]:
        with compressed(model, plan, kernels) as session, torch.inference_mode():
            session.route.least_tokens = 0
            cache, found = session.new_cache(), []
            for start, stop in ((0, 14), (14, 15), (15, 17), *((t, t + 1) for t in range(17, 24))):
                shown = (torn if start >= 15 or not late else mask)[:, :stop]
                positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:stop]
                found.append(
                    model.model(
                        ids[:, start:stop],
                        attention_mask=shown,
                        position_ids=positions,
                        past_key_values=cache,
                    ).logits
                )
            return torch.cat(found, 1)[torn.bool()], cache

    wanted, old = run("off")
    found, new = run("auto")
    assert (found - wanted).norm() / wanted.norm() < 1e-5
    assert new.nbytes == old.nbytes
    assert (new.kernels, old.left) == (None, None)
    assert "the attention mask hides more" in new.left
    with pytest.raises(UsageError):
        run("on")


def test_a_mask_that_hides_what_was_shown_leaves_the_kernels() -> None:
    """The second row's padding grows from one pass to the next."""
    model = model_of("Llama")
    plan = make_plan(model, ranks=half)
    ids, mask = token_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    later = mask.clone()
    later[1, :5] = 0
    outputs = []
    for kernels in ("off", "auto"):
        with compressed(model, plan, kernels) as session, torch.inference_mode():
            session.route.least_tokens = 0
            cache = session.new_cache()
            model.model(ids[:, :11], attention_mask=mask[:, :11], past_key_values=cache)
            last = model.model(ids[:, 11:], attention_mask=later, past_key_values=cache)
            outputs.append(last.logits)
    assert (outputs[0] - outputs[1]).norm() / outputs[0].norm() < 1e-5


def test_a_mask_of_ones_own_leaves_the_kernels() -> None:
    model = model_of("Llama")
    plan = make_plan(model, ranks=half)
    ids = token_ids(1, 8)
    blocks = torch.ones(8, 8, dtype=torch.bool).tril()
    blocks[4:, :4] = False
    mask = torch.where(blocks, 0.0, torch.finfo(torch.float32).min)[None, None]
    outputs = []
    for kernels in ("off", "auto"):
        with compressed(model, plan, kernels) as session, torch.inference_mode():
            session.route.least_tokens = 0
            outputs.append(model.model(ids, attention_mask=mask).logits)
    assert torch.allclose(outputs[0], outputs[1], atol=1e-5)
    with compressed(model, plan, "on"), pytest.raises(UsageError, match="hides more"):
        model.model(ids, attention_mask=mask)


def test_masks_are_made_again_after_a_pass_that_needs_none() -> None:
    model, other = model_of("Llama"), loaded("Llama")
    ids = token_ids(2, 9)
    with compressed(other, make_plan(other), "off"), torch.inference_mode():
        wanted = other.model(ids).logits
        with compressed(model, make_plan(model, ranks=half), "on"):
            model.model(ids)
            with pytest.raises(UsageError):  # in the middle of a pass
                model.model(ids, past_key_values="nothing")
            assert torch.equal(other.model(ids).logits, wanted)


def test_another_batch_than_the_caches_is_refused() -> None:
    model = model_of("Llama")
    with compressed(model, make_plan(model), "on") as session, torch.inference_mode():
        cache = session.new_cache()
        model.model(token_ids(3, 6), past_key_values=cache)
        with pytest.raises(UsageError, match=r"3 sequences, .* 2"):
            model.model(token_ids(2, 1), past_key_values=cache)


def test_a_layer_by_itself_is_refused() -> None:
    model = model_of("Llama")
    with compressed(model, make_plan(model), "on") as session, torch.inference_mode():
        cache = session.new_cache()
        model.model(token_ids(1, 5), past_key_values=cache)
        block = model.model.model.layers[0]
        hidden = torch.randn(1, 5, 48)
        angles = model.model.model.rotary_emb(hidden, torch.arange(5)[None])
        with pytest.raises(UsageError):
            block(hidden, position_embeddings=angles, past_key_values=cache)


def test_states_in_an_unknown_dtype_fail_where_no_mask_was_made() -> None:
    model = model_of("Llama")
    with compressed(model, make_plan(model), "auto") as session, torch.inference_mode():
        session.route.least_tokens = 0
        session.route._at = {
            (index, CPU, torch.float32): "a reason" for index in range(len(model.layout.layers))
        }
        with pytest.raises(FailedError):
            model.model(token_ids(1, 5))


def test_chunked_attention_stays_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("Qwen3", head_dim=32)
    config = model.model.config
    kinds = ["full_attention", "chunked_attention"]
    monkeypatch.setattr(config, "layer_types", kinds)
    with (
        pytest.raises(UsageError, match=r"layer 1 .*'chunked_attention'"),
        compressed(model, make_plan(model), "on"),
    ):
        pass
    monkeypatch.setattr(config, "layer_types", None)
    monkeypatch.setattr(config, "attention_chunk_size", 64, raising=False)
    with (
        pytest.raises(UsageError, match=r"layer 0 .*chunked"),
        compressed(model, make_plan(model), "on"),
    ):
        pass
