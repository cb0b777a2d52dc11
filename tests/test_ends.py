"""How a process ends early, as processes: signals, a parent that is killed, streams that fail."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvprof import cli, interrupt, scratch
from kvprof.interrupt import graceful_interrupt, raising
from kvprof.leash import Leash
from kvprof.scratch import ScratchFolder, alone_in, new_temporary, sweep, sweep_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals, locks and pipes are POSIX's")

ROOT = Path(cli.__file__).parents[1]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HEED = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
)


def python(code: str, **options: Any) -> "subprocess.Popen[str]":
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(
        [sys.executable, "-c", HEED + code], env=os.environ | {"PYTHONPATH": str(ROOT)}, **given
    )


def said_ready(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def wait_until(what: Any) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return Path("/proc").exists() is False and _answers(pid)
    return state != "Z"


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(autouse=True)
def not_under_nohup() -> Iterator[None]:
    """What ignores SIGHUP when the tests are started is not what they ask about."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


# --- signals --------------------------------------------------------------------------------
#
# Who waits for a signal sleeps in short pieces: of one that comes just before a long sleep Python
# hears after it.

WAITS = "[time.sleep(0.05) for _ in range(1200)]"
COMMAND = """
import sys, types, time
from kvprof import cli
from kvprof.interrupt import graceful_interrupt
from kvprof.scratch import ScratchFolder
def doctor() -> None:
{body}
sys.modules["kvprof.commands.doctor"] = types.SimpleNamespace(doctor=doctor)
sys.argv = ["kvprof", "doctor"]
cli.main()
"""


