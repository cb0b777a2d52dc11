"""Which rates are measured, what is kept of a sweep that stops, and servers that are children."""

import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvprof.errors import FailedError, LackingError, UsageError
from kvprof.methods.named import ENGINE_FORMATS
from kvprof.records.events import LoadRateFinished, LoadRateStarted, LoadRequest, RunStarted, Warned
from kvprof.records.fold import result_of
from kvprof.records.journal import Journal
from kvprof.serving.load import target as load_target
from kvprof.serving.load.http import parse_address
from kvprof.serving.load.lengths import load_lengths
from kvprof.serving.load.marks import parse_marks
from kvprof.serving.load.requests import Outcome
from kvprof.serving.load.server import (
    EngineSettings,
    Served,
    ServerProcess,
    serve_command,
    served_by_engine,
    server_variables,
    told_variables,
)
from kvprof.serving.load.sweep import SweepOptions, cases_of, next_rate, run_sweep
from kvprof.serving.load.target import LoadOutcome, ServedTarget, ServerInfo
from kvprof.serving.settings import RUNNER_VARIABLE
from tests.records.load_stream import METHODS, load_inputs, load_stream, served
from tests.records.sample import ENVIRONMENT
from tests.serving.load.fake_server import Behaviour, FakeServer

LENGTHS = load_lengths("in=2k,out=200")


def row(rate, grows=False, share=1.0):
    return {"rate": rate, "complete": True, "grows": grows, "attained_share": share}


def walk(options, judge, first=None):
    """Measure as `judge` says until nothing is left; return the rates in order."""
    rows = []
    while (rate := next_rate(rows, options, first)) is not None:
        rows.append(judge(rate))
        assert len(rows) < 50
    return [one["rate"] for one in rows]


def limit(most, grown=None):
    """A method that is within up to `most` and whose queue grows from `grown` on."""
    return lambda rate: row(rate, rate > (grown or most), 1.0 if rate <= most else 0.1)


def test_rates_that_are_named_are_measured_until_the_queue_grows():
    options = SweepOptions(LENGTHS, rates=(0.5, 1.0, 2.0, 4.0, 8.0))
    assert walk(options, limit(1.5, 3.0)) == [0.5, 1.0, 2.0, 4.0]
    assert walk(options, limit(100.0)) == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_rates_that_are_found_double_until_the_queue_grows():
    options = SweepOptions(LENGTHS)
    assert walk(options, limit(3.0), 0.4) == [0.4, 0.8, 1.6, 3.2]
    assert walk(options, limit(0.15), 0.4) == [0.4, 0.2, 0.1]
    assert len(walk(options, limit(1e9), 1.0)) == 12  # somewhere it ends
    assert len(walk(options, lambda rate: row(rate, True), 1.0)) == 5


def test_refining_halves_what_lies_between():
    options = SweepOptions(LENGTHS, rates=(1.0, 2.0, 4.0), refine=3)
    assert walk(options, limit(2.9)) == [1.0, 2.0, 4.0, 3.0, 2.5, 2.75]
    found = walk(SweepOptions(LENGTHS, refine=2), limit(2.9), 1.0)
    assert found == [1.0, 2.0, 4.0, 3.0, 2.5]
    assert walk(options, limit(100.0)) == [1.0, 2.0, 4.0]


class Simulated:
    """A target of known slots: no server, and no time passes."""

    waits_for = "nothing"

    def __init__(self, method, fails=None):
        self.method = method
        self.fails = fails or {}
        self.opened = self.closed = 0
        self.rates = []

    def open(self, stop):
        self.opened += 1
        return ServerInfo(engine="none", cache_tokens=100, warnings=[f"{self.method}: a lack"])

    def alone(self, request):
        return 2.0

    def run(self, requests, observer, stop):
        self.rates.append(round(len(requests) / requests[-1].arrival, 1))
        outcomes = served(requests, *METHODS[self.method])
        fault = self.fails.get(len(self.rates))
        for one in outcomes[: 30 if fault else None]:
            observer.outcome(one, 0)
        observer.sample(1.0, 3, None)
        if fault == "dies":
            return LoadOutcome(f"{self.method}: its server was killed (signal 9)", gone=True)
        if fault == "stops":
            return LoadOutcome("interrupted")
        return LoadOutcome()

    def close(self):
        self.closed += 1


