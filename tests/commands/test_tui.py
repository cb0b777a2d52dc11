"""``kvprof tui`` without a terminal, and in one."""

import contextlib
import os
import pty
import select
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvprof.commands import tui
from kvprof.errors import LackingError, UsageError
from kvprof.records.files import write_result
from kvprof.records.fold import result_of
from tests.commands.running import kvprof, words_of
from tests.records.streams import stream, write

FAKE = """
import sys
from pathlib import Path
from kvprof.records.journal import Journal
from tests.records.streams import stream
folder = Path(sys.argv[sys.argv.index("--out") + 1])
print("timing", file=sys.stderr)
with Journal(folder / "events.jsonl", force="--force" in sys.argv) as journal:
    for event in stream(("full", "fdc"), steps=3):
        journal.emit(event)
print("the report of", *sys.argv[1:4])
sys.exit(7 if "--fail" in sys.argv else 0)
"""


@pytest.fixture
def run(tmp_path):
    write(tmp_path / "run" / "events.jsonl", stream(("full", "fdc")))
    return tmp_path / "run"


@pytest.fixture
def fake(monkeypatch):
    """Put a measurement that takes no time in the place of ``kvprof bench --jct``."""
    monkeypatch.setattr(tui, "PROGRAM", (sys.executable, "-c", FAKE))


class TestWithoutATerminal:
    def test_a_run_is_printed_and_a_line_says_why(self, run):
        done = kvprof("tui", run)
        assert done.code == 0
        assert "attention" in done.stdout
        assert (
            done.stderr == "stdin is not a terminal: showing the report instead of the live view\n"
        )

    def test_it_is_the_report_that_show_prints(self, run):
        assert kvprof("tui", run).stdout == kvprof("show", run).stdout

    def test_a_result_alone_is_printed(self, tmp_path):
        write_result(tmp_path / "r.json", result_of(stream(("full",))))
        assert "attention" in kvprof("tui", tmp_path / "r.json").stdout

    def test_a_command_runs_and_its_exit_code_counts(self, fake, tmp_path, capfd):
        done = kvprof("tui", "--", "bench", "--jct", "--out", tmp_path / "new")
        assert done.code == 0
        assert "stdin is not a terminal: running without the live view" in done.stderr
        assert "the report of bench --jct --out" in capfd.readouterr().out
        assert (tmp_path / "new" / "events.jsonl").exists()
        failed = kvprof("tui", "--", "bench", "--jct", "--fail", "--out", tmp_path / "other")
        assert failed.code == 7

    def test_alone_it_measures_the_reference_model_into_the_users_data(
        self, fake, tmp_path, monkeypatch, capfd
    ):
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
        done = kvprof("tui")
        assert done.code == 0
        (record,) = (tmp_path / "kvprof" / "runs").glob("jct-*/events.jsonl")
        assert str(record.parent) in "".join(done.stderr.split())
        assert "the report of bench --jct --model" in capfd.readouterr().out


class TestOpening:
    def test_a_result_of_another_kind_has_no_live_view(self):
        from kvprof.commands.tui import open_run

        record = "records/kernels-h200.json"
        with pytest.raises(UsageError, match=f"benchmark results .*kvprof show {record}"):
            open_run(record)

    def test_a_result_alone_cannot_be_played(self, tmp_path):
        from kvprof.commands.tui import open_run

        write_result(tmp_path / "r.json", result_of(stream(("full",))))
        with pytest.raises(UsageError, match="--speed"):
            open_run(str(tmp_path / "r.json"), 2.0)

    def test_the_result_of_a_runs_folder_is_seen_with_its_events(self, run):
        from kvprof.commands.tui import open_run

        write_result(run / "result.json", result_of(stream(("full", "fdc"))))
        assert open_run(str(run / "result.json")).record == run / "events.jsonl"
        assert open_run(str(run)).record == run / "events.jsonl"

    def test_the_demo_plays_in_twenty_seconds(self, tmp_path, monkeypatch):
        from kvprof.commands import run_source
        from kvprof.commands.tui import open_run

        events = [replace(event, time=event.time * 1e4) for event in stream(("full",))]
        write(tmp_path / "assets" / "demo" / "events.jsonl", events)
        monkeypatch.setattr(run_source, "files", lambda package: tmp_path)
        session = open_run("demo")
        assert session.source.playing
        start = next(event.time for event in events if event.event == "case_started")
        assert session.source._speed == pytest.approx((events[-1].time - start) / 20)

    def test_the_demo_that_ships_shows_parts_in_its_first_second(self):
        from kvprof.commands.tui import open_run

        session = open_run("demo")
        now = [0.0]
        session.source._clock = lambda: now[0]
        while session.advance():
            pass
        now[0] = 1.0
        while session.advance():
            pass
        assert any(case.account.by_part() for case in session.state.cases.values())
        assert session.source.playing

    def test_without_a_demo_it_is_said(self, tmp_path, monkeypatch):
        from kvprof.commands import run_source
        from kvprof.commands.tui import open_run

        monkeypatch.setattr(run_source, "files", lambda package: tmp_path)
        with pytest.raises(LackingError, match="demo"):
            open_run("demo")


@pytest.mark.parametrize("lacking", ["stdin", "stdout", "stderr"])
def test_every_stream_must_be_a_terminal(lacking, monkeypatch):
    class Stream:
        def __init__(self, terminal):
            self.terminal = terminal

        def isatty(self):
            return self.terminal

    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, Stream(name != lacking))
    assert tui.missing_terminal() == f"{lacking} is not a terminal"


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *command, **environment):
        self.seen = b""
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            os.environ.update({"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"})
            os.environ.update(environment)
            os.execv(command[0], command)

    def until(self, words, seconds=20):
        """Read until `words` were seen."""
        end = time.monotonic() + seconds
        while words.encode() not in self.seen:
            assert time.monotonic() < end, self.seen[-3000:].decode("utf-8", "replace")
            if select.select([self.screen], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.screen, 65536)
                except OSError:  # the other side is gone
                    break

    def press(self, key):
        os.write(self.screen, key.encode())

    def exit_code(self):
        end = time.monotonic() + 20
        while True:
            if select.select([self.screen], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):  # the other side is gone
                    self.seen += os.read(self.screen, 65536)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < end, self.seen[-3000:].decode("utf-8", "replace")


def test_in_a_terminal_it_is_live_and_leaves_with_q(run):
    terminal = Terminal(sys.executable, "-m", "kvprof", "tui", str(run))
    terminal.until("finished")
    terminal.until("Overview")
    terminal.press("q")
    assert terminal.exit_code() == 0
    assert b"Traceback" not in terminal.seen


def test_a_view_that_is_killed_gives_the_terminal_back(run):
    terminal = Terminal(sys.executable, "-m", "kvprof", "tui", str(run))
    terminal.until("finished")
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.exit_code() == 130
    assert b"\x1b[?1049l" in terminal.seen  # the screen of before
    assert b"\x1b[?1003l" in terminal.seen  # no reports of the mouse


def test_in_a_terminal_a_failing_measurement_is_the_exit_code(tmp_path):
    """The real command, which refuses its options; nothing is left in the user's data."""
    words = words_of("-m kvprof tui -- bench --jct --no-such-option")
    terminal = Terminal(sys.executable, *words, XDG_DATA_HOME=str(tmp_path))
    terminal.until("measurement failed")
    terminal.press("q")
    assert terminal.exit_code() == 2
    assert b"--no-such-option" in terminal.seen
    assert list(Path(tmp_path).glob("kvprof/runs/*")) == []
