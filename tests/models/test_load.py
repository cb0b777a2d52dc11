"""Loading, and every way in which a model is refused: one line, the right exit code."""

import json
import shutil
import sys
import warnings

import huggingface_hub
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from kvprof.errors import FailedError, LackingError, UsageError
from kvprof.models import load as load_module
from kvprof.models.load import load_model, wrap_model
from kvprof.models.projections import output_slices, value_weight
from kvprof.moments.collect import capture, run_batch
from tests.models.tiny import tiny, token_ids


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    tiny("Llama").save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 90)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", additional_special_tokens=["w7"]
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "llama")


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def _refused(kind, words, spec, **options):
    with pytest.raises(kind, match=words) as info:
        load_model(str(spec), **options)
    assert str(spec).split("/")[-1] in str(info.value) or "--" in str(info.value)
    assert len(str(info.value)) < 400
    return str(info.value)


def test_a_folder_loads(folder, capfd):
    loaded = load_model(str(folder), device="cpu")
    assert (loaded.spec, loaded.revision) == (str(folder), None)
    assert (loaded.device, loaded.dtype) == (torch.device("cpu"), torch.float32)
    assert (loaded.context_length, loaded.vocab_size) == (128, 97)
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    # pad, bos, eos, an added special token, and the rows beyond the tokenizer's 90 words
    assert loaded.special_ids == {0, 1, 2, 7, *range(90, 97)}
    assert loaded.tokenizer() is loaded.tokenizer()
    assert loaded.tokenizer()("w5 w6")["input_ids"] == [5, 6]
    assert capfd.readouterr() == ("", "")


def test_a_model_in_memory_has_no_tokenizer():
    loaded = wrap_model(tiny("GPT2"))
    assert loaded.spec == "<python>"
    assert loaded.context_length == 128
    assert loaded.special_ids == {0, 1, 2}
    with pytest.raises(UsageError, match="has no tokenizer"):
        loaded.tokenizer()