def sweep(targets, options, earlier=(), stop=lambda: False):
    methods = [target.method for target in targets]
    with Journal(None) as journal:
        journal.emit(
            RunStarted(
                0.0,
                "2026-11-23T07:00:00Z",
                "0.1.0",
                "load",
                ("kvprof",),
                "served",
                load_inputs(methods, options.lengths, options.objective),
                ENVIRONMENT,
                {"name": "m"},
                tuple(methods),
                methods[0],
            )
        )
        complete, problems = run_sweep(targets, options, journal, earlier=earlier, stop=stop)
        return complete, problems, journal.recording().events


def test_every_method_is_measured_at_the_same_rates():
    targets = [Simulated("full"), Simulated("fdc")]
    complete, problems, events = sweep(targets, SweepOptions(LENGTHS, requests=150))
    assert (complete, problems) == (True, [])
    data = result_of(events)["data"]
    rates = {m: [r["rate"] for r in data["rates"] if r["method"] == m] for m in ("full", "fdc")}
    # One request takes 2 s: half of that rate is the first, and of all methods the same.
    assert rates["full"][0] == rates["fdc"][0] == 0.2
    assert rates["fdc"][: len(rates["full"])] == rates["full"]
    assert rates["fdc"][-1] >= rates["full"][-1]
    assert [(t.opened, t.closed) for t in targets] == [(1, 1), (1, 1)]
    assert sum(isinstance(event, Warned) for event in events) == 2


def test_a_server_that_dies_costs_its_method_and_no_other():
    targets = [Simulated("full", {2: "dies"}), Simulated("fdc")]
    options = SweepOptions(LENGTHS, rates=(1.0, 2.0), requests=60)
    complete, problems, events = sweep(targets, options)
    assert not complete
    assert [str(one) for one in problems] == ["full: its server was killed (signal 9)"]
    result = result_of(events)
    rows = {one["case"]: one for one in result["data"]["rates"]}
    assert rows["full @ 1/s"]["complete"]
    assert rows["full @ 2/s"]["reason"] == "full: its server was killed (signal 9)"
    assert rows["full @ 2/s"]["answered"] == 30  # what was measured is kept
    assert rows["fdc @ 2/s"]["complete"]
    assert targets[0].closed == 1
    assert any("given up" in said for said in result["warnings"])


def test_an_interrupted_sweep_goes_on_with_what_is_left():
    options = SweepOptions(LENGTHS, rates=(1.0, 2.0), requests=60)
    first = [Simulated("full"), Simulated("fdc", {2: "stops"})]
    complete, _, events = sweep(first, options)
    assert not complete
    assert sorted(cases_of(events)[0]) == ["fdc @ 1/s", "full @ 1/s", "full @ 2/s"]
    again = [Simulated("full"), Simulated("fdc")]
    complete, _, resumed = sweep(again, options, earlier=events)
    assert complete
    assert again[0].opened == 0  # all of its rates were there
    assert (again[1].opened, len(again[1].rates)) == (1, 1)
    whole = sweep([Simulated("full"), Simulated("fdc")], options)[2]
    assert result_of(resumed)["data"]["rates"] == result_of(whole)["data"]["rates"]
    warned = [event.message for event in resumed if isinstance(event, Warned)]
    assert len(warned) == len(set(warned))


def test_what_later_methods_measured_is_kept_when_an_earlier_one_stops_the_sweep_again():
    options = SweepOptions(LENGTHS, rates=(1.0, 2.0), requests=60)
    first = [Simulated("full", {2: "dies"}), Simulated("fdc", {2: "stops"})]
    _, _, events = sweep(first, options)
    assert sorted(cases_of(events)[0]) == ["fdc @ 1/s", "full @ 1/s"]
    again = [Simulated("full", {1: "stops"}), Simulated("fdc")]
    complete, _, resumed = sweep(again, options, earlier=events, stop=lambda: again[0].closed > 0)
    assert not complete
    assert again[1].opened == 0
    assert sorted(cases_of(resumed)[0]) == ["fdc @ 1/s", "full @ 1/s"]


