"""On a GPU keys are rebuilt by the kernels too, and a step that does so can be captured."""

from typing import Any

import pytest
import torch

from kvprof.models.load import LoadedModel, wrap_model
from tests.models.tiny import tiny
from tests.runtime.test_kernel_gpu import error, generated, replayed
from tests.runtime.test_kernel_rebuilt import CONFIGS, PLANS, palu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ARCHITECTURES = ["Llama", "Cohere", "GPTNeoX", "SmolLM3", "GPT2"]


def model_of(arch: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return wrap_model(tiny(arch, **CONFIGS[arch]).to("cuda", dtype))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"cache_implementation": "static"}],
    ids=["greedy", "beams", "static"],
)
def test_float32_says_what_the_torch_path_says(arch: str, options: dict[str, Any]) -> None:
    model = model_of(arch)
    for name in PLANS if arch == "Llama" else ("palu", "online"):
        plan = palu(model, name)
        found = generated(model, plan, "on", **options)
        wanted = generated(model, plan, "off", **options)
        assert torch.equal(found.sequences, wanted.sequences), name
        assert error(found, wanted) < 1e-4, name
        assert found.nbytes == wanted.nbytes, name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_half_precision_is_as_near_as_the_torch_path(arch: str) -> None:
    """Both against float32; tokens may part, so the prompt's last logits are compared."""
    model = model_of(arch, torch.bfloat16)
    exact = wrap_model(tiny(arch, **CONFIGS[arch]).bfloat16().to("cuda", torch.float32))
    wanted = generated(exact, palu(exact), "off").logits[0]
    errors = [
        (generated(model, palu(model), kernels).logits[0].float() - wanted).norm() / wanted.norm()
        for kernels in ("on", "off")
    ]
    assert errors[0] < 1.5 * errors[1] + 5e-3


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_counts_for_itself(arch: str, dtype: torch.dtype) -> None:
    """One capture, many replays: angles are written and read where they stand."""
    model = model_of(arch, dtype)
    replayed(model, palu(model))
