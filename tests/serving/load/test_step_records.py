"""Step times are read from what ships, from composed runs, and from loads that were served."""

import json
import runpy
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kvprof.errors import FailedError, UsageError
from kvprof.records.events import (
    LoadRateFinished,
    LoadRateStarted,
    LoadRequest,
    LoadServer,
    RunFinished,
    RunStarted,
)
from kvprof.records.files import write_result
from kvprof.records.fold import result_of
from kvprof.records.journal import Journal, read_events
from kvprof.serving.load.step_records import read_model_steps
from kvprof.serving.load.step_times import StepSample, StepTimes, fit_step_times
from tests.commands.running import kvprof

REPOSITORY = Path(__file__).parents[3]


def test_what_ships_is_what_the_tool_gathers_from_the_records(tmp_path, monkeypatch):
    made = tmp_path / "h200.json"
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("sys.argv", ["step_times.py", "--out", str(made)])
    runpy.run_path("tools/step_times.py", run_name="__main__")
    shipped = files("kvprof") / "assets" / "step_times" / "h200.json"
    assert json.loads(made.read_text()) == json.loads(shipped.read_text())


def test_means_of_a_load_s_stretches_tell_what_the_stretches_do(tmp_path, monkeypatch):
    times = StepTimes((0.0,), (5e-3,), 5e-5, 1e-6, 0.0, 2e-4 - 5e-5)
    batches = tuple(range(1, 60))
    names = ("model", "methods", "lengths", "memory", "rates", "seconds", "engine")
    inputs = dict.fromkeys(names)
    run = served(tmp_path / "run", times, batches, (0, 40, 300, 900), inputs=inputs)
    monkeypatch.chdir(REPOSITORY)
    arguments = ["--loads", str(run), "--out", str(tmp_path / "steps.json")]
    monkeypatch.setattr("sys.argv", ["step_times.py", *arguments])
    runpy.run_path("tools/step_times.py", run_name="__main__")
    (method,) = json.loads((tmp_path / "steps.json").read_text())["data"]["methods"]
    assert method["method"] == "full"
    known = read_model_steps(run).method("full").samples
    means = [StepSample(*one[:5], "", True, one[5]) for one in method["samples"]]
    assert len(means) < len(known) / 2
    assert sum(one.weight for one in means) == pytest.approx(sum(one.weight for one in known))
    told = fit_step_times(means)
    for step in ((4, 1000.0, 0, 0.0), (1, 100.0, 300, 300 * 125.5), (50, 9000.0, 0, 0.0)):
        assert told.step(*step) == pytest.approx(times.step(*step), rel=0.02)


def test_a_record_of_steps_is_added_to_by_the_methods_asked_for(tmp_path, monkeypatch):
    inputs = dict.fromkeys(("model", "methods", "lengths", "memory", "rates", "seconds", "engine"))
    times = StepTimes((0.0,), (5e-3,), 5e-5, 1e-6)
    runs = [
        served(tmp_path / name, times, (1, 2, 3), (0, 40), inputs=inputs) for name in ("one", "two")
    ]
    monkeypatch.chdir(REPOSITORY)
    made = tmp_path / "steps.json"

    def gathered(*arguments: str) -> dict[str, Any]:
        command = ["step_times.py", *arguments, "--out", str(made)]
        monkeypatch.setattr("sys.argv", command)
        runpy.run_path("tools/step_times.py", run_name="__main__")
        found: dict[str, Any] = json.loads(made.read_text())["data"]
        return found

    before = gathered("--loads", str(runs[0]))
    other = gathered("--onto", str(made), "--only", "fdc", "--loads", str(runs[1]))
    assert other["methods"] == before["methods"]
    assert len(other["loads"]) == 2
    (own,) = gathered("--onto", str(made), "--only", "full", "--loads", str(runs[1]))["methods"]
    (known,) = before["methods"]
    assert own["samples"][: len(known["samples"])] == known["samples"]
    more = own["samples"][len(known["samples"]) :]
    assert [one[:-1] for one in more] == [one[:-1] for one in known["samples"]]
    assert {one[-1] for one in more} == {2}


