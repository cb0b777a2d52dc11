"""A GGUF file as a command's model."""

import json
from pathlib import Path

import pytest

from kvprof.benchmark.shapes import has_weights, load_shape
from kvprof.commands import bench_load_servers
from kvprof.commands.bench_load_servers import engine_model, started_servers
from kvprof.errors import UsageError
from kvprof.methods.plan_files import load_plan
from kvprof.models.load import load_model, token_counter
from kvprof.records.load_names import load_methods
from kvprof.serving.load.lengths import load_lengths
from tests.commands.running import kvprof, process_of
from tests.models.gguf_files import write_llama

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
    assert "leave it out" in kvprof("spectrum", file, "--gguf", "tiny.gguf").error
    assert "leave it out" in kvprof("spectrum", "reference", "--gguf", "tiny.gguf").error


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
    assert "requires --model" in kvprof("bench", "--gguf", "b.gguf").error
    assert "requires --model" in kvprof("bench", "--load", "--gguf", "b.gguf").error
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


#: Inputs of a load that starts its servers.
LOAD = {
    "memory": 2**20, "replicas": 1, "router": "shortest-queue", "seed": 0, "rate": 0.5,
    "timeout": 9.0,
}  # fmt: skip


def test_servers_of_a_load_read_the_files_weights_while_it_lasts(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written out once, and a plan of the file is one of what was written."""
    monkeypatch.setattr(bench_load_servers, "find_spec", lambda name: name)
    saved = tmp_path / "own.plan"
    made = kvprof("plan", file, "--method", "kq", "--rate", 0, "--save", saved, "--minimum", 4)
    assert made.code == 0, made.stderr
    methods = load_methods(["full", "kq", "own.plan"], [1])
    lengths = load_lengths("in=64,out=8")
    with engine_model(str(file), None, []) as model:
        assert model.unpacked is not None
        assert model.unpacked.described["file"] == "tiny.gguf"
        targets = started_servers(model, methods, [saved], LOAD, lengths)
        words = [process_of(one)._commands(81) for one in targets]
        assert all(model.folder in command for command in words)
        moved = load_plan(Path(words[2][words[2].index("--plan") + 1]))
        written = load_model(model.folder, device="cpu")
        assert moved.fingerprint == written.fingerprint != load_plan(saved).fingerprint
        with pytest.raises(UsageError, match="the model has 512 positions"):
            started_servers(model, methods, [], LOAD, load_lengths("in=512,out=8"))
        with pytest.raises(UsageError, match="tale cannot be served"):
            started_servers(model, load_methods(["tale"], [1]), [], LOAD, lengths)
    assert not Path(model.folder).exists()
    with engine_model(str(file), None, ["--load-format", "dummy"]) as model:
        targets = started_servers(model, methods, [saved], LOAD, lengths)
        words = [process_of(one)._commands(81) for one in targets]
        assert str(saved) in words[2]  # random weights are nobody's


def test_texts_of_a_load_are_counted_by_the_files_tokenizer(file: Path) -> None:
    count = token_counter(str(file))
    for text in ("the tea", "a 12"):
        own = load_model(str(file), device="cpu").tokenizer()
        assert count(text) == len(own(text, add_special_tokens=False).input_ids)
