"""One model, one fingerprint, however it was loaded; another model, another."""

import pytest
import torch

from kvprof.models.load import load_model, wrap_model
from tests.models.tiny import tiny


@pytest.mark.parametrize("arch", ["Llama", "Mixtral", "GPT2", "DeepseekV3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_dtype_folder_and_offloading_do_not_matter(arch, tied, tmp_path):
    model = tiny(arch, tie_word_embeddings=tied)
    expected = wrap_model(model).fingerprint
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    found = {
        load_model(str(tmp_path / "a")).fingerprint,
        load_model(str(tmp_path / "b"), dtype="bfloat16").fingerprint,
        load_model(str(tmp_path / "b"), device="offload").fingerprint,
    }
    assert found == {expected}
    assert len(expected) == 32


def test_float16_keeps_it_for_bfloat16_weights(tmp_path):
    model = tiny("Llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    half = load_model(str(tmp_path), dtype="float16")
    assert half.dtype == torch.float16
    assert half.fingerprint == load_model(str(tmp_path)).fingerprint


def test_one_weight_one_head_and_one_base_each_make_another_model():
    def changed(**overrides):
        return wrap_model(tiny("Llama", **overrides)).fingerprint

    model = tiny("Llama")
    prints = [wrap_model(model).fingerprint]
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[3, 5] += 0.5
    prints.append(wrap_model(model).fingerprint)
    prints.append(changed(num_attention_heads=8, head_dim=8, num_key_value_heads=4))
    prints.append(changed(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    prints.append(changed(seed=1))
    assert len(set(prints)) == len(prints)
    assert changed() == prints[0]


def test_tying_is_seen():
    assert (
        wrap_model(tiny("Llama", tie_word_embeddings=True)).fingerprint
        != wrap_model(tiny("Llama")).fingerprint
    )