def test_a_rate_under_way_is_kept_until_it_is_measured_again():
    """A run that is cut off twice, the second time before it came to the rate again."""
    options = SweepOptions(LENGTHS, rates=(1.0, 2.0), requests=60)
    _, _, events = sweep([Simulated("full", {2: "stops"})], options)
    killed = [e for e in events if not (isinstance(e, LoadRateFinished) and not e.complete)]
    for earlier, reason in ((events, "interrupted"), (killed, "stopped")):
        idle = Simulated("full")
        again = sweep([idle], options, earlier=earlier, stop=lambda: True)[2]
        assert idle.rates == []
        rows = {row["case"]: row for row in result_of(again)["data"]["rates"]}
        assert rows["full @ 2/s"]["answered"] == 30
        assert not rows["full @ 2/s"]["complete"]
        assert reason in rows["full @ 2/s"]["reason"]
        started = sweep([Simulated("full", {1: "stops"})], options, earlier=again)[2]
        assert len([e for e in started if isinstance(e, LoadRateFinished)]) == 3
        whole = sweep([Simulated("full")], options, earlier=started)[2]
        anew = sweep([Simulated("full")], options)[2]
        assert result_of(whole)["data"]["rates"] == result_of(anew)["data"]["rates"]


def test_of_a_rate_that_began_twice_the_time_with_more_requests_is_kept():
    options = SweepOptions(LENGTHS, rates=(1.0,), requests=60)
    _, _, events = sweep([Simulated("full", {1: "stops"})], options)
    (started,) = [event for event in events if isinstance(event, LoadRateStarted)]
    _, begun = cases_of([*events, started])
    assert sum(isinstance(event, LoadRequest) for event in begun["full @ 1/s"]) == 30


def test_a_server_that_sheds_ends_the_sweep_as_a_queue_does():
    class Shedding(Simulated):
        def run(self, requests, observer, stop):
            self.rates.append(round(len(requests) / requests[-1].arrival, 1))
            for one in requests:
                shed = self.rates[-1] > 1 and one.number % 2
                ended = Outcome(one, one.arrival, (), "HTTP 503")
                observer.outcome(ended if shed else served([one], *METHODS["full"])[0], 0)
            return LoadOutcome()

    target = Shedding("full")
    options = SweepOptions(LENGTHS, rates=(1.0, 2.0, 4.0), requests=60)
    complete, _, events = sweep([target], options)
    assert (complete, target.rates) == (True, [1.0, 2.0])
    (own,) = result_of(events)["data"]["methods"]
    assert (own["largest_rate"], own["limited_by"]) == (1.0, "shed")


@pytest.mark.parametrize(("late", "judged"), [(0.04, True), (0.06, False)])
def test_a_rate_at_which_the_client_is_late_is_not_judged(late, judged):
    """By more than 5 % of the time between requests, of one in ten: whatever the queue does."""

    class Starving(Simulated):
        def run(self, requests, observer, stop):
            for one in served(requests, *METHODS["full"]):
                by = late / rate if one.request.number % 10 == 0 else 0.0
                observer.outcome(replace(one, sent=one.request.arrival + by), 0)
            return LoadOutcome()

    for rate, limit in ((1.0, None), (8.0, "queue")):
        _, _, events = sweep([Starving("full")], SweepOptions(LENGTHS, rates=(rate,)))
        result = result_of(events)
        (own,) = result["data"]["methods"]
        assert own["limited_by"] == (limit if judged else "client")
        assert judged or (own["largest_rate"], own["largest_rate_interval"]) == (None, [None, None])
        assert any("too slow" in said for said in result["warnings"]) is not judged


def test_a_load_of_which_nothing_is_answered_is_given_up():
    class Refusing(Simulated):
        def run(self, requests, observer, stop):
            for one in requests:
                observer.outcome(Outcome(one, one.arrival, (), "HTTP 500"), 0)
            return LoadOutcome()

    complete, problems, _ = sweep([Refusing("full")], SweepOptions(LENGTHS, rates=(1.0, 2.0)))
    assert not complete
    assert "every request failed (HTTP 500)" in str(problems[0])


def test_requests_that_a_server_cannot_take_are_refused_before_any_is_sent():
    class Short(Simulated):
        def open(self, stop):
            return ServerInfo(longest=2000)

    with pytest.raises(UsageError, match=r"2,248 tokens.*at most 2,000"):
        sweep([Short("full")], SweepOptions(LENGTHS, rates=(1.0,)))


# --- Servers.


def quick(server, **options):
    return ServedTarget(Served("served", [parse_address(server.url)]), **options)


SHORT = SweepOptions(load_lengths("in=50,out=8"), rates=(80.0, 160.0), requests=40)
# A request has ended before the next one comes.
ONE_BY_ONE = replace(SHORT, rates=(40.0,))


