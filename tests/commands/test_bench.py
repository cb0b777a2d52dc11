"""``kvprof bench`` from the command line: what it asks for, what it refuses, what it leaves."""

import csv
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvprof.benchmark.request import DEFAULT_METHODS, BenchRequest
from kvprof.methods.plan_files import save_plan
from kvprof.records.files import read_result
from kvprof.views.bench import median_seconds
from tests.commands.running import kvprof, words_of
from tests.methods.shapes import layer, plan
from tests.views.synthetic_bench import bench_result

Run = Callable[..., tuple[dict[str, Any], list[str]]]


class Recorder:
    """Stands for the measurement: keeps the request and returns figures that are known."""

    def __init__(self) -> None:
        self.request: BenchRequest | None = None
        self.act: Callable[[], None] = lambda: None

    def __call__(
        self, request: BenchRequest, *, progress: Any, should_stop: Callable[[], bool]
    ) -> tuple[dict[str, Any], list[str]]:
        self.request = request
        with progress("decode", 2) as bar:
            bar.advance()
            self.act()
        data = bench_result(phases=("decode",), batches=(1,))["data"]
        if should_stop():
            data["rows"] = data["rows"][:1]
        return data, ["fdc: samples spread by 12 %"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr("kvprof.benchmark.run.run_bench", recorder)
    return recorder


def asked(recorder: Recorder, *arguments: Any) -> BenchRequest:
    done = kvprof("bench", *arguments)
    assert done.code == 0, done.stderr
    assert recorder.request is not None
    return recorder.request


# --- what is asked for ------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("--seq", "100k"), ("--device", "cpu")])
def test_alone_it_does_the_sensible_thing_on_a_cpu(
    measured: Recorder, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert asked(measured, *arguments) == BenchRequest(
        shape="Llama-3.1-8B",
        seqs=(102_400,),
        batches=(1,),
        rate=0.5,
        ranks=None,
        phases=("decode", "prefill"),
        methods=DEFAULT_METHODS,
        dtype="float32",
        repeats=None,
        device="cpu",
        seed=0,
    )


@pytest.mark.parametrize(("device", "resolved"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_on_a_gpu_it_measures_batch_1_and_8_in_bfloat16(
    measured: Recorder, monkeypatch: pytest.MonkeyPatch, device: str, resolved: int
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    request = asked(measured, "--device", device)
    assert (request.batches, request.dtype) == ((1, 8), "bfloat16")
    assert request.device == f"cuda:{resolved}"


def test_every_option_arrives(measured: Recorder, tmp_path: Path) -> None:
    request = asked(
        measured,
        "--model",
        "qwen3-8b",
        "--seq",
        "32k,4k,1.5k",
        "--batch",
        "8,2",
        "--rate",
        "0.25",
        "--ranks",
        tmp_path / "r.json",
        "--phase",
        "prefill",
        "--methods",
        "full, fdc-4bit,fdc",
        "--dtype",
        "fp16",
        "--repeats",
        "5",
        "--device",
        "cpu",
        "--seed",
        "7",
    )
    assert request == BenchRequest(
        shape="qwen3-8b",
        seqs=(1536, 4096, 32_768),
        batches=(2, 8),
        rate=0.25,
        rate_given=True,
        ranks=tmp_path / "r.json",
        phases=("prefill",),
        methods=("full", "fdc-4bit", "fdc"),
        dtype="float16",
        repeats=5,
        device="cpu",
        seed=7,
    )


# --- what it leaves ---------------------------------------------------------------------------


def test_the_report_goes_to_stdout_and_progress_to_stderr(measured: Recorder) -> None:
    done = kvprof("bench", "--device", "cpu")
    assert "Decode, batch 1, 100k tokens" in done.stdout
    assert "samples spread by 12 %" in done.stdout
    assert "decode …" in done.stderr
    assert "decode …" not in done.stdout


def test_the_result_is_whole_and_holds_no_path(measured: Recorder, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = kvprof("bench", "--device", "cpu", "--ranks", tmp_path / "my.json", "--out", run)
    assert done.code == 0, done.stderr
    result = read_result(run)
    assert result["kind"] == "bench"
    assert result["complete"] is True
    assert result["inputs"] == {
        "model": "Llama-3.1-8B",
        "seqs": [102_400],
        "batches": [1],
        "rate": 0.5,
        "ranks": "my.json",
        "phases": ["decode", "prefill"],
        "methods": list(DEFAULT_METHODS),
        "dtype": "float32",
        "repeats": None,
        "device": "cpu",
        "seed": 0,
    }
    assert str(tmp_path) not in (run / "result.json").read_text()
    again = kvprof("bench", "--device", "cpu", "--out", run)
    assert again.code == 2
    assert "--force" in again.error


def test_json_and_csv_take_stdout_from_the_report(measured: Recorder) -> None:
    done = kvprof("bench", "--device", "cpu", "--json", "-")
    assert json.loads(done.stdout)["kind"] == "bench"
    done = kvprof("bench", "--device", "cpu", "--csv", "-")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["method"] for row in rows if row["kind"] == "method"] == [
        *DEFAULT_METHODS,
        "fdc-4bit",
    ]


def test_figures(measured: Recorder, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra plot")
    svg, png = tmp_path / "b.svg", tmp_path / "b.png"
    done = kvprof("bench", "--device", "cpu", "--svg", svg, "--png", png)
    assert done.code == 0, done.stderr
    assert svg.read_text().lstrip().startswith("<?xml")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_keeps_what_was_measured(measured: Recorder, tmp_path: Path) -> None:
    measured.act = lambda: os.kill(os.getpid(), signal.SIGINT)
    path = tmp_path / "b.json"
    done = kvprof("bench", "--device", "cpu", "--json", path)
    assert done.code == 130
    result = read_result(path)
    assert result["complete"] is False
    assert result["incomplete_reason"] == "interrupted"
    assert len(result["data"]["rows"]) == 1
    assert "INCOMPLETE" in done.stdout


# --- what it refuses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "Llama-9"], ("'Llama-9'", "Llama-3.1-8B")),
        (["--seq", "0"], ("--seq", "'0'", "below 1")),
        (["--seq", "-4k"], ("--seq", "'-4k'")),
        (["--seq", "long"], ("--seq", "'long'", "8k")),
        (["--seq", "1,024"], ("--seq", "1024,2048")),
        (["--seq", ""], ("--seq",)),
        (["--batch", "0"], ("--batch", "'0'")),
        (["--batch", "many"], ("--batch", "'many'")),
        (["--rate", "1"], ("--rate 1", "1 would store nothing")),
        (["--rate", "-0.1"], ("--rate -0.1",)),
        (["--rate", "nan"], ("--rate nan",)),
        (["--rate", "0.99"], ("0.99", "0.875")),
        (["--rate", "half"], ("--rate half", "30%")),
        (["--ranks", "missing.json"], ("--ranks missing.json", "no such file")),
        (["--phase", "training"], ("'training'", "decode, prefill")),
        (["--phase", ","], ("--phase", "','")),
        (["--methods", "fcd"], ("'fcd'", "fdc")),
        (["--methods", "fdc-5bit"], ("fdc-5bit", "did you mean fdc-4bit")),
        (["--methods", ","], ("--methods", "names no method")),
        (["--dtype", "int8"], ("--dtype", "'int8'", "float32")),
        (["--repeats", "2"], ("--repeats 2", "3 or more")),
        (["--repeats", "few"], ("--repeats", "'few'")),
        (["--device", "tpu"], ("--device", "'tpu'", "cpu")),
        (["--device", "balanced"], ("--device", "'balanced'")),
        (["--seed", "-1"], ("--seed", "-1")),
        (["--json", "-", "--csv", "-"], ("--json and --csv",)),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], says: tuple[str, ...]) -> None:
    device = [] if "--device" in arguments else ["--device", "cpu"]
    done = kvprof("bench", *arguments, *device)
    assert done.code == 2, done.stderr
    assert done.stdout == ""
    for words in says:
        assert words in done.error


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_without_that_gpu_it_says_what_to_do(
    device: str, measured: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = kvprof("bench", "--device", device)
    assert done.code == 3
    assert f"--device {device}: torch sees no CUDA GPUs" in done.error
    assert "--device cpu" in done.error
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    done = kvprof("bench", "--device", "cuda:3")
    assert done.code == 3
    assert "torch sees 1 CUDA GPU; the last GPU is cuda:0" in done.error
    assert measured.request is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[[64, 48], [32, 32]]", ("2 pairs", "Llama-3.1-8B", "8 KV heads")),
        (json.dumps([[144, 64]] * 8), ("144", "128")),
        (json.dumps([[0, 64]] * 8), ("rank 0",)),
        ('{"keys": [64, 64]}', ("ranks.json", "[K, V] pairs")),
        ("[[64, 48", ("ranks.json", "JSON")),
    ],
)
def test_ranks_of_another_shape_are_refused(
    content: str, says: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "ranks.json"
    path.write_text(content)
    done = kvprof("bench", "--device", "cpu", "--methods", "fdc", "--ranks", path)
    assert done.code == 2, done.stderr
    for words in says:
        assert words in done.error


def test_a_plan_for_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.safetensors"
    save_plan(plan(layer()), path)
    done = kvprof("bench", "--device", "cpu", "--methods", "fdc", "--ranks", path)
    assert done.code == 2, done.stderr
    assert "2 KV heads of 16" in done.error
    assert "Llama-3.1-8B has 8 of 128" in done.error


# --- for real ---------------------------------------------------------------------------------


def test_a_small_run_measures_and_reports(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    done = kvprof(
        *words_of("bench --seq 64 --methods full,fdc --phase decode --repeats 3 --device cpu"),
        *words_of(f"--json {path} --force"),
    )
    assert done.code == 0, done.stderr
    assert "Decode, batch 1, 64 tokens" in done.stdout
    result = read_result(path)
    full, fdc = result["data"]["rows"]
    assert (full["method"], full["rate"], full["schedule"]) == ("full", 0, None)
    assert fdc["rate"] == pytest.approx(0.5)
    assert fdc["cache_bytes"] * 2 == full["cache_bytes"] == 64 * 8 * 2 * 128 * 4
    assert sum(map(sum, (fdc["ranks"]["keys"], fdc["ranks"]["values"]))) == 8 * 128
    assert fdc["error"] < 1e-4
    middle = median_seconds(fdc)
    assert middle is not None
    assert fdc["tb_per_s"] == pytest.approx(fdc["bytes_moved"] / middle / 1e12)
    names = [row["name"] for row in result["data"]["baselines"] if row["seconds"]]
    assert full["baseline"] == fdc["baseline"]
    assert fdc["baseline"] in names
    assert "kvprof" in names
