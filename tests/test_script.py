"""``scripts/kvprof``, the command that the wheel carries, as installers leave it."""

import os
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

import kvprof
from kvprof.requirements import DISTRIBUTION
from kvprof.version import __version__

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a script of the shell")

ROOT = Path(kvprof.__file__).parents[1]
SCRIPT = ROOT / "scripts" / "kvprof"
LIBRARY = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")


def said(*words: str | Path, **options: Any) -> "subprocess.CompletedProcess[str]":
    options = {"capture_output": True, "text": True, "timeout": 60, "check": False, **options}
    done: subprocess.CompletedProcess[str] = subprocess.run(list(map(str, words)), **options)
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment whose path has a blank, with kvprof in it as an editable install puts it."""
    place = tmp_path_factory.mktemp("two words") / "an environment"
    venv.create(place, with_pip=False, symlinks=True)
    paths = [str(ROOT), *(path for path in sys.path if path.endswith("-packages"))]
    (place / LIBRARY / "zz_kvprof.pth").write_text("\n".join(paths) + "\n")
    shutil.copy(SCRIPT, place / "bin" / "kvprof")
    return place / "bin" / "kvprof"


def test_the_wheel_carries_it_and_it_can_be_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["shared-scripts"] == {"scripts/kvprof": "kvprof"}
    assert "scripts" not in project["project"]  # installers would write theirs in its place
    assert os.access(SCRIPT, os.X_OK)
    assert f"{DISTRIBUTION.replace('-', '_')}-*.dist-info" in SCRIPT.read_text()


def test_it_runs_by_its_path_through_links_and_from_its_folder(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "far").symlink_to(installed)
    (tmp_path / "near").symlink_to("far")
    (tmp_path / "kvprof").mkdir()  # of somebody else, in the working folder
    (tmp_path / "kvprof" / "__init__.py").write_text("raise SystemExit('not this one')")
    for words, folder in (
        ([installed], tmp_path),
        ([tmp_path / "near"], tmp_path),
        (["./near"], tmp_path),
        (["sh", "kvprof"], installed.parent),
    ):
        done = said(*words, "--version", cwd=folder)
        assert (done.returncode, done.stdout) == (0, f"kvprof {__version__}\n"), done.stderr
    assert said(installed, "show", "no such run").returncode == 2
    offered = said(
        installed,
        env={
            **os.environ,
            "_KVPROF_COMPLETE": "complete_bash",
            "COMP_WORDS": "kvprof spe",
            "COMP_CWORD": "1",
        },
    )
    assert offered.stdout.split() == ["spectrum"], offered.stderr


def test_ctrl_c_ends_it_in_silence_before_site_is_imported(installed: Path) -> None:
    """Site, and what its files run, is most of what Python does before a line that is ours."""
    early = installed.parents[1] / LIBRARY / "aa_early.pth"
    early.write_text("import _signal; _signal.raise_signal(_signal.SIGINT)\n")
    try:
        done = said(  # whatever these tests were started with
            installed,
            "--version",
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
        ignoring = said(  # by nohup, or in the background of a script
            installed,
            "--version",
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
        assert (ignoring.returncode, ignoring.stderr) == (0, "")
    finally:
        early.unlink()


def knows_block_signal() -> bool:
    return said("env", "--block-signal=INT", "true").returncode == 0


@pytest.mark.skipif(not knows_block_signal(), reason="the system's env cannot block signals")
def test_ctrl_c_before_a_line_of_python_is_run_waits_and_is_not_lost(
    installed: Path, tmp_path: Path
) -> None:
    shutil.copytree(installed.parents[1], tmp_path / "own", symlinks=True)
    script = tmp_path / "own" / "bin" / "kvprof"
    python = script.with_name("python3")
    python.unlink()
    python.write_text(f'#!/bin/sh\nkill -INT $$\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    started = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    early = script.parents[1] / LIBRARY / "aa_early.pth"  # run by site, which is not reached
    early.write_text("import os; os.write(2, b'went on')\n")
    done = said(script, "--version", **started)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    # The shell that stands for Python lives beyond its own signal: it is held back there.
    python.write_text('#!/bin/sh\nkill -INT $$\necho "still here"\n')
    assert said(script, **started).stdout == "still here\n"


def test_no_signal_is_held_back_from_what_kvprof_runs(installed: Path) -> None:
    early = installed.parents[1] / LIBRARY / "aa_early.pth"
    early.write_text("import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))\n")
    try:
        assert said(installed, "--version").stdout.splitlines()[0] == "set()"
    finally:
        early.unlink()


@pytest.mark.parametrize("body", ["exit 1", "exit 125", None])
def test_an_env_that_cannot_block_signals_is_not_asked_to(
    body: str | None, installed: Path, tmp_path: Path
) -> None:
    """BusyBox's says how it is used and fails; and a path with = would be a variable to any."""
    environment, script = None, installed
    if body is not None:
        (tmp_path / "env").write_text(f"#!/bin/sh\necho no such option >&2\n{body}\n")
        (tmp_path / "env").chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    else:
        shutil.copytree(installed.parents[1], tmp_path / "a=b", symlinks=True)
        script = tmp_path / "a=b" / "bin" / "kvprof"
    done = said(script, "--version", env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvprof {__version__}\n", "")


@pytest.mark.parametrize("beside", [True, False])
def test_outside_of_an_environment_it_takes_the_python_that_has_kvprof(
    beside: bool, tmp_path: Path
) -> None:
    name = LIBRARY.parts[1]
    (tmp_path / "bin").mkdir()
    shutil.copy(SCRIPT, tmp_path / "bin" / "kvprof")
    (tmp_path / LIBRARY / f"{DISTRIBUTION.replace('-', '_')}-1.0.dist-info").mkdir(parents=True)
    where = tmp_path / ("bin" if beside else "elsewhere")
    where.mkdir(exist_ok=True)
    for program, body in ((name, 'echo "right $1"'), ("python3", "echo wrong")):
        (where / program).write_text(f"#!/bin/sh\n{body}\n")
        (where / program).chmod(0o755)
    done = said(
        tmp_path / "bin" / "kvprof", env={"PATH": f"{tmp_path / 'elsewhere'}:{os.environ['PATH']}"}
    )
    assert done.stdout == "right -PS\n", done.stderr
