from dataclasses import replace
from pathlib import Path

import pytest

from kvprof.records.events import (
    CaseStarted,
    MemorySample,
    PartSample,
    Progress,
    RunFinished,
    StepFinished,
    TelemetrySample,
    Warned,
)
from kvprof.records.fold import fold, result_of
from kvprof.tui.figures import LayerFilter, layer_rows
from kvprof.tui.state import LOG_LINES, RunState, state_of
from tests.records.streams import case_name, cuts, stream, whole_first


def state_after(events: list) -> RunState:
    state = RunState()
    state.add_all(events)
    return state


def figures(state: RunState) -> dict:
    """Everything that a screen shows of a state, but for the log."""
    return {
        name: {
            "parts": {part: pytest.approx(s) for part, s in case.account.by_part().items()},
            "jct": pytest.approx(case.account.seconds),
            "ttft": case.ttft_seconds(),
            "itl": case.itl_seconds(),
            "layers": {
                number: (layer.key_ranks, layer.nbytes, pytest.approx(layer.seconds))
                for number, layer in case.layers.items()
            },
            "memory": [(one.context, one.logical, one.levels) for one in case.memory],
            "peak": case.peak,
            "steps": [(one.context, one.seconds, one.weight) for one in case.steps],
        }
        for name, case in state.cases.items()
    }


