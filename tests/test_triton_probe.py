"""What is told of a Triton that does not work; `test_child.py` asks one that does."""

import subprocess
from typing import Any

import pytest

from kvprof import triton_probe
from kvprof.triton_probe import probe_triton


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
