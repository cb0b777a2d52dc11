"""Shapes without weights as an engine serves them."""

import json
from pathlib import Path

import pytest

from kvprof.benchmark.jct.model_shape import load_model_shape
from kvprof.errors import UsageError
from kvprof.methods.accounting import rate
from kvprof.serving.refusals import check_servable
from kvprof.serving.shapes import drawn_plan, shape_folder, words_for_shape, write_shape


def test_what_is_written_of_a_shape_reads_as_that_shape(tmp_path: Path) -> None:
    model = load_model_shape("Llama-3.1-70B").of_layers(3)
    write_shape(model, tmp_path / "shape")
    read = load_model_shape(tmp_path / "shape")
    assert read.dense == model.dense
    for name in ("layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "context"):
        assert getattr(read.attention, name) == getattr(model.attention, name)
    config = json.loads((tmp_path / "shape" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_a_shape_that_no_llama_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="QK-norm"):
        write_shape(load_model_shape("Qwen3-8B"), tmp_path / "shape")
    assert not (tmp_path / "shape").exists()


@pytest.mark.parametrize("method", ["fdc", "fdc:kinds=2", "kq", "fdc-4bit", "palu", "zack"])
def test_a_drawn_plan_is_served_and_removes_what_was_asked_for(method: str) -> None:
    shape = load_model_shape("Llama-3.1-8B").of_layers(4).attention
    plan = drawn_plan(method, shape, 0.84 if "4bit" in method else 0.5).plan
    check_servable(plan)
    assert len(plan.layers) == 4
    stored = rate(plan, 1)
    if "4bit" in method:
        assert 0.8 < stored < 0.88
    else:
        assert abs(stored - 0.5) < 0.02


def test_a_folder_is_taken_as_it_is_and_a_name_gets_one_meanwhile(tmp_path: Path) -> None:
    with shape_folder(str(tmp_path)) as folder:
        assert folder == str(tmp_path)
    with shape_folder("llama-3.1-8b", 1) as folder:
        assert Path(folder).name == "Llama-3.1-8B"
        assert Path(folder, "config.json").exists()
    assert not Path(folder).exists()


def test_what_is_given_is_not_given_twice(tmp_path: Path) -> None:
    words = ["--load-format", "dummy", "--skip-tokenizer-init"]
    assert words_for_shape(str(tmp_path), []) == words
    assert words_for_shape(str(tmp_path), ["--load_format=dummy"]) == words[2:]
    assert words_for_shape(str(tmp_path), words) == []
    (tmp_path / "tokenizer.json").write_text("{}")
    assert words_for_shape(str(tmp_path), []) == words[:2]
