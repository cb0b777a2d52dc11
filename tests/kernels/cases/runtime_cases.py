"""Whole models through the Triton kernels against the torch path; run by test_cases.py."""

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvprof.kernels.quantized import moving
from kvprof.kernels.quantized.moving import TokenMove, token_move
from kvprof.models.load import LoadedModel, wrap_model
from kvprof.runtime.backends import segments
from kvprof.runtime.compressed import compressed
from tests.models.tiny import tiny, token_ids
from tests.runtime.plans import make_plan
from tests.runtime.test_kernel_generation import PLANS
from tests.runtime.test_kernel_segments import PLANS as AGING
from tests.runtime.test_kernel_segments import QUANTISED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16]


def model_of(arch: str, dtype: torch.dtype, layers: int = 2) -> LoadedModel:
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if arch == "GptOss" else {}
    model = tiny(arch, head_dim=32, num_hidden_layers=layers, **kinds)
    return wrap_model(model.to(DEVICE, dtype))


def logits(model: LoadedModel, plan: Any, kernels: str, cuts: list[int]) -> tuple[Any, int]:
    """Run a left-padded batch in pieces: prompts, single tokens, several in the middle."""
    ids, mask = token_ids(2, cuts[-1]).to(DEVICE), torch.ones(2, cuts[-1], dtype=torch.long)
    mask[1, :4] = 0
    mask = mask.to(DEVICE)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = []
    with compressed(model, plan, kernels) as session, torch.inference_mode():
        cache = session.new_cache()
        for start, stop in pairwise(cuts):
            found.append(
                model.model(
                    ids[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=cache,
                ).logits
            )
    return torch.cat(found, 1)[mask.bool()].float(), cache.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", ["Llama", "Gemma2", "GptOss"])
def test_models_on_triton_say_what_they_say_on_torch(arch: str, dtype: torch.dtype) -> None:
    """Unlike widths, soft-cap, sinks, windows of 6, rows that begin at tokens 0 and 4."""
    model = model_of(arch, dtype)
    plan = make_plan(model, **PLANS["ragged" if arch == "Llama" else "ragged_online"])
    cuts = [0, 8, 9, 12]
    found, stored = logits(model, plan, "on", cuts)
    wanted, nbytes = logits(model, plan, "off", cuts)
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    assert (found - wanted).norm() / wanted.norm() < limit
    assert stored == nbytes


@pytest.mark.parametrize(
    "name", ["levels", "quantised levels", "quantised 8-bit", "quantised window"]
)
def test_levels_and_quantised_latents_on_triton_too(name: str) -> None:
    """Prompts, steps that move tokens on, a prompt in the middle."""
    model = model_of("Llama", DTYPES[1], layers=1)
    kinds = AGING if name == "levels" else QUANTISED
    plan = make_plan(model, **kinds[name.removeprefix("quantised ")])
    cuts = [0, 9, 10, 13, 14]
    found, stored = logits(model, plan, "on", cuts)
    wanted, nbytes = logits(model, plan, "off", cuts)
    assert (found - wanted).norm() / wanted.norm() < 3e-2
    assert stored == nbytes


def test_steps_move_tokens_by_launches_whose_tables_live_as_long_as_the_cache(monkeypatch) -> None:
    """What is at full precision is moved by the kernel, what is quantised by torch."""
    model = model_of("Llama", DTYPES[1], layers=1)
    plan = make_plan(model, **QUANTISED["levels"])
    with compressed(model, plan, "on") as session, torch.no_grad():
        cache = session.new_cache(40)
        model.model(token_ids(1, 13).to(DEVICE), past_key_values=cache)
        monkeypatch.setattr(segments, "is_capturing", lambda device: True)
        model.model(token_ids(1, 1).to(DEVICE), past_key_values=cache)
        step_plan = cache.kernels.held[0][0]
        fused = [isinstance(each, TokenMove) for each in (step_plan.newest, *step_plan.moves)]
        assert fused == [True, False, True, True]
        tables = weakref.ref(step_plan.newest.columns), weakref.ref(step_plan.moves[2].columns)
        del step_plan
        token_move.cache_clear()
        moving._tables.cache_clear()
        gc.collect()
        assert all(ref() is not None for ref in tables)


def test_a_step_of_one_level_is_projected_to_where_it_is_read(monkeypatch) -> None:
    model = model_of("Llama", DTYPES[1], layers=1)
    with (
        compressed(model, make_plan(model, **QUANTISED["8-bit"]), "on") as session,
        torch.no_grad(),
    ):
        cache = session.new_cache(40)
        model.model(token_ids(1, 13).to(DEVICE), past_key_values=cache)
        monkeypatch.setattr(segments, "is_capturing", lambda device: True)
        model.model(token_ids(1, 1).to(DEVICE), past_key_values=cache)
        assert cache.kernels.held[0][0].newest is None


def test_rows_whose_prompt_has_not_begun_are_nothing() -> None:
    model = model_of("Llama", torch.float32)
    plan = make_plan(model, **PLANS["ragged"])
    found, _ = logits(model, plan, "on", [0, 2, 3, 7, 8])
    wanted, _ = logits(model, plan, "off", [0, 8])
    assert (found - wanted).norm() / wanted.norm() < 1e-4
