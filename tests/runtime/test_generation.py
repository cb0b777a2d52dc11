"""At full rank a compressed model says what the model says: greedy, sampled, beams, logits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvprof.methods.plan import Placement, Plan
from kvprof.models.load import LoadedModel
from kvprof.runtime.compressed import compressed
from tests.models.tiny import ARCHITECTURES, seeded, token_ids
from tests.runtime.plans import loaded, make_plan

VARIANTS: dict[str, dict[str, Any]] = {
    "identity": {"placement": Placement.NONE, "project_values": False},
    "post_rope": {},
    "post_rope_folded_keys": {"fold_keys": True},
    "grouped": {"heads": 2, "placement": Placement.PRE_ROPE, "fold_values": (True, True)},
    "pre_rope_folded": {"placement": Placement.PRE_ROPE, "fold_keys": True,
                        "fold_values": (False, False)},
    "lazy": {"lazy": True, "heads": 2, "placement": Placement.NONE, "fold_values": (False, True)},
    "strawman": {"online_bases": True, "project_values": False, "placement": Placement.NONE},
}  # fmt: skip


def padded() -> tuple[Tensor, Tensor]:
    """Return a batch of 3 whose rows begin at tokens 0, 4 and 4: two are stored together."""
    ids, mask = token_ids(3, 11), torch.ones(3, 11, dtype=torch.long)
    mask[1:, :4] = 0
    return ids, mask


def generate(model: LoadedModel, plan: Plan | None = None, **options: Any) -> Tensor:
    ids, mask = padded()
    settings = {
        "attention_mask": mask,
        "max_new_tokens": 4,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        **options,
    }
    seeded(3)
    if plan is None:
        return model.model.generate(ids, **settings)
    with compressed(model, plan):
        return model.model.generate(ids, **settings)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_are_the_models_own(arch: str) -> None:
    model = loaded(arch)
    wanted = generate(model)
    for name, options in VARIANTS.items():
        assert torch.equal(generate(model, make_plan(model, **options)), wanted), name


@pytest.mark.parametrize("arch", ["Llama", "Gemma2", "GPT2"])
@pytest.mark.parametrize("variant", ["post_rope", "grouped"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.8},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"cache_implementation": "static"},
        {"use_cache": False},
    ],
    ids=["sampled", "beams", "beam_sampled", "static", "no_cache"],
)
def test_other_ways_to_decode_give_the_models_own_tokens(
    arch: str, variant: str, options: dict[str, Any]
) -> None:
    model = loaded(arch)
    own = {k: v for k, v in options.items() if k != "cache_implementation"}
    plan = make_plan(model, **VARIANTS[variant])
    assert torch.equal(generate(model, plan, **options), generate(model, **own))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_through_the_cache_agree(arch: str) -> None:
    model = loaded(arch)
    ids, mask = padded()
    with torch.inference_mode():
        wanted = model.model(ids, attention_mask=mask, position_ids=_positions(mask)).logits
        for name in ("post_rope_folded_keys", "grouped", "lazy"):
            with compressed(model, make_plan(model, **VARIANTS[name])) as session:
                cache, found = session.new_cache(), []
                # a prefill in two passes, the second row's first real token in the second of them
                for start, stop in [(0, 3), (3, 6), *((t, t + 1) for t in range(6, 11))]:
                    found.append(
                        model.model(
                            ids[:, start:stop],
                            attention_mask=mask[:, :stop],
                            position_ids=_positions(mask)[:, start:stop],
                            past_key_values=cache,
                        ).logits
                    )
            real = mask.bool()
            error = (torch.cat(found, 1) - wanted)[real].norm() / wanted[real].norm()
            assert error < 1e-4, (name, error)


def test_padding_that_all_rows_share_is_left_out() -> None:
    model = loaded("Llama")
    ids, mask = token_ids(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[:, :4] = 0
    places = {"attention_mask": mask, "position_ids": _positions(mask)}
    with torch.inference_mode():
        wanted = model.model(ids, **places).logits[:, 4:]
        with compressed(model, make_plan(model)):
            found = model.model(ids, **places).logits[:, 4:]
    assert (found - wanted).norm() / wanted.norm() < 1e-4


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def test_a_plain_forward_pass_runs_compressed_too() -> None:
    model = loaded("Llama")
    ids = token_ids(2, 12)
    with compressed(model, make_plan(model)) as session, torch.inference_mode():
        found = model.model(ids, use_cache=False)
        assert session.cache is not None
        assert session.cache.get_seq_length() == 12
    wanted = model.model(ids).logits
    assert found.past_key_values is None
    assert torch.allclose(found.logits, wanted, atol=1e-4)


def test_a_second_turn_goes_on_from_the_same_cache() -> None:
    model = loaded("Qwen3")
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with compressed(model, make_plan(model)) as session:
        cache = session.new_cache()
        first = model.model.generate(token_ids(1, 9), past_key_values=cache, **settings)
        longer = torch.cat([first, token_ids(1, 5, seed=1)], dim=1)
        second = model.model.generate(longer, past_key_values=cache, **settings)
    assert torch.equal(second, model.model.generate(longer, **settings))
