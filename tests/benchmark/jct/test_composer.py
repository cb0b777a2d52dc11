"""Requests put together from points whose times are known formulas."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from kvprof.benchmark.jct.composed import measure_composed
from kvprof.benchmark.jct.composer import (
    Composer,
    RequestLengths,
    around,
    decode_rungs,
    prefill_rungs,
)
from kvprof.benchmark.jct.layer_bench import LayerTimes
from kvprof.benchmark.jct.model_shape import load_model_shape
from kvprof.benchmark.jct.serving import trace_warnings
from kvprof.errors import LackingError
from kvprof.records.events import (
    CaseFinished,
    CaseStarted,
    PartSample,
    RunFinished,
    RunStarted,
    StepFinished,
    Warned,
)
from kvprof.records.fold import fold
from tests.benchmark.jct.shapes import CPU, tiny_bench, tiny_shape
from tests.benchmark.on_shapes import method_on

FAST = 1e15  # flop/s: every prompt can be measured


@dataclass
class Formula:
    """Stands for `Bench`: an attention that grows with the context, an MLP with the tokens."""

    model: object = field(default_factory=tiny_shape)
    machine: object = CPU
    dtype: torch.dtype = torch.float32
    asked: list = field(default_factory=list)
    watts: float | None = None
    powered: set = field(default_factory=set)
    ends: object = None  # from a length to its interval
    uncut: tuple = ()  # prompts whose work needs no cutting

    workload = staticmethod(tiny_bench().workload)

    def point(self, method, workload, window=None, *, powered=False):
        self.asked.append((workload.phase, workload.seq, window))
        if powered:
            self.powered.add((workload.phase, workload.seq))
        tokens = workload.queries
        seen = min(workload.seq, window or workload.seq)
        attention = 1e-6 * seen if workload.phase == "decode" else 1e-9 * tokens * seen
        parts = {"attention": attention, "mlp": 2e-6 * tokens}
        once = {"head": 1e-4, "schedule": 1e-5}
        if workload.phase == "prefill" and workload.seq in self.uncut:
            del once["schedule"]
        return LayerTimes(
            workload.seq,
            parts,
            once,
            sum(parts.values()) + 3e-6 * tokens,
            {"store": "counted", f"{workload.phase} of": str(workload.seq)},
            self.watts if powered else None,
            self.ends(workload.seq) if self.ends else None,
        )


def composer(requests, model=None, *, rate=FAST, sampled=(), **options):
    bench = Formula(model or tiny_shape(), **options)
    return Composer(bench, method_on("full", bench.model.attention), 1, requests, rate, sampled)


def test_decode_is_the_sum_over_every_step():
    request = RequestLengths(100, 5000)
    found = composer([request]).compose(request)
    contexts = range(101, 100 + 5000)
    layers = 2
    assert found.decode["attention"] == pytest.approx(layers * 1e-6 * sum(contexts))
    assert found.decode["mlp"] == pytest.approx(layers * 2e-6 * len(contexts))
    assert found.decode["head"] == pytest.approx(1e-4 * len(contexts))
    whole = sum(layers * (1e-6 * c + 5e-6) + 1.1e-4 for c in contexts)
    assert found.decode_seconds == pytest.approx(whole)
    assert sum(weight for _, _, weight in found.steps) == pytest.approx(4999)
    assert len(found.steps) < 10
    assert found.error == pytest.approx(0, abs=1e-9)


def test_prefill_is_measured_at_the_prompts_length():
    request = RequestLengths(1000, 1)
    found = composer([request]).compose(request)
    assert found.prefill["attention"] == pytest.approx(2 * 1e-9 * 1000 * 1000)
    assert found.prefill_seconds == pytest.approx(2 * (1e-3 + 5e-3) + 1.1e-4)
    assert found.decode_seconds == 0
    assert found.steps == []
    assert found.predicted_from is None


def test_a_prompt_that_takes_too_long_is_predicted_and_said():
    request = RequestLengths(64 * 1024, 2)
    slow = composer([request], rate=5e8)
    found = slow.compose(request)
    assert found.predicted_from is not None
    assert found.predicted_from < 8192
    assert max(seq for phase, seq, _ in slow.bench.asked if phase == "prefill") < 8192
    tokens = request.input_len
    assert found.prefill["attention"] == pytest.approx(2 * 1e-9 * tokens**2, rel=1e-3)
    assert found.prefill_seconds == pytest.approx(
        2 * (1e-9 * tokens**2 + 5e-6 * tokens) + 1.1e-4, rel=2e-2
    )
    labels = events_of(request, slow)[0].labels
    assert labels["predicted"].startswith("prefill, from prompts of up to")
    assert "all layers" in labels["schedule"]
    assert (
        "predicted"
        not in events_of(RequestLengths(100, 2), composer([RequestLengths(100, 2)]))[0].labels
    )
    (said,) = trace_warnings(
        "full", [found, composer([RequestLengths(9, 1)]).compose(RequestLengths(9, 1))]
    )
    assert "1 of 2 requests" in said


def test_prompts_whose_work_is_cut_at_some_lengths_only():
    request = RequestLengths(64 * 1024, 2)
    rungs = composer([request], rate=5e8)._prefill_rungs
    kept = [rung for rung in rungs if rung >= rungs[-1] // 4]
    assert len(kept) >= 3
    for uncut in ((), kept[:1], kept[:-1], kept[-1:], kept):
        found = composer([request], rate=5e8, uncut=tuple(uncut)).compose(request)
        assert found.prefill["head"] == pytest.approx(1e-4)
        # What does not grow is predicted as it is; from a single length, as if it grew.
        grown = request.input_len / kept[-1] if uncut == kept[:-1] else 1.0
        expected = 0.0 if kept[-1] in uncut else 1e-5 * grown
        assert found.prefill.get("schedule", 0.0) == pytest.approx(expected, rel=1e-6)


def test_between_prompts_of_which_one_is_cut_the_work_of_cutting_is_between():
    sampled = [RequestLengths(200 + 37 * n, 3) for n in range(50)]
    rungs = composer([RequestLengths(2013, 3)], sampled=sampled)._prefill_rungs
    some = composer([RequestLengths(2013, 3)], sampled=sampled, uncut=tuple(rungs[::2]))
    cuts = [some.prefill(one.input_len)[0].get("schedule", 0.0) for one in sampled]
    assert min(cuts) >= 0.0
    assert max(cuts) <= 1e-5
    assert max(cuts) > min(cuts)


def test_a_part_that_is_not_smooth_does_not_overshoot_between_lengths():
    sampled = [RequestLengths(300 + 97 * n, 3) for n in range(40)]
    rungs = composer([RequestLengths(4183, 3)], sampled=sampled)._prefill_rungs
    assert len(rungs) >= 4
    steps = composer([RequestLengths(4183, 3)], sampled=sampled)
    measure = steps.bench.point

    def point(method, workload, window=None, *, powered=False):
        found = measure(method, workload, window, powered=powered)
        waits = 1e-2 * (rungs.index(workload.seq) % 2) if workload.phase == "prefill" else 0.0
        return replace(found, parts={**found.parts, "basis": waits}, layer=found.layer + waits)

    steps.bench.point = point
    for request in sampled:
        found = steps.compose(request)
        tokens = request.input_len
        assert 0.0 <= found.prefill["basis"] <= 2 * 1e-2
        exact = 2 * (1e-9 * tokens**2 + 5e-6 * tokens) + 1.1e-4 + found.prefill["basis"]
        assert found.prefill_seconds == pytest.approx(exact, rel=1e-6)


def test_sampled_requests_lie_between_few_points():
    sampled = [RequestLengths(200 + 37 * n, 3 + n) for n in range(50)]
    several = composer([RequestLengths(700, 30)], sampled=sampled)
    for request in sampled:
        found = several.compose(request)
        exact = 2 * (1e-9 * request.input_len**2 + 5e-6 * request.input_len) + 1.1e-4
        assert found.prefill_seconds == pytest.approx(exact, rel=2e-2)
        contexts = range(request.first, request.last + 1)
        assert found.decode["attention"] == pytest.approx(2e-6 * sum(contexts))
    assert len(set(several.bench.asked)) < 20


def test_what_costs_the_same_at_every_length_does_so_between_lengths_too():
    """A short prompt's layers take about as long whatever its length."""
    sampled = [RequestLengths(64 + n, 2) for n in range(0, 640, 9)]
    several = composer([RequestLengths(300, 2)], sampled=sampled)
    several.bench.point = lambda v, workload, window=None, powered=False: LayerTimes(
        workload.seq, {"mlp": 1e-3}, {"head": 1e-4}, 1e-3, {}
    )
    for request in sampled:
        assert several.compose(request).prefill_seconds == pytest.approx(2 * 1e-3 + 1e-4)


