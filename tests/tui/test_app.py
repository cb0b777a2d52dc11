"""Each key and each click, driven by a run that never happened."""

import json
from dataclasses import replace

import pytest
from textual.events import Resize

from kvprof.records.files import read_result
from kvprof.records.fold import result_of
from kvprof.tui.frame import KEYS, REQUEST_SCREENS, SCREENS
from kvprof.tui.session import Session
from kvprof.tui.sources import Replay
from tests.records.streams import stream, write
from tests.tui.running import in_turn, keys, press, recorded, settle, show, text, until
from tests.tui.test_figures import two_requests


def test_numbers_go_to_the_screens(tmp_path):
    numbers = {str(number): name for number, name in enumerate(REQUEST_SCREENS, 1)}
    turns = ["4", *numbers]
    for number, found in zip(turns, in_turn(tmp_path, *turns), strict=True):
        assert found["mode"] == numbers[number]
        assert f"[{number} {SCREENS[numbers[number]]}]" in found["text"]


def test_m_chooses_the_next_method_on_every_screen(tmp_path):
    first, second = in_turn(tmp_path, ("m",), ("2", "m"))
    assert first["choice"].method == "full"
    assert "Layers · palu" in second["text"]


def test_b_holds_the_others_against_the_next_method(tmp_path):
    found = keys(tmp_path, "b")
    assert "against palu" in found["text"]
    line = next(line for line in found["text"].splitlines() if line.startswith("   palu "))
    assert "baseline" in line


def test_n_goes_to_the_next_request_and_back(tmp_path):
    turns = in_turn(tmp_path, (), ("n",), ("N",), events=two_requests())
    first, following, again = (found["text"] for found in turns)
    assert "4k in" in first
    assert "request 2 of 2" in first
    assert "n request" in first
    assert "2k in" in following
    assert "4k in" in again


def test_s_sorts_what_the_screen_lists(tmp_path):
    overview, layers = in_turn(tmp_path, ("s",), ("2", "s"))
    assert overview["choice"].parts_by_size
    assert "ms ▼" in layers["text"]


def test_space_holds_the_view_and_nothing_is_lost(tmp_path):
    events = stream(("full", "fdc"))
    session = recorded(tmp_path, events[:300])

    async def steps(app, pilot):
        shown = await press(app, pilot, "space")
        assert "‖ paused" in shown
        assert "space resume" in shown
        before = session.state.version
        lines = write(tmp_path / "rest.jsonl", events).read_bytes().splitlines(keepends=True)
        with session.record.open("ab") as file:
            file.write(b"".join(lines[300:]))
        await pilot.pause(0.3)
        assert session.state.version == before
        shown = await press(app, pilot, "space")
        await until(app, pilot, lambda: session.state.end is not None)
        await settle(app, pilot)
        assert "■ finished" in text(app)

    show(session, tmp_path, steps)


class TestFilter:
    def test_it_applies_while_it_is_written_enter_keeps_it_and_escape_drops_it(self, tmp_path):
        turns = in_turn(tmp_path, ("2", "slash", "0", "minus", "1"), ("enter",), ("escape",))
        written, kept, dropped = (found["text"] for found in turns)
        assert "filter 0-1: 2 of 4" in written
        assert "Enter keep the filter" in written
        assert "filter 0-1: 2 of 4" in kept
        assert "q quit" in kept
        assert "filter" not in dropped.splitlines()[3]

    def test_letters_are_text_while_it_is_written_and_what_is_no_filter_is_said(self, tmp_path):
        written, entered = in_turn(tmp_path, ("2", "slash", "q", "m", "x"), ("enter",))
        assert written["mode"] == "layers"
        assert written["choice"].method is None
        assert "! 'qmx' is not a filter" in entered["text"]
        assert "q quit" not in entered["text"]


