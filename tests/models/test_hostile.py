"""Models that are not what they say: templates that loop, sizes that nothing has, hubs away."""

import contextlib
import json
import math
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvprof.benchmark.shapes import shape_of_config
from kvprof.errors import FailedError, KvprofError, LackingError, UsageError
from kvprof.models import chat, hub, locate
from kvprof.models.chat import ChatWriter
from kvprof.models.load import load_model
from kvprof.models.locate import check_config_sizes
from kvprof.runtime.generation import GenerationSettings, generate_text, prompt_ids
from kvprof.sources.windows import read_documents
from tests.records.hostile import LEAVES

MESSAGES = [{"role": "user", "content": "hi"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
FITS = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
TOLD = (
    "architectures", "attention_bias", "dtype", "eos_token_id", "hidden_act", "hidden_size",
    "initializer_range", "intermediate_size", "max_position_embeddings", "mlp_bias", "model_type",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id",
    "pretraining_tp", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "use_cache",
    "vocab_size",
)  # fmt: skip


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LOOPS, "0.5 s"),
        ("{{ 9 ** (9 ** 9) }}", "0.5 s"),
        ("{{ 'x' * 99999999999 }}", "memory"),
        ("{{ 'x' * 99999999 }}", "characters"),
        ("{{ raise_exception('no') }}", "refuses: no"),
        ("{{ messages[7].content.nothing }}", "refuses"),
    ],
)
def test_a_template_cannot_hang_or_fill_the_memory(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, template: str, message: str
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.5 if "0.5" in message else 120.0)
    tokenizer = load_model(str(tiny_folder)).tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", template)
    writer = ChatWriter(tokenizer, "tiny")
    with pytest.raises(FailedError, match=f"tiny: its chat template.*{message}"):
        writer(MESSAGES)
    # It starts again where its process was ended.
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }}")
    writer.close()
    assert writer(MESSAGES) == "hi"
    assert writer(MESSAGES) == "hi"
    writer.close()


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "head_dim"])
@pytest.mark.parametrize("value", [10**12, 0, -1, "64", 6.5, True, {}, 10**400])
def test_absurd_sizes_are_refused(name: str, value: Any) -> None:
    for config in ({**FITS, name: value}, {"text_config": {**FITS, name: value}}):
        with pytest.raises(FailedError, match=f"tiny: config.json: {name} is "):
            check_config_sizes("tiny", config)


def test_sizes_that_contradict_each_other() -> None:
    check_config_sizes("tiny", FITS, 1000)
    check_config_sizes("tiny", {**FITS, "num_attention_heads": 6, "head_dim": 10})
    for wrong in ({"num_attention_heads": 5}, {"num_key_value_heads": 3}):
        with pytest.raises(FailedError):
            check_config_sizes("tiny", {**FITS, **wrong})
    with pytest.raises(FailedError):
        check_config_sizes("tiny", {**FITS, "hidden_size": 2**18, "num_hidden_layers": 4096}, 10**6)
    with pytest.raises(FailedError):
        check_config_sizes("tiny", [1])


@pytest.mark.parametrize("text", ['{"hidden_size": 1' + "0" * 5000 + "}", "[" * 200_000, "\x00"])
def test_a_config_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FailedError, match=r"config\.json is damaged"):
        locate.locate(str(tmp_path))


def changed(folder: Path, new: Path, file: str, text: str) -> Path:
    """Return a copy of a model's folder, by links, in which one file is another."""
    for path in folder.iterdir():
        if path.name != file:
            (new / path.name).symlink_to(path)
    (new / file).write_text(text)
    return new


@settings(max_examples=40)
@given(
    key=st.sampled_from([*TOLD, "sliding_window", "layer_types", "rope_scaling", "head_dim"]),
    value=st.sampled_from([*LEAVES, math.nan, math.inf, -2, ["sliding_attention"] * 3]),
)
@example(key="hidden_act", value="nope")
@example(key="sliding_window", value=math.nan)
def test_a_config_that_says_anything_is_used_or_refused_in_a_line(
    tiny_folder: Path, key: str, value: Any
) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    with tempfile.TemporaryDirectory() as place:
        folder = changed(
            tiny_folder, Path(place), "config.json", json.dumps({**config, key: value})
        )
        for use in (shape_of_config, load_model):
            with contextlib.suppress(KvprofError):
                use(str(folder))


@pytest.mark.parametrize("value", ["x", [1, "x"], True, 1.5, {}, math.nan])
def test_a_text_ends_at_a_tokens_number(tiny_folder: Path, tmp_path: Path, value: Any) -> None:
    own = json.loads((tiny_folder / "generation_config.json").read_text())
    text = json.dumps({**own, "eos_token_id": value})
    folder = changed(tiny_folder, tmp_path, "generation_config.json", text)
    with pytest.raises(FailedError):
        load_model(str(folder))


def test_a_generation_config_that_cannot_be_followed(tiny_folder: Path, tmp_path: Path) -> None:
    own = json.loads((tiny_folder / "generation_config.json").read_text())
    text = json.dumps({**own, "repetition_penalty": "x"})
    loaded = load_model(str(changed(tiny_folder, tmp_path, "generation_config.json", text)))
    with pytest.raises(FailedError):
        generate_text(loaded, [1, 2], GenerationSettings(max_new_tokens=2))


def test_a_hub_that_does_not_answer_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_PATIENCE", 0.2)

    over, waited = threading.Event(), []

    def blocks(*_: Any, **__: Any) -> Any:
        waited.append(over.wait(60))
        raise OSError

    # Neither a name that cannot be looked up, nor a client that tries again and again.
    monkeypatch.setattr(socket, "create_connection", blocks)
    with pytest.raises(LackingError):
        hub.check_reachable("somebody/no-such-model", None)
    with pytest.raises(LackingError):
        locate.locate("somebody/no-such-model")
    assert not waited  # neither look-up came to its end
    over.set()


def test_a_line_as_long_as_the_file_is_read_in_parts(tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_text("word " * 1_000_000)
    (document,) = read_documents(text)
    first = next(iter(document))
    assert len(first) < 1_200_000
    (document,) = read_documents(text)
    assert "".join(document) == text.read_text()
    rows = tmp_path / "one.jsonl"
    rows.write_text(json.dumps({"text": "word " * 1_000_000}))
    (document,) = read_documents(rows)
    pieces = list(document)
    assert max(map(len, pieces)) < 1_200_000
    assert "".join(pieces) == text.read_text()


def test_a_prompt_that_cannot_fit_is_not_cut_into_tokens(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(str(tiny_folder))
    monkeypatch.setattr(type(loaded.tokenizer()), "__call__", None)  # it is never asked
    with pytest.raises(UsageError):
        prompt_ids(loaded, "x" * 10_000_000, chat=False)
