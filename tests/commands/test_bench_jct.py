"""``kvprof bench --jct`` from the command line: what it asks for, refuses, leaves and prints."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kvprof.benchmark.jct.request import JctRequest
from kvprof.errors import FailedError, Interrupted, LackingError
from kvprof.records.events import EVENTS
from kvprof.records.files import read_result, write_result
from kvprof.records.fold import result_of
from kvprof.records.journal import Journal, read_events
from tests.benchmark.jct.shapes import tiny_folder
from tests.commands.running import kvprof, words_of
from tests.records.streams import stream, write


class Recorder:
    """Stands for the run: keeps the request, and fails as it is told."""

    def __init__(self) -> None:
        self.request: JctRequest | None = None
        self.problem: Exception | None = None

    def __call__(self, request: JctRequest, journal: Any, **options: Any) -> None:
        self.request = request
        raise self.problem or LackingError("this was no run")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    recorder = Recorder()
    monkeypatch.setattr("kvprof.benchmark.jct.run.run_jct", recorder)

    def ask(*arguments: Any) -> JctRequest:
        done = kvprof("bench", "--jct", "--device", "cpu", *arguments)
        assert done.code == 3, done.stderr
        assert recorder.request is not None
        return recorder.request

    return ask


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvprof.benchmark.machine.cpu_read_bandwidth", lambda: 0.02)
    monkeypatch.setattr("kvprof.benchmark.machine.usable_threads", lambda: 1)


def test_alone_the_reference_model_answers(asked: Any) -> None:
    request = asked()
    assert (request.model, request.mode, request.baseline) == ("reference", "real", "full")
    assert request.methods == ("full", "palu", "fdc")
    assert (request.batches, request.input_lens, request.output_lens) == ((1,), (1024,), (64,))
    assert (request.dtype, request.device, request.rate) == ("float32", "cpu", 0.5)


def test_a_shape_is_composed_and_lengths_are_as_people_write_them(asked: Any) -> None:
    request = asked(
        *words_of("--model Llama-3.1-70B --tp 4 --input-len 128,1k,100k --output-len 256"),
        *words_of("--batch 1,8 --methods full,palu,fdc,kq --baseline palu --repeats 9 --seed 4"),
        *words_of("--rate 0.4 --layers 3"),
    )
    assert request.mode == "composed"
    assert request.input_lens == (128, 1024, 102_400)
    assert (request.output_lens, request.batches, request.tp) == ((256,), (1, 8), 4)
    assert (request.baseline, request.repeats, request.seed) == ("palu", 9, 4)
    assert (request.rate, request.layers) == (0.4, 3)


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        (("--trace", "fdc/arxiv"), "composed"),
        (("--methods", "fdc,fdc:no-post-rope"), "composed"),
        (("--composed",), "composed"),
        (("--model", "Llama-3.1-8B", "--real"), "real"),
    ],
)
def test_what_is_asked_for_decides_how_it_is_measured(
    asked: Any, arguments: tuple[str, ...], mode: str
) -> None:
    request = asked(*arguments)
    assert request.mode == mode
    if "--trace" in arguments:
        assert request.requests == 200


def test_without_full_the_first_method_is_the_baseline(asked: Any) -> None:
    assert asked("--methods", "fdc,palu").baseline == "fdc"


# --- what it leaves ---------------------------------------------------------------------------


def run_of(folder: Path, *arguments: Any) -> tuple[str, ...]:
    return (
        *words_of("bench --jct --model"),
        str(folder),
        *words_of("--device cpu --input-len 48 --output-len 9 --repeats 3 --methods full,fdc"),
        *map(str, arguments),
    )


@pytest.mark.usefixtures("quick")
def test_a_run_leaves_events_and_a_result_and_shows_both_methods(
    folder: Path, tmp_path: Path
) -> None:
    run, table = tmp_path / "run", tmp_path / "parts.csv"
    done = kvprof(*run_of(folder, "--out", run, "--csv", table))
    assert done.code == 0, done.stderr
    assert "JCT by part" in done.stdout
    assert "one layer of" in done.stderr
    result = read_result(run)
    assert (result["kind"], result["complete"]) == ("jct", True)
    assert result["inputs"]["input_lens"] == [48]
    assert str(folder) not in json.dumps(result["inputs"])
    recording = read_events(run / "events.jsonl")
    assert recording.finished
    assert json.loads((run / "events.jsonl").read_text().splitlines()[0])["format"] == EVENTS
    assert "attention" in table.read_text()
    again = kvprof(*run_of(folder, "--out", run))
    assert again.code == 2
    assert "--force" in again.error
    assert kvprof(*run_of(folder, "--out", run, "--force")).code == 0


@pytest.mark.usefixtures("quick")
def test_ctrl_c_keeps_what_was_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvprof.benchmark.jct import layer_bench

    point = layer_bench.LayerBench.point

    def watched(self: Any, variant: Any, *arguments: Any, **options: Any) -> Any:
        if variant.name == "fdc":
            os.kill(os.getpid(), signal.SIGINT)
        return point(self, variant, *arguments, **options)

    monkeypatch.setattr(layer_bench.LayerBench, "point", watched)
    run = tmp_path / "run"
    done = kvprof(*run_of(folder, "--out", run))
    assert done.code == 130, done.stderr
    result = read_result(run)
    assert (result["complete"], result["incomplete_reason"]) == (False, "interrupted")
    assert [case["method"] for case in result["data"]["cases"]] == ["full"]
    assert "incomplete" in done.stdout.lower()


def test_interrupted_before_anything_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(run: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise Interrupted

    monkeypatch.setattr("kvprof.benchmark.jct.run.run_composed", stopped)
    done = kvprof("bench", "--jct", "--composed", "--device", "cpu")
    assert done.code == 130


# --- a disk that is full by now -----------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_full_disk_costs_no_measurement(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, lines = Journal._write_on, []

    def full(self: Journal) -> None:
        lines.append(1)
        if len(lines) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(self)

    monkeypatch.setattr(Journal, "_write_on", full)
    run = tmp_path / "run"
    done = kvprof(*run_of(folder, "--out", run))
    assert done.code == 1
    assert "No space left on device" in done.error
    assert done.stderr.count("the measurement continues") == 1
    assert "JCT by part" in done.stdout
    result = read_result(run)
    assert result["complete"]
    assert [case["method"] for case in result["data"]["cases"]] == ["full", "fdc"]
    assert len(read_events(run / "events.jsonl").events) == 5


@pytest.mark.usefixtures("quick")
def test_a_forced_run_that_fails_leaves_the_earlier_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "x").mkdir(parents=True)
    write(run / "events.jsonl", stream(("full",)))
    write_result(run / "result.json", result_of(stream(("full",))))
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}

    def broken(*_arguments: Any) -> Any:
        raise FailedError("the model is damaged")

    monkeypatch.setattr("kvprof.benchmark.jct.run.run_composed", broken)
    done = kvprof(*run_of(folder, "--composed", "--out", run, "--force"))
    assert done.code == 1
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
