"""The screen *Load*: what it shows of a load that never happened, live, over, and as a result."""

import pytest

from kvprof.records.events import LoadRateFinished, LoadRequest
from kvprof.records.fold import result_of
from kvprof.records.load import rate_row
from kvprof.tui.load_figures import RateBrief, binned, brief_from_row, brief_of
from kvprof.tui.load_page import RateTable
from kvprof.tui.session import Session
from kvprof.tui.sources import NoEvents
from kvprof.tui.state import RunState, state_of
from kvprof.views.bars import Ink
from kvprof.views.numbers import duration
from kvprof.views.page import render_text
from tests.records.streams import stream
from tests.tui.loads import load
from tests.tui.running import press, recorded, settle, show, text, whole_text


def state_after(events):
    state = RunState()
    state.add_all(events)
    return state


class TestFigures:
    def test_a_rate_in_a_few_figures_is_the_result_s_without_intervals(self):
        state = state_after(load())
        assert state.is_load
        for case in state.load.cases.values():
            row = rate_row(case, state.objective)
            brief = brief_of(case, state.objective)
            for own, theirs in (
                (brief.latency, row["normalised_latency_seconds"]["mean"]),
                (brief.attained, row["attained_share"]),
            ):
                assert own == pytest.approx(theirs, rel=1e-12)
            same = brief_from_row(row)
            assert (same.grows, same.ended, same.failed) == (brief.grows, 60, brief.failed)
            assert (same.complete, brief.over) == (True, True)
            assert state.briefs[case.started.case] == brief

    def test_the_queue_grows_where_requests_come_faster_than_they_are_answered(self):
        briefs = state_after(load(requests=200)).briefs
        # So few requests tell no rate that is served for sure.
        assert [briefs[f"full @ {rate}/s"].grows for rate in (1, 2, 4)] == [None, None, True]

    def test_a_rate_under_way_counts_the_requests_that_ended(self):
        events = [event for event in load() if not isinstance(event, LoadRateFinished)]
        state = state_after(events[: len(events) // 3])
        (case, *_) = state.load.cases.values()
        brief = brief_of(case, state.objective)
        assert not brief.over
        assert brief.grows is None
        assert brief.ended == len(case.requests) <= case.started.requests

    def test_values_over_time_are_means_of_stretches(self):
        times, values = [0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 3.0, None, 5.0, 7.0]
        assert binned(times, values, 2) == [2.0, 6.0]
        assert binned(times, values, 5) == [1.0, 3.0, None, 5.0, 7.0]
        assert binned([], [], 5) == []
        assert binned([0.0], [4.0], 2) == [4.0, None]


class TestScreen:
    @pytest.mark.parametrize("size", [(80, 24), (120, 40), (60, 12)])
    def test_a_load_opens_on_it_and_has_two_screens(self, tmp_path, size):
        async def steps(app, pilot):
            shown = text(app)
            assert app.current_mode == "load"
            assert "[1 Load] 2 Log" in shown
            assert "Overview" not in shown
            assert "fdc at 4.00/s" in shown
            await press(app, pilot, "2")
            assert app.current_mode == "log"
            assert "fdc @ 4/s: over" in text(app)
            await press(app, pilot, "3")
            assert app.current_mode == "log"
            await press(app, pilot, "1")
            assert app.current_mode == "load"

        show(recorded(tmp_path, load()), tmp_path, steps, size=size)

    def test_a_run_of_requests_has_no_such_screen(self, tmp_path):
        async def steps(app, pilot):
            assert "Load" not in text(app).splitlines()[0]
            await press(app, pilot, "4")
            assert app.current_mode == "log"

        show(recorded(tmp_path, stream()), tmp_path, steps)

    def test_latency_by_rate_stands_against_the_baseline(self, tmp_path):
        session = recorded(tmp_path, load())
        briefs = {}

        async def steps(app, pilot):
            briefs.update(app.session.state.briefs)
            rows = whole_text(app, "rates").splitlines()
            assert rows[0].split() == ["requests/s", "full", "fdc"]
            full, fdc = briefs["full @ 2/s"], briefs["fdc @ 2/s"]
            row = next(row for row in rows if row.startswith("2.00"))
            assert duration(full.latency) in row
            assert duration(fdc.latency) in row
            by = round((fdc.latency / full.latency - 1) * 100)
            assert f"−{-by} %" in row
            assert "▲" in next(row for row in rows if row.startswith("4.00"))
            assert rows[-1] == "▲ the queue grows"
            await press(app, pilot, "b")
            assert f"+{round((full.latency / fdc.latency - 1) * 100)} %" in whole_text(app, "rates")

        show(session, tmp_path, steps, size=(120, 40))

    def test_the_levels_over_time_are_those_of_the_chosen_rate(self, tmp_path):
        async def steps(app, pilot):
            lines = whole_text(app, "queue").splitlines()
            assert [line.split()[0] for line in lines] == [
                "waiting",
                "running",
                "cache",
                "preempted",
            ]
            assert "28 most" in lines[0]
            assert "8 most" in lines[1]
            assert "95 % most" in lines[2]
            assert lines[3].split() == ["preempted", "2"]
            assert "▁" in lines[0]
            await press(app, pilot, "n")  # from the highest rate on to the lowest
            assert "fdc at 1.00/s" in whole_text(app, "title")
            assert "0 most" in whole_text(app, "queue").splitlines()[0]
            await press(app, pilot, "N", "m")
            assert "full at 4.00/s" in whole_text(app, "title")

        show(recorded(tmp_path, load()), tmp_path, steps)

    def test_what_the_servers_do_not_tell_is_said(self, tmp_path):
        async def steps(app, pilot):
            assert "waiting, running, cache used" in whole_text(app, "queue")
            assert "simulated" not in whole_text(app, "notes")

        show(recorded(tmp_path, load(told=False, mode="url")), tmp_path, steps)

    def test_a_simulation_speaks_of_no_server(self, tmp_path):
        # The first rate has begun; all of it is worked out before anything is told.
        session = recorded(tmp_path, load()[:3])
        session.source.age = lambda: 125.0

        async def steps(app, pilot):
            assert "no event for 02:05: simulating, or killed" in text(app)
            assert "server" not in text(app)
            assert {line.kind for line in app.session.state.log} >= {"engine"}

        show(session, tmp_path, steps, size=(120, 40))

    def test_failures_are_counted(self, tmp_path):
        async def steps(app, pilot):
            await press(app, pilot, "N")
            title = whole_text(app, "title")
            assert "fdc at 2.00/s · 60 requests · 1 failed · rate 5 of 6" in title

        show(recorded(tmp_path, load()), tmp_path, steps)

    def test_it_follows_a_load_that_goes_on(self, tmp_path):
        events = load(("full", "fdc", "kq"), requests=300)
        starts = [place for place, event in enumerate(events) if isinstance(event, LoadRequest)]
        session = recorded(tmp_path, events[: starts[1000] + 1])

        async def steps(app, pilot):
            assert "fdc at 1.00/s · 101 of 300 requests ended" in whole_text(app, "title")
            assert "so far" in whole_text(app, "rates")
            assert "● fdc @ 1/s" in text(app)
            app.session.state.add_all(events[starts[1000] + 1 :])
            app.draw()
            await settle(app, pilot)
            assert "kq at 4.00/s · 300 requests" in whole_text(app, "title")
            assert "so far" not in whole_text(app, "rates")
            assert "■ finished" in text(app)

        show(session, tmp_path, steps, size=(120, 40))

    def test_more_methods_than_fit_are_told(self, tmp_path):
        methods = [f"method-{n}" for n in range(5)]

        async def steps(app, pilot):
            assert "2 more: m shows the next method" in whole_text(app, "rates")
            heads = whole_text(app, "rates").splitlines()[0]
            assert "method-0" in heads
            assert "method-4" in heads  # the baseline, and what is shown

        show(recorded(tmp_path, load(methods, (1.0, 2.0))), tmp_path, steps, size=(80, 24))

    def test_a_result_alone_shows_its_figures(self, tmp_path):
        events = load()
        session = Session(
            "a result", NoEvents(), result=(made := result_of(events)), state=state_of(made)
        )
        live = state_after(events).briefs

        async def steps(app, pilot):
            assert app.current_mode == "load"
            rows = whole_text(app, "rates").splitlines()
            row = next(row for row in rows if row.startswith("2.00"))
            assert duration(live["fdc @ 2/s"].latency) in row
            assert "95 % most" in whole_text(app, "queue")

        show(session, tmp_path, steps)

    def test_the_screen_is_saved_under_its_name(self, tmp_path):
        async def steps(app, pilot):
            await press(app, pilot, "x")
            await settle(app, pilot)
            assert "svg" in (tmp_path / "kvprof-load.svg").read_text()

        show(recorded(tmp_path, load()), tmp_path, steps)


def brief_at(label: str, latency: float) -> RateBrief:
    """Return a rate of 2 requests a second, of which nothing but its latency is known."""
    none = (None, None, False, False, 20, 0, 0)
    return RateBrief(f"{label} @ 2/s", label, 2.0, latency, *none, complete=True, over=True)


def test_a_methods_name_is_as_long_as_its_column():
    name = "my-served.plan"
    drawn = render_text(RateTable([brief_at(name, 0.01)], name, None, {}, Ink()))
    head, row = drawn.splitlines()[:2]
    assert name in head
    assert len(head.rstrip()) <= len("requests/s  ") + 19
    assert "10.0 ms" in row


def test_a_method_is_held_against_the_baseline_on_as_many_gpus() -> None:
    seconds = {"full tp=2": 0.02, "fdc tp=2": 0.01, "full tp=4": 0.01, "fdc tp=4": 0.02}
    briefs = [brief_at(label, latency) for label, latency in seconds.items()]
    drawn = render_text(RateTable(briefs, "full tp=2", None, {}, Ink()), width=100)
    _, row = drawn.splitlines()[:2]
    assert row.split()[1:] == [
        "20.0", "ms", "10.0", "ms", "−50", "%", "10.0", "ms", "20.0", "ms", "+100", "%",
    ]  # fmt: skip
    # Where not all fit, the chosen one's own baseline stands beside it.
    narrow = RateTable(briefs, "full tp=2", "fdc tp=4 @ 2/s", {}, Ink())
    head = render_text(narrow, width=52).splitlines()[0]
    assert head.split()[1:] == ["full", "tp=4", "fdc", "tp=4"]
