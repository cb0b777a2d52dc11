"""How a process ends early, as processes: signals, a parent that is killed, streams that fail."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvprof import cli
from kvprof.child import Leash
from kvprof.interrupt import graceful_interrupt, raising
from kvprof.scratch import alone_in

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
from tempfile import TemporaryDirectory
from kvprof import cli, interrupt
from kvprof.errors import Interrupted
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
    body = f"with TemporaryDirectory(dir={str(tmp_path)!r}):\n    print('ready', flush=True)\n    "
    process = python(command(body + WAITS))
    said_ready(process)
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said.count("\n")) == (130, 1)
    assert said.startswith("kvprof: interrupted")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_inside_of_a_modules_import_ends_at_once(tmp_path: Path) -> None:
    """Raised there it was swallowed by whoever imports on trial, and half a module went on."""
    slow = f"import time\nprint('ready', flush=True)\ntry:\n    {WAITS}\n"
    (tmp_path / "slow.py").write_text(f"{slow}except BaseException:\n    pass\n")
    body = f"sys.path.insert(0, {str(tmp_path)!r})\nimport slow\nprint('went on')"
    process = python(command(body))
    said_ready(process)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=30)
    assert (process.returncode, out, said) == (130, "", "kvprof: interrupted\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_the_work_in_hand_is_finished(number: int) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with graceful_interrupt() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # as `timeout` and a shell that ends send it
        assert stop()
    assert [signal.getsignal(one) for one in SIGNALS] == before


STEP = """
with interrupt.graceful_interrupt() as stop:
    print('ready', flush=True)
    try:
        {step}
    except Interrupted:
        print('kept')
"""


def test_a_step_that_takes_long_is_broken_off() -> None:
    process = python(command(STEP.format(step=WAITS)))
    said_ready(process)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[0] == "kept\n"


@pytest.mark.parametrize("twice", [False, True])
def test_what_does_not_listen_ends_and_a_second_ctrl_c_is_at_once(twice: bool) -> None:
    deaf = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
    process = python(command(STEP.format(step=WAITS if twice else deaf)))
    said_ready(process)
    process.send_signal(signal.SIGINT)
    if twice:
        time.sleep(0.6)
        process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=1.2 if twice else 20)
    assert (process.returncode, out) == (130, "")


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
from kvprof.child import Leash
child = "from kvprof.child import die_with_parent; die_with_parent(); print('ready', flush=True)\\n"
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
        "from kvprof.child import die_with_parent; die_with_parent()\n"
        "import os, sys; print(sorted(name for name in os.environ if 'LEASH' in name))"
    )
    leash = Leash()
    process = leash.start([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=30)
    leash.close()
    assert out == "[]\n"


# --- files ----------------------------------------------------------------------------------


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["--help", "show demo"])
def test_a_full_disk_behind_stdout_is_told(words: str) -> None:
    code = f"import sys; sys.argv = ['kvprof', *{words.split()}]\n"
    with Path("/dev/full").open("w") as full:
        process = python(f"{code}from kvprof.cli import main; main()", stdout=full)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert "No space" in said.splitlines()[-1]
    assert "Traceback" not in said


@pytest.mark.parametrize("words", ["--help", "show demo --json -"])
def test_a_reader_that_leaves_early_hears_nothing(words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = f"import sys; sys.argv = ['kvprof', *{words.split()}]\n"
    process = python(f"{code}from kvprof.cli import main; main()", stdout=writing)
    os.close(writing)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, "")


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
    ("end", "code"), [("return", 0), ("raise SystemExit(4)", 4), ("raise SystemExit('why')", 1)]
)
def test_what_goes_on_at_the_end_is_waited_for(end: str, code: int) -> None:
    """Threads, pools and what is to be done at the end, and all that was printed meanwhile."""
    process = python(ENDING.format(end=end))
    out, said = process.communicate(timeout=60)
    assert out == "pool thread atexit"
    assert "heard" in said
    assert ("why" in said) == ("why" in end)
    assert process.returncode == code