def test_x_saves_the_screen_and_never_over_another(tmp_path):
    async def steps(app, pilot):
        shown = await press(app, pilot, "x", "x", "2", "x")
        assert "saved" in shown

    show(recorded(tmp_path), tmp_path, steps)
    names = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert names == ["kvprof-layers.svg", "kvprof-overview-2.svg", "kvprof-overview.svg"]
    drawn = (tmp_path / "kvprof-overview.svg").read_text()
    assert drawn.startswith("<svg")
    assert "attention" in drawn


def test_e_exports_what_was_measured(tmp_path):
    events = stream(("full", "fdc"))

    async def steps(app, pilot):
        await pilot.press("e")
        await until(app, pilot, lambda: (tmp_path / "kvprof-result.json").exists())
        await until(app, pilot, lambda: "exported" in text(app))
        await pilot.press("e")
        await until(app, pilot, lambda: (tmp_path / "kvprof-result-2.json").exists())

    show(recorded(tmp_path, events), tmp_path, steps)
    assert read_result(tmp_path / "kvprof-result.json") == json.loads(json.dumps(result_of(events)))


def test_saving_where_nothing_can_be_written_is_said(tmp_path):
    async def steps(app, pilot):
        shown = await press(app, pilot, "x")
        assert "cannot write" in shown
        await pilot.press("e")
        await until(app, pilot, lambda: text(app).count("cannot write") == 2)

    (tmp_path / "file").write_text("")
    show(recorded(tmp_path), tmp_path / "file", steps)


def test_the_help_names_every_key_and_below_it_the_others_do_nothing(tmp_path):
    turns = (("question_mark",), ("2", "m", "b", "x"), ("escape", "2"))
    shown, below, closed = in_turn(tmp_path, *turns, size=(100, 60))
    for key in KEYS:
        assert key.help in shown["text"]
    assert "? or Escape closes this help" in shown["text"]
    assert below["mode"] == "overview"
    assert below["choice"].method is None
    assert list(tmp_path.glob("*.svg")) == []
    assert closed["mode"] == "layers"


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
def test_leaving_a_recorded_run_asks_nothing(tmp_path, key):
    async def steps(app, pilot):
        await pilot.press(key)

    assert show(recorded(tmp_path), tmp_path, steps) == 0


@pytest.mark.parametrize("screen", range(1, 5))
def test_the_timer_may_tick_while_the_view_closes(tmp_path, screen):
    async def steps(app, pilot):
        await press(app, pilot, str(screen))
        close = app._close_all

        async def ticking():
            await app.screen.remove_children()
            app.screen.on_resize(Resize(app.size, app.size))
            app.draw()
            await close()

        app._close_all = ticking

    show(recorded(tmp_path), tmp_path, steps)


class TestReplay:
    def session(self, folder):
        events = [replace(event, time=100 * event.time) for event in stream(("full", "fdc"))]
        record = write(folder / "events.jsonl", events)
        return Session("demo", Replay(record, 1.0), record=record)

    def test_end_jumps_where_the_screen_could_scroll_and_scrolls_after_that(self, tmp_path):
        events = stream(("full", "fdc"))
        record = write(tmp_path / "events.jsonl", events)
        now = [0.0]
        session = Session("demo", Replay(record, 1.0, lambda: now[0]), record=record)
        session.advance()
        now[0] = 0.9 * events[-1].time  # the clock of the replay; it then stands still

        async def steps(app, pilot):
            await until(app, pilot, lambda: len(session.state.cases) == 2)
            await settle(app, pilot)
            body = app.screen.query_one("#body")
            assert body.max_scroll_y > 0
            await pilot.press("end")
            await until(app, pilot, lambda: session.state.end is not None)
            assert body.scroll_y == 0
            await pilot.press("end")
            await until(app, pilot, lambda: body.scroll_y > 0)

        show(session, tmp_path, steps, size=(80, 24), everything=False)

    def test_end_moves_within_a_filter_that_is_written(self, tmp_path):
        session = self.session(tmp_path)

        async def steps(app, pilot):
            await press(app, pilot, "2", "slash", "1", "home", "end")
            assert session.source.playing
            assert app.screen.query_one("#filter").cursor_position == 1

        show(session, tmp_path, steps, everything=False)
