"""The step times that ship, and the tool that gathers such from loads that were served."""

import json
import runpy
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvprof.errors import UsageError
from kvprof.records.events import (
    LoadRateFinished,
    LoadRateStarted,
    LoadRequest,
    LoadServer,
    RunFinished,
    RunStarted,
)
from kvprof.records.files import read_result, write_result
from kvprof.records.fold import result_of
from kvprof.records.journal import Journal, read_events
from kvprof.serving.load.step_records import read_model_steps
from kvprof.serving.load.step_times import StepSample, StepTimes, fit_step_times

REPOSITORY = Path(__file__).parents[3]
SHIPPED = Path(str(files("kvprof") / "assets/step_times/h200.json"))
TOOL = SimpleNamespace(**runpy.run_path(str(REPOSITORY / "tools/step_times.py")))
TIMES = StepTimes((0.0,), (5e-3,), 5e-5, 1e-6, 0.0, 2e-4 - 5e-5)
#: What an engine tells: its front end has a tenth of a request's time.
LATE = {"requests": 2.0, "waiting": 0.0, "prefill": 1.0, "decode": 6.0, "end_to_end": 7.8}


def test_what_ships_tells_steps_near_those_that_were_measured():
    found = read_model_steps("Llama-3.1-8B")
    assert (found.device, found.tp) == ("NVIDIA H200", 1)
    # vLLM 0.26 says 57,576 pages of 16 tokens: activations take what is between.
    assert 57_576 < found.cache_bytes / 131_072 / 16 < 57_576 * 1.02
    full, compressed = found.method("full"), found.method("fdc")
    assert full.token_bytes == 131_072
    assert compressed.token_bytes == full.token_bytes / 2
    for one in found.methods.values():
        assert one.times.residual < 0.08
        assert one.times.per_context * one.times.per_pair > 0
    # The slope is bytes over bandwidth: 131,072 bytes at 4.3 to 4.9 TB/s.
    assert 131_072 / 4.9e12 < full.times.per_context < 131_072 / 4.3e12
    seventy = read_model_steps("meta-llama/Llama-3.1-70B", tp=4)
    assert "palu" in seventy.methods
    with pytest.raises(UsageError):
        found.method("tale")
    with pytest.raises(UsageError, match="Other with --tp 1"):
        read_model_steps("Other")


def served(
    folder,
    times=TIMES,
    batches=(1, 4, 16),
    prefills=(0, 40, 300, 900),
    requests=(),
    inputs=None,
    slow=None,
    **ended,
):
    """Write a load that a server took whose steps take known times.

    With `slow`, what its engine told, there is a second rate at which tokens take three times as
    long; `ended` is of the first.
    """
    folder.mkdir()
    short = [LoadRequest(0.0, "", n, 0.0, 0.0, p, 2, 0.1, 0.2, 2) for n, p in ((0, 100), (1, 300))]
    each = (100 * 101 / 2 + 300 * 301 / 2) / 400
    spans = [
        {
            "at": 0.0,
            "tokens": 10.0,
            "between": times.step(batch, 50.0 * batch * k, prefill, prefill * each),
            "batch": float(batch),
            "context": 50.0 * batch * k,
            "prefill": float(prefill),
        }
        for batch in batches
        for prefill in prefills
        for k in (1, 9)
    ]
    rates = [(1.0, spans, {"complete": True, "engine": {"prefix_hits": 0.0}} | ended)]
    if slow is not None:
        three = [span | {"between": 3 * span["between"]} for span in spans]
        rates.append((9.0, three, {"complete": True, "engine": slow}))
    environment = json.loads(SHIPPED.read_text())["environment"]
    given = {"tp": 1, "engine": None, "model": "Llama-3.1-8B"} | (inputs or {})
    with Journal(folder / "events.jsonl") as journal:
        started = (0.0, "2026-11-23T00:00:00Z", "0", "load", (), "served", given, environment)
        journal.emit(RunStarted(*started, {"name": given["model"]}, ("full",), "full"))
        journal.emit(LoadServer(0.0, "full", 1.0, 1, "vllm", 2000, 2_000_000))
        for rate, own, how in rates:
            case = f"full @ {rate:g}/s"
            journal.emit(LoadRateStarted(0.0, case, "full", rate, 2, 1.0))
            for one in (*short, *requests):
                journal.emit(LoadRequest(**{**vars(one), "case": case}))
            journal.emit(LoadRateFinished(1.0, case, spans=own, **how))
        journal.emit(RunFinished(1.0, True))
    write_result(folder / "result.json", result_of(read_events(folder / "events.jsonl").events))
    return folder