def test_a_damaged_tokenizer_is_named(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(FailedError):
        load_model(str(folder)).tokenizer()


def test_no_such_model(tmp_path, folder):
    _refused(UsageError, "no such folder", tmp_path / "nowhere")
    _refused(UsageError, "is a file", folder / "config.json")
    _refused(LackingError, "somebody/some-model", "somebody/some-model")
    _refused(UsageError, "no revisions", folder, revision="main")


def test_a_gated_model(monkeypatch):
    def gated(*args, **kwargs):
        raise huggingface_hub.errors.GatedRepoError.__new__(huggingface_hub.errors.GatedRepoError)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", gated)
    assert "hf auth login" in _refused(LackingError, "is gated", "somebody/gated")


def test_a_cached_hub_model_loads_offline(saved, tmp_path):
    base = tmp_path / "cache" / "models--somebody--some-model"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(saved, base / "snapshots" / commit)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(commit)
    loaded = load_model("somebody/some-model")
    assert loaded.revision == commit
    assert loaded.fingerprint == load_model(str(saved)).fingerprint
    assert loaded.tokenizer()("w5")["input_ids"] == [5]


@pytest.mark.parametrize(
    "index",
    [
        {},
        [],
        None,
        "text",
        {"weight_map": None},
        {"weight_map": ["a"]},
        {"weight_map": {}},
        {"weight_map": {"w": 3}},
        {"weight_map": {"w": ["a"]}},
    ],
    ids=str,
)
def test_an_index_without_a_map_of_weights(saved, tmp_path, index):
    base = tmp_path / "cache" / "models--somebody--some-model"
    cached = base / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(saved, cached)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(cached.name)
    (cached / "model.safetensors.index.json").write_text(json.dumps(index))
    for spec in (cached, "somebody/some-model"):
        _refused(FailedError, r"index\.json .*weight_map", spec)


@pytest.mark.parametrize("where", ["..", "/"])
def test_weights_outside_of_the_models_folder_are_not_read(folder, tmp_path, where):
    """Whatever an index that somebody hands out names, also a file that is there."""
    place = {"..": folder.parent, "/": tmp_path}[where]
    shutil.move(folder / "model.safetensors", place / "far.safetensors")
    named = {"..": "../far.safetensors", "/": str(place / "far.safetensors")}
    index = {"weight_map": {"w": named[where]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _refused(FailedError, r"index\.json names '", folder)


def test_a_folder_without_config_or_with_a_damaged_one(folder):
    (folder / "config.json").write_text('{"model_type": ')
    _refused(FailedError, "config.json is damaged", folder)
    (folder / "config.json").unlink()
    _refused(UsageError, "config.json is missing", folder)


def test_truncated_safetensors(folder):
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    for keep in (len(data) - 1000, 300, 4, 0):
        weights.write_bytes(data[:keep])
        _refused(FailedError, "model.safetensors is truncated or damaged", folder)


def test_a_missing_shard(tmp_path):
    tiny("Llama").save_pretrained(tmp_path / "m", max_shard_size="50KB")
    shard = sorted((tmp_path / "m").glob("model-*.safetensors"))[1]
    shard.unlink()
    _refused(FailedError, f"{shard.name} is missing", tmp_path / "m")


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    _refused(UsageError, r"only pytorch_model.bin; .*safetensors and GGUF weights only", folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("device", ["auto", "offload"])
def test_weights_that_are_not_finite(folder, value, device):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][2, 3] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind = "NaN" if value != value else "infinite"
    _refused(
        FailedError,
        rf"model.layers.1.self_attn.k_proj.weight contains {kind}",
        folder,
        device=device,
    )


def test_weights_that_overflow_float16_are_not_called_damaged_only(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] = 1e6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_model(str(folder), dtype="bf16").dtype == torch.bfloat16
    _refused(FailedError, "float16 is too narrow", folder, dtype="float16")


def test_missing_and_unexpected_tensors(folder):
    tensors = load_file(folder / "model.safetensors")
    lost = {k: v for k, v in tensors.items() if "layers.2.self_attn" not in k}
    save_file(lost, folder / "model.safetensors", metadata={"format": "pt"})
    _refused(FailedError, r"lacks model.layers.2.self_attn.* and 3 more tensors", folder)
    more = {**tensors, "model.layers.0.extra.weight": torch.ones(3)}
    save_file(more, folder / "model.safetensors", metadata={"format": "pt"})
    _refused(FailedError, "model.layers.0.extra.weight", folder)
    _edit_config(folder, num_hidden_layers=4)
    _refused(FailedError, "model.layers.0.extra|lacks model.layers.3", folder)
    _edit_config(folder, num_hidden_layers=3)
    shape = {**tensors, "model.norm.weight": torch.ones(3)}
    save_file(shape, folder / "model.safetensors", metadata={"format": "pt"})
    _refused(FailedError, "model.norm.weight", folder)


def _edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_architectures_that_are_not_supported(folder, tmp_path):
    _edit_config(folder, model_type="t5", architectures=["T5ForConditionalGeneration"])
    _refused(UsageError, "not supported", folder)
    _edit_config(folder, model_type="nonesuch", architectures=["LlamaForCausalLM"])
    _refused(UsageError, "does not know", folder)
    _edit_config(folder, model_type="nonesuch", auto_map={"AutoConfig": "own.OwnConfig"})
    (folder / "own.py").write_text("raise SystemExit('must not run')")
    _refused(UsageError, "--trust-remote-code", folder)
    tiny("Bloom").save_pretrained(tmp_path / "bloom")
    with pytest.raises(UsageError, match="BloomForCausalLM is not supported"):
        load_model(str(tmp_path / "bloom"))


def test_devices_and_dtypes(folder, monkeypatch):
    _refused(UsageError, "--device 'gpu'", folder, device="gpu")
    _refused(UsageError, "--dtype 'int8'", folder, dtype="int8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _refused(LackingError, "cuda:1", folder, device="cuda:1")
    _refused(LackingError, "balanced", folder, device="balanced")
    assert load_model(str(folder), dtype="fp16").dtype == torch.float16


def _free_memory(monkeypatch, size):
    real = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real._replace(available=size))


def test_a_model_larger_than_memory(folder, monkeypatch):
    needed = (folder / "model.safetensors").stat().st_size
    expected = load_model(str(folder))
    _free_memory(monkeypatch, needed)
    _refused(LackingError, "--device auto", folder, device="cpu")
    spread = load_model(str(folder))  # accelerate decides; some of it may go to disk
    assert spread.fingerprint == expected.fingerprint


@pytest.mark.parametrize("arch", ["Qwen3", "GPT2", "Mixtral"])
def test_capture_works_with_layers_on_disk(arch, tmp_path):
    tiny(arch).save_pretrained(tmp_path)
    taps = []
    pair = load_model(str(tmp_path)), load_model(str(tmp_path), device="offload")
    assert "meta" in {p.device.type for p in pair[1].model.parameters()}
    for loaded in pair:
        with capture(loaded, taps.append, pre_rope=True):
            run_batch(loaded, token_ids())
    for here, offloaded in zip(taps[:3], taps[3:], strict=True):
        for name in ("q", "k", "v", "q_pre", "k_pre"):
            torch.testing.assert_close(getattr(here, name), getattr(offloaded, name))
    for read in (output_slices, value_weight):
        torch.testing.assert_close(*(read(x.model, x.layout, 1) for x in pair))


def test_the_users_own_warning_settings_survive(folder):
    before = list(warnings.filters)
    load_model(str(folder))
    assert warnings.filters == before


def test_a_model_without_a_stated_length_accepts_any(monkeypatch):
    monkeypatch.setattr(load_module, "_LENGTHS", ("no_such_entry",))
    assert wrap_model(tiny("Llama")).context_length == sys.maxsize