def test_a_server_is_measured_from_outside_and_by_its_marks():
    with FakeServer(Behaviour(slots=2, token_seconds=0.002)) as server:
        complete, problems, events = sweep([quick(server)], SHORT)
    assert (complete, problems) == (True, [])
    result = result_of(events)
    one = result["data"]["rates"][0]
    assert (one["answered"], one["failed"]) == (40, 0)
    assert one["parts"]["requests"] == 40
    assert one["parts"]["waiting_seconds"] >= 0
    assert one["cache_share"]["most"] <= 1
    sent = [event for event in events if isinstance(event, LoadRequest)]
    assert all(event.sent >= event.arrival for event in sent)
    first = [event for event in sent if event.case == one["case"]]
    waited = sum(event.last - event.arrival for event in first) / len(first)
    outside = waited - one["parts"]["end_to_end_seconds"]
    assert one["parts"]["outside_seconds"] == pytest.approx(outside)
    assert outside > -1e-3  # client and server stamp one clock
    assert 0 < one["client_busy_share"] < 1
    assert result["data"]["methods"][0]["cache_tokens"] == 16_000
    assert result["data"]["methods"][0]["engine"] == "vLLM 9.9"


@pytest.mark.parametrize(("share", "told"), [(0.69, []), (0.71, ["71%"])])
def test_a_client_that_may_be_what_tokens_wait_for_is_told(share, told):
    class Busy(Simulated):
        def run(self, requests, observer, stop):
            return replace(super().run(requests, observer, stop), client_busy_share=share)

    _, _, events = sweep([Busy("full")], SweepOptions(LENGTHS, rates=(1.0,)))
    said = [event.message for event in events if isinstance(event, Warned)]
    busy = [one.split("busy ")[1].split()[0] for one in said if "the client was busy" in one]
    assert busy == told
    assert result_of(events)["data"]["rates"][0]["client_busy_share"] == share


def test_a_server_without_marks_is_measured_and_that_is_said():
    with FakeServer(Behaviour(marks=False)) as server:
        _, _, events = sweep([quick(server)], SHORT)
    result = result_of(events)
    assert any("/metrics" in said for said in result["warnings"])
    one = result["data"]["rates"][0]
    assert (one["parts"], one["cache_share"], one["preemptions"]) == (None, None, None)
    assert one["in_flight"] is not None


def test_reading_marks_takes_no_token_s_time(monkeypatch):
    def slowly(text):
        time.sleep(0.5)
        return parse_marks(text)

    monkeypatch.setattr(load_target, "parse_marks", slowly)
    with FakeServer(Behaviour(slots=4, token_seconds=0.02)) as server:
        _, _, events = sweep([quick(server)], ONE_BY_ONE)
    assert max(event.longest for event in events if isinstance(event, LoadRequest)) < 0.4
    assert result_of(events)["data"]["rates"][0]["running"] is not None


@pytest.mark.parametrize(
    ("router", "spread"), [("round-robin", [20, 20]), ("shortest-queue", None)]
)
def test_the_client_spreads_requests_over_servers(router, spread):
    slow, fast = Behaviour(slots=1, token_seconds=0.01), Behaviour(slots=8, token_seconds=0.001)
    with FakeServer(slow) as one, FakeServer(fast) as two:
        target = ServedTarget(
            Served("served", [parse_address(one.url), parse_address(two.url)]), router=router
        )
        options = SweepOptions(load_lengths("in=50,out=8"), rates=(60.0,), requests=40)
        _, _, events = sweep([target], options)
    found = result_of(events)["data"]["rates"][0]["servers"]
    if spread is not None:
        assert found == spread
    else:
        assert found[1] > 1.5 * found[0]


def child(behaviour="{}"):
    def command(port):
        program = "tests.serving.load.fake_server"
        return [sys.executable, "-m", program, "--port", str(port), "--behaviour", behaviour]

    return command


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def test_a_server_of_our_own_is_started_and_ended(here):
    process = ServerProcess("full", child())
    target = ServedTarget(process)
    complete, _, _ = sweep([target], SHORT)
    assert complete
    assert process.addresses[0].host == "127.0.0.1"
    assert process._running == []


def test_a_server_that_is_killed_in_the_middle_is_told(here):
    process = ServerProcess("full", child('{"dies_after": 30}'))
    complete, problems, events = sweep([ServedTarget(process)], SHORT)
    assert not complete
    assert "killed (signal 9)" in str(problems[0])
    assert isinstance(problems[0], FailedError)
    kept = [event for event in events if isinstance(event, LoadRequest)]
    assert sum(event.failure is None for event in kept) > 10
    (finished,) = [event for event in events if isinstance(event, LoadRateFinished)]
    assert not finished.complete


