from dataclasses import replace

import pytest

from kvprof.records.events import CaseStarted, PartSample, StepFinished
from kvprof.records.parts import UNTIMED
from kvprof.tui.figures import Choice, bars, difference, itl_curve, nice_scale, share, shown_parts
from kvprof.tui.state import RunState
from tests.records.streams import stream


def state_of(events):
    state = RunState()
    state.add_all(events)
    return state


def two_requests():
    """A run of two methods at two input lengths."""
    short, long = stream(("full", "fdc"), steps=3), stream(("full", "fdc"), steps=3)
    begin, end = short[0], short[-1]
    moved = []
    for event in long[1:-1]:
        change = {"case": f"{event.case} long"} if hasattr(event, "case") and event.case else {}
        if isinstance(event, CaseStarted):
            change["input_len"] = 4096
        moved.append(replace(event, **change))
    return [begin, *short[1:-1], *moved, end]


class TestBars:
    def test_differences_are_against_the_baseline_at_the_same_request(self):
        state = state_of(stream(("full", "fdc")))
        first, second = bars(state, Choice())
        assert first.is_baseline
        assert first.baseline is None
        assert second.baseline == first.seconds
        assert sum(second.parts.values()) == pytest.approx(second.seconds)

    def test_there_is_no_difference_while_either_is_unfinished(self):
        events = stream(("full", "fdc"))
        finished = [i for i, event in enumerate(events) if event.event == "case_finished"]
        _, second = bars(state_of(events[: finished[1]]), Choice())
        assert second.baseline is None
        choice = Choice(baseline="fdc")
        first, _ = bars(state_of(events[: finished[1]]), choice)
        assert first.baseline is None

    def test_a_case_that_is_timed_as_a_whole_first_grows_meanwhile(self):
        state = state_of(stream(("full",))[:2])
        case = next(iter(state.cases))
        state.add(StepFinished(0.0, case, "prefill", 0, 8, 2.0))
        state.add(StepFinished(0.0, case, "decode", 1, 9, 0.5, weight=4.0))
        (bar,) = bars(state, Choice())
        assert (bar.seconds, bar.parts) == (4.0, {UNTIMED: 4.0})
        state.add(PartSample(0.0, case, "prefill", "attention", 1.5, 0, 8))
        (bar,) = bars(state, Choice())
        assert (bar.seconds, bar.parts) == (4.0, {"attention": 1.5, UNTIMED: 2.5})

    def test_another_request_has_bars_of_its_own(self):
        state, choice = state_of(two_requests()), Choice()
        assert choice.shown_request(state) == (1, 4096, 4)
        assert choice.move_request(state, 1) == (1, 2048, 4)
        assert [bar.case.started.input_len for bar in bars(state, choice)] == [2048, 2048]
        assert choice.move_request(state, -1) == (1, 4096, 4)

    def test_parts_by_size_come_largest_first(self):
        state = state_of(stream(("full",)))
        parts = shown_parts(state, Choice(parts_by_size=True))
        seconds = next(iter(state.cases.values())).account.by_part()
        assert [seconds[part] for part in parts] == sorted(seconds.values(), reverse=True)
        assert parts != shown_parts(state, Choice())


class TestChoice:
    def test_the_case_under_way_is_shown_until_one_is_chosen(self):
        events = stream(("full", "palu", "fdc"))
        starts = [i for i, event in enumerate(events) if isinstance(event, CaseStarted)]
        choice = Choice()
        assert choice.shown_case(state_of(events[: starts[1] + 1])).method == "palu"
        assert choice.next_method(state_of(events[: starts[1] + 1])) == "full"
        assert choice.shown_case(state_of(events)).method == "full"

    def test_methods_go_round_in_a_circle(self):
        state, choice = state_of(stream(("full", "palu", "fdc"))), Choice()
        assert [choice.next_method(state) for _ in range(4)] == ["full", "palu", "fdc", "full"]

    def test_the_baseline_begins_as_the_runs_own(self):
        state, choice = state_of(stream(("full", "palu", "fdc"))), Choice()
        assert choice.baseline_method(state) == "full"
        assert choice.next_baseline(state) == "palu"
        assert choice.baseline_case(state).method == "palu"

    def test_nothing_can_be_chosen_before_anything_was_started(self):
        state, choice = RunState(), Choice()
        assert choice.next_method(state) is None
        assert choice.next_baseline(state) is None
        assert choice.move_request(state, 1) is None
        assert choice.shown_case(state) is None


@pytest.mark.parametrize(("value", "scale"), [(0.9, 1), (1, 1), (1.01, 1.2), (7e-3, 8e-3), (9, 10)])
def test_a_scale_is_the_next_round_number(value, scale):
    assert nice_scale(value) == pytest.approx(scale)


class TestCurve:
    def case(self, steps):
        state = RunState()
        state.add(CaseStarted(0.0, "c", "fdc", None, 1, 8, 8))
        for context, seconds, weight in steps:
            state.add(StepFinished(0.0, "c", "decode", 0, context, seconds, weight))
        return state.cases["c"]

    def test_contexts_ascend_whatever_the_order_of_measuring(self):
        case = self.case([(64, 3.0, 1), (16, 1.0, 1), (32, 2.0, 1)])
        assert itl_curve(case, 60) == ([16, 32, 64], [1.0, 2.0, 3.0])

    def test_steps_that_share_a_point_are_averaged_by_weight(self):
        case = self.case([(100, 1.0, 3.0), (100, 2.0, 1.0)])
        assert itl_curve(case, 60) == ([100], [1.25])

    def test_a_long_curve_is_drawn_with_few_points(self):
        case = self.case([(context, 1.0, 1.0) for context in range(1500)])
        contexts, seconds = itl_curve(case, 50)
        assert 40 <= len(contexts) <= 51
        assert set(seconds) == {1.0}

    def test_prefill_is_no_time_between_tokens(self):
        state = RunState()
        state.add(CaseStarted(0.0, "c", "fdc", None, 1, 8, 8))
        state.add(StepFinished(0.0, "c", "prefill", 0, 8, 9.0))
        assert itl_curve(state.cases["c"], 60) == ([], [])


@pytest.mark.parametrize(
    ("value", "base", "words"),
    [
        (0.66, 1.0, "−34 %"), (1.021, 1.0, "+2.1 %"), (1.0, 1.0, "same"), (1.0, 0.0, "n/a"),
        (None, 1.0, "n/a"), (1.0, None, "n/a"), (0.9999, 1.0, "same"), (3.0, 1.0, "+200 %"),
    ],
)  # fmt: skip
def test_a_difference_is_written_with_its_sign(value, base, words):
    assert difference(value, base) == words


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.345, "34 %"), (0.004, "0.4 %"), (0.0996, "10 %"), (-0.02, "−2.0 %"), (0.0, "0.0 %")],
)
def test_a_share_has_the_digits_that_are_read(value, text):
    assert share(value) == text
