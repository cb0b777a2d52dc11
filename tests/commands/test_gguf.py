"""A GGUF file as a command's model."""

import json
from pathlib import Path

import pytest

from kvprof.benchmark.shapes import has_weights, load_shape
from tests.commands.running import kvprof
from tests.models.gguf_files import HEADS, KV_HEADS, LAYERS, WIDTH, write_llama

pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf", rounded=True)


def test_the_result_names_the_file_and_how_it_is_rounded(file: Path, tmp_path: Path) -> None:
    to = tmp_path / "r.json"
    done = kvprof("spectrum", file, "--tokens", 128, "--seq-len", 64, "--json", to)
    assert done.code == 0, done.stderr
    inputs = json.loads(to.read_text())["inputs"]
    assert inputs["gguf"]["file"] == "tiny.gguf"
    assert inputs["gguf"]["architecture"] == "llama"
    assert inputs["gguf"]["quantisation"].startswith("Q8_0 ")
    assert "tiny.gguf, Q8_0 " in " ".join(done.stdout.split())


def test_a_plan_is_for_the_file_that_it_was_made_of(file: Path, tmp_path: Path) -> None:
    plan, other = tmp_path / "x.plan", write_llama(tmp_path / "other.gguf", rounded=False)
    options = ("--method", "kq", "--rate", 0.3, "--option", "grid=2", "--option", "minimum=2")
    made = kvprof("plan", file, *options, "--calibrate-tokens", 1024, "--save", plan)
    assert made.code == 0, made.stderr
    asked = ("--prompt", "the", "--max-new-tokens", 2, "--plan", plan)
    assert kvprof("generate", file.parent, "--gguf", file.name, *asked).code == 0
    refused = kvprof("generate", other, *asked)
    assert refused.code == 2
    assert "not for the model given" in refused.error


def test_what_is_damaged_or_not_there_is_one_line(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:700])
    done = kvprof("spectrum", cut)
    assert done.code == 1
    assert "cut.gguf is truncated or damaged" in done.error
    assert "no such file" in kvprof("spectrum", tmp_path / "none.gguf").error
    assert "leave it out" in kvprof("spectrum", file, "--gguf", "tiny.gguf").error
    assert "leave it out" in kvprof("spectrum", "reference", "--gguf", "tiny.gguf").error


def test_bench_takes_its_shape(file: Path) -> None:
    shape = load_shape(str(file))
    assert (shape.layers, shape.num_heads, shape.num_kv_heads) == (LAYERS, HEADS, KV_HEADS)
    assert shape.head_dim == WIDTH // HEADS
    assert has_weights(str(file))
