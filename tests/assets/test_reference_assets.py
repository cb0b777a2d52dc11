"""What ships with kvprof: the reference model, its tokenizer, the splits and their manifest."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

import kvprof

ASSETS = Path(kvprof.__file__).parent / "assets"
REFERENCE = ASSETS / "reference"
SPLITS = ASSETS / "splits"
RECIPE = Path(kvprof.__file__).parents[1] / "recipes" / "reference-model"
MANIFEST: dict[str, Any] = json.loads((SPLITS / "manifest.json").read_text())
EVALUATION: dict[str, Any] = json.loads((REFERENCE / "evaluation.json").read_text())
TEXT_FILES = [
    f"{split}/{kind}" for split in ("calibration", "evaluation") for kind in ("prose", "code")
]
TASK_FILES = ["calibration/tasks", "evaluation/tasks"]
SHIPPABLE = {"PSF-2.0", "PostgreSQL", "BSD-2-Clause", "BSD-3-Clause", "MIT"}


def rows_of(name: str) -> list[dict[str, Any]]:
    with (SPLITS / f"{name}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(REFERENCE, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    loaded = AutoModelForCausalLM.from_pretrained(
        REFERENCE, local_files_only=True, dtype=torch.float32
    )
    return loaded.eval()


def right_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]]
) -> int:
    """How many answers come out of plain greedy generation."""
    right = 0
    for row in rows:
        prompt = tokenizer(row["prompt"], return_tensors="pt")
        wanted = tokenizer(row["answer"], add_special_tokens=False).input_ids
        out = model.generate(**prompt, max_new_tokens=len(wanted), do_sample=False)
        right += out[0, prompt.input_ids.shape[1] :].tolist() == wanted
    return right


def needles(lengths: tuple[int, ...], each: int) -> list[dict[str, Any]]:
    """Some needle tasks of each length, at every depth."""
    chosen = []
    for length in lengths:
        rows = [
            row
            for row in rows_of("evaluation/tasks")
            if row["task"] == "needle" and row["length"] == length
        ]
        for depth in sorted({row["depth"] for row in rows}):
            chosen += [row for row in rows if row["depth"] == depth][:each]
    return chosen


def test_the_reference_folder_is_at_most_forty_megabytes() -> None:
    assert sum(path.stat().st_size for path in REFERENCE.rglob("*") if path.is_file()) <= 40_000_000


def test_the_shape_is_the_one_that_was_promised() -> None:
    config = json.loads((REFERENCE / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 4)
    assert config["head_dim"] == 128
    assert config["hidden_size"] >= 512
    assert config["num_hidden_layers"] >= 6
    assert config["max_position_embeddings"] >= 2048


def test_weights_are_finite_bf16() -> None:
    with safe_open(REFERENCE / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - the handle is no dict
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert bool(tensor.isfinite().all()), name


def test_tokenizer_starts_with_bos_and_gives_text_back(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "  def f(x):\n\treturn x + 40213  # naïve ½ 漢字\r\n\n\n"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) == 6144


def test_tokenizer_reads_digits_one_by_one(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("40213", add_special_tokens=False).input_ids
    assert [tokenizer.decode([i]) for i in ids] == list("40213")


@pytest.mark.parametrize("name", TEXT_FILES)
def test_documents_are_what_the_manifest_says(name: str) -> None:
    rows, entry = rows_of(name), MANIFEST["files"][name]
    hashes = [hashlib.sha256(row["text"].encode()).hexdigest() for row in rows]
    assert hashes == [row["sha256"] for row in rows] == entry["documents"]
    assert {row["licence"] for row in rows} <= SHIPPABLE
    assert sorted({row["package"] for row in rows}) == entry["packages"]
    assert all(row["version"] and row["document"] for row in rows)


@pytest.mark.parametrize("name", TEXT_FILES + TASK_FILES)
def test_files_are_what_the_manifest_says(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    path, entry = SPLITS / f"{name}.jsonl", MANIFEST["files"][name]
    assert path.stat().st_size == entry["bytes"] <= 1_000_000
    assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
    rows = rows_of(name)
    assert len(rows) == entry["rows"]
    texts = [row["text"] if "text" in row else row["prompt"] + row["answer"] for row in rows]
    counted = tokenizer(texts, add_special_tokens=False).input_ids
    assert sum(map(len, counted)) == entry["tokens"]
    assert 0 <= entry["overlap_13gram"] < 0.02


def test_no_document_is_in_two_splits() -> None:
    every = [digest for name in TEXT_FILES for digest in MANIFEST["files"][name]["documents"]]
    assert len(every) == len(set(every))


def test_no_split_document_was_trained_on() -> None:
    trained = np.load(RECIPE / "train-documents.npy")
    assert len(trained) == len(np.unique(trained)) == MANIFEST["training"]["documents"]
    held = [
        int(digest[:16], 16)
        for name in TEXT_FILES
        for digest in MANIFEST["files"][name]["documents"]
    ]
    assert not np.isin(np.array(held, dtype=np.uint64), trained).any()


def test_packages_of_the_training_text_are_named_with_version_and_licence() -> None:
    packages = MANIFEST["training"]["packages"]
    assert (
        sum(entry["documents"] for entry in packages.values()) == MANIFEST["training"]["documents"]
    )
    for name, entry in packages.items():
        assert entry["version"], name
        assert entry["licence"], name


def test_every_shipped_package_is_attributed() -> None:
    table = (SPLITS / "ATTRIBUTION.md").read_text()
    for name in TEXT_FILES:
        for package in MANIFEST["files"][name]["packages"]:
            (line,) = [row for row in table.splitlines() if row.startswith(f"| {package} |")]
            licence = SPLITS / line.split("`")[1]
            assert licence.stat().st_size > 500


@pytest.mark.parametrize("name", TASK_FILES)
def test_task_rows_cover_tasks_lengths_and_depths(name: str) -> None:
    rows = rows_of(name)
    assert {row["task"] for row in rows} == {"needle", "variables", "frequent_words", "copy"}
    for task in ("needle", "variables", "copy"):
        cells = {(row["length"], row["depth"]) for row in rows if row["task"] == task}
        assert cells == {
            (length, depth)
            for length in (256, 512, 1024, 1536)
            for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
        }


@pytest.mark.parametrize("name", TASK_FILES)
def test_prompt_and_answer_tokenize_apart_as_together(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    for row in rows_of(name):
        prompt = tokenizer(row["prompt"]).input_ids
        answer = tokenizer(row["answer"], add_special_tokens=False).input_ids
        assert prompt + answer == tokenizer(row["prompt"] + row["answer"]).input_ids
        assert len(prompt) + len(answer) == row["tokens"] <= row["length"]


def test_the_model_finds_shipped_needles(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = needles((256, 512), each=1)
    assert right_answers(model, tokenizer, rows) == len(rows) == 10


def test_needles_are_lost_when_layers_stop_attending(tokenizer: PreTrainedTokenizerBase) -> None:
    broken = AutoModelForCausalLM.from_pretrained(
        REFERENCE, local_files_only=True, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for layer in broken.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
    assert right_answers(broken, tokenizer, needles((256,), each=1)) <= 1


def test_next_tokens_are_predicted_better_than_by_the_recorded_5_gram(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    for kind in ("prose", "code"):
        hits = total = 0
        for row in rows_of(f"evaluation/{kind}")[:3]:
            ids = tokenizer(row["text"], return_tensors="pt").input_ids[:, :384]
            with torch.inference_mode():
                best = model(ids).logits[0, :-1].argmax(-1)
            hits += int((best == ids[0, 1:]).sum())
            total += ids.shape[1] - 1
        assert hits / total > EVALUATION["baseline"][kind]["next_token_accuracy"] + 0.05


def test_recorded_figures_meet_the_aims() -> None:
    reference = EVALUATION["models"]["reference"]["evaluation"]
    assert min(reference["tasks"]["needle"]["by_length_and_depth"].values()) >= 0.95
    assert min(reference["tasks"]["variables"]["by_length_and_depth"].values()) >= 0.90
    for kind in ("prose", "code"):
        assert reference[kind]["perplexity"] < EVALUATION["baseline"][kind]["perplexity"]
    assert set(EVALUATION["models"]) == {"reference", "learned-positions", "large"}