def test_a_load_that_was_served_gives_a_model_s_method_its_steps(tmp_path, monkeypatch):
    """As means, which tell what the stretches do; all else in the record stays as it is."""
    run, made = served(tmp_path / "run", batches=range(1, 60)), tmp_path / "made.json"
    known = TOOL.steps_of(run)["full"]["samples"]
    command = ["step_times.py", str(run), "--record", str(SHIPPED), "--out", str(made)]
    monkeypatch.setattr("sys.argv", command)
    TOOL.main()
    before, after = (read_result(path)["data"]["models"] for path in (SHIPPED, made))
    assert after[1] == before[1]
    assert [one["method"] for one in after[0]["methods"]] == [
        one["method"] for one in before[0]["methods"]
    ]
    assert after[0]["methods"][1:] == before[0]["methods"][1:]
    means = [StepSample(*one) for one in after[0]["methods"][0]["samples"]]
    assert len(means) < len(known) / 2
    assert sum(one.weight for one in means) == pytest.approx(sum(one.weight for one in known))
    told = fit_step_times(means)
    for step in ((4, 1000.0, 0, 0.0), (1, 100.0, 300, 300 * 125.5), (50, 9000.0, 0, 0.0)):
        assert told.step(*step) == pytest.approx(TIMES.step(*step), rel=0.02)


def test_a_load_of_another_model_or_device_is_refused(tmp_path, monkeypatch):
    run = served(tmp_path / "run", inputs={"model": "tiny"})
    monkeypatch.setattr("sys.argv", ["step_times.py", str(run), "--record", str(SHIPPED)])
    with pytest.raises(SystemExit, match="the record has no tiny on 1 GPUs"):
        TOOL.main()


@pytest.mark.parametrize("engine", [{"preemptions": 3.0}, LATE])
def test_rates_at_which_requests_waited_tell_nothing_of_steps(tmp_path, engine):
    """Who was preempted waits, and who waits for a front end that is late.

    Less than a tenth of a request's time in it is no reason.
    """
    run = served(tmp_path / "run", slow=engine)
    found = TOOL.steps_of(run)["full"]["samples"]
    assert fit_step_times(found).step(4, 1000.0) == pytest.approx(TIMES.step(4, 1000.0), rel=0.02)
    fit = read_result(run / "result.json")["data"]["methods"][0]["fit"]
    assert fit["spans"] == len(found) == 24
    in_time = served(tmp_path / "in-time", slow=LATE | {"end_to_end": 7.7})
    assert len(TOOL.steps_of(in_time)["full"]["samples"]) == 48
    assert TOOL.steps_of(served(tmp_path / "none", engine=engine)) == {}


def test_prompts_that_were_read_alone_tell_what_prompts_cost(tmp_path):
    """And not stretches, in which a prompt's token seems to cost half; nor others' prompts."""
    stretches = StepTimes((0.0,), (5e-3,), 1e-5, 1e-6)
    alone = StepTimes((0.0,), (5e-3,), 2e-5, 1e-6, 8e-10)

    def request(arrival, sent, prompt, first, failure=None):
        return LoadRequest(
            0.0, "", 9, arrival, sent, prompt, 2, first, first + 0.1, 2, 0.1, failure
        )

    def run(name, most=8192, **more):
        at, requests = 1.0, []
        for prompt in (2048, 5000, 8192, 12_288, 24_576):
            steps = -(-prompt // most)
            each, pairs = prompt / steps, prompt * (prompt + 1) / 2 / steps
            sent = at + 0.5  # late
            first = sent + steps * alone.step(0, 0.0, each, pairs)
            requests.append(request(at, sent, prompt, first))
            at = first + 1.0
        for behind, prompt, first, failure in (
            (0, 9000, 9, None),
            (8, 9000, 9, None),  # beside it
            (20, 2000, 29, None),  # short
            (40, 9000, 49, "timeout"),
            (50, 9000, 59, None),  # the server may be at work for the one before
        ):
            requests.append(request(at + behind, at + behind, prompt, at + first, failure))
        folder = served(tmp_path / name, stretches, (1, 2, 4, 8, 16), (0, 300), requests, **more)
        return TOOL.steps_of(folder)["full"]["samples"]

    engine = {"engine": "--max-num-batched-tokens 4k"}
    for own, weights in ((run("run"), [1, 1, 1, 2, 3]), (run("4k", 4000, inputs=engine), None)):
        prompts = [one for one in own if not one.decode]
        assert len(prompts) == 5
        assert weights is None or [one.weight for one in prompts] == weights
        for step in ((0, 0.0, 4000, 4000 * 2000.5), (0, 0.0, 8000, 8000 * 12_288.0)):
            assert fit_step_times(own).step(*step) == pytest.approx(alone.step(*step), rel=0.05)
    for name, other in (
        ("found again", {"engine": {"prefix_hits": 64.0}}),
        ("no marks", {"engine": {}}),
    ):
        assert all(one.decode for one in run(name, **other)), name
