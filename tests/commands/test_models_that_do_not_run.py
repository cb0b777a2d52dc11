"""Models that can be looked at and not run compressed: every command says so before it works."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.commands.running import kvprof, words_of
from tests.models.folder import byte_tokenizer, save_tiny
from tests.models.tiny import VOCABULARY

WHY = {"FalconH1": "recurrent state", "Gemma3n": "another layer"}


@pytest.fixture(scope="module", params=sorted(WHY))
def odd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param) / request.param, arch=request.param)


def test_commands_that_need_it_refuse_before_they_calibrate(odd: Path) -> None:
    planned = ("--method", "kq", "--rate", "0.3")
    for command in (
        ("plan", odd, *planned),
        ("eval", odd, *planned),
        ("frontier", odd, "--no-cache"),
        ("generate", odd, "--prompt", "a prompt", "--max-new-tokens", "4", *planned),
        ("plan", odd, "--transfer"),
    ):
        done = kvprof(*command)
        assert done.code == 2, command
        assert WHY[odd.name] in done.error
        assert "calibrat" not in done.stderr
        assert done.stdout == ""


def test_spectrum_takes_it_and_says_what_cannot_be_had(odd: Path, tmp_path: Path) -> None:
    path = tmp_path / "spectrum.json"
    done = kvprof("spectrum", odd, "--tokens", "64", "--seq-len", "32", "--json", path)
    assert done.code == 0, done.stderr
    warnings = json.loads(path.read_text())["warnings"]
    assert any(WHY[odd.name] in warning for warning in warnings)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_theta": 0.0}, "logits"),
        ({"rope_type": "foo"}, "'foo'"),
    ],
)
def test_a_config_that_says_nonsense_is_told_from_a_model_that_cannot_run(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    folder = save_tiny(tmp_path / "model")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.setdefault("rope_parameters", {}).update(change)
    file.write_text(json.dumps(config))
    done = kvprof("plan", folder, "--method", "fp8", "--calibrate", "random:256")
    assert done.code in (1, 2)
    assert says in done.error


def test_another_model_at_the_same_path_takes_nothing_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPROF_CACHE", str(tmp_path / "cache"))
    folder = save_tiny(tmp_path / "model")

    def found() -> tuple[int, int]:
        path = tmp_path / "result.json"
        done = kvprof(
            *words_of(f"frontier {folder} --methods fp8 --text prose --sequences 2 --seq-len 16"),
            *words_of(f"--tasks none --metric perplexity --json {path} --force"),
        )
        assert done.code == 0, done.stderr
        inputs = json.loads(path.read_text())["inputs"]
        return inputs["evaluations_found"], inputs["evaluations_measured"]

    first = found()
    assert first[0] == 0
    assert found()[1] == 0
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_act": "relu"}))
    assert found() == first


@pytest.mark.parametrize(
    "words",
    [
        ("spectrum", "--source", "TEXT", "--tokens", 64, "--seq-len", 32),
        ("stability", "--source", "TEXT", "--against", "prose", "--seq-len", 32),
        ("sensitivity", "--text", "TEXT", "--seq-len", 32),
        ("plan", "--method", "fdc", "--removal", 0.3, "--calibrate", "TEXT"),
        ("eval", "--method", "fp8", "--text", "TEXT", "--seq-len", 32, "--tasks", "none"),
        ("frontier", "--methods", "fp8", "--text", "TEXT", "--seq-len", 32, "--no-cache"),
        ("generate", "--method", "full", "--prompt", "a <image>"),
        ("generate", "--method", "full", "--prompt", "a", "--chat"),
    ],
    ids=lambda words: words[0],
)
def test_a_token_beyond_the_embedding_is_named(tmp_path: Path, words: tuple[Any, ...]) -> None:
    folder = save_tiny(tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = "{{ messages[0].content }} <image>"
    tokenizer.save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("A picture <image> and words about it. " * 20)
    done = kvprof(words[0], folder, *(text if word == "TEXT" else word for word in words[1:]))
    assert done.code == 2
    assert "'<image>'" in done.error
    assert str(VOCABULARY) in done.error


def test_a_model_of_zeros_runs_compressed(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    file = folder / "model.safetensors"
    save_file({name: 0 * one for name, one in load_file(file).items()}, file, {"format": "pt"})
    finest = ("--grid", 1, "--minimum", 1, "--calibrate", "random:256", "--rate", 0.3)
    few = ("--prompt", "a", "--max-new-tokens", 4)
    for method in ("kq", "fdc", "palu"):
        done = kvprof("generate", folder, "--method", method, *few, *finest)
        assert done.code == 0, done.stderr
    done = kvprof("plan", folder, "--method", "kq", "--allocation", "fisher", *finest)
    assert done.code == 2
    assert "fisher" in done.error
