"""What runs on the kernels says what the torch path says, which has its own tests."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprof.methods.accounting import bytes_at
from kvprof.methods.plan import Placement, Plan
from kvprof.models.load import LoadedModel
from kvprof.runtime.compressed import compressed
from tests.models.tiny import seeded, token_ids
from tests.runtime.plans import loaded, make_plan
from tests.runtime.test_generation import padded

# Soft-caps and windows, sinks and windows, QK-norm, no RoPE, some layers without RoPE, one window.
ARCHITECTURES = ["Llama", "Qwen3", "Gemma2", "GptOss", "GPT2", "SmolLM3", "Mistral"]
# The prompt's last token gives one; the others go once round windows of 6.
NEW, NEW_IN_WINDOWS = 4, 7


def half(layer: int, side: str, first: int, width: int) -> tuple[int, ...]:
    """Keep 16 or 32 of 32 columns, other ones for each layer, side and head."""
    return (16 * (1 + (layer + first + (side == "keys")) % 2),)


PLANS: dict[str, dict[str, Any]] = {
    "identity": {"placement": Placement.NONE, "project_values": False},
    "full_rank": {"fold_values": (False, True)},
    "ragged": {"ranks": half},
    "ragged_online": {"ranks": half, "fold_values": (False, False)},
    "ragged_turned_back": {"ranks": half, "fold_values": (True, False)},
    "ragged_folded_keys": {"ranks": half, "fold_keys": True},
}  # fmt: skip


@cache
def model_of(arch: str, layers: int = 2) -> LoadedModel:
    wide = {"hidden_size": 64, "num_attention_heads": 2} if arch == "GPT2" else {"head_dim": 32}
    return loaded(arch, **wide, num_hidden_layers=layers)


def generated(model: LoadedModel, plan: Plan | None, kernels: str, **options: Any) -> Any:
    ids, mask = padded()
    windows = any(layer.sliding_window for layer in model.layout.layers)
    settings = {
        "attention_mask": mask,
        "max_new_tokens": NEW_IN_WINDOWS if windows else NEW,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "output_logits": True,
        "return_dict_in_generate": True,
        **options,
    }
    seeded(3)
    if plan is None:
        return model.model.generate(ids, **settings)
    with compressed(model, plan, kernels) as session:
        found = model.model.generate(ids, **settings)
    assert session.kernel_reasons.count(None) == (kernels == "on") * len(plan.layers)
    found.nbytes = session.cache.nbytes if session.cache is not None else None
    return found


def error(found: Any, wanted: Any) -> float:
    mine, other = torch.stack(found.logits), torch.stack(wanted.logits)
    return float((mine - other).norm() / other.norm())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_logits_and_bytes_are_those_of_the_torch_path(arch: str) -> None:
    """Batch of 3 with left padding, windows that go round."""
    model = model_of(arch)
    every = arch in ("Llama", "Gemma2", "GPT2")
    for name in PLANS if every else ("ragged", "ragged_online"):
        options = PLANS[name]
        plan = make_plan(model, **options)
        found, wanted = generated(model, plan, "on"), generated(model, plan, "off")
        assert torch.equal(found.sequences, wanted.sequences), name
        assert error(found, wanted) < 1e-5, name
        assert found.nbytes == wanted.nbytes, name


@pytest.mark.parametrize("arch", ["Llama", "Gemma2", "GptOss"])
def test_full_rank_says_what_the_model_says(arch: str) -> None:
    model = model_of(arch)
    found = generated(model, make_plan(model), "on")
    wanted = generated(model, None, "off")
    assert torch.equal(found.sequences, wanted.sequences)
    assert error(found, wanted) < 1e-4


@pytest.mark.parametrize("arch", ["Llama", "Gemma2", "GptOss"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.8},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "num_beams": 2},
        {"use_cache": False},
    ],
    ids=["sampled", "beams", "beam_sampled", "static", "static_beams", "no_cache"],
)
def test_other_ways_to_decode_agree_too(arch: str, options: dict[str, Any]) -> None:
    model = model_of(arch)
    plan = make_plan(model, **PLANS["ragged"])
    found, wanted = (generated(model, plan, kernels, **options) for kernels in ("on", "off"))
    assert torch.equal(found.sequences, wanted.sequences)
    assert error(found, wanted) < 1e-5


def in_pieces(
    model: LoadedModel, plan: Plan, kernels: str, cuts: list[int], capacity: int | None = None
) -> tuple[Tensor, int, int]:
    """Return the logits of a batch that comes in pieces, and the bytes stored and held."""
    ids, mask = token_ids(3, cuts[-1]), torch.ones(3, cuts[-1], dtype=torch.long)
    mask[1, :9] = 0
    mask[2, :1] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = []
    with compressed(model, plan, kernels) as session, torch.inference_mode():
        cache = session.new_cache(capacity)
        for start, stop in pairwise(cuts):
            found.append(
                model.model(
                    ids[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=cache,
                ).logits
            )
    return torch.cat(found, 1)[mask.bool()], cache.nbytes, cache.allocated_bytes


@pytest.mark.parametrize("arch", ["Llama", "Gemma2", "GptOss"])
@pytest.mark.parametrize("capacity", [None, 40], ids=["dynamic", "static"])
def test_any_pieces_of_any_length_agree(arch: str, capacity: int | None) -> None:
    """Rows that begin in a later piece, pieces shorter and longer than the window of 6."""
    model = model_of(arch)
    plan = make_plan(model, **PLANS["ragged"])
    wanted, nbytes, _ = in_pieces(model, plan, "off", [0, 40])
    for cuts in ([0, 40], [0, 3, 6, 7, 8, 11, 40], [0, 21, 22, 23, 25, 40], list(range(41))):
        found, stored, held = in_pieces(model, plan, "on", cuts, capacity)
        assert (found - wanted).norm() / wanted.norm() < 1e-5, cuts
        assert stored == nbytes
        assert held >= stored


@pytest.mark.parametrize("arch", ["Llama", "Gemma2"])
def test_bytes_are_the_accounts(arch: str) -> None:
    model = model_of(arch)
    plan = make_plan(model, **PLANS["ragged"])
    _, stored, held = in_pieces(model, plan, "on", [0, 30, 31, 32])
    rows = (32, 23, 31)
    assert stored == sum(bytes_at(plan, tokens, itemsize=4).total for tokens in rows)
    _, stored, held = in_pieces(model, plan, "on", [0, 30, 31, 32], capacity=48)
    assert stored == sum(bytes_at(plan, tokens, itemsize=4).total for tokens in rows)
    token = bytes_at(plan, 1, itemsize=4)
    if arch == "Llama":
        assert held == 3 * 48 * token.total
    else:  # rings of 6 tokens and not of 48
        assert held < 3 * 48 * token.total


def test_a_second_turn_goes_on_from_the_same_cache() -> None:
    model = model_of("Qwen3")
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    turns = []
    for kernels in ("on", "off"):
        with compressed(model, make_plan(model, **PLANS["ragged"]), kernels) as session:
            cache = session.new_cache()
            first = model.model.generate(token_ids(1, 9), past_key_values=cache, **settings)
            longer = torch.cat([first, token_ids(1, 5, seed=1)], dim=1)
            turns.append(model.model.generate(longer, past_key_values=cache, **settings))
    assert torch.equal(turns[0], turns[1])


def test_assisted_decoding_takes_tokens_back() -> None:
    """Kept as they came, latents can be rolled back: what drafts got wrong leaves no trace."""
    model = model_of("Llama")
    plan = make_plan(model, **PLANS["ragged"])
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = token_ids(1, 6).repeat(1, 3)
    with compressed(model, plan, "on") as session:
        wanted = model.model.generate(ids, **settings)
        assert session.cache is not None
        stored = session.cache.nbytes
        found = model.model.generate(ids, prompt_lookup_num_tokens=3, **settings)
        assert session.cache.nbytes <= stored
    assert torch.equal(found, wanted)


def test_half_precision_runs() -> None:
    from kvprof.models.load import wrap_model
    from tests.models.tiny import tiny

    for dtype in (torch.bfloat16, torch.float16):
        model = wrap_model(tiny("Gemma2", head_dim=32).to(dtype))
        plan = make_plan(model, **PLANS["ragged"])
        found, wanted = generated(model, plan, "on"), generated(model, plan, "off")
        first = (found.logits[0] - wanted.logits[0]).norm() / wanted.logits[0].norm()
        assert first < 3e-2
        assert found.nbytes == wanted.nbytes
