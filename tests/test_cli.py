import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvprof import cli
from kvprof.cli import COMMANDS
from kvprof.errors import (
    ClaimNotMetError,
    ExitCode,
    FailedError,
    KvprofError,
    LackingError,
    UsageError,
)
from kvprof.requirements import COMMAND_NEEDS
from kvprof.version import __version__
from tests.commands.running import kvprof

HEAVY = ("torch", "transformers", "triton", "textual", "numpy", "scipy")
ROOT = Path(cli.__file__).parents[1]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# A process for each run, copied from one that has loaded what they share: no second one begins
# with Python's and Typer's start.
RUNS = """\
import atexit, contextlib, json, os, sys, {shared}
with contextlib.suppress(ImportError):  # what this Typer may read options with
    import pydantic.type_adapter
for number, (arguments, environment) in enumerate({runs!r}):
    if os.fork() == 0:
        os.environ.update(environment)
        sys.argv = ["kvprof", *arguments]
        said = open(f"{folder}/{{number}}.said", "w")
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        atexit.register(
            lambda: open(f"{folder}/{{number}}.loaded", "w").write(json.dumps([*sys.modules]))
        )
        from kvprof.cli import main
        main()
        sys.exit()
    if code := os.waitstatus_to_exitcode(os.wait()[1]):
        sys.exit(f"{{arguments}} ended with {{code}}")
"""


def forked(
    folder: Path, *runs: tuple[Sequence[str], Mapping[str, str]], shared: str = "kvprof.cli"
) -> Iterator[tuple[str, set[str]]]:
    """Yield what each run of the command line says, and the modules that it has then loaded.

    A run is its arguments and its environment; `shared` are modules that all of them find loaded.
    """
    given = [([*arguments], dict(environment)) for arguments, environment in runs]
    done = python(RUNS.format(shared=shared, runs=given, folder=folder))
    assert done.returncode == 0, done.stderr
    for number in range(len(runs)):
        loaded = json.loads((folder / f"{number}.loaded").read_text())
        yield (folder / f"{number}.said").read_text(), set(loaded)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Put a function in the place of the first command's own."""

    def install(function: Callable[..., Any]) -> None:
        name = COMMANDS[0].name
        module = ModuleType(name)
        setattr(module, name, function)
        monkeypatch.setitem(sys.modules, f"kvprof.commands.{name}", module)

    return install


def raising(problem: BaseException) -> Callable[[], None]:
    def run() -> None:
        """Fail."""
        raise problem

    return run


def caused(problem: BaseException, cause: BaseException) -> BaseException:
    problem.__cause__ = cause
    return problem


# --- what is loaded -------------------------------------------------------------------------


def test_the_top_level_loads_neither_a_command_nor_anything_heavy(tmp_path: Path) -> None:
    for _, loaded in forked(tmp_path, (["--help"], {}), (["--version"], {}), ([], {})):
        assert "kvprof.cli" in loaded
        assert not loaded.intersection(HEAVY)
        assert not [name for name in loaded if name.startswith("kvprof.commands")]


def test_a_commands_help_loads_its_module_alone_and_no_torch(tmp_path: Path) -> None:
    names = [entry.name for entry in COMMANDS]
    runs = [([name, "--help"], {}) for name in names]
    shared = "kvprof.cli, kvprof.commands.options, kvprof.commands.output"
    for name, (_, loaded) in zip(names, forked(tmp_path, *runs, shared=shared), strict=True):
        assert f"kvprof.commands.{name}" in loaded
        assert not loaded.intersection(("torch", "transformers", "triton", "textual")), name
        assert not loaded & {f"kvprof.commands.{other}" for other in names if other != name}


@pytest.mark.parametrize("name", [entry.name for entry in COMMANDS])
def test_every_command_listed_exists_and_doctor_knows_its_needs(name: str) -> None:
    assert callable(getattr(import_module(f"kvprof.commands.{name}"), name))
    assert name in COMMAND_NEEDS


