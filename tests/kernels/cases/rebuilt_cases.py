"""Whole models with shared latents through the Triton kernels; run by test_cases.py."""

import pytest
import torch

from kvprof.methods.plan import Placement
from kvprof.models.load import wrap_model
from tests.kernels.cases.runtime_cases import DEVICE, DTYPES, logits
from tests.models.tiny import tiny
from tests.runtime.plans import make_plan
from tests.runtime.test_kernel_rebuilt import CONFIGS, part


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", ["Llama", "Cohere", "GPTNeoX", "GPT2"])
def test_shared_latents_on_triton_say_what_they_say_on_torch(arch: str, dtype: torch.dtype) -> None:
    """Groups of two, halves and neighbours as pairs, partial RoPE, none, rows of unlike lengths."""
    made = tiny(arch, **{**CONFIGS[arch], "num_hidden_layers": 1}).to(DEVICE, dtype)
    model = wrap_model(made)
    plan = make_plan(model, placement=Placement.PRE_ROPE, heads=2, ranks=part)
    cuts = [0, 8, 9, 12, 13]
    found, stored = logits(model, plan, "on", cuts)
    wanted, nbytes = logits(model, plan, "off", cuts)
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    assert (found - wanted).norm() / wanted.norm() < limit
    assert stored == nbytes
