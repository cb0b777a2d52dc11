"""Real processes: what a measurement says last, and how it ended, must not get lost."""

import signal
import sys
import time

import pytest

from kvprof.errors import FailedError
from kvprof.tui.worker import MESSAGES_NAME, REPORT_NAME, Worker


def started(folder, code):
    worker = Worker([sys.executable, "-c", code], folder)
    worker.start()
    return worker


def wait_for(what):
    end = time.monotonic() + 10
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_both_streams_are_kept_and_the_report_has_the_terminals_width(tmp_path):
    code = "import os, sys; print('width', os.environ['COLUMNS']); print('hm', file=sys.stderr)"
    worker = Worker([sys.executable, "-c", code], tmp_path, width=77)
    worker.start()
    assert worker.wait(10)
    assert worker.exit_code == 0
    assert worker.report() == "width 77\n"
    assert worker.new_messages() == ["hm"]
    assert worker.new_messages() == []


def test_lines_come_whole_and_the_last_one_without_its_newline(tmp_path):
    worker = started(
        tmp_path,
        "import sys, time; e = sys.stderr; e.write('one\\nhal'); e.flush();"
        "sys.stdin.read(); time.sleep(0.3); e.write('f\\nlast'); e.flush()",
    )
    found = []
    wait_for(lambda: found.extend(worker.new_messages()) or found)
    assert found == ["one"]
    worker.wait(10)
    assert worker.new_messages() == ["half", "last"]


def test_it_waits_for_no_reader(tmp_path):
    """A pipe that nobody empties would stop the measurement after 64 KiB."""
    worker = started(tmp_path, "import sys; sys.stderr.write('x' * 300_000)")
    assert worker.wait(10)
    assert worker.exit_code == 0


@pytest.mark.parametrize("stop", ["sys.exit(3)", "raise RuntimeError('the GPU went away')"])
def test_a_failure_is_its_exit_code_and_its_last_words(tmp_path, stop):
    worker = started(tmp_path, f"import sys; print('progress', file=sys.stderr); {stop}")
    worker.wait(10)
    assert worker.exit_code == (3 if "exit" in stop else 1)
    assert ("the GPU went away" in worker.last_words()) is ("raise" in stop)


def test_kvprofs_own_line_is_the_last_word(tmp_path):
    worker = started(
        tmp_path,
        "import sys; e = sys.stderr; e.write('timing\\nkvprof: no such model\\n'); sys.exit(2)",
    )
    worker.wait(10)
    assert worker.last_words() == "kvprof: no such model"


def test_one_that_is_killed_says_by_what(tmp_path):
    worker = started(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    worker.wait(10)
    assert worker.exit_code == 128 + signal.SIGKILL
    assert "SIGKILL" in worker.last_words()


def test_an_interrupt_lets_it_keep_what_it_has(tmp_path):
    worker = started(
        tmp_path,
        "import signal, sys, time\n"
        # What a shell starts in the background ignores Ctrl-C, and so would this process.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n"
        "    print('ready', file=sys.stderr, flush=True)\n"
        # One long sleep would miss a signal that comes just before it begins.
        "    while True: time.sleep(0.02)\n"
        "except KeyboardInterrupt: print('kept'); sys.exit(130)",
    )
    wait_for(lambda: worker.new_messages())
    assert worker.running
    assert worker.exit_code is None
    worker.interrupt()
    assert worker.wait(10)
    assert worker.exit_code == 130
    assert worker.report() == "kept\n"


def test_one_that_ignores_everything_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("kvprof.tui.worker._PATIENCE", 0.3)
    worker = started(
        tmp_path,
        "import signal, sys, time\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
        "print('deaf', file=sys.stderr, flush=True); time.sleep(60)",
    )
    wait_for(lambda: worker.new_messages())
    worker.end()
    assert not worker.running
    assert worker.exit_code == 128 + signal.SIGKILL


def test_ctrl_c_of_the_terminal_does_not_reach_it(tmp_path):
    worker = started(tmp_path, "import os; print(os.getsid(0) == os.getpid())")
    worker.wait(10)
    assert worker.report() == "True\n"


def test_a_folder_without_events_is_cleaned_up_and_another_is_left(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
    (other / "notes").write_text("mine")
    for folder in (own, other):
        worker = started(folder, "pass")
        worker.wait(10)
        worker.clean()
    assert not own.exists()
    assert [path.name for path in other.iterdir()] == ["notes"]


def test_what_cannot_be_started_is_said(tmp_path):
    with pytest.raises(FailedError, match="cannot start the measurement"):
        Worker(["/no/such/program"], tmp_path).start()
    with pytest.raises(FailedError, match="cannot start the measurement"):
        started(tmp_path / "missing", "pass")


def test_its_streams_lie_in_the_runs_folder(tmp_path):
    started(tmp_path, "pass").wait(10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [MESSAGES_NAME, REPORT_NAME]
