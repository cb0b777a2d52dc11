"""Steps, marked and not: some stand for the rest, and tokens stay the same."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvprof.benchmark.jct.paired_runs import (
    CaseEvents,
    PairedRuns,
    RequestRun,
    reported_steps,
    run_warnings,
)
from kvprof.benchmark.jct.steps import Runner, Step
from kvprof.runtime.clock import REST, Stretch, WallClock
from kvprof.runtime.compressed import compressed
from tests.benchmark.jct.real_runs import NEW, PROMPT, Ticks, measured, of
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
        marked = [runner.step(True).tokens for _ in range(NEW)]
        wanted = model.model.generate(
            ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert torch.equal(torch.tensor(plain).T, wanted[:, PROMPT:])
    assert marked == plain


def test_a_marked_step_times_every_layer_and_what_belongs_to_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.perf_counter", Ticks())
    model = loaded("Llama", num_hidden_layers=3)
    with compressed(model, make_plan(model, ranks=ragged)) as session:
        runner = Runner(model, session, token_ids(2, PROMPT), NEW, graph=False)
        runner.begin()
        runner.step()
        step = runner.step(True)
    parts = {(stretch.part, stretch.layer) for stretch in step.stretches}
    assert {layer for _, layer in parts} == {None, 0, 1, 2}
    for layer in range(3):
        assert {part for part, own in parts if own == layer} >= {
            "norm",
            "qkv_proj",
            "rope",
            "attention",
            "compress",
            "o_proj",
            "mlp",
        }
    total = sum(stretch.seconds for stretch in step.stretches)
    assert 0.8 * step.queued < total <= step.queued  # what comes after is no part


@pytest.mark.parametrize("steps", [0, 1, 2, 31, 255, 256, 257, 1000, 5000])
def test_few_steps_stand_for_all(steps: int) -> None:
    told = reported_steps(steps)
    assert len(told) <= 257
    assert told.pop(0) == 1
    assert sum(told.values()) == steps
    assert all(1 <= step <= steps for step in told)
    if steps > 200:  # also of what grows with every step
        grown = sum(step * count for step, count in told.items())
        assert grown == pytest.approx(steps * (steps + 1) / 2, rel=0.01)


def case_events(steps: int, events: list[Any], on_gpu: bool) -> CaseEvents:
    model = loaded("Llama")
    return CaseEvents(
        model, make_plan(model), "c", token_ids(1, 5), steps, on_gpu, events.append, lambda: 0.0
    )


def told_pass(*steps: list[Stretch]) -> RequestRun:
    """Return a run that has ended, of steps with these parts."""
    made = RequestRun(0.0, 1.0, [Step(99.0, 0.0, [], [])] * len(steps))
    for number, stretches in enumerate(steps):
        made.tell(number, stretches)
    return made


def test_what_a_gpu_waited_is_the_hosts() -> None:
    events: list[Any] = []
    told = case_events(2, events, True)
    stretches = [
        Stretch(REST, None, 0.5, True),
        Stretch("mlp", 1, 1.0, True),
        Stretch("mlp", 1, 0.25, False),
        Stretch("head", None, 0.25, True),
    ]
    timed = told_pass([Stretch("mlp", 0, 1.0, True)], stretches, stretches)
    assert "5%" not in str(told.wait_warning([timed]))
    # A second step that took less than its work: each of the four stretches has 0.25 s of a mark.
    told.finish([clocked(9.0, 5.0, 1.0)], [timed])
    found = {(e.step, e.part): e.seconds for e in events}
    assert found == {
        (0, "mlp"): 1.0, (0, "host"): 8.0,
        (1, "mlp"): 1.25, (1, "head"): 0.25, (1, "host"): 3.0,
        (2, "mlp"): 0.75, (2, "head"): 0.0, (2, "host"): 0.0,
    }  # fmt: skip
    assert told.attributed_seconds(timed, clocked(9.0, 5.0, 1.0)) == 1.0 + 1.5 + 0.75


def test_parts_are_those_of_each_steps_median_run() -> None:
    """So they add up to a time that a step took, whichever part a neighbour hits."""
    events: list[Any] = []
    told = case_events(1, events, False)
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


def test_different_tokens_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Runner.step

    def other(self: Runner, marked: bool = False, **options: Any) -> Step:
        found = step(self, marked, **options)
        moved = marked and self._steps_done == 3
        return replace(found, tokens=[-1]) if moved else found

    monkeypatch.setattr(Runner, "step", other)
    _, events = measured(loaded("Llama"), make_plan(loaded("Llama")))
    assert any("token 3;" in w.message for w in of(events, "warning"))


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
    done, events = measured(loaded("Llama"), make_plan(loaded("Llama")))
    assert done is not None
    assert len(waits) == NEW
    assert min(waits) > 0
    assert events[0].labels["by_difference"] == "host"
    steps = {event.step: event.seconds for event in of(events, "step")}
    hosts = {e.step: e for e in of(events, "part") if e.part == "host"}
    assert set(hosts) == set(steps)
    for step, seconds in steps.items():
        others = sum(e.seconds for e in of(events, "part") if e.step == step and e.part != "host")
        # What lay in no part counts as the GPU's, but is nobody's.
        assert hosts[step].seconds <= max(0.0, seconds - others)
        assert hosts[step].weight == 1.0


def clocked(*seconds: float) -> RequestRun:
    return RequestRun(0.0, 1.0, [Step(second, 0.0, [], []) for second in seconds])


def test_doubts_are_told_when_there_are_any() -> None:
    plain, slower = clocked(9.0, 1.0, 1.0, 1.0), clocked(9.0, 1.05, 1.05, 4.0)
    assert run_warnings([plain], [plain]) == []
    found = run_warnings([plain, clocked(9.0, 2.0, 2.0, 2.0)], [slower, slower])
    assert len(found) == 1
    assert "12 to 15 s" in found[0]
    assert run_warnings([clocked(1.0)], [clocked(1.0)]) == []  # nothing was decoded
    assert run_warnings([plain], [plain], [0.98, 1.0, 1.03]) == []
    assert "90% to 130%" in run_warnings([plain], [plain], [0.9, 1.3])[0]


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

    def step(self, marked: bool = False, **_: Any) -> Step:
        parts = [Stretch("mlp", None, self.now, True)] if marked else []
        return Step(self.now, 0.0, [1], parts)


def turned(*runs: float, repeats: int, most: int) -> tuple[PairedRuns, list[Any]]:
    events: list[Any] = []
    told = case_events(2, events, False)
    told._memory_at = set()
    runner: Any = Paced(*runs)
    made = PairedRuns(runner, told, 2, lambda: False, lambda: 0.0)
    made.run(repeats, most)
    return made, events


def test_a_quiet_machine_needs_no_more_runs_than_asked_for() -> None:
    made, events = turned(*([1.0] * 20), repeats=3, most=9)
    assert len(made.plain) == len(made.marked) == 3
    assert made.attributed() == [1.0] * 3
    assert run_warnings(made.plain, made.marked, made.attributed()) == []
    steps = [(e.step, e.runs) for e in events if e.event == "step"]
    assert steps == [(0, 1), (1, 1), (2, 1), (0, 3), (1, 3), (2, 3)]
    assert [e.step for e in events if e.event == "part"] == [0, 1, 2]


def test_more_runs_are_made_while_the_share_in_parts_changes() -> None:
    # A neighbour is there for the first turn alone: plain 1, marked 1.5, marked 1, plain 1, …
    made, events = turned(1.0, 1.5, *([1.0] * 40), repeats=3, most=12)
    assert 3 < len(made.plain) < 12
    assert {e.seconds for e in events if e.event == "part"} == {1.0}
    assert made.seconds(made.marked) == (1.0, 2.0)
    noisy = [1.0 + 0.3 * (n % 3) for n in range(40)]
    made, _ = turned(*noisy, repeats=3, most=5)
    assert len(made.plain) == 5
    assert "62%" in run_warnings(made.plain[:1], made.marked[:1], made.attributed())[0]


def test_a_first_run_that_was_disturbed_does_not_stay_in_the_steps() -> None:
    """The time between tokens is of the runs that the request's time is of."""
    made, events = turned(9.0, 1.0, *([1.0] * 20), repeats=3, most=3)
    steps = [e for e in events if e.event == "step"]
    assert [e.seconds for e in steps] == [9.0] * 3 + [1.0] * 3
    assert made.seconds(made.plain) == (1.0, 2.0)


def test_each_way_goes_first_as_often_as_the_other() -> None:
    made, _ = turned(*map(float, range(1, 9)), repeats=4, most=4)
    assert [one.steps[0].seconds for one in made.plain] == [1.0, 4.0, 5.0, 8.0]