def test_layers_with_a_window_stop_growing_there():
    model = tiny_shape(sliding_window=150, window_pattern="WF")
    request = RequestLengths(100, 901)
    found = composer([request], model).compose(request)
    contexts = range(101, 1001)
    wanted = sum(1e-6 * c + 1e-6 * min(c, 150) for c in contexts)
    assert found.decode["attention"] == pytest.approx(wanted, rel=1e-6)
    # Each kind of layer has its work cut once; the head is there once for both.
    assert found.decode["schedule"] == pytest.approx(2e-5 * len(contexts))
    assert found.decode["head"] == pytest.approx(1e-4 * len(contexts))


def test_energy_is_power_times_each_phases_seconds():
    request = RequestLengths(100, 11)
    found = composer([request], watts=250.0).compose(request)
    assert found.energy_joules == pytest.approx(250 * found.jct)
    assert composer([request]).compose(request).energy_joules is None


def test_a_requests_interval_is_that_of_the_points_that_it_is_made_of():
    request = RequestLengths(100, 50)
    ends = {100: (0.9, 1.1), 101: (0.8, 1.2), 149: (0.7, 1.05)}
    made = composer([request], ends=lambda seq: ends[seq])
    found = made.compose(request)
    prefill, steps = found.prefill_seconds, found.steps
    assert found.prefill_interval == pytest.approx((0.9 * prefill, 1.1 * prefill))
    assert [context for context, _, _ in steps] == [101, 149]
    for side in (0, 1):
        wanted = sum(weight * seconds * ends[context][side] for context, seconds, weight in steps)
        assert found.decode_interval[side] == pytest.approx(wanted)
    unknown = composer([request], ends=lambda seq: None if seq == 149 else (1.0, 1.0))
    assert unknown.compose(request).decode_interval is None


