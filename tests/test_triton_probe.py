import subprocess
import sys
from typing import Any

import pytest

from kvprof import triton_probe
from kvprof.triton_probe import probe_triton


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_a_kernel_compiles_here_even_when_the_user_asked_for_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    state = probe_triton()
    assert (state.compiles, state.interpreted, state.problem) == (True, True, None)


def test_a_compiler_that_fails_is_told_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(command: list[str], **_options: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 1, "", "Traceback\n  …\nOSError: no ptxas\n")

    monkeypatch.setattr(subprocess, "run", broken)
    state = probe_triton()
    assert not state.compiles
    assert state.problem == "OSError: no ptxas"


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_probe, "package_version", lambda _name: None)
    state = probe_triton()
    assert (state.version, state.compiles) == (None, False)
    assert state.problem == "Triton is not installed"
