"""Steps, marked and not: what is sampled stands for the rest, and tokens stay the same."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvprof.benchmark.jct.interleaved import CaseEvents, InterleavedRuns, RequestRun, run_warnings
from kvprof.benchmark.jct.marks import OTHER_LAYERS
from kvprof.benchmark.jct.steps import Runner, Step
from kvprof.benchmark.jct.timed_layers import TimedLayers, choose_timed_layers
from kvprof.runtime.clock import REST, Stretch, WallClock
from kvprof.runtime.compressed import compressed
from tests.benchmark.jct.real_runs import NEW, PROMPT, Ticks, measured, of, seconds_by
from tests.models.tiny import token_ids
from tests.runtime.plans import loaded, make_plan, ragged


def test_tokens_are_those_of_generate() -> None:
    model = loaded("Llama")
    plan, ids = make_plan(model, ranks=ragged), token_ids(2, PROMPT)
    with compressed(model, plan) as session:
        runner = Runner(model, session, ids, NEW, graph=False)
        runner.begin()
        plain = [runner.step().tokens for _ in range(NEW)]
        runner.begin()
        marked = [runner.step((1,)).tokens for _ in range(NEW)]
        wanted = model.model.generate(
            ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert torch.equal(torch.tensor(plain).T, wanted[:, PROMPT:])
    assert marked == plain


def test_a_sampled_step_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", Ticks())
    model = loaded("Llama", num_hidden_layers=3)
    plan = make_plan(model, ranks=ragged)
    with compressed(model, plan) as session:
        runner = Runner(model, session, token_ids(2, PROMPT), NEW, graph=False)
        runner.begin()
        runner.step()
        for layers in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
            step = runner.step(layers)
            parts = {(stretch.part, stretch.layer) for stretch in step.stretches}
            assert {layer for _, layer in parts} == {None, *layers}
            assert {part for part, layer in parts if layer == layers[0]} >= {
                "norm",
                "qkv_proj",
                "rope",
                "attention",
                "compress",
                "o_proj",
                "mlp",
            }
            assert ((OTHER_LAYERS, None) in parts) == (len(layers) < 3)
            total = sum(stretch.seconds for stretch in step.stretches)
            assert 0.8 * step.queued < total <= step.queued  # what comes after is no part


def test_a_step_may_time_its_layers_alone() -> None:
    model = loaded("Llama")
    with compressed(model, make_plan(model, ranks=ragged)) as session:
        runner = Runner(model, session, token_ids(2, PROMPT), NEW, graph=False)
        runner.begin()
        runner.step()
        alone = {(s.part, s.layer) for s in runner.step((1,), outside=False).stretches}
        assert {layer for part, layer in alone if part != REST} == {1}
        assert {part for part, _ in alone} >= {REST, "norm", "rope", "attention", "mlp"}
        others = {(s.part, s.layer) for s in runner.step(()).stretches}
        assert {layer for _, layer in others} == {None}
        assert {part for part, _ in others} >= {OTHER_LAYERS, "embedding", "rope", "norm", "head"}
        # Nothing stays muted.
        whole = {layer for _, layer in ((s.part, s.layer) for s in runner.step((0, 1)).stretches)}
        assert whole == {None, 0, 1}


def test_layers_take_turns_and_stand_for_each_other() -> None:
    model = loaded("Llama", num_hidden_layers=3)
    _, events = measured(model, make_plan(model, ranks=ragged), sample_layers=3)
    parts = of(events, "part")
    for step in range(NEW):
        layers = {e.layer for e in parts if e.step == step} - {None}
        assert layers == ({0, 1, 2} if step == 0 else {(step - 1) % 3})
    for event in parts:
        whole = event.layer is None or event.step == 0
        assert event.weight == (1.0 if whole else 3.0)
        assert event.part != OTHER_LAYERS


SAMPLINGS = [
    (steps, every, rounds)
    for steps in (1, 2, 31, 255, 256, 257, 1000, 5000)
    for every, rounds in ((1, 0), (2, 0), (2, 2), (6, 2), (6, 8), (3, 60))
    if rounds * (every + 1) <= steps // TimedLayers(6, steps).block
]


@pytest.mark.parametrize(("steps", "every", "rounds"), SAMPLINGS)
def test_few_steps_stand_for_all(steps: int, every: int, rounds: int) -> None:
    choice = TimedLayers(6, steps, every, rounds)
    told = [step for step in range(1, steps + 1) if choice.stands_for(step)]
    assert len(told) <= 256
    assert sum(choice.stands_for(step) for step in told) == steps
    shares, rest = dict.fromkeys(range(6), 0.0), 0.0
    growing = grown = 0.0
    marked = 0
    for step in told:
        layers, outside = choice.at(step), choice.outside(step)
        marked += bool(layers or outside)
        assert not rounds or not (layers and outside)
        for layer in layers:
            shares[layer] += choice.stands_for(step) * choice.weight(step)
            growing += step * choice.stands_for(step) * choice.weight(step)
        if outside:
            rest += choice.stands_for(step) * choice.outside_weight(step)
            grown += step * choice.stands_for(step) * choice.outside_weight(step)
    assert marked == (rounds * (every + 1) if rounds else len(told))
    assert sum(shares.values()) == pytest.approx(6 * steps)
    assert rest == pytest.approx(steps)
    if steps > 200 or rounds:
        assert all(share == pytest.approx(steps, rel=0.08) for share in shares.values())
        # Also of what grows with every step.
        truth = steps * (steps + 1) / 2
        assert growing == pytest.approx(6 * truth, rel=0.04)
        assert grown == pytest.approx(truth, rel=0.08)


class Scripted:
    """A runner whose steps take what a test says."""

    def __init__(self, overhead: float, on_gpu: bool = False) -> None:
        self.overhead, self.on_gpu = overhead, on_gpu
        self.runs = 0

    def begin(self) -> None:
        self.runs = 0

    def step(self, layers: tuple[int, ...] | None = None, **_: Any) -> Step:
        self.runs += 1
        slow = 10.0 if self.runs <= 3 else 1.0  # prefill, and what is done for the first time
        return Step(slow * (1 + self.overhead * (layers is not None)), 0.0, [], [])


@pytest.mark.parametrize(
    ("overhead", "every"), [(-0.1, 1), (0.009, 1), (0.019, 2), (0.029, 3), (0.035, 6), (5.0, 6)]
)
def test_as_many_layers_are_timed_as_the_overhead_allows(overhead: float, every: int) -> None:
    runner: Any = Scripted(overhead)
    assert choose_timed_layers(runner, "auto", layers=6, steps=30).every == every
    assert choose_timed_layers(runner, 4, layers=6, steps=30).every == 4


def test_what_is_no_layers_takes_turns_where_marks_are_dear() -> None:
    def chosen(on_gpu: bool, every: str | int, steps: int, overhead: float = 0.065) -> TimedLayers:
        runner: Any = Scripted(overhead, on_gpu)
        return choose_timed_layers(runner, every, layers=6, steps=steps)

    assert chosen(True, "auto", 14).rounds == chosen(True, 2, 6).rounds == 2
    assert chosen(True, "auto", 13).rounds == 0  # a layer would be timed once
    assert chosen(True, 1, 14).rounds == chosen(False, "auto", 14).rounds == 0
    # All turns once in seven steps, or in as many as bring the marks down to 1 %.
    assert chosen(True, "auto", 70).rounds == 10
    assert chosen(True, "auto", 70, 0.095).rounds == 6
    assert chosen(True, "auto", 70, 9.0).rounds == 2
    for steps in (14, 70, 257, 300, 5000):
        choice = chosen(True, "auto", steps, 9.0)
        told = [step for step in range(1, steps + 1) if choice.stands_for(step)]
        assert sum(choice.outside(step) for step in told) == 2
        assert all(sum(layer in choice.at(step) for step in told) == 2 for layer in range(6))


def test_warming_up_runs_no_more_steps_than_the_request_has() -> None:
    for steps in range(14):
        runner: Any = Scripted(0.5)
        choose_timed_layers(runner, "auto", layers=6, steps=steps)
        assert runner.runs <= 1 + steps


def case_events(choice: TimedLayers, events: list[Any], on_gpu: bool) -> CaseEvents:
    model = loaded("Llama")
    return CaseEvents(
        model, make_plan(model), "c", token_ids(1, 5), choice, on_gpu, events.append, lambda: 0.0
    )


def told_pass(*steps: list[Stretch]) -> RequestRun:
    """Return a run that has ended, of steps with these parts."""
    made = RequestRun(0.0, 1.0, [Step(99.0, 0.0, [], [])] * len(steps))
    for number, stretches in enumerate(steps):
        made.tell(number, stretches)
    return made


def test_what_a_gpu_waited_is_the_hosts() -> None:
    events: list[Any] = []
    told = case_events(TimedLayers(3, 2, 3), events, True)
    stretches = [
        Stretch(REST, None, 0.5, True),
        Stretch("mlp", 1, 1.0, True),
        Stretch("mlp", 1, 0.25, True),
        Stretch(OTHER_LAYERS, None, 2.0, False),
        Stretch("head", None, 0.125, True),
    ]
    timed = told_pass([Stretch("mlp", 0, 1.0, True)], stretches, stretches)
    told.parts(1, [timed])
    # Kernels of no part are not told.
    assert {(e.part, e.layer): (e.seconds, e.weight) for e in events} == {
        ("mlp", 1): (1.25, 3.0),
        ("head", None): (0.125, 1.0),
    }
    assert "46%" in str(told.wait_warning([timed]))
    # What is left of the first step after 3.875 s of work is waiting; the second one took less than
    # its work by chance, and waits are the phase's as a whole.
    told.finish([clocked(9.0, 5.0, 3.375)], [timed])
    waits = {e.step: e.seconds for e in events if e.part == "host"}
    assert waits == {0: 8.0, 1: pytest.approx(0.625), 2: 0.0}
    assert told.attributed_seconds(timed) == 1.0 + 2 * (3 * 1.25 + 0.125)


def test_a_wait_is_each_steps_own_where_parts_take_turns() -> None:
    events: list[Any] = []
    choice = TimedLayers(3, 10, 3, rounds=2)
    told = case_events(choice, events, True)

    def stretches(step: int) -> list[Stretch]:
        """Return 3.5 s on the GPU: three layers of an MLP, and a head."""
        (layer,) = choice.at(step) or (None,)
        if layer is not None:
            return [Stretch(REST, None, 2.5, True), Stretch("mlp", layer, 1.0, True)]
        if choice.outside(step):
            return [Stretch(OTHER_LAYERS, None, 3.0, True), Stretch("head", None, 0.5, True)]
        return [Stretch(REST, None, 3.5, True)]

    prompt = [Stretch("mlp", layer, 1.0, True) for layer in range(3)]
    timed = told_pass(prompt, *map(stretches, range(1, 11)))
    told.finish([clocked(3.0, *[4.0] * 10)], [timed])
    decode = [e for e in events if e.step]
    weights = {(e.part, e.weight) for e in decode}
    assert weights == {("mlp", 3 * 10 / 6), ("head", 5.0), ("host", 1.0)}
    assert [e.seconds for e in decode if e.part == "host"] == [pytest.approx(0.5)] * 10
    assert sum(e.seconds * e.weight for e in decode) == pytest.approx(40.0)
    assert told.attributed_seconds(timed) == 3.0 + 10 * 3.5


def test_waits_never_make_a_phase_longer_than_it_is() -> None:
    """Steps that are shorter without marks by chance do not count as waits of nothing."""
    events: list[Any] = []
    told = case_events(TimedLayers(3, 40, 1), events, True)
    plain = clocked(1.0, *([2.0, 4.0] * 20))
    timed = told_pass(*[[Stretch("mlp", None, 3.0 if n else 1.0, True)] for n in range(41)])
    told.finish([plain], [timed])
    total = sum(e.seconds * e.weight for e in events if e.phase == "decode")
    assert total == pytest.approx(120.0)


def test_parts_are_those_of_each_steps_median_run() -> None:
    """So they add up to a time that a step took, whichever part a neighbour hits."""
    events: list[Any] = []
    told = case_events(TimedLayers(3, 1, 1), events, False)
    timed = [
        told_pass(
            [Stretch("mlp", None, first, True)],
            [Stretch("mlp", None, mlp, True), Stretch("head", None, head, True)],
        )
        for first, mlp, head in ((1.0, 2.0, 9.0), (5.0, 9.0, 1.0), (2.0, 30.0, 40.0))
    ]
    told.finish([], timed)
    found = [(e.step, e.part, e.seconds) for e in events]
    assert found == [(0, "mlp", 2.0), (1, "mlp", 2.0), (1, "head", 9.0)]
    told.finish([], timed)
    assert len(events) == 3  # told once


def test_different_tokens_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Runner.step

    def other(self: Runner, layers: Any = None, **options: Any) -> Step:
        found = step(self, layers, **options)
        moved = layers is not None and self._steps_done == 3
        return replace(found, tokens=[-1]) if moved else found

    monkeypatch.setattr(Runner, "step", other)
    _, events = measured(loaded("Llama"), make_plan(loaded("Llama")))
    assert any("different tokens from the 3." in w.message for w in of(events, "warning"))


def test_on_a_gpu_parts_come_from_steps_that_were_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The way of a GPU, walked on a CPU: a clock of its own, waits that are noted."""
    made, waits = Runner.__init__, []

    def on_gpu(self: Runner, *args: Any) -> None:
        made(self, *args)
        self.on_gpu = True
        self._watched = WallClock()

    monkeypatch.setattr(Runner, "__init__", on_gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", waits.append)
    done, events = measured(loaded("Llama"), make_plan(loaded("Llama")), sample_layers=1)
    assert done is not None
    # The prompt and one step are looked at first, with marks.
    assert len(waits) == 2 + NEW
    assert min(waits) > 0
    assert events[0].labels["by_difference"] == "host"
    assert "taken off" in events[0].labels["marks"]
    steps = {event.step: event.seconds for event in of(events, "step")}
    hosts = {e.step: e for e in of(events, "part") if e.part == "host"}
    assert set(hosts) == set(steps)
    for step, seconds in steps.items():
        others = sum(e.seconds for e in of(events, "part") if e.step == step and e.part != "host")
        # What lay in no part counts as the GPU's, but is nobody's.
        assert hosts[step].seconds <= max(0.0, seconds - others)
        assert hosts[step].weight == 1.0


def test_the_reference_models_parts_are_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvprof.methods.family import MethodInputs, plan_at
    from kvprof.methods.registry import plan_family
    from kvprof.models.load import load_model

    model = load_model("reference", device="cpu")
    monkeypatch.setattr("time.perf_counter", Ticks())
    inputs = MethodInputs(model.layout, model.fingerprint, None)
    family = plan_family("full", inputs)
    done, events = measured(
        model, plan_at(family, family.settings[0]), batch=1, sample_layers=1, output_len=12
    )
    assert done is not None
    by_phase = seconds_by(events, "phase", "part")
    for phase in ("prefill", "decode"):
        total = sum(seconds for (which, _), seconds in by_phase.items() if which == phase)
        assert 0.9 < total / getattr(done, f"instrumented_{phase}_seconds") <= 1


def clocked(*seconds: float) -> RequestRun:
    return RequestRun(0.0, 1.0, [Step(second, 0.0, [], []) for second in seconds])


def test_doubts_are_told_when_there_are_any() -> None:
    plain, slower = clocked(9.0, 1.0, 1.0, 1.0), clocked(9.0, 1.05, 1.05, 4.0)
    assert run_warnings([plain], [plain]) == []
    assert run_warnings([plain], [clocked(9.0, 1.02, 1.02, 4.0)]) == []  # one step is a neighbour's
    assert "5.0% slower" in run_warnings([plain], [slower])[0]
    found = run_warnings([plain, clocked(9.0, 2.0, 2.0, 2.0)], [slower, slower])
    assert len(found) == 1
    assert "12 s once and 15 s" in found[0]
    assert run_warnings([clocked(1.0)], [clocked(1.0)]) == []  # nothing was decoded
    # Some steps have marks, and most have none.
    some = [clocked(9.0, 1.2, 1.0, 1.0)], ["layers", "none", "none"]
    assert "6.7% slower" in run_warnings([clocked(9.0, 1.0, 1.0, 1.0)], some[0], alike=some[1])[0]
    assert run_warnings([plain], [plain], [0.98, 1.0, 1.03]) == []
    assert "between 90% and 130%" in run_warnings([plain], [plain], [0.9, 1.3])[0]


def test_a_requests_interval_holds_what_its_runs_took() -> None:
    made, _ = turned(*([1.0] * 20), repeats=3, most=3)
    assert made.intervals(made.plain) == ([1.0, 1.0], [2.0, 2.0])
    runs = [clocked(1.0, 2.0, 2.0), clocked(3.0, 2.0, 4.0), clocked(2.0, 4.0, 2.0)]
    prefill, decode = made.intervals(runs)
    assert prefill == [1.0, 3.0]
    # Every step's median is 2, and no run took 4 s.
    assert decode == [4.0, 6.0]
    assert made.intervals(runs[:1]) == (None, None)


class Paced:
    """A runner whose requests take what a test says, run after run."""

    on_gpu = False

    def __init__(self, *runs: float) -> None:
        self.runs, self.cache = list(runs), SimpleNamespace()

    def begin(self) -> None:
        self.now = self.runs.pop(0)

    def step(self, layers: tuple[int, ...] | None = None, **_: Any) -> Step:
        parts = [] if layers is None else [Stretch("mlp", None, self.now, True)]
        return Step(self.now, 0.0, [1], parts)


def turned(*runs: float, repeats: int, most: int) -> tuple[InterleavedRuns, list[Any]]:
    events: list[Any] = []
    choice = TimedLayers(3, 2, 1)
    told = case_events(choice, events, False)
    told._memory_at = set()
    runner: Any = Paced(*runs)
    made = InterleavedRuns(runner, told, choice, lambda: False, lambda: 0.0)
    made.run(repeats, most)
    return made, events


def test_a_quiet_machine_needs_no_more_runs_than_asked_for() -> None:
    made, events = turned(*([1.0] * 20), repeats=3, most=9)
    assert len(made.plain) == len(made.marked) == 3
    assert made.attributed() == [1.0] * 3
    assert run_warnings(made.plain, made.marked, made.attributed()) == []
    steps = [(e.step, e.runs) for e in events if e.type == "step"]
    assert steps == [(0, 1), (1, 1), (2, 1), (0, 3), (1, 3), (2, 3)]
    assert [e.step for e in events if e.type == "part"] == [0, 1, 2]


def test_more_runs_are_made_while_the_share_in_parts_changes() -> None:
    # A neighbour is there for the first turn alone: plain 1, marked 1.5, marked 1, plain 1, …
    made, events = turned(1.0, 1.5, *([1.0] * 40), repeats=3, most=12)
    assert 3 < len(made.plain) < 12
    assert {e.seconds for e in events if e.type == "part"} == {1.0}
    assert made.seconds(made.marked) == (1.0, 2.0)
    noisy = [1.0 + 0.3 * (n % 3) for n in range(40)]
    made, _ = turned(*noisy, repeats=3, most=5)
    assert len(made.plain) == 5
    assert "between" in run_warnings(made.plain[:1], made.marked[:1], made.attributed())[0]


def test_a_first_run_that_was_disturbed_does_not_stay_in_the_steps() -> None:
    """The time between tokens is of the runs that the request's time is of."""
    made, events = turned(9.0, 1.0, *([1.0] * 20), repeats=3, most=3)
    steps = [e for e in events if e.type == "step"]
    assert [e.seconds for e in steps] == [9.0] * 3 + [1.0] * 3
    assert made.seconds(made.plain) == (1.0, 2.0)


def test_each_way_goes_first_as_often_as_the_other() -> None:
    made, _ = turned(*map(float, range(1, 9)), repeats=4, most=4)
    assert [one.steps[0].seconds for one in made.plain] == [1.0, 4.0, 5.0, 8.0]