def test_between_two_points_the_worse_one_counts():
    request = RequestLengths(100, 5000)
    made = composer([request], ends=lambda seq: (1 - 1e-4 * (seq - 99), 1.5 - 1e-4 * seq))
    low, high = made._interval("decode", [(3000, 2.0, 1.0)])
    shorter, longer = (point.tokens for point in made._bracketing_points("decode", 3000, None))
    assert shorter < 3000 < longer
    assert (low, high) == pytest.approx((2 * (1 - 1e-4 * (longer - 99)), 3 - 2e-4 * shorter))
    assert around([1, 5, 9], 5) == [5]
    assert around([1, 5, 9], 7) == [5, 9]
    assert around([4, 9], 2) == [4]
    assert around([4, 9], 12) == [9]


def test_power_is_asked_for_where_a_cases_energy_needs_it():
    """A trace's other requests need none, and each costs as long as a point's own samples."""
    case, others = RequestLengths(3000, 20), [RequestLengths(128, 5), RequestLengths(8000, 40)]
    made = composer([case], sampled=others, watts=250.0)
    assert made.compose(case).energy_joules == pytest.approx(250 * made.compose(case).jct)
    powered = {tokens for phase, tokens in made.bench.powered if phase == "prefill"}
    assert powered == {3000}
    assert len({seq for phase, seq, _ in made.bench.asked if phase == "prefill"}) == 1
    assert made.compose(others[1]).energy_joules is None
    assert {tokens for phase, tokens in made.bench.powered if phase == "prefill"} == {3000}
    assert made.watts(case) == [250.0, 250.0]


def test_power_is_of_the_first_kind_of_layers_and_within_its_window():
    shape = tiny_shape(sliding_window=64, window_pattern="W")
    made = composer([RequestLengths(100, 50)], shape, watts=200.0)
    assert made.compose(RequestLengths(100, 50)).energy_joules is not None
    both = composer([RequestLengths(100, 50)], tiny_shape(sliding_window=64, window_pattern="FW"))
    both.bench.watts = 200.0
    assert both.compose(RequestLengths(100, 50)).energy_joules is not None
    assert len(both.bench.powered) == 2


