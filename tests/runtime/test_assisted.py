"""Assisted and prompt-lookup decoding through a compressed cache; taking tokens back."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.methods.accounting import bytes_at
from kvprof.methods.plan import Placement, Plan
from kvprof.methods.storage import Eviction, Levels, Quantiser, SideQuantiser
from kvprof.models.load import LoadedModel
from kvprof.runtime.compressed import compressed
from tests.models.tiny import tiny, token_ids
from tests.runtime.plans import full, loaded, make_plan, ragged

# Low ranks, shared latents that are rebuilt before RoPE, windows, chunks.
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("Llama", {"ranks": full}),
    "ragged": ("Llama", {"ranks": ragged}),
    "rebuilt": ("Llama", {"ranks": ragged, "placement": Placement.PRE_ROPE, "heads": 2}),
    "windows": ("Gemma2", {"ranks": ragged}),
    "chunks": ("Llama4", {"ranks": ragged}),
}
HELP: dict[str, dict[str, Any]] = {
    "lookup": {"prompt_lookup_num_tokens": 4},
    "assistant": {"assistant_model": True},
}


def repeating() -> torch.Tensor:
    """Text that looks itself up: what is found there is right at times."""
    return token_ids(1, 6).repeat(1, 4)[:, :21]


def written(model: LoadedModel, plan: Plan, kernels: str, **options: Any) -> tuple[list[int], Any]:
    if options.get("assistant_model"):
        options["assistant_model"] = tiny(ASSISTANTS[model.layout.architecture], seed=0)
    with compressed(model, plan, kernels) as session:
        session.route.least_tokens = 0
        result = model.model.generate(
            repeating(),
            attention_mask=torch.ones(1, 21, dtype=torch.long),
            do_sample=False,
            max_new_tokens=14,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            **options,
        )
        return result.sequences[0].tolist(), session.cache


ASSISTANTS = {
    "LlamaForCausalLM": "Llama", "Gemma2ForCausalLM": "Llama", "Llama4ForCausalLM": "Llama4",
}  # fmt: skip


@pytest.mark.parametrize("how", HELP)
@pytest.mark.parametrize("name", PLANS)
def test_helped_decoding_writes_what_plain_greedy_decoding_writes(name: str, how: str) -> None:
    arch, options = PLANS[name]
    model = loaded(arch)
    plan = make_plan(model, **options)
    plain, _ = written(model, plan, "off")
    found, cache = written(model, plan, "off", **HELP[how])
    assert found == plain
    assert len(plain) == 21 + 14
    assert cache.nbytes == bytes_at(plan, cache.get_seq_length(), itemsize=4).total


@pytest.mark.parametrize("name", ["ragged", "rebuilt", "windows"])
def test_helped_decoding_on_the_kernels(name: str) -> None:
    arch, options = PLANS[name]
    model = loaded(arch, head_dim=32)
    plan = make_plan(model, **{**options, "ranks": lambda *facts: (16 * (facts[3] // 32),)})
    plain, _ = written(model, plan, "auto")
    found, cache = written(model, plan, "auto", prompt_lookup_num_tokens=4)
    assert found == plain
    assert (cache.kernels is None) is (name == "windows")


REFUSED: dict[str, dict[str, Any]] = {
    "quantises": {"quantiser": Quantiser("affine", *[SideQuantiser((4,))] * 2)},
    "lower ranks": {
        "levels": Levels(shares=(0.5, 0.5)),
        "ranks": lambda layer, side, first, width: (width // 2, width),
    },
    "evicts": {"eviction": Eviction("recent", 0.5)},
    "exactly": {"lazy": True, "fold_values": (False, True)},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_taken_back_is_refused_in_one_line(what: str) -> None:
    model = loaded("Llama")
    plan = make_plan(model, **REFUSED[what])
    with pytest.raises(UsageError):
        written(model, plan, "off", prompt_lookup_num_tokens=4)
    with compressed(model, plan, "off") as session, torch.no_grad():
        cache = session.new_cache()
        model.model(token_ids(1, 8), past_key_values=cache)
        before = cache.nbytes
        assert not cache.is_croppable
        with pytest.raises(UsageError, match="cannot be rolled back"):
            cache.crop(-1)
        assert (cache.get_seq_length(), cache.nbytes) == (8, before)


@settings(max_examples=15)
@given(
    st.sampled_from(sorted(PLANS)),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(0, 5),
)
def test_any_passes_taken_back_in_part_leave_no_trace(
    name: str, passes: list[tuple[int, int]], padding: int
) -> None:
    arch, options = PLANS[name]
    model = loaded(arch)
    plan = make_plan(model, **options)
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[0, :padding] = 0
    kept = token_ids(2, 64)

    def run(cache: Any, ids: torch.Tensor) -> torch.Tensor:
        past = cache.get_seq_length()
        shown = mask[:, : past + ids.shape[1]]
        places = (shown.cumsum(1) - 1).clamp(min=0)[:, past:]
        return model.model(
            ids, attention_mask=shown, position_ids=places, past_key_values=cache
        ).logits

    with compressed(model, plan, "off") as session, torch.no_grad():
        cache, plain = session.new_cache(), session.new_cache()
        cache.activate_past_recording()
        for number, (tokens, removed) in enumerate(passes):
            past, removed = cache.get_seq_length(), min(removed, tokens)
            right = kept[:, past : past + tokens]
            wrong = token_ids(2, tokens, seed=number + 9)[:, :removed]
            run(cache, torch.cat([right[:, : tokens - removed], wrong], 1))
            # Older versions of transformers say what is to be left.
            cache.crop(-removed if removed % 2 or tokens == removed else past + tokens - removed)
            if tokens > removed:
                run(plain, right[:, : tokens - removed])
            assert cache.nbytes == plain.nbytes
        past = cache.get_seq_length()
        assert past == plain.get_seq_length()
        ids = kept[:, past : past + 3]
        found, wanted = run(cache, ids), run(plain, ids)
    real = mask[:, past : past + 3].bool()
    assert torch.allclose(found[real], wanted[real], atol=1e-4)
