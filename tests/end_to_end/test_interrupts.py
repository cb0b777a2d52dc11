"""Ctrl-C in the middle of a command: it ends soon, with 130, and keeps what was measured."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kvprof.child import child_environment, module_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's"),
]

# In this time a command ends; 5 seconds are promised, on a machine that does nothing else.
SECONDS = 30

# Of each way to stop (calibrating, evaluating, timing, simulating, processes of its own) a command
# that would take long, what it says on stderr before the signal, and seconds of work until then.
COMMANDS = {
    "plan": ("plan --method kq --rate 30% --calibrate random:10m", "calibrating", 0.5),
    "eval": ("eval --method full --sequences 400 --tasks none", "evaluating", 1),
    "jct": ("bench --jct --method full --output-len 900 --repeats 50", "", 8),
    "load": ("bench --load --simulate --lengths arxiv --requests 200000", "requests in", 0.5),
    "recipe": ("recipe run fdc-table-3", "recipes", 2),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_ends_a_command(name: str, tmp_path: Path) -> None:
    words, said, after = COMMANDS[name]
    log = tmp_path / "said"
    out = tmp_path / "out"
    kept = ["--out", str(out)] if name in ("jct", "load", "recipe") else ["--json", str(out)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            module_command("kvprof", *words.split(), *kept),
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            # What a shell starts in the background ignores Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        end = time.monotonic() + 240
        while said not in log.read_text(errors="replace") and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.1)
        time.sleep(after)
        assert process.poll() is None, log.read_text(errors="replace")
        process.send_signal(signal.SIGINT)
        code = process.wait(SECONDS)
    finally:
        process.kill()
        process.wait()
    told = log.read_text(errors="replace")
    assert code == 130, told
    assert "Traceback" not in told
    written = [path for path in (out, out / "result.json") if path.is_file()]
    assert written or name != "recipe"  # the ledger of what was run
    assert not any(json.loads(path.read_text())["complete"] for path in written)
    assert not list(tmp_path.glob("**/.kvprof-*.tmp"))
