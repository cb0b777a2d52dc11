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


def test_bench_names_the_file_that_it_took_of_a_folder(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(file.read_bytes())
    asked = ("--seq", 256, "--methods", "full,uniform", "--phase", "decode", "--repeats", 3)
    to = tmp_path / "b.json"
    done = kvprof("bench", "--model", folder, "--gguf", "b.gguf", *asked, "--json", to)
    assert done.code == 0, done.stderr
    result = json.loads(to.read_text())
    assert result["inputs"]["model"] == "b.gguf"
    assert result["data"]["shape"]["gguf"]["file"] == "b.gguf"
    assert result["data"]["shape"]["gguf"]["quantisation"].startswith("Q8_0 ")
    assert "b.gguf, Q8_0 " in " ".join(done.stdout.split())
    several = kvprof("bench", "--model", folder, *asked)
    assert several.code == 2
    assert "2 GGUF files; choose with --gguf a.gguf" in several.error
    assert "no file 'c.gguf'" in kvprof("bench", "--model", folder, "--gguf", "c.gguf").error
    assert "--model names" in kvprof("bench", "--gguf", "b.gguf").error
    assert "means nothing with --load" in kvprof("bench", "--load", "--gguf", "b.gguf").error
    (folder / "a.gguf").unlink()
    assert load_shape(str(folder)).name == "b.gguf"
    assert has_weights(str(folder))


@pytest.mark.parametrize("way", ["--real", "--composed"])
def test_a_request_is_timed_on_a_file(file: Path, tmp_path: Path, way: str) -> None:
    to = tmp_path / "j.json"
    given = ("--model", file.parent, "--gguf", file.name, "--methods", "full", "--repeats", 3)
    lengths = ("--input-len", 64, "--output-len", 4)
    done = kvprof("bench", "--jct", way, *given, *lengths, "--json", to)
    assert done.code == 0, done.stderr
    shape = json.loads(to.read_text())["data"]["shape"]
    assert (shape["name"], shape["gguf"]["file"]) == ("tiny.gguf", "tiny.gguf")
    assert "tiny.gguf, Q8_0 " in " ".join(done.stdout.split())


def test_a_shape_to_transfer_is_a_files(file: Path) -> None:
    asked = ("--rate", "50%", "--link", "pcie5x16", "--method", "kq")
    done = kvprof("plan", "--transfer", "--shape", file, *asked)
    assert done.code == 0, done.stderr


def test_serve_takes_no_gguf_file(file: Path) -> None:
    for model in (file, file.parent, "smollm2"):
        done = kvprof("serve", model, "--method", "kq", "--rate", 0.3)
        assert done.code == 2
        assert "is a GGUF file" in done.error