def test_what_ships_tells_steps_near_those_that_were_measured():
    found = read_model_steps(None, "Llama-3.1-8B")
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
    seventy = read_model_steps(None, "meta-llama/Llama-3.1-70B", tp=4)
    assert "palu" in seventy.methods
    with pytest.raises(UsageError, match=r"--methods tale: h200\.json has no steps of it"):
        found.method("tale")


def test_a_composed_run_gives_its_prompts_and_steps(tmp_path):
    demo = files("kvprof") / "assets" / "demo" / "events.jsonl.gz"
    result = result_of(read_events(Path(str(demo))).events)
    write_result(tmp_path / "run.json", result)
    found = read_model_steps(tmp_path / "run.json")
    assert found.model == result["data"]["shape"]["name"]
    assert found.cache_bytes == read_model_steps(None, "Llama-3.1-8B").cache_bytes
    assert list(found.methods) == list(dict.fromkeys(c["method"] for c in result["data"]["cases"]))
    full = found.method("full")
    for step in result["data"]["steps"]:
        if step["case"].startswith("full b1 ") and step["phase"] == "decode":
            told = full.times.step(1, step["context"])
            assert told == pytest.approx(step["seconds"], rel=0.05)


#: Of the machine whose record ships.
ENVIRONMENT = json.loads((files("kvprof") / "assets/step_times/h200.json").read_text())[
    "environment"
]


def served(
    folder,
    times,
    batches=(1, 4, 16),
    prefills=(0, 300),
    mode="served",
    inputs=None,
    engines=None,
    labels=("full",),
):
    """Write the events of a load on servers whose steps take known times."""
    folder.mkdir()
    with Journal(folder / "events.jsonl") as journal:
        journal.emit(
            RunStarted(
                0.0,
                "2026-11-23T00:00:00Z",
                "0",
                "load",
                (),
                mode,
                inputs or {},
                ENVIRONMENT,
                {"name": "tiny"},
                labels,
                labels[0],
            )
        )
        servers = 2 if inputs is None else 1
        for label in labels:
            journal.emit(
                LoadServer(
                    0.0, label, 1.0, servers, "vllm", 2000, 2_000_000, {}, engines, longest=2048
                )
            )
            journal.emit(LoadRateStarted(0.0, f"{label} @ 1/s", label, 1.0, 2, 1.0))
            for number, prompt in enumerate((100, 300)):
                journal.emit(
                    LoadRequest(0.0, f"{label} @ 1/s", number, 0.0, 0.0, prompt, 2, 0.1, 0.2, 2)
                )
            # Half of a prompt's tokens are attended to, weighted by length.
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
            journal.emit(LoadRateFinished(1.0, f"{label} @ 1/s", True, None, {}, spans))
        journal.emit(RunFinished(1.0, True))
    result = result_of(read_events(folder / "events.jsonl").events)
    write_result(folder / "result.json", result)
    return folder


def test_a_load_that_was_served_gives_the_steps_of_its_stretches(tmp_path):
    times = StepTimes((0.0,), (5e-3,), 5e-5, 1e-6, 0.0, 2e-4 - 5e-5)
    found = read_model_steps(served(tmp_path / "run", times))
    own = found.method("full")
    assert (found.model, found.device, own.token_bytes) == ("tiny", "NVIDIA H200", 1000.0)
    assert found.cache_bytes == 1_000_000  # of one server's cache
    assert own.times.per_context == pytest.approx(1e-6, rel=0.05)
    # Of means, a token of a prompt and a sequence that decodes are told apart.
    for step in ((4, 1000.0, 0, 0.0), (1, 100.0, 300, 300 * 125.5), (64, 9000.0, 0, 0.0)):
        assert own.times.step(*step) == pytest.approx(times.step(*step), rel=0.02)


