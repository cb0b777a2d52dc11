import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvprof.records.schema import validate_result
from tests.commands.running import kvprof, result_of, words_of
from tests.conftest import calibrate_on_few

PROMPT = "The cache holds"
FDC = ("--method", "fdc", "--rate", 0.4, "--grid", 1, "--minimum", 1)
FULL = ("--method", "full")


generate_json = partial(result_of, "generate")


def own_text(folder: Path, new: int, **options: Any) -> tuple[list[int], Any]:
    """Generate with transformers alone."""
    model, tokenizer = (x.from_pretrained(folder) for x in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)
    return out[0, ids.shape[1] :].tolist(), tokenizer


def test_full_writes_the_models_own_text(tiny_folder: Path, tmp_path: Path) -> None:
    expected, tokenizer = own_text(tiny_folder, 24)
    done = kvprof("generate", tiny_folder, *FULL, "--prompt", PROMPT, "--max-new-tokens", 24)
    assert done.code == 0, done.stderr
    assert done.stdout == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    result = generate_json(
        tmp_path, tiny_folder, *FULL, "--prompt", PROMPT, "--max-new-tokens", 24, "--diff"
    )
    data = result["data"]
    assert data["tokens"] == expected
    assert data["difference"]["position"] is None
    assert max(data["difference"]["kl"]) < 1e-9
    assert data["prompt_tokens"] == 16  # <bos> and a token per letter


def test_a_compressed_cache_is_measured_beside_its_account(
    tiny_folder: Path, tmp_path: Path
) -> None:
    result = generate_json(tmp_path, tiny_folder, *FDC, "--prompt", PROMPT, "--max-new-tokens", 20)
    cache = result["data"]["cache"]
    assert cache["tokens"] == result["data"]["prompt_tokens"] + len(result["data"]["tokens"]) - 1
    assert cache["measured_bytes"] == cache["account_bytes"]
    assert cache["full_bytes"] == cache["tokens"] * 768
    assert 0.4 <= cache["rate"] < 0.45
    done = kvprof("generate", tiny_folder, *FDC, "--prompt", PROMPT, "--max-new-tokens", 20)
    assert "compression rate" in done.stderr
    assert "compression rate" not in done.stdout


