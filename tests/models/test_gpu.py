"""Capture on a GPU, spread over two, and offloaded from one: the same vectors everywhere."""

import pytest
import torch

from kvprof.models.load import load_model
from kvprof.models.projections import output_slices
from kvprof.moments.collect import capture, run_batch
from tests.models.tiny import ARCHITECTURES, tiny, token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def _taps(loaded):
    taps = []
    with capture(loaded, taps.append, pre_rope=True):
        run_batch(loaded, token_ids())
    return taps


@pytest.mark.parametrize("device", ["cuda", "offload", pytest.param("balanced", marks=_two)])
@pytest.mark.parametrize("arch", ["Llama", "Gemma2", "GPT2", "GPTNeoX", "Mixtral"])
def test_capture_does_not_depend_on_where_layers_lie(arch, device, tmp_path):
    tiny(arch).save_pretrained(tmp_path)
    here = load_model(str(tmp_path), device="cpu")
    there = load_model(str(tmp_path), device=device, dtype="float32")
    assert there.device.type == "cuda"
    assert there.fingerprint == here.fingerprint
    taps = _taps(there)
    if device == "balanced":
        assert len({tap.q.device for tap in taps}) > 1
    for one, other in zip(_taps(here), taps, strict=True):
        for name in ("q", "k", "v", "q_pre", "k_pre"):
            torch.testing.assert_close(
                getattr(one, name), getattr(other, name).cpu(), rtol=1e-3, atol=1e-3
            )
    torch.testing.assert_close(
        output_slices(here.model, here.layout, 2), output_slices(there.model, there.layout, 2).cpu()
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_do_not_change_in_bfloat16(arch, tmp_path):
    tiny(arch).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.dtype == torch.bfloat16
    ids = token_ids().to(loaded.device)
    with torch.no_grad():
        before = loaded.model(ids, use_cache=False).logits
        with capture(loaded, lambda tap: None, pre_rope=True):
            during = loaded.model(ids, use_cache=False).logits
    assert torch.equal(before, during)
