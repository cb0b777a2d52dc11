"""One model, one fingerprint, however it was loaded; another model, another."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvprof.models import fingerprint
from kvprof.models.fingerprint import file_digests, tensor_digests
from kvprof.models.load import load_model, wrap_model
from tests.models.tiny import tiny

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.float8_e4m3fn,
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Which files' tensors were read."""
    found: list[str] = []
    read = fingerprint._read

    def counted(path):
        found.append(path.name)
        return read(path)

    monkeypatch.setattr(fingerprint, "_read", counted)
    return found


@pytest.mark.parametrize("arch", ["Llama", "Mixtral", "GPT2", "DeepseekV3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_dtype_folder_files_and_offloading_do_not_matter(arch, tied, tmp_path):
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


def test_a_value_is_the_same_value_in_a_wider_dtype(tmp_path):
    model = tiny("Llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    half = load_model(str(tmp_path), dtype="float16")
    assert half.dtype == torch.float16
    assert half.fingerprint == load_model(str(tmp_path)).fingerprint
    assert half.fingerprint == wrap_model(model.to(torch.float32)).fingerprint


def test_a_tied_weight_may_be_written_twice(tmp_path):
    tiny("Llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    expected = load_model(str(tmp_path)).fingerprint
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_model(str(tmp_path)).fingerprint == expected


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
    prints.append(changed(hidden_act="relu"))
    prints.append(changed(rms_norm_eps=0.3))
    prints.append(changed(seed=1))
    assert len(set(prints)) == len(prints)
    assert changed() == prints[0]


def test_tying_is_seen():
    assert (
        wrap_model(tiny("Llama", tie_word_embeddings=True)).fingerprint
        != wrap_model(tiny("Llama")).fingerprint
    )


def test_what_a_configuration_says_beside_the_model_does_not_matter(tmp_path):
    tiny("Llama").save_pretrained(tmp_path)
    expected = load_model(str(tmp_path)).fingerprint
    path = tmp_path / "config.json"
    stated = json.loads(path.read_text())
    beside = {
        "_name_or_path": "elsewhere",
        "transformers_version": "4.0",
        "dtype": "float16",
        "pad_token_id": 5,
        "use_cache": False,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
    }
    path.write_text(json.dumps({**stated, **beside}))
    assert load_model(str(tmp_path)).fingerprint == expected
    path.write_text(json.dumps({**stated, "attention_multiplier": 0.5}))
    assert load_model(str(tmp_path)).fingerprint != expected  # unknown words count


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 4000), st.integers(0, 3), st.data())
def test_every_bit_of_a_tensor_counts(dtype, size, skipped, data):
    generator = torch.Generator().manual_seed(size)
    raw = torch.randint(0, 100, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    byte = data.draw(st.integers(0, len(raw) - 1))
    bit = data.draw(st.integers(0, 7))
    other = raw.clone()
    other[byte] ^= 1 << bit
    before = bytes(skipped * dtype.itemsize)  # a tensor may begin anywhere in its storage
    one, two = (
        {"w": torch.frombuffer(bytearray(before + x.numpy().tobytes()), dtype=dtype)[skipped:]}
        for x in (raw, other)
    )
    assert tensor_digests(one) != tensor_digests(two)
    assert fingerprint.checksum(one) != fingerprint.checksum(two)
    assert tensor_digests(one) == tensor_digests({"w": one["w"].clone()})


def test_what_is_changed_in_memory_is_another_model_at_once(tmp_path):
    tiny("Llama").save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="bfloat16")
    before = loaded.fingerprint
    weight = loaded.model.model.layers[1].self_attn.q_proj.weight
    kept = weight.data.clone()
    weight.data[:, 5] = 0  # behind the back of autograd's counters
    pruned = loaded.fingerprint
    assert pruned != before
    assert pruned == wrap_model(loaded.model).fingerprint
    weight.data.copy_(kept)
    assert loaded.fingerprint == wrap_model(loaded.model).fingerprint != pruned


def test_a_file_is_read_once_and_again_when_it_changed(tmp_path, reads):
    tiny("Llama").save_pretrained(tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    time.sleep(0.06)  # what has changed just now is read, but not kept
    expected = load_model(str(tmp_path / "a")).fingerprint
    assert load_model(str(tmp_path / "a")).fingerprint == expected
    assert len(reads) == 1
    times = path.stat()
    with safe_open(path, "pt") as tensors:
        metadata, names = tensors.metadata(), list(tensors.keys())
    written = {name: tensor.clone() for name, tensor in load_file(path).items()}
    written[names[-1]].view(-1)[-1] += 1
    save_file(written, tmp_path / "new", metadata)
    with path.open("r+b") as file:  # in place: same inode, same size
        file.write((tmp_path / "new").read_bytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        times.st_ino,
        times.st_size,
        times.st_mtime_ns,
    )
    assert load_model(str(tmp_path / "a")).fingerprint != expected
    assert len(reads) == 2


def test_a_damaged_or_unwritable_store_costs_a_look_and_nothing_else(tmp_path, reads, monkeypatch):
    tiny("Llama").save_pretrained(tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    time.sleep(0.06)
    expected = file_digests([path])
    [kept] = (Path(os.environ["XDG_CACHE_HOME"]) / "kvprof" / "weights").iterdir()
    stored = json.loads(kept.read_text())
    for name in stored["tensors"]:
        stored["tensors"][name] = "0" * 64
    kept.write_text(json.dumps(stored))
    assert file_digests([path]) == expected
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert file_digests([path]) == expected
    assert len(reads) == 3


def test_a_file_of_the_hub_is_known_by_its_name_until_it_is_written_to(tmp_path, reads):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    blob = blobs / ("ab" * 32)
    save_file({"w": torch.ones(3)}, blob)
    time.sleep(0.06)
    expected = file_digests([blob])
    shutil.copytree(tmp_path, tmp_path / "moved", copy_function=shutil.copy2)
    assert file_digests([tmp_path / "moved" / "blobs" / blob.name]) == expected
    assert len(reads) == 1
    times = blob.stat()
    save_file({"w": torch.zeros(3)}, tmp_path / "new")
    blob.write_bytes((tmp_path / "new").read_bytes())
    os.utime(blob, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_digests([blob]) != expected
    assert len(reads) == 2
