"""A GGUF file's model as a folder: what transformers alone reads there, and plans of it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvprof
from kvprof.errors import UsageError
from kvprof.methods.plan_files import load_plan, save_plan
from kvprof.models.load import load_model
from kvprof.runtime.compressed import compressed
from kvprof.serving.unpacked import UnpackedModel
from tests.models.gguf_files import write_llama

pytest.importorskip("gguf", reason="the package gguf is not installed")

TEXTS = ("the year 12345, a  e\n\tand 2,048", "tea at 11 12 112 ")


@pytest.mark.parametrize(
    "made",
    [{"template": "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"}, {"pre": "smollm"}],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_folder_is_the_files_model(
    tmp_path: Path, made: dict[str, str], dtype: torch.dtype
) -> None:
    """Weights, configuration, tokens, template and the tokens that end an answer are the file's."""
    file = write_llama(tmp_path / "tiny.gguf", rounded=True, **made)
    name = str(dtype).removeprefix("torch.")
    own = load_model(str(file), device="cpu", dtype=name)
    folder = UnpackedModel(str(file), tmp_path / "model", dtype).folder
    read = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert read.dtype == dtype
    weights, written = own.model.state_dict(), read.state_dict()
    assert weights.keys() == written.keys()
    assert all(torch.equal(weights[key], written[key]) for key in weights)
    assert not hasattr(read.config, "quantization_config")
    assert read.config.architectures == ["LlamaForCausalLM"]
    assert read.generation_config.eos_token_id == own.model.generation_config.eos_token_id
    ids = torch.arange(3, 43).reshape(2, 20)
    assert torch.equal(read(ids).logits, own.model(ids).logits)
    mine, theirs = own.tokenizer(), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert theirs(text).input_ids == mine(text).input_ids
    assert theirs.chat_template == mine.chat_template
    assert theirs.eos_token_id == mine.eos_token_id


def test_a_plan_of_the_file_is_one_of_the_folder(tmp_path: Path) -> None:
    """It is the same plan and gives the same numbers; another model's stays another's."""
    file = write_llama(tmp_path / "tiny.gguf", rounded=True)
    own = load_model(str(file), device="cpu", dtype="float32")
    made = kvprof.plan(own, method="kq", rate=0.4, calibrate="random:512", grid=4, minimum=4)
    save_plan(made, tmp_path / "of-file.plan")
    unpacked = UnpackedModel(str(file), tmp_path / "model", torch.float32)
    read = load_model(str(unpacked.folder), device="cpu", dtype="float32")
    moved = load_plan(unpacked.plan_of(tmp_path / "of-file.plan"))
    assert moved.fingerprint == read.fingerprint != made.fingerprint
    ids = torch.arange(3, 43).reshape(2, 20)
    with compressed(own, made):
        wanted = own.model(ids).logits
    with compressed(read, moved):
        assert torch.equal(read.model(ids).logits, wanted)
    other = write_llama(tmp_path / "other.gguf", seed=1, rounded=True)
    theirs = load_model(str(other), device="cpu", dtype="float32")
    save_plan(kvprof.plan(theirs, method="full", rate=0), tmp_path / "other.plan")
    with pytest.raises(UsageError, match="the plan is for"):
        unpacked.plan_of(tmp_path / "other.plan")


def test_a_file_that_reads_no_text_is_refused(tmp_path: Path) -> None:
    """An engine's clients send texts."""
    for name, made, why in (
        ("bare", {"tokenizer": False}, "has no tokenizer"),
        ("odd", {"pre": "nobody-knows"}, "nobody-knows"),
    ):
        file = write_llama(tmp_path / f"{name}.gguf", **made)
        with pytest.raises(UsageError, match=why):
            UnpackedModel(str(file), tmp_path / name, torch.float32)
        assert not (tmp_path / name).exists()
