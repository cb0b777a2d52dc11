import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvprof.records.schema import validate_result
from tests.commands.running import kvprof


def advice(tmp_path: Path, *arguments: Any) -> dict[str, Any]:
    path = tmp_path / "advice.json"
    done = kvprof("advise", *arguments, "--json", path, "--force")
    assert done.code == 0, done.stderr
    result = json.loads(path.read_text())
    validate_result(result)
    return result


def test_users_are_the_pool_over_what_a_request_takes(tmp_path: Path) -> None:
    data = advice(tmp_path, "Llama-3.1-8B", "--gpu", "h100-80gb", "--context", "32k")["data"]
    first, fp8 = data["plans"][:2]
    assert first["bytes_per_token"] == 131_072  # 32 layers, 8 heads of 128, K and V, 2 bytes
    assert first["users"] == pytest.approx(data["available_bytes"] / 131_072 / 32_768, rel=1e-3)
    assert fp8["users"] == pytest.approx(2 * first["users"], rel=1e-3)
    seconds = (data["weights_bytes"] + 131_072 * 32_768) / 3.35e12
    assert first["step_seconds"] == pytest.approx(seconds)


def test_the_plan_named_keeps_enough_and_fits_most_users(tmp_path: Path) -> None:
    for share in ("0.99", "0.97"):
        data = advice(tmp_path, "Llama-3.1-8B", "--gpu", "h100-80gb", "--keep", share)["data"]
        enough = [
            one
            for one in data["plans"]
            if one["engine"] == "vLLM" and one["keeps_at_least"] >= float(share)
        ]
        assert data["best"] == max(enough, key=lambda one: one["users"])["plan"]


def test_a_plan_that_another_model_does_not_bear_is_not_named(tmp_path: Path) -> None:
    data = advice(tmp_path, "Gemma-3-27B", "--gpu", "h200-141gb")["data"]
    fp8 = next(one for one in data["plans"] if one["plan"] == "fp8_e4m3")
    assert fp8["keeps_at_least"] < 0.6  # on Qwen2.5-Coder-1.5B, whose keys have a bias
    assert data["best"] == "int8_per_token_head"


def test_a_folder_with_a_config_alone_is_advised(tmp_path: Path) -> None:
    folder = tmp_path / "Some-7B"
    folder.mkdir()
    config = {
        **{"model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048},
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    }
    (folder / "config.json").write_text(json.dumps(config))
    data = advice(tmp_path, folder, "--gpu", "a100-80gb")["data"]
    assert data["weights_bytes"] == 14_000_000_000  # 2 bytes for each of the name's 7 billion
    plans = {one["plan"]: one for one in data["plans"]}
    assert plans["16 bits"]["bytes_per_token"] == 27 * 576 * 2
    assert plans["turboquant_4bit_nc"]["users"] is None
    assert "MLA" in plans["turboquant_4bit_nc"]["refused"]


def test_neither_torch_nor_transformers_is_imported() -> None:
    program = (
        "import sys; from kvprof.cli import app\n"
        "try: app(['advise', 'Llama-3.1-8B', '--gpu', 'h100-80gb', '--csv', '-'])\n"
        "except SystemExit: print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stdout.startswith("plan,engine,")


def test_the_table_of_what_plans_keep_is_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    advise_kept = import_module("advise_kept")
    assert json.loads(advise_kept.TABLE.read_text("utf-8")) == advise_kept.table()