def test_prompts_that_were_read_alone_tell_what_prompts_cost(tmp_path):
    """And not stretches, in which a prompt's token seems to cost half; nor others' prompts."""
    stretches = StepTimes((0.0,), (5e-3,), 1e-5, 1e-6)
    alone = StepTimes((0.0,), (5e-3,), 2e-5, 1e-6, 8e-10)

    def run(name, most=8192, complete=True, hits=0.0, **inputs):
        folder = served(tmp_path / name, stretches, inputs=inputs)
        lines = (folder / "events.jsonl").read_text().splitlines()
        number = next(n for n, line in enumerate(lines) if '"load_request"' in line)
        at, requests = 1.0, []
        for prompt in (2048, 5000, 8192, 12_288, 24_576):
            steps = -(-prompt // most)
            each, pairs = prompt / steps, prompt * (prompt + 1) / 2 / steps
            sent = at + 0.5  # late
            first = sent + steps * alone.step(0, 0.0, each, pairs)
            requests.append({"arrival": at, "sent": sent, "prompt": prompt, "first": first})
            at = first + 1.0
        for behind, prompt, first, failure in (
            (0, 9000, 9, None),
            (8, 9000, 9, None),  # beside it
            (20, 2000, 29, None),  # short
            (40, 9000, 49, "timeout"),
            (50, 9000, 59, None),  # the server may be at work for the one before
        ):
            own = {"arrival": at + behind, "sent": at + behind, "prompt": prompt}
            requests.append(own | {"first": at + first, "failure": failure})
        template = json.loads(lines[number])
        lines[number + 2 : number + 2] = [
            json.dumps(template | one | {"last": one["first"] + 0.1}) for one in requests
        ]
        ended = next(n for n, line in enumerate(lines) if '"load_rate_finished"' in line)
        marks = {"complete": complete, "engine": {} if hits is None else {"prefix_hits": hits}}
        lines[ended] = json.dumps(json.loads(lines[ended]) | marks)
        (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
        return read_model_steps(folder).method("full")

    engine = "--max-num-batched-tokens 4k"
    for own, weights in ((run("run"), [1, 1, 1, 2, 3]), (run("4k", 4000, engine=engine), None)):
        prompts = [one for one in own.samples if not one.decode]
        assert len(prompts) == 5
        assert weights is None or [one.weight for one in prompts] == weights
        for step in ((0, 0.0, 4000, 4000 * 2000.5), (0, 0.0, 8000, 8000 * 12_288.0)):
            assert own.times.step(*step) == pytest.approx(alone.step(*step), rel=0.05)
    for name, other in (
        ("broken off", {"complete": False}),
        ("found again", {"hits": 64.0}),
        ("no marks", {"hits": None}),
    ):
        assert all(one.decode for one in run(name, **other).samples), name


def shown(folder):
    result = result_of(read_events(folder / "events.jsonl").events)
    write_result(folder / "result.json", result, force=True)
    return " ".join(kvprof("show", folder).stdout.split())


LATE = {"requests": 2.0, "waiting": 0.0, "prefill": 1.0, "decode": 6.0, "end_to_end": 7.8}


@pytest.mark.parametrize("engine", [{"preemptions": 3.0}, LATE])
def test_rates_at_which_requests_waited_tell_nothing_of_steps(tmp_path, engine):
    """Where others have stretches enough; else they are all that there is, and that is said.

    Who was preempted waits, and who waits for a front end that is late; less than a tenth of a
    request's time in it is no reason.
    """
    times = StepTimes((0.0,), (5e-3,), 5e-5, 1e-6, 0.0, 2e-4 - 5e-5)
    for batches, left_out in (((1, 2, 4, 8, 16), True), ((1, 4), False)):
        folder = served(tmp_path / f"run-{len(batches)}", times, batches)
        lines = (folder / "events.jsonl").read_text().splitlines()
        number = next(n for n, x in enumerate(lines) if '"load_rate_finished"' in x)
        ended, begun = json.loads(lines[number]), "load_rate_started"
        start = json.loads(next(x for x in lines if f'"{begun}"' in x))
        slow = [span | {"between": 3 * span["between"]} for span in ended["spans"]]
        other = {"case": "full @ 9/s"}
        lines[number + 1 : number + 1] = [
            json.dumps(start | other | {"rate": 9.0}),
            json.dumps(ended | other | {"spans": slow, "engine": engine}),
        ]
        (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
        found = read_model_steps(folder).method("full")
        assert len(found.samples) == len(slow) * (1 if left_out else 2)
        in_time = lines.copy()
        in_time[number + 2] = json.dumps(
            ended | other | {"engine": {**LATE, "end_to_end": 7.7}}  # less than a tenth
        )
        own = tmp_path / f"in-time-{len(batches)}"
        own.mkdir()
        (own / "events.jsonl").write_text("\n".join(in_time) + "\n")
        (own / "result.json").write_text((folder / "result.json").read_text())
        assert len(read_model_steps(own).method("full").samples) == 2 * len(slow)
        fit = result_of(read_events(folder / "events.jsonl").events)["data"]["methods"][0]["fit"]
        assert (fit is None) == (found.notes != ()) == (not left_out)
        if left_out:
            assert fit["spans"] == len(slow)
            assert found.times.step(4, 1000.0) == pytest.approx(times.step(4, 1000.0), rel=0.02)
        else:
            assert found.times.step(4, 1000.0) > 1.3 * times.step(4, 1000.0)
            assert "preempted" in found.notes[0]
            late = "its server's front end passed them on in time"
            why = late if engine is LATE else "no request was preempted"
            assert f"too few tokens came at rates at which {why}" in shown(folder)


def test_a_load_on_several_numbers_of_gpus_gives_steps_of_each(tmp_path):
    times = StepTimes((0.0,), (5e-3,), 5e-5, 1e-6, 0.0, 2e-4 - 5e-5)
    labels = ("full tp=2", "full tp=4")
    folder = served(tmp_path / "run", times, inputs={"tp": [2, 4]}, labels=labels)
    for tp in (2, 4):
        found = read_model_steps(folder, tp=tp)
        assert (found.tp, list(found.methods)) == (tp, ["full"])
        assert (found.method("full").rate, found.method("full").token_bytes) == (0.0, 1000.0)
    with pytest.raises(UsageError, match="no steps of --tp 1: it has tiny with --tp 2, tiny with"):
        read_model_steps(folder)


@pytest.mark.parametrize(("inputs", "engines"), [({"replicas": 4}, None), ({"replicas": 1}, 4)])
def test_behind_a_router_of_the_engine_s_own_a_cache_is_one_engine_s(tmp_path, inputs, engines):
    """One address tells the cache of four: by what it says of them, else by what was started."""
    times = StepTimes((0.0,), (5e-3,), 5e-5, 1e-6, 0.0, 2e-4 - 5e-5)
    found = read_model_steps(served(tmp_path / "run", times, inputs=inputs, engines=engines))
    assert found.cache_bytes == 500_000
    assert found.method("full").token_bytes == 1000.0
    assert found.positions == 2048


def test_what_tells_no_steps_is_refused(tmp_path):
    times = StepTimes((1.0,), (5e-3,), 5e-5)
    with pytest.raises(UsageError, match="there is no such file"):
        read_model_steps(tmp_path / "none.json")
    with pytest.raises(UsageError, match="a simulated load has measured no step"):
        read_model_steps(served(tmp_path / "simulated", times, mode="simulated"))
    run = served(tmp_path / "run", times)
    (run / "events.jsonl").unlink()
    with pytest.raises(UsageError, match="in its events: name the run's folder"):
        read_model_steps(run)
    with pytest.raises(UsageError, match=r"no steps of Other with --tp 1: it has Llama-3\.1-8B"):
        read_model_steps(None, "Other")
    kernels = REPOSITORY / "docs/benchmarks/kernels.json"
    with pytest.raises(UsageError, match="a result of benchmark has no times of steps: name a"):
        read_model_steps(kernels)
    damaged = json.loads((files("kvprof") / "assets/step_times/h200.json").read_text())
    del damaged["data"]["models"][0]["name"]
    write_result(tmp_path / "damaged.json", damaged)
    with pytest.raises(FailedError, match="no record of step times"):
        read_model_steps(tmp_path / "damaged.json")
    one_kind = read_model_steps(served(tmp_path / "decode", times, prefills=(0,)))
    with pytest.raises(FailedError, match="of full: steps that decode and steps that read"):
        _ = one_kind.method("full").times
