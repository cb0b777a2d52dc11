"""What can go wrong while somebody is watching."""

import os
import signal
import sys
import time

import pytest

from kvprof.printable import UNPRINTABLE
from kvprof.records.event_lines import event_from
from kvprof.records.events import event_line
from kvprof.records.files import read_result
from kvprof.records.journal import Journal
from kvprof.tui import worker as worker_module
from kvprof.tui.session import Session
from kvprof.tui.sources import Live
from kvprof.tui.worker import Worker
from tests.records.hostile import HOSTILE, texts_filled
from tests.records.streams import stream, write
from tests.tui.running import press, recorded, resize, settle, show, text, until

#: Writes events as a measurement does; stops after a step when it is interrupted.
MEASUREMENT = """
import signal, sys, time
from pathlib import Path
from kvprof.records.events import RunFinished
from kvprof.records.files import read_result
from kvprof.records.journal import Journal
from tests.records.streams import stream
stop = []
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
events, fails = stream(("full", "palu"), steps=6), int(sys.argv[2])
with Journal(Path(sys.argv[1]) / "events.jsonl") as journal:
    for number, event in enumerate(events[:-1]):
        journal.emit(event)
        if number == fails:
            sys.exit("kvprof: the GPU fell off the bus")
        if number == 250:
            while not stop and fails < 0:
                time.sleep(0.01)
        if stop:
            journal.emit(RunFinished(journal.now(), False, "interrupted"))
            print("report of a part")
            sys.exit(130)
    journal.emit(events[-1])
print("report")
"""

ALL_BUT_THE_END = """
from pathlib import Path
from kvprof.records.journal import Journal
from tests.records.streams import stream
with Journal(Path(sys.argv[1]) / "events.jsonl") as journal:
    for event in stream(("full", "palu"), steps=6)[:-1]:
        journal.emit(event)
"""


def measuring(folder, fails=-1):
    """Return a session with a measurement of its own; it goes on until it is interrupted."""
    worker = Worker([sys.executable, "-c", MEASUREMENT, str(folder), str(fails)], folder)
    worker.start()
    record = folder / "events.jsonl"
    return Session("mine", Live(record), record=record, worker=worker)


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    return run


def begun(session):
    return lambda: session.state.version > 200