def test_a_server_that_dies_of_a_rates_last_request_is_no_rate_that_fails(here):
    """One request lost of 40 looks like any failure; the rate must not be judged by it."""
    # Two come before the rate.
    process = ServerProcess("full", child('{"dies_after": 41, "lingers": 0.5}'))
    complete, problems, events = sweep([ServedTarget(process)], ONE_BY_ONE)
    assert not complete
    assert str(problems[0]) == "full: its server was killed (signal 9)"
    (row,) = result_of(events)["data"]["rates"]
    assert (row["complete"], row["answered"]) == (False, 39)


def test_an_address_that_loses_a_rates_last_request_is_asked_whether_it_is_there():
    with FakeServer(Behaviour(fails={42: "cut"})) as server:
        complete, problems, _ = sweep([quick(server)], ONE_BY_ONE)
    assert (complete, problems) == (True, [])


@pytest.mark.parametrize(
    ("method", "own", "runner"),
    [
        ("turboquant_4bit_nc", None, "1"),
        ("turboquant_4bit_nc", "0", "1"), ("fp8", None, None), ("fp8", "0", "0"),
        ("fdc", None, "0"), ("fdc", "1", "1"),
    ],
)  # fmt: skip
def test_a_server_gets_a_model_runner_that_can_serve_it(
    monkeypatch: pytest.MonkeyPatch, method: str, own: str | None, runner: str | None
) -> None:
    """VLLM's first one ends with TurboQuant; else somebody's own choice stands, and all is told."""
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    if own is not None:
        monkeypatch.setenv(RUNNER_VARIABLE, own)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_USE_A_PATH", "/a/path")
    variables = server_variables(method)
    assert told_variables(variables) == ("" if runner is None else f"{RUNNER_VARIABLE}={runner}")
    program = f"import os; raise SystemExit('ran with %s' % os.environ.get('{RUNNER_VARIABLE}'))"
    server = ServerProcess(
        method, lambda port: [sys.executable, "-c", program], variables=variables
    )
    server.start()
    try:
        until = time.monotonic() + 20
        while (said := server.ended()) is None and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        server.stop()
    assert said is not None
    assert f"ran with {runner}" in said


@pytest.mark.parametrize("plan", [True, False])
def test_a_plan_of_any_name_is_kvprofs_own(monkeypatch: pytest.MonkeyPatch, plan: bool) -> None:
    monkeypatch.delenv(RUNNER_VARIABLE, raising=False)
    assert server_variables("turboquant_x", plan=plan) == {RUNNER_VARIABLE: "0" if plan else "1"}


def test_methods_differ_in_what_they_store_and_nothing_else():
    settings = EngineSettings(
        2**30, 8448, tp=2, replicas=4, seed=7, dtype="bfloat16", more=("--enforce-eager",)
    )
    same = [
        "--seed", "7", "--disable-uvicorn-access-log", "--dtype", "bfloat16",
        "--max-model-len", "8448", "--kv-cache-memory-bytes", str(2**30),
        "--data-parallel-size", "4", "--enforce-eager",
    ]  # fmt: skip
    full, fp8 = (serve_command("m", 81, settings, method=name) for name in ("full", "fp8"))
    fdc = serve_command("m", 81, settings, method="kq", options=["grid=32"], rate=0.4)
    plan = serve_command("m", 81, settings, method="my.plan", plan="/x/my.plan")
    for words in (full, fp8, fdc, plan):
        assert words[-len(same) :] == same
        assert words[words.index("--host") + 1] == "127.0.0.1"
    assert full[full.index("--kv-cache-dtype") + 1] == "auto"
    assert fp8[fp8.index("--kv-cache-dtype") + 1] == "fp8"
    assert "serve" not in full  # nothing of ours but the end of the process
    at = fdc.index("serve")
    assert fdc[at + 1 : at + 8] == ["m", "--method", "kq", "--rate", "0.4", "--option", "grid=32"]
    assert plan[plan.index("serve") + 2 : plan.index("serve") + 4] == ["--plan", "/x/my.plan"]
    assert "--max-model-len" not in EngineSettings(more=("--max-model-len=5",), longest=9).words()
    assert EngineSettings(more=("--dtype", "float16")).words().count("--dtype") == 1


