"""What lies in the folder that a child runs in is data, whatever it is called."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvprof
from kvprof.child import child_environment, child_python, module_command
from kvprof.environment import package_version
from kvprof.recipes.runs import run_child
from kvprof.triton_probe import TritonState, probe_triton

TRACE = "trace"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder in which whatever is imported leaves a trace."""
    code = f"import os; os.close(os.open({str(tmp_path / TRACE)!r}, os.O_CREAT | os.O_WRONLY))\n"
    for name in ("yaml", "triton", "torch", "typer", "rich", "json", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "kvprof").mkdir()
    for name in ("__init__", "__main__", "triton_probe_kernel"):
        (tmp_path / "kvprof" / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    # As for a parent that was started by python -m.
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def said(command: list[str]) -> str:
    done = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_no_code_of_the_working_folder_runs(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A kernel compiles here, even when the user asked for the interpreter.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if sys.platform == "linux":
        assert probe_triton() == TritonState(package_version("triton"), True, True, None)
    outcome = run_child(("recipe", "validate", "no-such"), lambda: False)
    assert outcome.message.startswith("no such option") or "recipe" in outcome.message.lower()
    # A program of its own, and what that starts.
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import yaml'])"
    said(child_python("-c", f"import json; {inner}"))
    assert not (hostile / TRACE).exists()


def test_the_folder_is_hostile(hostile: Path) -> None:
    subprocess.run([child_python()[0], "-c", "import yaml"], check=True)
    assert (hostile / TRACE).exists()


def test_a_child_runs_the_kvprof_of_its_parent(hostile: Path) -> None:
    version = said(module_command("kvprof", "--version"))
    assert version == f"kvprof {kvprof.__version__}"
    environment = child_environment({"A": "b"})
    assert environment == {"A": "b", "PYTHONSAFEPATH": "1"}
    assert "PYTHONSAFEPATH" not in os.environ


# Modules that start programs which are no Python (git, the assembler), or copies of themselves.
_NO_PYTHON = {"environment.py", "kernels/compile.py", "models/chat.py"}
_STARTS = {"Popen", "run", "call", "check_call", "check_output"}
# What has none of these words starts nothing; parsing all of kvprof takes seconds.
_WORDS = re.compile(r"subprocess|multiprocessing|\.\s*(exec|spawn|posix_spawn|system|popen)")


def test_every_process_is_started_by_the_helper() -> None:
    root = Path(kvprof.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name in ("child.py", "requirements.py"):  # the latter prints it, for people to type
            continue
        text = path.read_text("utf-8")
        assert "sys.executable" not in text, f"{name}: kvprof.child says how Python is started"
        if _WORDS.search(text) is None:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom | ast.Import):
                modules = {one.name for one in node.names} | {getattr(node, "module", "")}
                forks = {one for one in modules if one and "multiprocessing" in one}
                assert not forks or name in _NO_PYTHON, f"{name} starts processes by {forks}"
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner, called = node.func.value, node.func.attr
            if not isinstance(owner, ast.Name):
                continue
            assert not (owner.id == "os" and called.startswith(("exec", "spawn", "posix_spawn")))
            assert not (owner.id == "os" and called in ("system", "popen"))
            if owner.id == "subprocess" and called in _STARTS and name not in _NO_PYTHON:
                given = {keyword.arg for keyword in node.keywords}
                assert "env" in given, f"{name}:{node.lineno}: no child_environment()"
                assert "child_environment" in text, name
