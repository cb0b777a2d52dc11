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
from tests.tui.running import keys, press, recorded, settle, show, text, until
from tests.tui.test_figures import two_requests


@pytest.mark.parametrize(("number", "name"), list(enumerate(REQUEST_SCREENS, 1)))
def test_numbers_go_to_the_screens(tmp_path, number, name):
    other = "5" if number == 1 else "1"
    found = keys(tmp_path, other, str(number))
    assert found["mode"] == name
    assert f"[{number} {SCREENS[name]}]" in found["text"]


def test_m_chooses_the_next_method_on_every_screen(tmp_path):
    assert keys(tmp_path, "m")["choice"].method == "full"
    assert "Layers · palu" in keys(tmp_path / "again", "m", "2", "m")["text"]


def test_b_holds_the_others_against_the_next_method(tmp_path):
    found = keys(tmp_path, "b")
    assert "against palu" in found["text"]
    line = next(line for line in found["text"].splitlines() if line.startswith("   palu "))
    assert "baseline" in line


def test_n_goes_to_the_next_request_and_back(tmp_path):
    first = keys(tmp_path, events=two_requests())["text"]
    assert "4k in" in first
    assert "request 2 of 2" in first
    assert "n request" in first
    assert "2k in" in keys(tmp_path / "a", "n", events=two_requests())["text"]
    assert "4k in" in keys(tmp_path / "b", "n", "N", events=two_requests())["text"]


def test_s_sorts_what_the_screen_lists(tmp_path):
    assert keys(tmp_path, "s")["choice"].parts_by_size
    layers = keys(tmp_path / "a", "2", "s")
    assert "ms ▼" in layers["text"]
    assert "multiprocessors by load" in keys(tmp_path / "b", "3", "s")["text"]


def test_space_holds_the_view_and_nothing_is_lost(tmp_path):
    events = stream(("full", "fdc"))
    session = recorded(tmp_path, events[:300])

    async def steps(app, pilot):
        shown = await press(app, pilot, "space")
        assert "view paused" in shown
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
    def shown(self, folder, *pressed):
        return keys(folder, "2", *pressed)["text"]

    def test_it_applies_while_it_is_written(self, tmp_path):
        shown = self.shown(tmp_path, "slash", "0", "minus", "1")
        assert "filter 0-1: 2 of 4" in shown
        assert "Enter keep the filter" in shown

    def test_enter_keeps_it_and_escape_drops_it(self, tmp_path):
        kept = self.shown(tmp_path, "slash", "3", "enter")
        assert "filter 3: 1 of 4" in kept
        assert "q quit" in kept
        dropped = self.shown(tmp_path / "again", "slash", "3", "enter", "escape")
        assert "filter" not in dropped.splitlines()[3]

    def test_what_is_no_filter_is_said_where_it_is_written(self, tmp_path):
        shown = self.shown(tmp_path, "slash", "z", "enter")
        assert "! 'z' is no filter: write layers" in shown
        assert "q quit" not in shown

    def test_letters_are_text_while_it_is_written(self, tmp_path):
        found = keys(tmp_path, "2", "slash", "q", "m", "x")
        assert found["mode"] == "layers"
        assert found["choice"].method is None


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


def test_the_help_names_every_key(tmp_path):
    shown = keys(tmp_path, "question_mark", size=(100, 60))["text"]
    for key in KEYS:
        assert key.help in shown
    assert "? or Escape closes this page" in shown


def test_below_the_help_the_other_keys_do_nothing(tmp_path):
    found = keys(tmp_path, "question_mark", "2", "m", "b", "x")
    assert found["mode"] == "overview"
    assert found["choice"].method is None
    assert list(tmp_path.glob("*.svg")) == []
    assert keys(tmp_path / "a", "question_mark", "escape", "2")["mode"] == "layers"


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
def test_leaving_a_recorded_run_asks_nothing(tmp_path, key):
    async def steps(app, pilot):
        await pilot.press(key)

    assert show(recorded(tmp_path), tmp_path, steps) == 0


@pytest.mark.parametrize("screen", range(1, 6))
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

    def test_it_plays_and_end_jumps(self, tmp_path):
        session = self.session(tmp_path)

        async def steps(app, pilot):
            await settle(app, pilot)
            shown = text(app)
            assert "► replay" in shown
            assert "End jump" in shown
            assert session.state.end is None
            await pilot.press("end")
            await until(app, pilot, lambda: session.state.end is not None)
            await settle(app, pilot)
            shown = text(app)
            assert "■ finished" in shown
            assert "End jump" not in shown

        show(session, tmp_path, steps, everything=False)