# --- help and completion --------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ()])
def test_help_lists_every_command_and_the_exit_codes(arguments: tuple[str, ...]) -> None:
    done = kvprof(*arguments)
    assert done.code == 0
    for entry in COMMANDS:
        assert re.search(rf"^  {entry.name} +{re.escape(entry.help[:20])}", done.stdout, re.M)
    for code in ExitCode:
        assert re.search(rf"\b{code:d}\b", done.stdout)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_help_ends_before_a_numpy_docstrings_sections(command: Any) -> None:
    def run() -> None:
        """Do it.

        At length [with brackets].

        Parameters
        ----------
        hidden : int
        """

    command(run)
    text = kvprof(COMMANDS[0].name, "--help").stdout
    assert "At length [with brackets]." in text
    assert "hidden" not in text


def test_version() -> None:
    assert kvprof("--version").stdout == f"kvprof {__version__}\n"


def test_the_shell_completes_commands_and_their_options(tmp_path: Path) -> None:
    shells, asked = ("bash", "zsh", "fish"), ("kvprof do", "kvprof doctor --me")

    def completing(shell: str, words: str) -> dict[str, str]:
        return {
            "_KVPROF_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
            "_TYPER_COMPLETE_ARGS": words,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }

    runs = [([], completing(shell, words)) for shell in shells for words in asked]
    said = [said for said, _ in forked(tmp_path, *runs)]
    for shell, commands, options in zip(shells, said[::2], said[1::2], strict=True):
        assert "doctor" in commands, shell
        assert "spectrum" not in commands, shell
        assert "--measure" in options, shell


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("doctr",), "No such command 'doctr'. Did you mean 'doctor'?"),
        (("frobnicate",), "No such command 'frobnicate'"),
        (("--nope",), "No such option.*--nope"),
        (("doctor", "--mesure"), "--measure"),
        (("doctor", "extra"), "extra"),
        (("doctor", "--json"), "--json"),
        (("spectrum", "--seed", "many"), "'--seed'.*'many'"),
        (("spectrum", "--seed", "-1"), "'--seed'.*-1"),
    ],
)
def test_wrong_usage_is_one_line_and_2(arguments: tuple[str, ...], said: str) -> None:
    done = kvprof(*arguments)
    assert done.code == ExitCode.USAGE
    assert done.stdout == ""
    assert re.search(said.replace("?", r"\?"), done.error)
    assert "--help" in done.error
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (FailedError("the weights hold NaN"), 1),
        (UsageError("no tokens asked for"), 2),
        (LackingError("no GPU"), 3),
        (ClaimNotMetError("claim 1 does not hold"), 4),
    ],
)
def test_our_own_errors_are_their_line_and_their_code(
    problem: KvprofError, code: int, command: Any
) -> None:
    command(raising(problem))
    done = kvprof(COMMANDS[0].name)
    assert (done.code, done.stdout, done.stderr) == (code, "", f"kvprof: {problem}\n")


def test_what_nobody_thought_of_is_one_line_that_says_how_to_see_more(command: Any) -> None:
    command(raising(ZeroDivisionError("division\nby zero")))
    done = kvprof(COMMANDS[0].name)
    assert done.code == ExitCode.FAILED
    assert done.error.startswith("kvprof: internal error: ZeroDivisionError: division by zero;")
    assert "--debug" in done.error
    assert "KVPROF_DEBUG" in done.error
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("how", ["option", "variable"])
def test_debug_shows_the_traceback_too(
    how: str, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(raising(ZeroDivisionError("by zero")))
    if how == "variable":
        monkeypatch.setenv("KVPROF_DEBUG", "1")
    options = ["--debug"] if how == "option" else []
    result = CliRunner().invoke(cli.app, [*options, COMMANDS[0].name])
    assert result.exit_code == ExitCode.FAILED
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.endswith("kvprof: internal error: ZeroDivisionError: by zero\n")


class OutOfMemoryError(RuntimeError):
    """Stands for torch's, which is recognised by its name."""


@pytest.mark.parametrize(
    "problem",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        type("PanicException", (BaseException,), {})("unable to mmap: Cannot allocate memory (12)"),
        caused(FailedError("x cannot be loaded"), MemoryError()),
    ],
)
def test_no_memory_is_something_that_the_machine_lacks(
    problem: BaseException, command: Any
) -> None:
    command(raising(problem))
    done = kvprof(COMMANDS[0].name)
    assert done.code == ExitCode.LACKING
    assert done.error.startswith("kvprof: out of memory: ")
    assert str(problem) in done.error