def test_what_no_memory_holds_is_refused_before_it_is_measured():
    with pytest.raises(LackingError, match="largest context that fits"):
        composer([RequestLengths(2**40, 2)])


def test_rungs_of_a_window_go_no_further():
    assert max(decode_rungs([RequestLengths(100, 5000)], window=256)) == 256
    assert decode_rungs([RequestLengths(5, 1)]) == []


def test_prompts_that_fit_are_measured_and_longer_ones_add_shorter_rungs():
    model = load_model_shape("Llama-3.1-8B")
    sizes = {"free": 100 * 2**30, "itemsize": 2, "kind": "cuda"}
    rungs, most = prefill_rungs(model, 1, [128, 1024], rate=8e14, **sizes)
    assert (rungs, most) == ([128, 1024], 1024)
    rungs, most = prefill_rungs(model, 1, [128, 2**20], rate=8e14, **sizes)
    assert 8192 <= most < 2**20
    assert rungs == [128, most // 4, most // 2, most]


def events_of(request, emitted_by):
    events = []
    measure_composed(
        emitted_by, request, case="full b1", emit=events.append, now=lambda: float(len(events))
    )
    return events


def test_events_fold_to_the_same_figures():
    request = RequestLengths(64, 400)
    made = composer([request])
    events = events_of(request, made)
    started = RunStarted(
        0.0,
        "2026-01-01T00:00:00Z",
        "0",
        "jct",
        (),
        "composed",
        {},
        {},
        {"name": "tiny"},
        ("full b1",),
        "full",
    )
    data = fold([started, *events, RunFinished(1.0, True)])
    wanted = made.compose(request)
    (case,) = data["cases"]
    assert case["complete"]
    assert case["jct_seconds"] == pytest.approx(wanted.jct)
    assert case["rate"] == 0
    parts = {(row["phase"], row["part"]): row["seconds"] for row in data["parts"]}
    for phase, known in (("prefill", wanted.prefill), ("decode", wanted.decode)):
        for part, seconds in known.items():
            assert parts[phase, part] == pytest.approx(seconds)
    # A layer of the formula takes 3 µs more per token than its parts.
    assert parts["decode", "unattributed"] == pytest.approx(2 * 3e-6 * 399)
    assert parts["prefill", "unattributed"] == pytest.approx(2 * 3e-6 * 64)
    assert isinstance(events[0], CaseStarted)
    assert isinstance(events[-1], CaseFinished)
    assert len(events[0].layers) == 2
    assert sum(layer["nbytes"] for layer in events[0].layers) == data["memory"][-1]["logical"]
    contexts = [event.context for event in events if isinstance(event, StepFinished)]
    assert (contexts[0], contexts[1], contexts[-1]) == (64, 65, 463)


def test_what_ran_is_said_of_a_requests_own_lengths():
    requests = [RequestLengths(64, 10), RequestLengths(4000, 10), RequestLengths(64, 4000)]
    made = composer(requests, ends=lambda _: (0.9, 1.2))
    for request in requests:
        started, *_, done = events_of(request, made)
        assert started.labels["prefill of"] == str(request.input_len)
        # Steps are measured at lengths that double.
        assert request.last / 2 <= int(started.labels["decode of"]) <= request.last
        assert done.prefill_interval == pytest.approx(
            [0.9 * done.prefill_seconds, 1.2 * done.prefill_seconds]
        )


def test_events_come_as_points_are_measured():
    request = RequestLengths(64, 4000)
    made = composer([request])
    seen = []
    point = made.bench.point

    def watched(*arguments, **options):
        seen.append(sum(isinstance(event, PartSample) for event in events))
        return point(*arguments, **options)

    made.bench.point = watched
    events = []
    asked = RequestLengths(64, 4000)
    measure_composed(made, asked, case="a", emit=events.append, now=lambda: 0.0)
    assert seen == sorted(seen)
    assert seen[-1] > 10


def test_a_bent_curve_tells_its_error():
    bent = composer([RequestLengths(64, 40_000)])
    bent.bench.point = lambda v, workload, window=None, powered=False: LayerTimes(
        workload.seq, {"attention": 1e-12 * workload.seq**3}, {}, 1e-12 * workload.seq**3, {}
    )
    events = events_of(RequestLengths(64, 40_000), bent)
    assert any(isinstance(event, Warned) and "may be off" in event.message for event in events)
