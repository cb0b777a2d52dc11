"""What the screens show, and what a click does, on a run that never happened."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvprof.records.events import Warned
from kvprof.records.files import read_result
from kvprof.records.fold import result_of
from kvprof.tui.session import Session
from kvprof.tui.sources import NoEvents
from kvprof.tui.state import state_of
from tests.records.streams import stream
from tests.tui.running import (
    in_turn,
    keys,
    press,
    recorded,
    resize,
    settle,
    show,
    text,
    until,
    whole_text,
)


class TestMouse:
    def test_a_click_on_a_tab_goes_there(self, tmp_path):
        async def steps(app, pilot):
            column = text(app).splitlines()[0].index("3 Cache")
            await pilot.click("#tabs", offset=(column + 1, 0))
            await settle(app, pilot)
            assert app.current_mode == "cache"

        show(recorded(tmp_path), tmp_path, steps)

    def test_a_click_on_a_key_presses_it(self, tmp_path):
        async def steps(app, pilot):
            (column,) = (at for line in text(app).splitlines() if (at := line.find("b base")) >= 0)
            await pilot.click("#keys", offset=(column + 1, 0))
            await settle(app, pilot)
            assert app.choice.baseline == "palu"

        show(recorded(tmp_path), tmp_path, steps)

    def test_a_click_on_a_bar_chooses_its_method(self, tmp_path):
        async def steps(app, pilot):
            lines = whole_text(app, "bars").splitlines()
            row = next(i for i, line in enumerate(lines) if "palu" in line)
            await pilot.click("#bars", offset=(12, row))
            await settle(app, pilot)
            assert app.choice.method == "palu"

        show(recorded(tmp_path), tmp_path, steps)

    def test_a_click_on_a_column_sorts_and_a_second_one_turns_it(self, tmp_path):
        async def steps(app, pilot):
            await press(app, pilot, "2")
            for arrow in ("▼", "▲"):
                column = whole_text(app, "head").index("bytes")
                await pilot.click("#head", offset=(column + 2, 0))
                await settle(app, pilot)
                assert f"bytes {arrow}" in text(app)

        show(recorded(tmp_path), tmp_path, steps)


class TestScreens:
    def test_a_curve_fills_a_frame_and_the_rest_comes_in_the_next(self, tmp_path, monkeypatch):
        events = stream(("full", "fdc"))
        session = recorded(tmp_path, events[: len(events) // 2])

        async def steps(app, pilot):
            drawn = []
            put = type(app.screen).put

            def noted(screen, widget, key, make, **options):
                filled = put(screen, widget, key, make, **options)
                if filled:
                    drawn.append(widget)
                return filled

            monkeypatch.setattr(type(app.screen), "put", noted)
            app.calm = 1e-9
            session.state.add_all(events[len(events) // 2 :])
            app.screen.draw()
            assert drawn == ["curve"]
            app.screen.draw()
            assert {"bars", "parts"} <= set(drawn[1:])
            assert "curve" not in drawn[1:]

        show(session, tmp_path, steps)

    def test_a_result_without_events_is_shown(self, tmp_path):
        result = result_of(stream())
        session = Session("result.json", NoEvents(), result=result, state=state_of(result))

        async def steps(app, pilot):
            assert "■ finished" in text(app)
            assert "attention" in text(app)
            await press(app, pilot, "e")
            await until(app, pilot, lambda: (tmp_path / "kvprof-result.json").exists())

        show(session, tmp_path, steps)
        assert read_result(tmp_path / "kvprof-result.json") == result

    def test_the_log_tells_what_happened_and_wraps(self, tmp_path):
        async def steps(app, pilot):
            shown = await press(app, pilot, "4")
            assert "! warning fdc b1 in2048 out9: the first step was slow" in shown
            assert "finished" in shown
            await resize(app, pilot, (62, 40))
            assert shown.count("started") == text(app).count("started")

        show(recorded(tmp_path), tmp_path, steps)

    def test_what_wraps_in_the_log_hangs_below_its_text(self, tmp_path):
        words = " ".join(f"word{number}" for number in range(20))
        events = [*stream(("full",))[:1], Warned(0.0, words)]
        lines = keys(tmp_path, "4", events=events, size=(62, 40))["text"].splitlines()
        first = next(i for i, line in enumerate(lines) if "word0" in line)
        last = next(i for i, line in enumerate(lines) if "word19" in line)
        assert last > first + 1
        start = lines[first].index("word0")
        for line in lines[first + 1 : last + 1]:
            assert len(line) - len(line.lstrip()) == start

    def test_lines_of_the_log_are_as_wide_as_the_screen(self, tmp_path):
        events = [*stream(("full",))[:1], Warned(0.0, "word " * 19 + "last")]
        lines = keys(tmp_path, "4", events=events, size=(130, 40))["text"].splitlines()
        assert sum("word" in line for line in lines) == 1

    def test_layers_that_were_not_timed_say_why(self, tmp_path):
        events = stream(("full",))
        assert "no layer was timed" not in keys(tmp_path, "2", events=events)["text"]
        composed = [
            replace(event, layer=None) if event.event == "part" else event for event in events
        ]
        shown = keys(tmp_path / "composed", "2", events=composed)["text"]
        assert "times one layer for all" in shown

    def test_a_measurement_that_says_nothing_yet_is_told_to_start(self):
        worker: Any = SimpleNamespace(running=True, stopping=False)
        session = Session("a run", NoEvents(), record=Path("events.jsonl"), worker=worker)
        session._begun -= 12
        assert session.progress().startswith("starting: loading torch")
        assert session.progress().endswith("· 00:12")
        session.said = "loading the weights"
        assert session.progress() == "measurement: loading the weights"
        session.said, worker.running = "", False
        assert session.progress() == ""

    @pytest.mark.parametrize(
        ("until_type", "words"),
        [
            ("run_started", "preparing case 1 of 2"),
            ("case_started", "measuring case 1 of 2"),
            ("case_finished", "preparing case 2 of 2"),
        ],
    )
    def test_the_status_says_which_case_and_how_long(self, tmp_path, until_type, words):
        events = [replace(event, time=61.0) for event in stream(("full", "fdc"))]
        end = next(i for i, event in enumerate(events) if event.event == until_type)
        session = recorded(tmp_path, events[: end + 1])
        session.source.age = lambda: 3.0
        session.state.add_all(session.source.poll(10_000))
        session.caught_up = True
        assert session.status() == f"● {words} · 01:04"

    def test_after_the_last_case_it_is_finishing(self, tmp_path):
        session = recorded(tmp_path, stream(("full",))[:-1])
        session.state.add_all(session.source.poll(10_000))
        assert session.status().startswith("● finishing · ")

    def test_much_unattributed_is_a_warning_beside_the_bars(self, tmp_path):
        events = [
            replace(event, prefill_seconds=1.0) if event.event == "case_finished" else event
            for event in stream(("full",))
        ]
        shown = keys(tmp_path, events=events, size=(120, 50))["text"]
        assert "of its time has no part; its shares are doubtful" in shown

    @pytest.mark.parametrize("width", [80, 120, 200])
    def test_screens_use_the_width_they_have(self, tmp_path, width):
        async def steps(app, pilot):
            for number in range(1, 5):
                lines = (await press(app, pilot, str(number))).splitlines()
                assert max(map(len, lines)) <= width
                assert not any("…" in line for line in lines[3:-3]), number

        show(recorded(tmp_path), tmp_path, steps, size=(width, 40))


class TestResizing:
    def test_a_paused_screen_is_that_of_its_size(self, tmp_path):
        sizes = ((80, 24), (40, 10), (100, 30))

        def shown(folder, sizes):
            found = {}

            async def steps(app, pilot):
                await press(app, pilot, "space")
                for key in "124":
                    if app.size != sizes[0]:
                        await resize(app, pilot, sizes[0])
                    await press(app, pilot, key)
                    for size in sizes[1:]:
                        await resize(app, pilot, size)
                    await settle(app, pilot)
                    found[key] = text(app)

            show(recorded(folder), folder, steps, size=sizes[0])
            return found

        assert shown(tmp_path / "a", sizes) == shown(tmp_path / "b", sizes[-1:])


class TestSmallParts:
    def test_they_open_and_fold_by_key(self, tmp_path):
        turns = in_turn(tmp_path, (), ("p",), ("p",))
        folded, opened, again = (found["text"] for found in turns)
        assert "▸ " in folded
        assert "▸ " not in opened
        assert "embedding" in opened
        assert "p fold parts" in opened
        assert "▸ " in again
