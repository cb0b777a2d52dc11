import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvprof.errors import Interrupted, UsageError
from kvprof.evaluation.frontier import Half
from kvprof.methods.advice import PLANS, is_measured
from kvprof.methods.engine_cache import CacheLayer
from kvprof.methods.plan_files import load_plan
from kvprof.models.config_files import read_share, weight_bytes
from kvprof.records.schema import validate_result
from tests.commands.running import kvprof
from tests.conftest import calibrate_on_few


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
    for share in (0.99, 0.97, 0.9):
        data = advice(tmp_path, "Llama-3.1-8B", "--gpu", "h100-80gb", "--keep", share)["data"]
        served = [one for one in data["plans"][1:] if one["engine"] == "vLLM"]
        least = {one["plan"]: min(one["keeps_at_least"], one["finds_at_least"]) for one in served}
        enough = [one for one in served if least[one["plan"]] >= share]
        assert data["best"] == max(enough, key=lambda one: one["users"])["plan"]


def test_a_plan_that_another_model_does_not_bear_is_not_named(tmp_path: Path) -> None:
    data = advice(tmp_path, "Gemma-3-27B", "--gpu", "h200-141gb")["data"]
    fp8 = next(one for one in data["plans"] if one["plan"] == "fp8_e4m3")
    assert fp8["keeps_at_least"] < 0.6  # on Qwen2.5-Coder-1.5B, whose keys have a bias
    assert data["best"] == "int8_per_token_head"


def test_no_command_is_advised_that_no_engine_starts(tmp_path: Path) -> None:
    long = kvprof("advise", "Llama-3.1-8B", "--gpu", "l4-24gb", "--context", "128k")
    assert (long.code, "vllm serve" in long.stdout) == (0, False)
    own = advice(tmp_path, "reference", "--gpu", "l4-24gb")
    config = json.loads(
        (Path(own["data"]["plans"][0]["command"].split()[2]) / "config.json").read_text()
    )
    assert own["inputs"]["context"] == config["max_position_embeddings"] < 32_768


@pytest.mark.parametrize(
    ("model", "measured"),
    [
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", True),
        ("qwen2.5-coder-1.5b.gguf", True),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", True),
        ("Qwen/Qwen2.5-Coder-1.5B", False),
        ("Qwen/Qwen2.5-Coder-14B-Instruct", False),
    ],
)
def test_a_measured_model_is_known_by_its_name(model: str, measured: bool) -> None:
    names = "Qwen2.5-Coder-1.5B", "SmolLM2-135M"
    assert any(is_measured({"measured_on": name}, model) for name in names) is measured


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


_MIXED = {"num_experts": 16, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("name", "config", "size"),
    [
        ("Some-7B-Instruct-1M", {}, 14_000_000_000),  # of a million tokens of context
        ("Some-1.5m", {"weights": 5}, 3_000_000),
        ("Some-30B-A3B", _MIXED, 60_000_000_000),
        ("Some-17B-16E", _MIXED, None),  # what a token reads
        ("Some-8B-AWQ", {"quantization_config": {"bits": 4}}, None),
        ("Some-4", {}, None),
    ],
)
def test_weights_are_sized_by_a_name_that_tells_it(
    name: str, config: dict[str, Any], size: int | None
) -> None:
    if size is None:
        with pytest.raises(UsageError):
            weight_bytes(name, config)
    else:
        assert weight_bytes(name, config)[0] == size


def test_a_step_reads_the_experts_that_a_token_is_sent_to(tmp_path: Path) -> None:
    data = advice(tmp_path, "gpt-oss-120b", "--gpu", "h200-141gb", "--context", "64")["data"]
    assert data["plans"][0]["step_seconds"] == pytest.approx(60.8 * 2**30 / 32 / 4.8e12, rel=1e-2)
    fp8 = next(one for one in data["plans"] if one["plan"] == "fp8_e4m3")
    assert fp8["measured_on"] == "Qwen2.5-Coder-1.5B"  # keys of both have a bias


def test_experts_are_counted_by_the_names_that_families_use() -> None:
    assert read_share({"num_experts": 0, "moe_num_experts": 64, "moe_k": 6}) == 6 / 64
    assert read_share({"num_local_experts": 8, "num_experts_per_tok": 10**400}) == 1
    assert read_share({"n_routed_experts": 8, "num_experts_per_tok": "2"}) == 1 / 8


def test_a_context_that_is_asked_for_stays(tmp_path: Path) -> None:
    result = advice(tmp_path, "reference", "--gpu", "l4-24gb", "--context", "32k", "--users", 10**6)
    assert result["inputs"]["context"] == 32_768
    assert ["states a context" in result["warnings"][0], len(result["warnings"])] == [True, 2]


def test_scales_of_narrow_heads_are_counted() -> None:
    narrow = [CacheLayer("full", 4, 64)]
    plan = next(one for one in PLANS if one.name == "hadamard 3/2")
    assert plan.token_bytes(narrow) == [4 * (64 * (3 + 2) / 8 + 2 * 4)]  # scale and zero of each


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