def command(body: str) -> str:
    return COMMAND.format(body="\n".join(f"    {line}" for line in body.splitlines()))


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_cleans_up_and_is_130(number: int, tmp_path: Path) -> None:
    body = (
        f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "with ScratchFolder('x'):\n    print('ready', flush=True)\n    " + WAITS
    )
    process = python(command(body))
    said_ready(process)
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said.count("\n")) == (130, 1)
    assert said.startswith("kvprof: interrupted")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_in_the_first_moments_leaves_no_traceback() -> None:
    """At the entry of the script: before, while and after what it needs is imported."""
    for milliseconds in (0, 30, 80):
        code = (
            "import os, sys, threading\n"
            "from kvprof.__main__ import main\n"
            "sys.argv = ['kvprof', 'recipe', 'list']\n"
            "from kvprof import interrupt; interrupt.at_once()\n"
            f"threading.Timer({milliseconds} / 1000, os.kill, (os.getpid(), 2)).start()\n"
            "main()"
        )
        _, said = (process := python(code)).communicate(timeout=30)
        assert "Traceback" not in said
        assert process.returncode == 130, said


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_is_silent_from_the_first_line_that_is_ours(ignored: bool) -> None:
    """Nothing is imported before it: every millisecond there is one in which Python would tell."""
    code = (
        ("signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if ignored else "")
        + "import sys, kvprof\n"
        "assert signal.getsignal(2) in (signal.SIG_IGN, signal.default_int_handler)\n"
        "before = set(sys.modules)\n"
        "from kvprof.__main__ import main\n"
        "print(sorted(set(sys.modules) - before), flush=True)\n"
        "signal.raise_signal(2)\n"
        "print('still here')"
    )
    out, said = (process := python(code)).communicate(timeout=30)
    assert out == "['kvprof.__main__']\n" + ("still here\n" if ignored else "")
    assert (process.returncode, said) == (0 if ignored else -signal.SIGINT, "")


def test_importing_kvprof_loads_next_to_nothing() -> None:
    code = "import sys\nbefore = set(sys.modules)\nimport kvprof\nprint(set(sys.modules) - before)"
    out, _ = python(code).communicate(timeout=30)
    assert set(eval(out)) <= {"kvprof", "kvprof.version", "__future__"}


def test_an_error_that_an_interrupt_was_made_of_is_one() -> None:
    body = "try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt as told:\n"
    body += "    raise RuntimeError('Error calling __set_name__') from told"
    _, said = (process := python(command(body))).communicate(timeout=30)
    assert process.returncode == 130
    assert said.startswith("kvprof: interrupted")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_inside_of_a_modules_import_ends_at_once(number: int, tmp_path: Path) -> None:
    """Raised there it was swallowed by whoever imports on trial, and half a module went on."""
    slow = f"import time\nprint('ready', flush=True)\ntry:\n    {WAITS}\n"
    (tmp_path / "slow.py").write_text(f"{slow}except BaseException:\n    pass\n")
    body = (
        f"import sys, tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        f"sys.path.insert(0, {str(tmp_path)!r}); sys.dont_write_bytecode = True\n"
        "with ScratchFolder('x'):\n    import slow\n    print('went on')"
    )
    process = python(command(body))
    said_ready(process)
    process.send_signal(number)
    out, said = process.communicate(timeout=30)
    assert (process.returncode, out, said) == (130, "", "kvprof: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["slow.py"]


@pytest.mark.parametrize("number", SIGNALS)
def test_the_work_in_hand_is_finished(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with graceful_interrupt() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # as `timeout` and a shell that ends send it
        assert stop()
    assert [signal.getsignal(one) for one in SIGNALS] == before
    assert capsys.readouterr().err.count("keeping what was measured") == 1


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_is_meant_again_drops_it(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may never end: somebody's method that hangs."""
    kind = "_TWICE_SECONDS" if number == signal.SIGINT else "_MEANT_SECONDS"
    monkeypatch.setattr(interrupt, kind, -1.0)
    with graceful_interrupt() as stop:
        os.kill(os.getpid(), number)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raising(), graceful_interrupt() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


# --- children -------------------------------------------------------------------------------

PARENT = """
import sys, time
from kvprof.leash import Leash
child = "from kvprof.leash import follow_parent; follow_parent(); print('ready', flush=True)\\n"
child += "import time; time.sleep(60)"
leash = Leash()
process = leash.start([sys.executable, "-c", child])
{then}
print(process.pid, flush=True)
[time.sleep(0.05) for _ in range(1200)]
"""


@pytest.mark.parametrize("released", [False, True])
def test_a_child_ends_with_a_parent_that_is_killed_unless_released(released: bool) -> None:
    parent = python(PARENT.format(then="leash.release()" if released else ""))
    assert parent.stdout is not None
    said = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
    pid = int((said - {"ready"}).pop())
    try:
        parent.kill()
        parent.wait()
        if released:
            time.sleep(0.3)
            assert alive(pid)
        else:
            wait_until(lambda: not alive(pid))
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
        parent.stdout.close()


def test_a_leash_is_not_handed_on() -> None:
    code = (
        "from kvprof.leash import follow_parent; follow_parent()\n"
        "import os, sys; print(sorted(name for name in os.environ if 'LEASH' in name))"
    )
    leash = Leash()
    process = leash.start([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=30)
    leash.close()
    assert out == "[]\n"


@pytest.mark.parametrize("stated", ["", "x", "0", "2", "9999", "9" * 30])
def test_a_leash_that_is_none_is_none(stated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvprof.leash import follow_parent

    monkeypatch.setenv("KVPROF_LEASH", stated)
    follow_parent()
    assert "KVPROF_LEASH" not in os.environ


# --- scratch --------------------------------------------------------------------------------


def test_scratch_of_the_killed_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        f"import tempfile, time; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from pathlib import Path\n"
        "from kvprof.scratch import ScratchFolder, open_temporary\n"
        f"kept = ScratchFolder('x'), open_temporary(Path({str(tmp_path)!r}))\n"
        "print('ready', flush=True); [time.sleep(0.05) for _ in range(1200)]"
    )
    killed = python(code)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = ScratchFolder("y")
    (tmp_path / "kvprof-results").mkdir()  # a user's
    (tmp_path / ".kvprof-mine.tmp").write_text("")
    with new_temporary(tmp_path) as (temporary, _):
        said_ready(killed)
        assert (sweep(), sweep_folder(tmp_path)) == ([], [])
        killed.kill()
        killed.communicate()
        (folder,) = sweep()
        assert folder.name.startswith("kvprof-x-")
        assert len(sweep_folder(tmp_path)) == 1
        left = {"kvprof-results", ".kvprof-mine.tmp", temporary.name, Path(own.name).name}
        assert {path.name for path in tmp_path.iterdir()} == left
    own.cleanup()
    assert not temporary.exists()
    assert not Path(own.name).exists()


def test_no_link_is_followed_to_what_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    link = tmp_path / ".kvprof-0123456789ab.tmp"
    link.symlink_to(tmp_path / "precious")
    assert sweep_folder(tmp_path) == []
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_file_that_vanishes_as_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who cleans up takes it between its making and its lock."""
    lock, taken = scratch._lock, []

    def late(descriptor: int, **options: Any) -> None:
        if not taken:
            taken.extend(sweep_folder(tmp_path))
        lock(descriptor, **options)

    monkeypatch.setattr(scratch, "_lock", late)
    with new_temporary(tmp_path) as (path, file):
        file.write(b"text")
        assert path.read_bytes() == b"text"
        assert taken
        assert taken != [path]


def test_one_process_at_a_time_is_alone_in_a_folder(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from kvprof.scratch import alone_in\n"
        f"print('ready', flush=True)\nwith alone_in(Path({str(tmp_path)!r})): print('in')"
    )
    with alone_in(tmp_path):
        other = python(code)
        said_ready(other)
        assert other.stdout is not None
        assert not select.select([other.stdout], [], [], 0.2)[0]
    assert other.communicate(timeout=30)[0] == "in\n"
    assert list(tmp_path.iterdir()) == []


# --- streams --------------------------------------------------------------------------------

SAYS = (
    "from kvprof import console\nimport sys\nsys.stderr.write('theirs\\n')\n"
    "with console.track('pass', 2) as t: t.advance(); console.warn('look')\n"
    "console.note('x' * 9999)\n"
    "console.report_console().print('the report')"
)


@pytest.mark.parametrize("how", ["full", "closed", "reader left"])
def test_a_stderr_that_fails_never_matters(how: str) -> None:
    reading, writing = os.pipe()
    if how == "full":
        if not Path("/dev/full").exists():
            pytest.skip("needs /dev/full")
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    os.close(reading)
    options: dict[str, Any] = {"stderr": writing}
    if how == "closed":
        options = {"stderr": None, "preexec_fn": lambda: os.close(2)}
    process = python(command(SAYS), **options)
    os.close(writing)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "the report\n")


@pytest.mark.parametrize(
    "words", ["--version", "--help", "recipe list example-*", "show demo", "doctor"]
)
@pytest.mark.parametrize("how", ["full", "closed"])
def test_a_stdout_that_takes_nothing_is_told(words: str, how: str) -> None:
    options: dict[str, Any] = {"stdout": None, "preexec_fn": lambda: os.close(1)}
    if how == "full":
        if not Path("/dev/full").exists():
            pytest.skip("needs /dev/full")
        options = {"stdout": os.open("/dev/full", os.O_WRONLY)}
    # Nor is there a Triton, whose compiler the doctor would start.
    code = (
        "from kvprof import triton_probe; triton_probe.find_spec = lambda _: None\n"
        f"import sys; sys.argv = ['kvprof', *{words.split()}]\nfrom kvprof.cli import main; main()"
    )
    _, said = (process := python(code, **options)).communicate(timeout=60)
    if how == "full":
        os.close(options["stdout"])
    last = said.splitlines()[-1]
    assert process.returncode == 1, said
    assert ("stdout" in last and "closed" in last) if how == "closed" else "No space" in last


def test_no_file_takes_the_place_of_a_closed_stream() -> None:
    body = "import os\nprint(os.open('/', os.O_RDONLY))"
    process = python(command(body), stderr=None, preexec_fn=lambda: os.close(2))
    assert int(process.communicate(timeout=30)[0]) > 2


# --- the end of a command -------------------------------------------------------------------

ENDING = """
import atexit, concurrent.futures, sys, threading, time, types
from kvprof import cli
module = types.ModuleType("doctor")
pool = concurrent.futures.ThreadPoolExecutor()
def late(word, seconds):
    time.sleep(seconds)
    print(word, end=" ")
def doctor() -> None:
    threading.Thread(target=late, args=("thread", 0.3)).start()
    pool.submit(late, "pool", 0.1)
    atexit.register(print, "atexit", end="")
    sys.stderr.write("heard")
    {end}
module.doctor = doctor
sys.modules["kvprof.commands.doctor"] = module
sys.argv = ["kvprof", "doctor"]
cli.main()
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("return", 0), ("raise SystemExit(4)", 4), ("raise SystemExit('why')", 1)],
)
def test_what_goes_on_at_the_end_is_waited_for(end: str, code: int) -> None:
    """Threads, pools and what is to be done at the end, and all that was printed meanwhile."""
    process = python(ENDING.format(end=end))
    out, said = process.communicate(timeout=60)
    assert out == "pool thread atexit"
    assert "heard" in said
    assert ("why" in said) == ("why" in end)
    assert process.returncode == code
