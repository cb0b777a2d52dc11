"""The simulator as a target of a sweep: the same events as of a server, and what it is given."""

import numpy as np
import pytest

from kvprof.errors import UsageError
from kvprof.records.events import LoadRateFinished, LoadRequest, LoadSample, LoadServer
from kvprof.records.journal import Journal
from kvprof.serving.load.lengths import load_lengths
from kvprof.serving.load.replica import EngineSettings
from kvprof.serving.load.requests import Request
from kvprof.serving.load.simulator import SimulatedTarget, engine_settings, simulate
from kvprof.serving.load.step_records import MethodSteps, ModelSteps
from kvprof.serving.load.step_times import StepSample
from kvprof.serving.load.sweep import SweepOptions, run_sweep
from tests.records.streams import stream

SAMPLES = tuple(
    StepSample(*sample)
    for sample in (
        (1, 100, 0, 0, 5e-3),
        (1, 10_000, 0, 0, 6e-3),
        (8, 8_000, 0, 0, 6.2e-3),
        (0, 0, 512, 512 * 513 / 2, 3e-2),
        (0, 0, 4096, 4096 * 4097 / 2, 0.2),
    )
)


def steps(**methods):
    own = methods or {"full": 100.0, "half": 50.0}
    return ModelSteps(
        "a-model",
        1,
        "a device",
        "2026-11-23T00:00:00Z",
        10**6,
        131_072,
        {name: MethodSteps(name, 1 - size / 100, size, SAMPLES) for name, size in own.items()},
    )


def test_as_many_pages_as_fit_into_the_same_memory():
    known = steps()
    full, half = (engine_settings(known, name, None) for name in ("full", "half"))
    assert (full.pages, half.pages) == (625, 1250)
    assert engine_settings(known, "full", 3200, block_size=32).pages == 1
    with pytest.raises(UsageError):
        engine_settings(known, "full", 1599)


class Watched:
    def __init__(self):
        self.told, self.samples = [], []

    def outcome(self, outcome, server):
        self.told.append((outcome, server))

    def sample(self, at, sent, marks):
        self.samples.append((at, sent, marks))


def test_everything_is_told_in_the_order_in_which_it_happened():
    known = steps()
    settings = engine_settings(known, "full", 60_000, replicas=2, max_num_seqs=8)
    target = SimulatedTarget("full", known, settings)
    rng = np.random.default_rng(0)
    requests = [
        Request(number, float(at), int(rng.integers(20, 250)), int(rng.integers(2, 40)))
        for number, at in enumerate(np.cumsum(rng.exponential(0.05, 120)))
    ]
    observer = Watched()
    ended = target.run(requests, observer, lambda: False)
    assert ended.reason is None
    assert sorted(one.request.number for one, _ in observer.told) == list(range(120))
    ends = [one.tokens[-1] for one, _ in observer.told]
    assert ends == sorted(ends)
    direct = simulate(requests, settings, known.method("full").times)
    by_number = {one.request.number: one for one, _ in observer.told}
    assert all(list(by_number[n].tokens) == list(direct.outcomes[n].tokens) for n in range(120))
    assert {server for _, server in observer.told} == {0, 1}
    times = [at for at, _, _ in observer.samples]
    assert times == sorted(times)
    assert all(0 <= marks.cache <= 1 for _, _, marks in observer.samples)
    assert max(marks.running for _, _, marks in observer.samples) > 2
    assert observer.samples[-1][2].totals["preemptions"] == direct.totals.preemptions
    engine = ended.engine
    assert engine["requests"] == 120
    parts = engine["waiting"] + engine["prefill"] + engine["decode"]
    assert parts == pytest.approx(engine["end_to_end"])
    stays = sum(one.tokens[-1] - one.request.arrival for one in direct.outcomes)
    assert engine["end_to_end"] == pytest.approx(stays)
    assert min(engine["waiting"], engine["prefill"], engine["decode"]) > 0
    assert target.run(requests, observer, lambda: True).reason == "interrupted"


def test_a_sweep_is_the_one_of_a_server(tmp_path):
    known = steps()
    targets = [
        SimulatedTarget(name, known, engine_settings(known, name, None)) for name in known.methods
    ]
    options = SweepOptions(load_lengths("in=200,out=20"), rates=(1.0, 5.0), requests=50)
    with Journal(tmp_path / "events.jsonl") as journal:
        journal.emit(stream()[0])
        complete, problems = run_sweep(targets, options, journal)
        events = journal.recording().events
    assert complete
    assert not problems
    servers = [event for event in events if isinstance(event, LoadServer)]
    assert [one.cache_tokens for one in servers] == [10_000, 20_000]
    assert [one.cache_bytes for one in servers] == [10**6, 10**6]
    assert sum(isinstance(event, LoadRequest) for event in events) == 4 * 50
    assert sum(isinstance(event, LoadSample) for event in events) == 4 * 200
    finished = [event for event in events if isinstance(event, LoadRateFinished)]
    assert [one.case for one in finished] == [
        "full @ 1/s", "full @ 5/s", "half @ 1/s", "half @ 5/s",
    ]  # fmt: skip
    assert all(one.complete and one.spans for one in finished)


def test_a_method_that_the_record_lacks_is_refused():
    with pytest.raises(UsageError):
        SimulatedTarget("kq", steps(), EngineSettings(10))