#: What plans keep in these tests, by their method: the middle, and half of the interval.
_KEEPS = {"turboquant_4bit_nc": 0.97, "int4_per_token_head": 0.2, "hadamard-int4": 0.998}


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model whose heads and layers every format takes."""
    from tests.models.folder import save_tiny

    return save_tiny(tmp_path_factory.mktemp("wide"), num_hidden_layers=6, head_dim=64)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Let evaluations say what `_KEEPS` has, else 0.999; return the methods that were measured."""
    monkeypatch.setenv("KVPROF_CACHE", str(tmp_path / "cache"))
    calibrate_on_few(monkeypatch)
    found: list[str] = []

    def evaluation(_: Half, plan: Any, *__: Any) -> dict[str, Any]:
        found.append(plan.method)
        keeps = _KEEPS.get(plan.method, 0.999)
        ends = keeps - 0.001, keeps + 0.001
        return {
            **{"relative_accuracy": keeps, "relative_accuracy_interval": ends},
            **{"decoded_tokens": 2048, "tasks": {}},
        }

    monkeypatch.setattr(Half, "evaluation", evaluation)
    return found


_H100 = ("--gpu", "h100-80gb", "--context", "64", "--minutes", 5)


def test_what_would_change_the_answer_is_measured_first(
    tmp_path: Path, wide_folder: Path, measured: list[str]
) -> None:
    result = advice(tmp_path, wide_folder, *_H100)
    plans = {one["plan"]: one for one in result["data"]["plans"]}
    best = plans[result["data"]["best"]]
    served = [one for one in plans.values() if one["engine"] == "vLLM"]
    enough = [one for one in served if one["keeps_at_least"] >= 0.99]
    assert best == max(enough, key=lambda one: one["users"])
    assert best["measured_here"]
    assert (best["keeps"], best["keeps_interval"]) == (0.999, [0.998, 1.0])
    assert best["measured_on"] == str(wide_folder)
    # The plan that the config alone would name, then those that fit more users, most first.
    assert measured[:3] == ["int8_per_token_head", "int4_per_token_head", "fp8_e4m3"]
    assert best["plan"] == "fp8_e4m3"
    assert plans["int4_per_token_head"]["keeps"] == 0.2


def test_what_was_not_reached_keeps_the_nearest_models_figure(
    tmp_path: Path, wide_folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Half.evaluation

    def broken_off(half: Half, *arguments: Any) -> dict[str, Any]:
        if measured:
            raise Interrupted
        return before(half, *arguments)

    monkeypatch.setattr(Half, "evaluation", broken_off)
    result = advice(tmp_path, wide_folder, *_H100)
    here = [one["plan"] for one in result["data"]["plans"] if one["measured_here"]]
    assert here == ["16 bits", measured[0]]
    other = next(one for one in result["data"]["plans"] if one["plan"] == "q8_0")
    assert (other["measured_on"], other["measured_here"]) == ("SmolLM2-135M", False)
    assert "q8_0" in next(one for one in result["warnings"] if "not finished" in one)


def test_a_plan_that_this_model_cannot_have_gets_no_other_models_figure(
    tmp_path: Path, tiny_folder: Path, measured: list[str]
) -> None:
    plans = advice(tmp_path, tiny_folder, *_H100)["data"]["plans"]
    row = next(one for one in plans if one["plan"] == "q8_0")
    assert (row["keeps"], row["measured_on"]) == (None, None)
    assert "multiple of 32" in row["refused"]


def test_the_best_plan_of_kvprofs_own_is_saved(
    tmp_path: Path, wide_folder: Path, measured: list[str]
) -> None:
    path = tmp_path / "own.plan"
    result = advice(tmp_path, wide_folder, *_H100, "--save", path)
    saved = load_plan(path)
    own = [one for one in result["data"]["plans"] if one["engine"] == "torch only" and one["keeps"]]
    best = max((one for one in own if one["keeps_at_least"] >= 0.99), key=lambda one: one["users"])
    assert saved.method == next(one.method for one in PLANS if one.name == best["plan"])
    assert saved.fingerprint == result["inputs"]["fingerprint"]


def test_a_second_call_goes_on_where_the_first_one_was(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvprof.evaluation.evaluator import Evaluator

    monkeypatch.setenv("KVPROF_CACHE", str(tmp_path / "cache"))
    calibrate_on_few(monkeypatch)
    first = advice(tmp_path, tiny_folder, *_H100)["data"]

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was measured")

    monkeypatch.setattr(Evaluator, "found", never)
    assert advice(tmp_path, tiny_folder, *_H100)["data"] == first


def test_a_plan_that_loses_needles_is_not_named(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(share: float) -> dict[str, Any]:
        return {"tasks": {"niah_single_1": {"accuracy": share, "items": 4}}}

    def evaluation(half: Half, plan: Any, *rest: Any) -> dict[str, Any]:
        return before(half, plan, *rest) | found(0.25 if plan.method == "fp8_e4m3" else 0.5)

    before = Half.evaluation
    monkeypatch.setattr(Half, "evaluation", evaluation)
    monkeypatch.setattr(Half, "baseline", lambda *_: found(0.5))
    data = advice(tmp_path, *_H100)["data"]
    plans = {one["plan"]: one for one in data["plans"]}
    assert plans["fp8_e4m3"]["finds_at_least"] == 0.5  # of those that the model finds
    assert plans["fp8_e4m3"]["keeps_at_least"] >= 0.99
    assert plans[data["best"]]["finds_at_least"] == 1