class TestAgainstTheFold:
    """The screens and the report must not say different things of one run."""

    events = stream(("full", "palu", "fdc", "tale"), layers=3, steps=9)

    def test_parts_and_times_are_the_results_own(self):
        state, data = state_after(self.events), fold(self.events)
        for row in data["cases"]:
            case = state.cases[row["case"]]
            own = [part for part in data["parts"] if part["case"] == row["case"]]
            sums: dict[str, float] = {}
            for part in own:
                sums[part["part"]] = sums.get(part["part"], 0.0) + part["seconds"]
            assert case.account.by_part() == pytest.approx(sums)
            assert case.account.seconds == pytest.approx(row["jct_seconds"])
            assert case.ttft_seconds() == row["ttft_seconds"]
            assert case.itl_seconds() == pytest.approx(row["itl_seconds"])

    def test_a_killed_run_has_come_as_far_here_as_there(self):
        for events in (self.events, whole_first(self.events)):
            for end in cuts(events):
                state, data = state_after(events[:end]), fold(events[:end])
                for row in data["cases"]:
                    case = state.cases[row["case"]]
                    assert case.account.seconds == pytest.approx(row["measured_seconds"])

    def test_layers_are_the_results_own(self):
        state = state_after(self.events)
        for row in fold(self.events)["layers"]:
            layer = state.cases[row["case"]].layers[row["layer"]]
            assert layer.seconds == pytest.approx(row["seconds"])
            assert (layer.key_ranks, layer.value_ranks) == (row["key_ranks"], row["value_ranks"])
            assert layer.nbytes == row["nbytes"]

    @pytest.mark.parametrize("ended", [True, False])
    def test_a_result_alone_gives_the_figures_of_its_events(self, ended):
        events = self.events if ended else self.events[: len(self.events) // 2]
        state = state_of(result_of(events))
        assert figures(state) == figures(state_after(events))
        assert state.end is not None
        assert state.end.complete is ended

    def test_a_result_alone_says_what_the_run_warned_of(self):
        state = state_of(result_of(self.events))
        assert any("the first step was slow" in line.text for line in state.log)


class TestWhileItRuns:
    def test_parts_add_up_before_the_case_is_finished(self):
        events = stream(steps=5)
        cut = next(i for i, event in enumerate(events) if event.event == "step") + 1
        case = state_after(events[:cut]).cases[case_name("full", 5)]
        walked = [event for event in events[:cut] if isinstance(event, StepFinished)]
        assert case.account.seconds == pytest.approx(sum(step.seconds for step in walked))
        assert "unattributed" not in case.account.by_part()
        prefill = next(event for event in events[:cut] if event.event == "step")
        assert case.ttft_seconds() == prefill.seconds  # of one run so far

    def test_a_sample_stands_for_its_weight(self):
        state = state_after(stream(steps=1)[:2])
        case = next(iter(state.cases))
        state.add(PartSample(1.0, case, "decode", "attention", 2.0, 1, 10, 3, weight=8.0))
        assert state.cases[case].account.by_part() == {"attention": 16.0}
        assert state.cases[case].layers[3].seconds == 16.0

    def test_only_work_on_the_cache_counts_as_a_layers_time(self):
        state = state_after(stream(steps=1)[:2])
        case = next(iter(state.cases))
        state.add(PartSample(1.0, case, "decode", "mlp", 2.0, 1, 10, 0))
        assert state.cases[case].layers[0].seconds is None

    def test_negative_unattributed_stays_negative(self):
        events = stream(("full",), steps=2)
        events = [
            replace(event, prefill_seconds=1e-6, decode_seconds=1e-6)
            if event.event == "case_finished"
            else event
            for event in events
        ]
        assert state_after(events).cases[case_name("full", 2)].account.by_part()["unattributed"] < 0

    def test_slowing_down_is_logged_once_when_it_begins_and_once_when_it_ends(self):
        state = RunState()
        for reasons in ((), ("power cap",), ("power cap",), ()):
            state.add(TelemetrySample(1.0, "gpu 0", {"power_w": 700.0}, reasons))
        lines = [line.text for line in state.log if line.kind == "device"]
        assert lines == ["gpu 0: throttled: power cap", "gpu 0: no longer throttled"]

    def test_how_a_run_ended_early_is_in_the_log(self):
        state = RunState()
        state.add(RunFinished(3.0, False, "out of memory"))
        assert state.log[-1].text == "ended early: out of memory"

    def test_ranks_of_a_strange_record_are_left_out(self):
        layers = [{"layer": 0, "key_ranks": "all", "value_ranks": [4, "x"]}, {"layer": "zero"}, {}]
        state = RunState()
        state.add(CaseStarted(0.0, "c", "fdc", 0.5, 1, 8, 2, layers))
        rows = layer_rows(state.cases["c"], sort="layer", descending=False, shown=LayerFilter())
        assert [(row.layer, row.key_ranks, row.value_ranks) for row in rows] == [(0, [], [4])]


def test_a_hundred_thousand_events_leave_bounded_memory():
    state = RunState()
    state.add(CaseStarted(0.0, "c", "fdc", 0.5, 1, 8, 25_000))
    for step in range(25_000):
        state.add(PartSample(float(step), "c", "decode", "attention", 1e-3, step, step, 0))
        state.add(StepFinished(float(step), "c", "decode", step, step, 1e-3 + step * 1e-9))
        state.add(MemorySample(float(step), "c", step, 1, 2, 3, peak=step))
        state.add(TelemetrySample(float(step), "cpu", {"load": 0.5}))
        if step % 5 == 0:
            state.add(Warned(float(step), "again"))
    case = state.cases["c"]
    assert len(case.steps) < 2100
    assert len(case.memory) < 2100
    assert len(state.devices["cpu"]) < 300
    assert len(state.log) == LOG_LINES
    # Nothing that counts is thinned.
    assert case.account.by_part() == {"attention": pytest.approx(25.0)}
    assert case.peak == 24_999
    assert case.memory.last is not None
    assert case.memory.last.context == 24_999
    assert case.itl_seconds() == pytest.approx(1e-3 + 12_500 * 1e-9, rel=1e-3)
    assert state.logged == 5001


def test_the_state_knows_no_screen():
    source = Path("kvprof/tui")
    for name in ("state", "figures", "drawings", "session"):
        assert "textual" not in (source / f"{name}.py").read_text()


def test_what_a_sweep_says_of_a_method_at_every_length_is_logged_once() -> None:
    labels = {"by_difference": "attention", "host": "no part"}
    state = state_after(
        [
            CaseStarted(0.0, f"{method} out{length}", method, None, 1, 8, length, (), labels)
            for method in ("full", "fdc")
            for length in (8, 16)
        ]
    )
    notes = [line.text for line in state.log if line.kind == "note"]
    assert notes == [
        f"{method}: {words}"
        for method in ("full", "fdc")
        for words in ("by difference: attention", "host: no part")
    ]


class TestTimeLeft:
    def state(self, *told):
        run = replace(
            stream(("full", "fdc"), steps=5)[0],
            inputs={
                "methods": ["full", "fdc"],
                "batches": [1],
                "input_lens": [8],
                "output_lens": [6],
            },
        )
        case = CaseStarted(0.0, "a", "full", 0.0, 1, 8, 6)
        return state_after([run, case, *told])

    def test_of_passes_and_of_cases_to_come(self):
        first = Progress(10.0, "a", "pass", 0, 4, 8)
        assert self.state(first).seconds_left(10.0) is None
        state = self.state(first, replace(first, time=12.0, done=1))
        # 2 s a pass: 3 to 7 of them, and another case as long as this one.
        assert state.seconds_left(12.0) == pytest.approx((6 + 8, 14 + 16))
        assert state.seconds_left(13.0) == pytest.approx((5 + 8, 13 + 16))
        state = self.state(first, replace(first, time=11.0, step=5, steps=10))
        assert state.seconds_left(11.0)[0] == pytest.approx(7 + 8)

    def test_of_points_of_the_run(self):
        first = Progress(10.0, None, "point", 0, 4, 4)
        state = self.state(first, replace(first, time=13.0, done=3))
        assert state.seconds_left(13.5) == pytest.approx((0.5, 0.5))
        state.add(RunFinished(14.0, True))
        assert state.seconds_left(14.0) is None