def test_torchs_own_error_is_recognised(command: Any) -> None:
    import torch

    command(raising(torch.OutOfMemoryError("CUDA out of memory")))
    assert kvprof(COMMANDS[0].name).code == ExitCode.LACKING


def test_a_missing_package_is_something_that_the_machine_lacks(command: Any) -> None:
    command(raising(ModuleNotFoundError("No module named 'scipy'", name="scipy")))
    done = kvprof(COMMANDS[0].name)
    assert done.code == ExitCode.LACKING
    assert "'scipy'" in done.error
    command(raising(ModuleNotFoundError("No module named 'kvprof.x'", name="kvprof.x")))
    assert "internal error" in kvprof(COMMANDS[0].name).error


def test_a_full_disk_is_told(command: Any) -> None:
    command(raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/result.json")))
    done = kvprof(COMMANDS[0].name)
    assert done.code == ExitCode.FAILED
    assert done.error == "kvprof: No space left on device: run/result.json"


def test_an_interrupt_is_130_and_one_line(command: Any) -> None:
    command(raising(KeyboardInterrupt()))
    done = kvprof(COMMANDS[0].name)
    assert done.code == ExitCode.INTERRUPTED
    assert "interrupted" in done.error


def test_a_commands_own_exit_code_is_kept_without_a_word(command: Any) -> None:
    command(raising(typer.Exit(ExitCode.INTERRUPTED)))
    done = kvprof(COMMANDS[0].name)
    assert (done.code, done.stderr) == (130, "")


# --- as a process ---------------------------------------------------------------------------


def test_what_went_is_refused_with_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    went = {"bench --went": "kvprof show does it", "gone": "kvprof plan does it"}
    monkeypatch.setattr("kvprof.commands.options.GONE", went)
    for words in went:
        done = kvprof(*words.split())
        assert done.code == 2
        assert f"{words} was removed: {went[words]}" in done.error


def test_bench_refuses_a_wrong_name_before_torch_is_loaded() -> None:
    done = python(
        "import sys; from kvprof.cli import app\n"
        "try: app(['bench', '--methods', 'full,unifrom,tale:bits=none'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    assert done.stdout.split() == ["2", "False"]
    assert "method 'unifrom' is unknown; did you mean uniform?" in " ".join(done.stderr.split())


def test_bytes_that_are_no_text_are_refused_by_their_options_name(tmp_path: Path) -> None:
    done = kvprof("generate", "--method", "full", "--prompt", "a\udcff")
    assert done.code == ExitCode.USAGE
    assert "--prompt" in done.error
    for words in (("--method", "a\udcff"), ("--method", "full", "--calibrate", "a\udcff")):
        done = kvprof("generate", "--prompt", "a", *words)
        assert done.code == ExitCode.USAGE
    named = tmp_path / "a\udcff.ids"  # what a file is called is its own matter
    named.write_text("1 2 3\n")
    assert "UTF-8" not in kvprof("spectrum", "--source", named, "--tokens", 99).error


@pytest.mark.parametrize(("command", "megabytes"), [("spectrum", 300), ("eval", 1000)])
def test_too_little_address_space_is_something_that_the_machine_lacks(
    command: str, megabytes: int
) -> None:
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({megabytes} << 20,) * 2)"
    words = ["kvprof", command, *(["--method", "full"] if command == "eval" else [])]
    code = f"{limit}; import sys; sys.argv = {words}; from kvprof.cli import main; main()"
    done = python(code)
    assert done.returncode == ExitCode.LACKING, done.stderr
    assert "Traceback" not in done.stderr
