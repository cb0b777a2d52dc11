"""Shapes that ship fit together, and a local config gives the shape that its model has."""

import json

import pytest
from transformers import Gemma2Config, GptOssConfig, MistralConfig, Qwen3Config

from kvprof.benchmark.shapes import load_shape
from kvprof.errors import FailedError, UsageError
from kvprof.models.locate import shipped_shapes
from tests.benchmark.folder import save_config
from tests.models.tiny import tiny

# Parameters of W_Q, W_K, W_V and W_O over all layers, in billions, as their model cards' totals
# leave room for: a wrong head count or width shows here.
ATTENTION_PARAMETERS = {
    "Llama-2-7B": 2.147, "Llama-2-13B": 4.194, "Llama-3.1-8B": 1.342, "Llama-3.1-70B": 12.080,
    "Mistral-7B-v0.3": 1.342, "Phi-3-14B": 2.621, "Yi-9B": 1.812, "Yi-34B": 7.046,
    "Falcon-180B": 36.490, "Qwen3-8B": 1.510, "Qwen3-32B": 6.040, "gpt-oss-120b": 0.955,
    "Gemma-3-27B": 4.096,
}  # fmt: skip


def test_all_models_of_the_issue_ship():
    assert set(shipped_shapes()) == set(ATTENTION_PARAMETERS)


@pytest.mark.parametrize("name", list(shipped_shapes()))
def test_a_shape_fits_together(name):
    shape = load_shape(name)
    assert shape.num_heads == shape.group * shape.num_kv_heads
    assert shape.head_dim % 16 == 0
    assert shape.hidden_size % 64 == 0
    assert shape.rope.theta is not None
    assert shape.rope.theta >= 10_000
    assert (shape.sliding_window is None) == (shape.full_layers == shape.layers)
    assert shape.scaling == pytest.approx(
        168**-0.5 if name == "Gemma-3-27B" else shape.head_dim**-0.5
    )
    weights = shape.hidden_size * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    assert weights * shape.layers / 1e9 == pytest.approx(ATTENTION_PARAMETERS[name], abs=6e-4)
    assert json.dumps(shape.described())


def test_layers_with_a_window_are_counted():
    assert load_shape("gpt-oss-120b").full_layers == 18
    assert load_shape("gemma-3-27b").full_layers == 10
    assert load_shape("Gemma-3-27B").described()["measured"].startswith("one of the 10 layers")
    assert load_shape("Llama-3.1-8B").described()["measured"] == "one layer"


def test_a_config_gives_the_shape_of_its_model(tmp_path):
    shape = load_shape(save_config(tmp_path / "small", rope_theta=5e5))
    assert (shape.name, shape.layers, shape.hidden_size) == ("small", 2, 512)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (8, 4, 64)
    assert (shape.context, shape.sinks, shape.sliding_window) == (4096, False, None)
    assert load_shape(tmp_path / "small" / "config.json").head_dim == 64


def test_the_reference_model_is_a_shape():
    shape = load_shape("reference")
    assert (shape.layers, shape.num_kv_heads, shape.head_dim, shape.group) == (6, 4, 128, 2)


def test_windows_sinks_and_soft_caps_are_found(tmp_path):
    GptOssConfig(num_hidden_layers=4).save_pretrained(tmp_path / "oss")
    oss, shipped = load_shape(tmp_path / "oss"), load_shape("gpt-oss-120b")
    for fact in (
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "sinks",
        "sliding_window",
        "scaling",
        "rope",
        "hidden_size",
        "context",
    ):
        assert getattr(oss, fact) == getattr(shipped, fact), fact
    assert oss.window_pattern == "WFWF"
    Gemma2Config(num_hidden_layers=3).save_pretrained(tmp_path / "gemma2")
    gemma = load_shape(tmp_path / "gemma2")
    assert (gemma.softcap, gemma.window_pattern, gemma.head_dim) == (50.0, "WFW", 256)
    MistralConfig(num_hidden_layers=3, sliding_window=4096).save_pretrained(tmp_path / "mistral")
    assert load_shape(tmp_path / "mistral").measured_window == 4096
    Qwen3Config(num_hidden_layers=2).save_pretrained(tmp_path / "qwen")
    assert load_shape(tmp_path / "qwen").qk_norm


@pytest.mark.parametrize(
    ("arch", "reason"),
    [("FalconH1", "recurrent state"), ("Gemma3n", "another layer")],
)
def test_a_config_whose_model_cannot_run_compressed_says_why(arch, reason, tmp_path):
    tiny(arch).config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=f"cannot run with a compressed cache.*{reason}"):
        load_shape(str(tmp_path))


def test_what_is_no_shape_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UsageError):
        load_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UsageError, match="MambaConfig has no attention heads"):
        load_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises((FailedError, UsageError)):
        load_shape(tmp_path)
