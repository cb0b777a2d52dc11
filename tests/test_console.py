import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from kvprof import console

ROOT = Path(console.__file__).parents[1]


def run(code: str, *, terminal: bool = False, **environment: str) -> tuple[str, str]:
    """Run code on the two streams; with `terminal` both are one, as in a shell."""
    settings = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    settings |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"} | environment
    command = [sys.executable, "-c", f"from kvprof import console\n{code}"]
    if not terminal:
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr
    own, theirs = pty.openpty()
    running = subprocess.Popen(command, env=settings, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(own, 65536)
        except OSError:  # how Linux says that the other side has closed
            break
        if not piece:
            break
        shown += piece
    os.close(own)
    assert running.wait(timeout=30) == 0
    return shown.decode(), ""


def test_reports_go_to_stdout_and_the_rest_to_stderr() -> None:
    out, err = run(
        "console.report_console().print('report')\n"
        "console.note('note'); console.warn('look'); console.error('stop')"
    )
    assert out == "report\n"
    assert err == "note\nwarning: look\nkvprof: stop\n"


def test_an_error_is_one_line_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    console.error("a [bold]tag[/bold],\n  a second line, " + "and many words " * 30)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("kvprof: a [bold]tag[/bold], a second line, and")


def test_a_piped_report_is_as_wide_everywhere_unless_columns_says() -> None:
    print_width = "console.report_console().print(console.report_console().width)"
    assert run(print_width, COLUMNS="")[0] == "100\n"
    assert run(print_width, COLUMNS="80")[0] == "80\n"
    assert run(print_width, COLUMNS="10")[0] == f"{console.MIN_WIDTH}\n"


def test_without_a_terminal_there_is_no_escape_code() -> None:
    out, err = run(
        "console.report_console().print('report', style='red')\n"
        "console.error('stop')\n"
        "with console.status('wait'): pass\n"
        "with console.track('count', 2) as t: t.advance(); t.describe('more'); t.advance()"
    )
    assert "\x1b" not in out + err
    assert out == "report\n"
    assert err == "kvprof: stop\ncount …\n"


def test_a_terminal_shows_colour_and_a_bar_that_vanishes() -> None:
    code = (
        "console.report_console().print('report', style='red')\n"
        "with console.track('count', 2) as t: t.advance(); t.advance()"
    )
    shown, _ = run(code, terminal=True)
    assert "\x1b[31mreport" in shown
    assert "2/2" in shown
    uncoloured, _ = run(code, terminal=True, NO_COLOR="1")
    assert "\x1b[31m" not in uncoloured
    assert "report" in uncoloured


def test_a_stage_that_begins_by_itself_is_shown_with_the_one_around_it() -> None:
    code = (
        "import time\n"
        "from kvprof.progress import nested\n"
        "with nested.get()('unseen', 1): pass\n"
        "with console.track('cases', 2) as bar:\n"
        "    with nested.get()('kernels', 3) as inner: time.sleep(0.3)\n"
        "    bar.advance(2)\n"
        "with nested.get()('unseen', 1): pass"
    )
    assert run(code)[1] == "cases …\nkernels …\n"
    shown, _ = run(code, terminal=True)
    assert "unseen" not in shown
    assert "kernels" in shown
    # Two displays would draw over each other; of this one the stage is gone when it has ended.
    assert shown.count("\x1b[?25l") == 1
    assert "2/2" in shown.rpartition("kernels")[2]


def test_a_log_gets_a_line_now_and_then() -> None:
    code = (
        "console._BETWEEN_LINES = {}\n"
        "with console.track('cases', 3) as bar:\n"
        "    bar.advance(); bar.describe('more cases'); bar.advance(); bar.advance()"
    )
    _, often = run(code.format(0.0))
    first, *lines = often.splitlines()
    assert first == "cases …"
    assert [line.rpartition(" after ")[0] for line in lines] == [
        "cases: 1 of 3",
        "more cases: 2 of 3",
    ]
    assert run(code.format(60.0))[1] == "cases …\n"
