"""Which rotations and shared latents the kernels know, and what they say of the others."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from kvprof.errors import UsageError
from kvprof.methods.plan import Placement, Plan
from kvprof.methods.quantisers import per_token
from kvprof.methods.storage import Eviction, Levels
from kvprof.models.load import LoadedModel
from kvprof.runtime.backends.rotary import RotaryForm, rotary_form
from kvprof.runtime.backends.support import LayerSpec, kernel_reasons, why_not
from kvprof.runtime.compressed import compressed
from tests.models.tiny import token_ids
from tests.runtime.plans import loaded, make_plan

CPU = torch.device("cpu")
FORMS = {
    modeling_llama: RotaryForm(16, interleaved=False, stride=1),
    modeling_gpt_neox: RotaryForm(16, interleaved=False, stride=1),
    modeling_gpt_oss: RotaryForm(16, interleaved=False, stride=1),
    modeling_cohere: RotaryForm(16, interleaved=True, stride=2),
    modeling_glm: RotaryForm(16, interleaved=True, stride=1),
}


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.__name__.split(".")[-2])
def test_the_form_of_a_models_rotary_function_is_found(file: Any) -> None:
    """And gives what the function gives, in a head of which half is left alone."""
    function, form = file.apply_rotary_pos_emb, FORMS[file]
    assert rotary_form(function, 16, False) == form
    generator = torch.Generator().manual_seed(1)
    angles = torch.rand(2, 5, 8, generator=generator)
    table = {modeling_cohere: angles.repeat_interleave(2, -1), modeling_gpt_oss: angles}
    whole = table.get(file, torch.cat([angles, angles], -1))
    keys = torch.randn(2, 3, 5, 32, generator=generator)
    wanted = keys.clone()
    wanted[..., :16] = function(keys[..., :16], keys[..., :16], whole.cos(), whole.sin())[1]
    cos, sin = (form.pairs(own)[:, None] for own in (whole.cos(), whole.sin()))
    assert torch.allclose(form.rotated(keys, cos, sin), wanted, atol=1e-6)


def _permuted(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Put neighbours out as halves (DeepSeek V3)."""
    parted = [torch.cat([x[..., ::2], x[..., 1::2]], dim=-1) for x in (q, k)]
    found: tuple[Tensor, Tensor] = modeling_llama.apply_rotary_pos_emb(*parted, cos, sin)
    return found


def _complex(q: Tensor, k: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


def reasons(model: LoadedModel, plan: Plan) -> list[str | None]:
    return kernel_reasons(plan, model.layout, CPU, torch.float32, model)


def test_other_forms_are_none() -> None:
    assert rotary_form(_permuted, 16, False) is None
    assert rotary_form(_complex, 16, False) is None


def test_a_model_with_such_a_form_stays_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("Llama", head_dim=32)
    plan = make_plan(model, placement=Placement.PRE_ROPE)
    assert reasons(model, plan) == [None] * 2
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", _permuted_once)
    assert all("rotary embedding" in str(x) for x in reasons(model, plan))
    with compressed(model, plan, "auto") as session, torch.inference_mode():
        session.route.least_tokens = 0
        found = model.model(token_ids(1, 5), past_key_values=session.new_cache()).logits
    assert found.isfinite().all()
    with (
        pytest.raises(UsageError, match=r"layer 0 .* rotary embedding"),
        compressed(model, plan, "on"),
    ):
        pass
    # Where nothing is rebuilt it does not matter.
    assert reasons(model, make_plan(model)) == [None] * 2


def _permuted_once(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Column i with column d - 1 - i: a pairing that no kernel knows.
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    one, other = x[..., :half], x[..., half:].flip(-1)
    return torch.cat([one * cos - other * sin, (other * cos + one * sin).flip(-1)], dim=-1)


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "quantised": ({"quantiser": per_token((4,), group=None)}, "and latents are quantised"),
    "evicted": ({"eviction": Eviction("recent", 0.5)}, "tokens are evicted"),
    "levels": ({"levels": Levels(sink=2, shares=(0.8, 0.2), batch=4),
                "fold_values": (False, True), "ranks": lambda *a: (a[3] // 2, a[3])},
               "token levels"),
    "unlike groups": ({"heads": 1, "key_heads": 2}, "latents are shared by 1 and 2 KV heads"),
    "odd width": ({"ranks": lambda *a: (24,)}, "keeps 24 columns of its keys"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("placement", [Placement.PRE_ROPE, Placement.POST_ROPE])
def test_what_the_kernels_do_not_know_is_named(name: str, placement: Placement) -> None:
    options, reason = REASONS[name]
    model = loaded("Llama", head_dim=32)
    plan = make_plan(model, **{"placement": placement, "heads": 2, **options})
    with (
        pytest.raises(UsageError, match=f"layer 0 cannot run on the kernels: .*{reason}"),
        compressed(model, plan, "on"),
    ):
        pass
    with compressed(model, plan, "auto") as session, torch.inference_mode():
        assert None not in session.kernel_reasons
        model.model(token_ids(1, 5))


def test_shapes_that_cannot_run_are_named() -> None:
    model = loaded("Llama", head_dim=32)
    plan = make_plan(model, placement=Placement.PRE_ROPE, heads=2)
    layer, facts = plan.layers[0], model.layout.layers[0]
    for changed, reason in (
        ({"num_heads": 80}, "80 query heads"),
        ({"rotary_offset": 16}, "from column 16"),
        ({"qk_head_dim": 24}, "24 columns"),
    ):
        spec = LayerSpec(plan, layer, replace(facts, **changed), CPU, torch.float32)
        assert reason in str(why_not(spec))
    assert kernel_reasons(plan, model.layout, CPU, torch.float32) == [None] * 2
    wide = loaded("Llama", num_attention_heads=4, num_key_value_heads=4, head_dim=160)
    joint = make_plan(wide, placement=Placement.PRE_ROPE, heads=4, ranks=lambda *a: (576,))
    found = kernel_reasons(joint, wide.layout, CPU, torch.float32)
    assert all("keeps 576 columns of its keys" in str(reason) for reason in found)
