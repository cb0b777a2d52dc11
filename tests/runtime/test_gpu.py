"""On a GPU, and offloaded from one, a full-rank plan still gives the model's own tokens."""

from typing import Any

import pytest
import torch

from kvprof.methods.accounting import bytes_at
from kvprof.models.load import load_model
from kvprof.runtime.compressed import compressed
from tests.models.tiny import tiny, token_ids
from tests.runtime.plans import make_plan
from tests.runtime.test_generation import VARIANTS
from tests.runtime.test_memory import PLANS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SETTINGS: dict[str, Any] = {
    "max_new_tokens": 6,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("device", ["cuda", "offload"])
@pytest.mark.parametrize("arch", ["Llama", "Gemma2", "GPT2", "GPTNeoX", "Mixtral"])
def test_tokens_do_not_depend_on_where_layers_lie(device: str, arch: str, tmp_path: Any) -> None:
    tiny(arch).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device=device, dtype="float32")
    ids, mask = token_ids(3, 11).to(model.device), torch.ones(3, 11, dtype=torch.long)
    mask[1, :4] = 0
    mask = mask.to(model.device)
    wanted = model.model.generate(ids, attention_mask=mask, **SETTINGS)
    for name, options in VARIANTS.items():
        with compressed(model, make_plan(model, **options)):
            found = model.model.generate(ids, attention_mask=mask, **SETTINGS)
        assert torch.equal(found, wanted), name
    assert torch.equal(model.model.generate(ids, attention_mask=mask, **SETTINGS), wanted)


@pytest.mark.parametrize("name", PLANS)
def test_bytes_are_the_accounts_in_bfloat16(name: str, tmp_path: Any) -> None:
    tiny("Llama").save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cuda", dtype="bfloat16")
    plan = make_plan(model, **PLANS[name])
    with compressed(model, plan) as session:
        model.model.generate(token_ids(3, 40).to(model.device), **SETTINGS)
    assert session.cache is not None
    assert session.cache.nbytes == bytes_at(plan, 45, itemsize=2, batch=3).total
