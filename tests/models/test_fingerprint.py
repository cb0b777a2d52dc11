"""One model, one fingerprint; another model, another."""

import json
import shutil

import pytest
import torch

from kvprof.models import fingerprint
from kvprof.models.fingerprint import file_digest
from kvprof.models.load import load_model, wrap_model
from tests.models.tiny import tiny


def test_dtype_folder_and_offloading_do_not_matter(tmp_path):
    tiny("Llama").save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found = {
        load_model(str(tmp_path / "a")).fingerprint,
        load_model(str(tmp_path / "b"), dtype="bfloat16").fingerprint,
        load_model(str(tmp_path / "b"), device="offload").fingerprint,
    }
    assert len(found) == 1
    assert len(found.pop()) == 32


def test_another_weight_or_configuration_on_disk_is_another_model(tmp_path):
    tiny("Llama").save_pretrained(tmp_path)
    before = load_model(str(tmp_path)).fingerprint
    config = tmp_path / "config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps({**said, "rms_norm_eps": 0.3}))
    other = load_model(str(tmp_path)).fingerprint
    tiny("Llama", seed=1).save_pretrained(tmp_path)
    assert len({before, other, load_model(str(tmp_path)).fingerprint}) == 3


def test_a_large_file_is_known_by_samples_that_reach_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "_WHOLE", 1 << 16)
    monkeypatch.setattr(fingerprint, "_HEAD", 1 << 10)
    monkeypatch.setattr(fingerprint, "_BLOCK", 16)
    path, data = tmp_path / "w", bytearray(1 << 20)
    path.write_bytes(data)
    found = {file_digest(path)}
    for changed in (0, 1000, (1 << 20) - 1):
        other = bytearray(data)
        other[changed] ^= 1
        path.write_bytes(other)
        found.add(file_digest(path))
    path.write_bytes(data + b"\0")
    found.add(file_digest(path))
    assert len(found) == 5


def test_one_weight_one_head_and_one_base_each_make_another_model_in_memory():
    def changed(**overrides):
        return wrap_model(tiny("Llama", **overrides)).fingerprint

    model = tiny("Llama")
    prints = [wrap_model(model).fingerprint]
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[3, 5] += 0.5
    prints.append(wrap_model(model).fingerprint)
    prints.append(changed(num_attention_heads=8, head_dim=8, num_key_value_heads=4))
    prints.append(changed(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    prints.append(changed(rms_norm_eps=0.3))
    prints.append(changed(tie_word_embeddings=True))
    prints.append(changed(seed=1))
    assert len(set(prints)) == len(prints)
    assert changed() == prints[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_every_value_of_a_small_tensor_counts_and_its_values_alone(dtype):
    one = torch.arange(64).reshape(8, 8).to(dtype)
    other = one.clone()
    other.view(-1)[63] = 0
    assert fingerprint._samples(one) != fingerprint._samples(other)
    assert fingerprint._samples(one) == fingerprint._samples(one.T.contiguous().T)


def test_what_is_changed_in_memory_is_another_model_at_once(tmp_path):
    tiny("Llama").save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="bfloat16")
    before = loaded.fingerprint
    weight = loaded.model.model.layers[1].self_attn.q_proj.weight
    kept = weight.data.clone()
    weight.data[:, 5] = 0  # behind the back of autograd's counters
    assert loaded.fingerprint == wrap_model(loaded.model).fingerprint != before
    weight.data.copy_(kept)
    assert loaded.fingerprint == before
