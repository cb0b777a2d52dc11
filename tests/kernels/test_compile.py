import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--architecture", 2)])
def test_what_is_asked_of_it_is_answered_before_anything_is_compiled(word: str, code: int) -> None:
    command = [sys.executable, "-m", "kvprof.kernels.compile", word]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == code
    said = " ".join((done.stdout + done.stderr).split())
    assert "usage: python -m kvprof.kernels.compile" in said
    assert "B spilled" not in said