class TestQuittingWhileItMeasures:
    def test_it_can_go_on_in_the_background(self, folder):
        session = measuring(folder)

        async def steps(app, pilot):
            await until(app, pilot, begun(session))
            shown = await press(app, pilot, "q")
            assert "The measurement is still running." in shown
            assert str(folder.name) in shown
            await pilot.press("f")

        try:
            assert show(session, folder, steps, everything=False) == 0
            assert session.worker.released
            assert session.worker.running
        finally:
            session.worker.interrupt()
            assert session.worker.wait(10)
        assert session.worker.report() == "report of a part\n"

    def test_it_can_be_stopped_and_keeps_what_it_measured(self, folder):
        session = measuring(folder)

        async def steps(app, pilot):
            await until(app, pilot, begun(session))
            await press(app, pilot, "q", "s")
            await until(app, pilot, lambda: app.return_value is not None)

        assert show(session, folder, steps, everything=False) == 130
        lines = (folder / "events.jsonl").read_text().splitlines()
        assert '"interrupted"' in lines[-1]
        assert session.failure is None  # it was asked to

    def test_it_can_be_watched_on(self, folder):
        session = measuring(folder)

        async def steps(app, pilot):
            await until(app, pilot, begun(session))
            for key in ("c", "escape", "q"):
                assert "still running" in await press(app, pilot, "q")
                assert "still running" not in await press(app, pilot, key)
                assert session.worker.running
                assert not session.worker.stopping
            await press(app, pilot, "q", "s")
            await until(app, pilot, lambda: not session.worker.running)

        show(session, folder, steps, everything=False)

    def test_the_view_goes_on_while_one_that_will_not_die_is_ended(self, folder, monkeypatch):
        monkeypatch.setattr(worker_module, "_PATIENCE", 2.0)
        code = (
            "import signal, sys, time\n"
            "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
            f"{ALL_BUT_THE_END}\n"
            "while True: time.sleep(0.01)"
        )
        worker = Worker([sys.executable, "-c", code, str(folder)], folder)
        worker.start()
        record = folder / "events.jsonl"
        session = Session("mine", Live(record), record=record, worker=worker)

        async def steps(app, pilot):
            await until(app, pilot, begun(session))
            await press(app, pilot, "q", "s", "q")
            start = time.monotonic()
            await press(app, pilot, "s", "3")
            assert app.current_mode == "cache"
            assert time.monotonic() - start < 1.5
            assert worker.running
            await until(app, pilot, lambda: not worker.running)

        show(session, folder, steps, everything=False)
        assert worker.exit_code == 128 + signal.SIGKILL

    def test_the_answer_can_be_clicked(self, folder):
        session = measuring(folder)

        async def steps(app, pilot):
            await until(app, pilot, begun(session))
            lines = (await press(app, pilot, "q")).splitlines()
            row = next(i for i, line in enumerate(lines) if "in the background" in line)
            await pilot.click(offset=(lines[row].index("quit") + 2, row))
            await pilot.pause(0.1)

        try:
            assert show(session, folder, steps, everything=False) == 0
            assert session.worker.released
        finally:
            session.worker.interrupt()
            session.worker.wait(10)

    def test_a_closed_terminal_ends_the_measurement_after_its_step(self, folder):
        session = measuring(folder)

        async def steps(app, pilot):
            await until(app, pilot, begun(session))
            os.kill(os.getpid(), signal.SIGHUP)
            await until(app, pilot, lambda: session.worker.stopping)

        assert show(session, folder, steps, everything=False) == 130
        assert session.worker.wait(10)
        assert session.worker.exit_code == 130


def test_a_model_that_fails_half_way_shows_its_last_words(folder):
    session = measuring(folder, fails=210)

    async def steps(app, pilot):
        await until(app, pilot, lambda: session.failure is not None)
        await settle(app, pilot)
        shown = text(app)
        assert "✖ the measurement failed" in shown
        assert "code 1: kvprof: the GPU fell off the bus" in shown
        assert "so far" in shown  # what was measured stays in sight
        await press(app, pilot, "4")
        assert "says" in text(app)
        await pilot.press("q")

    assert show(session, folder, steps, everything=False) == 1


def test_a_measurement_that_ends_by_itself_is_told(folder):
    session = measuring(folder, fails=10_000)

    async def steps(app, pilot):
        await until(app, pilot, lambda: session.state.end is not None)
        await settle(app, pilot)
        assert "■ finished" in text(app)
        await pilot.press("q")

    assert show(session, folder, steps, everything=False) == 0


def test_two_viewers_watch_one_run_that_is_being_written(tmp_path):
    record, events = tmp_path / "events.jsonl", stream(("full", "fdc"))
    half = len(events) // 2
    first, second = (Session(name, Live(record), record=record) for name in "ab")
    with Journal(record) as journal:

        def emit(some):
            for event in some:
                journal.emit(event)

        async def other(app, pilot):
            await until(app, pilot, lambda: second.state.version > half)
            await press(app, pilot, "m", "b", "space")  # its own choice, and its own pause

        async def steps(app, pilot):
            emit(events[:half])
            await until(app, pilot, lambda: first.state.version > half)

        show(first, tmp_path, steps, everything=False)
        show(second, tmp_path, other, everything=False)
        emit(events[half:])

        async def rest(app, pilot):
            await until(app, pilot, lambda: first.state.end is not None)

        show(first, tmp_path, rest, everything=False)
    assert second.state.end is None
    assert list(first.state.cases) == list(second.state.cases)


