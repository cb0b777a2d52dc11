"""vLLM beside a real run: what the engine is given, what its stamps come to, and what is told."""

import json
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvprof.benchmark import external
from kvprof.benchmark.external import VllmShape, measure_vllm
from kvprof.models.load import LoadedModel, load_model
from tests.benchmark.external_engine import write_engine
from tests.commands.running import kvprof
from tests.serving.tiny import VOCABULARY, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), device="cpu")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(cpu: bool = True, **facts: Any) -> Path:
        seen = tmp_path / "seen.json"
        told = json.dumps({"vocabulary": VOCABULARY, "seen": str(seen), **facts})
        place = write_engine(tmp_path / "engine", told, cpu=cpu)
        monkeypatch.setenv("PYTHONPATH", str(place))
        monkeypatch.syspath_prepend(str(place))
        return seen

    return make


def test_the_figure_is_the_last_requests_mean_without_the_first_run(
    loaded: LoadedModel, engine: Any
) -> None:
    seen = engine()
    found = measure_vllm(VllmShape.of(loaded), [(1, 40, 8), (3, 20, 5), (1, 40, 8), (1, 9, 1)])
    assert (found["why"], found["version"]) == (None, "0.26.9")
    first, second = found["rows"]
    assert (first["batch"], first["input_len"], first["output_len"]) == (1, 40, 8)
    assert first["tbt_samples"] == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 5e-3])
    assert first["tbt_seconds"] == pytest.approx(3e-3)
    assert (first["ttft_seconds"], second["ttft_seconds"]) == (0.25, None)
    given = json.loads(seen.read_text())
    # Room for what the others of a batch decode until the last prompt is read: 3 pieces and 16.
    assert (given["longest"], given["batch"]) == (48, 3)
    shape = loaded.model.config
    for name in ("hidden_size", "num_key_value_heads", "num_hidden_layers", "vocab_size"):
        assert given["config"][name] == getattr(shape, name)
    assert given["config"]["architectures"] == ["LlamaForCausalLM"]
    assert shape.max_position_embeddings == 512  # the model's own stays


def test_positions_beyond_the_models_context_are_no_reason(
    loaded: LoadedModel, engine: Any
) -> None:
    seen = engine()
    found = measure_vllm(VllmShape.of(loaded), [(2, 500, 12)])
    assert found["why"] is None
    assert json.loads(seen.read_text())["longest"] == 500 + 12 + 2 + 16


@pytest.mark.parametrize(
    ("cpu", "facts", "why"),
    [
        (True, {"fails": True}, "ValueError: No memory of 3 GiB"),
        (False, {}, "runs on a GPU"),
    ],
)
def test_an_engine_that_does_not_answer_says_why(
    cpu: bool, facts: dict[str, Any], why: str, loaded: LoadedModel, engine: Any
) -> None:
    engine(cpu, **facts)
    found = measure_vllm(VllmShape.of(loaded), [(1, 8, 4)])
    assert found["rows"] == []
    assert why in found["why"]


def test_an_interrupt_ends_the_engine(loaded: LoadedModel, engine: Any) -> None:
    seen = engine(hangs=True)
    asked = threading.Event()

    def stop() -> bool:
        if seen.is_file():
            asked.set()
        return asked.is_set()

    begun = time.monotonic()
    found = measure_vllm(VllmShape.of(loaded), [(1, 8, 4)], should_stop=stop)
    assert "interrupted" in found["why"]
    assert time.monotonic() - begun < 60


def test_what_says_nothing_is_given_up(
    loaded: LoadedModel, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(hangs=True)
    monkeypatch.setattr(external, "_SILENT_SECONDS", 0.3)
    assert "said nothing" in measure_vllm(VllmShape.of(loaded), [(1, 8, 4)])["why"]


_RUN = ("bench", "--jct", "--methods", "full", "--input-len", 12, "--output-len", 4)


def _bench(folder: Path, to: Path, *more: Any) -> Any:
    return kvprof(*_RUN, "--model", folder, "--repeats", 1, "--json", to, *more)


def test_bench_sets_it_beside_full_and_compare_knows_it(
    folder: Path, engine: Any, tmp_path: Path
) -> None:
    engine()
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    done = _bench(folder, first, "--vllm")
    assert done.code == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("vLLM 0.26.9 "))
    assert row.split()[-3] == "3.00"  # ms; after it, what that is to full
    assert "median over 5 runs" in " ".join(done.stdout.split())
    result = json.loads(first.read_text())
    assert result["inputs"]["vllm"] is True
    assert result["data"]["external"]["rows"][0]["tbt_seconds"] == pytest.approx(3e-3)
    second.write_bytes(first.read_bytes())
    compared = kvprof("compare", first, second, "--all")
    assert compared.code == 0, compared.stderr
    assert "vLLM 0.26.9" in compared.stdout


def test_a_run_without_it_names_the_option(folder: Path, tmp_path: Path) -> None:
    done = _bench(folder, tmp_path / "a.json")
    assert done.code == 0, done.stderr
    assert "time between tokens was not measured: it was not asked for (--vllm)" in " ".join(
        done.stdout.split()
    )


def test_an_engine_that_fails_leaves_the_others_figures(
    folder: Path, engine: Any, tmp_path: Path
) -> None:
    engine(fails=True)
    done = _bench(folder, tmp_path / "a.json", "--vllm")
    assert done.stdout.startswith("INCOMPLETE")
    assert "vLLM was not measured: ValueError: No memory of 3 GiB" in " ".join(done.stdout.split())
    data = json.loads((tmp_path / "a.json").read_text())["data"]
    assert data["cases"][0]["jct_seconds"] > 0
    assert data["external"]["rows"] == []


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_asking_for_it_is_refused_before_anything_runs(
    folder: Path, tmp_path: Path
) -> None:
    done = _bench(folder, tmp_path / "a.json", "--vllm")
    assert done.code == 3
    assert "--vllm: vLLM is not installed: " in done.error


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--composed", "--vllm", "--model", "reference"), "--vllm stands beside a real run"),
        (("--vllm", "--output-len", "1"), "one token has no time to the next"),
    ],
)
def test_what_makes_no_sense_is_refused(more: tuple[str, ...], why: str) -> None:
    done = kvprof("bench", "--jct", *more)
    assert done.code == 2
    assert why in done.error
    assert "means nothing without --jct" in kvprof("bench", "--vllm").error


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_itself_answers(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    found = measure_vllm(VllmShape.of(loaded), [(1, 40, 6), (2, 30, 4)])
    assert found["why"] is None
    assert found["version"][0].isdigit()
    assert all(row["tbt_seconds"] > 0 for row in found["rows"])
    assert [len(row["tbt_samples"]) >= 3 for row in found["rows"]] == [True, True]