def test_each_of_several_servers_sees_gpus_of_its_own(here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    process = ServerProcess("full", child(), count=2, gpus=2)
    assert process._environment(0)["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert process._environment(1)["CUDA_VISIBLE_DEVICES"] == "6,7"
    one = ServerProcess("full", child(), gpus=2)._environment(0)
    assert one["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    with pytest.raises(LackingError):
        ServerProcess("full", child(), count=3, gpus=2)._environment(0)


@pytest.mark.parametrize(
    ("more", "gpus"),
    [
        ("", 2), ("-pp 3", 6), ("--pipeline_parallel_size=2 --enforce-eager", 4),
        ("--pipeline-par 2", 4), ("-pp 4 --pipeline-parallel-size 2", 4), ("--seed 3 -pp", 2),
    ],
)  # fmt: skip
def test_an_engine_has_gpus_for_its_pipeline_stages(more, gpus):
    assert EngineSettings(tp=2, more=tuple(more.split())).gpus == gpus


def test_what_a_killed_server_had_started_goes_with_it(here, tmp_path):
    pid = tmp_path / "pid"
    program = (
        "import subprocess, sys, os, signal\n"
        "own = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])\n"
        f"open({str(pid)!r}, 'w').write(str(own.pid))\n"
        "print('(Server) INFO: all is well', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    _, problems, _ = sweep(
        [ServedTarget(ServerProcess("full", lambda port: [sys.executable, "-c", program]))], SHORT
    )
    assert str(problems[0]) == "full: its server was killed (signal 9)"
    left = Path(f"/proc/{pid.read_text()}/stat")
    until = time.monotonic() + 10
    while left.exists() and " Z " not in left.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    assert not left.exists() or " Z " in left.read_text()


@pytest.mark.parametrize(
    "said",
    [
        ("Error: no memory for the cache",),
        (
            "(EngineCore pid=1) AssertionError: Not enough nodes",
            *["(APIServer pid=2)   File x, in y"] * 60,
            "(APIServer pid=2)     raise RuntimeError(",
            "(APIServer pid=2) RuntimeError: Engine core initialization failed."
            " See root cause above.",
            "(EngineCore pid=1) Exception: WorkerProc failed. See stack trace for root cause.",
        ),
    ],
    ids=["one", "several"],
)
def test_the_first_error_of_a_server_that_does_not_start_is_told(here, said):
    """As vLLM 0.27.1 ends: the engine's own error, a traceback of the server's, and its error."""

    def command(port):
        return [sys.executable, "-c", f"print({chr(10).join(said)!r}); exit(1)"]

    _, problems, _ = sweep([ServedTarget(ServerProcess("full", command))], SHORT)
    assert str(problems[0]) == f"full: its server exited with code 1: {said[0]}"


def test_an_address_that_ceases_to_answer_ends_the_rate():
    options = SweepOptions(load_lengths("in=50,out=8"), rates=(40.0,), requests=200)
    with FakeServer(Behaviour(token_seconds=0.002)) as server:
        closing = threading.Timer(0.5, server.close)
        closing.start()
        complete, problems, _ = sweep([quick(server)], options)
    assert not complete
    assert "stopped" in str(problems[0])


@pytest.mark.parametrize("router", ["shortest-queue", "round-robin"])
def test_one_of_several_that_ceases_to_answer_ends_the_rate(router):
    options = SweepOptions(load_lengths("in=50,out=8"), rates=(40.0,), requests=80)
    with FakeServer(Behaviour(token_seconds=0.002)) as one, FakeServer() as two:
        addresses = [parse_address(server.url) for server in (one, two)]
        closing = threading.Timer(0.4, one.close)
        closing.start()
        target = ServedTarget(Served("served", addresses), router=router)
        complete, problems, _ = sweep([target], options)
    assert not complete
    assert "server 1" in str(problems[0])


def test_a_stop_ends_a_rate_at_once_and_keeps_it_out_of_what_is_judged():
    began = time.monotonic()
    options = SweepOptions(load_lengths("in=50,out=8"), rates=(10.0,), requests=1000)
    with FakeServer() as server:  # which has two before the rate
        complete, problems, events = sweep(
            [quick(server)], options, stop=lambda: len(server.bodies) > 4
        )
    assert time.monotonic() - began < 30
    assert (complete, problems) == (False, [])
    assert result_of(events)["data"]["rates"][0]["reason"] == "interrupted"


def test_events_of_a_load_that_never_ended_have_their_finished_cases():
    events = load_stream(ends=False)
    assert "fdc @ 12/s" not in cases_of(events)[0]
    assert len(cases_of(events)[0]) == 7


def test_what_vllm_names_is_served_by_vllm_itself() -> None:
    for name, (engine, _) in ENGINE_FORMATS.items():
        assert served_by_engine(name) == (name if engine == "vLLM" else None)