def test_a_truncated_record_is_shown_up_to_the_damage(tmp_path):
    record = write(tmp_path / "events.jsonl", stream())
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:150]) + lines[150][:30] + b"\n" + lines[151])
    session = Session("damaged", Live(record), record=record)

    async def steps(app, pilot):
        await until(app, pilot, lambda: session.problem is not None)
        await settle(app, pilot)
        shown = text(app)
        assert "! line 151 " in shown
        assert "showing what precedes it" in " ".join(shown.split())
        assert "cannot read further" in shown
        assert "attention" in shown
        await press(app, pilot, "e")
        await until(app, pilot, lambda: (tmp_path / "kvprof-result.json").exists())

    show(session, tmp_path, steps, everything=False)
    result = read_result(tmp_path / "kvprof-result.json")
    assert not result["complete"]
    assert "line 151" in result["incomplete_reason"]


def test_a_record_that_another_run_replaces_is_not_mixed_with_it(tmp_path):
    session = recorded(tmp_path, stream()[:100])

    async def steps(app, pilot):
        (tmp_path / "events.jsonl").unlink()
        write(tmp_path / "events.jsonl", stream())
        await until(app, pilot, lambda: session.problem is not None)
        await settle(app, pilot)
        assert "was replaced by another run" in " ".join(text(app).split())

    show(session, tmp_path, steps)
    assert session.state.end is None


def test_a_run_that_was_killed_is_not_called_measuring(tmp_path):
    session = recorded(tmp_path, stream()[:100])
    os.utime(tmp_path / "events.jsonl", (1e9, 1e9))

    async def steps(app, pilot):
        assert "stuck, or killed" in text(app)

    show(session, tmp_path, steps)


def test_silence_before_a_case_may_be_work(tmp_path):
    """Loading and calibrating take minutes, and are no events."""
    session = recorded(tmp_path, stream()[:1])
    session.source.age = lambda: 125.0

    async def steps(app, pilot):
        assert "no event for 02:05: preparing a case, or killed" in text(app)

    show(session, tmp_path, steps)


def test_forty_columns_are_answered_in_a_line(tmp_path):
    async def steps(app, pilot):
        for number in "14":
            shown = await press(app, pilot, number)
            assert "needs 60 columns" in " ".join(shown.split())
            assert "has 40 and 20" in " ".join(shown.split())
            assert max(len(line) for line in shown.splitlines()) <= 40
            await resize(app, pilot, (80, 24))
            assert "needs 60 columns" not in text(app)
            await resize(app, pilot, (40, 20))
            assert "needs 60 columns" in " ".join(text(app).split())
        await pilot.press("q")

    assert show(recorded(tmp_path), tmp_path, steps, size=(40, 20)) == 0


def test_events_faster_than_the_eye_leave_the_keys_alive(tmp_path):
    """Twenty thousand events at once are read in slices; a key is answered in between."""
    session = recorded(tmp_path, stream(("full", "palu", "fdc"), layers=16, steps=60))
    assert sum(1 for _ in session.record.open()) > 18_000

    async def steps(app, pilot):
        answered = []
        go = app.action_show
        app.action_show = lambda name: (answered.append(session.state.end), go(name))
        await pilot.press("3")
        assert app.current_mode == "cache"
        assert answered == [None]  # before everything was read
        await until(app, pilot, lambda: session.state.end is not None)

    show(session, tmp_path, steps, everything=False)
    assert all(len(case.steps) < 2100 for case in session.state.cases.values())


def test_no_name_reaches_the_terminal_as_a_command(tmp_path):
    kept = frozenset(("event", "phase", "format", "created", "mode", "kind"))
    events = [
        event_from(texts_filled(event_line(event), keep=kept))
        for event in stream(("full", "tale"), layers=2, steps=3)
    ]
    session = recorded(tmp_path, events)
    session.name = f"a run {HOSTILE}"

    async def look(app, pilot):
        for key in "1234":
            shown = await press(app, pilot, key)
            assert not UNPRINTABLE.findall(shown)
            assert "[red]" in shown
        app._say(HOSTILE)
        await settle(app, pilot)
        assert not UNPRINTABLE.findall(text(app))

    show(session, tmp_path, look)