def test_the_difference_is_where_the_texts_part(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = (tiny_folder, *FDC, "--prompt", PROMPT, "--max-new-tokens", 30, "--diff")
    data = generate_json(tmp_path, *arguments)["data"]
    expected, tokenizer = own_text(tiny_folder, 30)
    found = data["difference"]
    assert found["tokens"] == expected
    place = next(
        i for i, (a, b) in enumerate(zip(data["tokens"], expected, strict=False)) if a != b
    )
    assert found["position"] == place
    assert found["common_text"] == tokenizer.decode(expected[:place])
    assert found["full_rest"] == tokenizer.decode(expected[place:])
    assert len(found["kl"]) == place + 1
    assert all(value > 0 for value in found["kl"])
    ours, theirs = found["compressed_token"], found["full_token"]
    assert (ours["id"], theirs["id"]) == (data["tokens"][place], expected[place])
    # Greedy: each finds its own token at least as probable as the other's.
    assert ours["compressed_probability"] >= theirs["compressed_probability"]
    assert theirs["full_probability"] >= ours["full_probability"]
    shown = kvprof("generate", *arguments)
    assert f"{ours['compressed_probability']:.4f}" in shown.stdout


def test_a_saved_plan_writes_the_same(tiny_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "plan.safetensors"
    assert kvprof("plan", tiny_folder, *FDC, "--save", saved).code == 0
    arguments = ("--prompt", PROMPT, "--max-new-tokens", 20)
    made = generate_json(tmp_path, tiny_folder, *FDC, *arguments)
    read = generate_json(tmp_path, tiny_folder, "--plan", saved, *arguments)
    assert made["data"] == read["data"]


def test_prompts_come_from_files_and_stdin(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (tiny_folder, *FULL, "--max-new-tokens", 8)
    expected = kvprof("generate", *arguments, "--prompt", PROMPT).stdout
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    assert kvprof("generate", *arguments, "--prompt-file", file).stdout == expected

    from typer.testing import CliRunner

    from kvprof.cli import app

    done = CliRunner().invoke(
        app, ["generate", *map(str, arguments), "--prompt", "-"], input=PROMPT + "\n"
    )
    assert done.stdout == expected


def test_sampling_is_repeatable(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = (tiny_folder, *FULL, "--prompt", PROMPT, "--max-new-tokens", 20)

    def drawn(*more: Any) -> list[int]:
        return list(generate_json(tmp_path, *arguments, *more)["data"]["tokens"])

    first = drawn("--sample", "--seed", 3)
    assert first == drawn("--sample", "--seed", 3)
    assert first != drawn("--sample", "--seed", 4)
    assert first != drawn()
    # Almost no mass but the most probable token's: greedy again.
    assert drawn("--sample", "--top-p", 1e-6) == drawn()
    assert drawn("--sample", "--temperature", 1e-4) == drawn()
    # One seed, one text: full draws what the model draws.
    both = generate_json(tmp_path, *arguments, "--sample", "--seed", 3, "--diff")
    assert both["data"]["difference"]["position"] is None


def test_the_end_of_text_ends_it(tiny_folder: Path, tmp_path: Path) -> None:
    expected, _ = own_text(tiny_folder, 12)
    folder = tmp_path / "ends"
    folder.mkdir()
    for file in tiny_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "generation_config.json").read_text())
    config["eos_token_id"] = [expected[5]]
    (folder / "generation_config.json").write_text(json.dumps(config))
    data = generate_json(
        tmp_path, folder, *FULL, "--prompt", PROMPT, "--max-new-tokens", 12, "--diff"
    )["data"]
    first = expected.index(expected[5])
    assert data["tokens"] == expected[: first + 1]
    assert data["ended"] == data["difference"]["ended"] == "end_of_text"
    count = len(data["tokens"])
    assert data["difference"]["length"] == {
        "tokens": count,
        "full_tokens": count,
        "ratio": 1.0,
        "ends": True,
        "full_ends": True,
    }


def test_the_chat_template_wraps_the_prompt(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    folder.mkdir()
    for file in tiny_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %} [assistant]{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    data = generate_json(
        tmp_path, folder, *FULL, "--prompt", "hi", "--chat", "--max-new-tokens", 2
    )["data"]
    assert data["prompt"] == "<bos>[user] hi [assistant]"
    assert data["prompt_tokens"] == 1 + len("[user] hi [assistant]")  # one <bos>, not two


def test_json_on_stdout_leaves_no_room_for_the_text(tiny_folder: Path) -> None:
    done = kvprof(
        "generate", tiny_folder, *FULL, "--prompt", PROMPT, "--max-new-tokens", 4, "--json", "-"
    )
    assert json.loads(done.stdout)["kind"] == "generate"


def test_ctrl_c_keeps_what_was_written(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvprof.runtime import generation

    written: list[str] = []
    original = generation._Streamer.on_finalized_text

    def slowly(self: Any, text: str, stream_end: bool = False) -> None:
        written.append(text)
        original(self, text, stream_end)
        if len(written) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(generation._Streamer, "on_finalized_text", slowly)
    path = tmp_path / "cut.json"
    done = kvprof(
        "generate",
        tiny_folder,
        *FULL,
        "--prompt",
        PROMPT,
        *words_of(f"--max-new-tokens 100 --diff --json {path}"),
    )
    assert done.code == 130
    result = json.loads(path.read_text())
    validate_result(result)
    assert not result["complete"]
    assert result["data"]["ended"] == "interrupted"
    assert result["data"]["difference"] is None
    assert 0 < len(result["data"]["tokens"]) < 100
    assert done.stdout.strip() == result["data"]["text"].strip()


@pytest.mark.slow
def test_the_reference_model_writes_and_departs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate_on_few(monkeypatch)
    arguments = ("reference", "--method", "kq", "--rate", 0.5, "--max-new-tokens", 24, "--diff")
    result = generate_json(tmp_path, *arguments, "--prompt", "The kernel uses a page table to")
    assert len(result["data"]["tokens"]) == 24
    assert 0.5 <= result["data"]["cache"]["rate"] < 0.55
    assert result["data"]["difference"]["kl"]
