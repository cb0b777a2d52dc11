"""Runs a command in this process, as the console script would; tells what a load would start."""

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvprof.cli import app
from kvprof.records.schema import validate_result
from kvprof.serving.load.server import ServerProcess
from kvprof.serving.load.target import LoadTarget, ServedTarget


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one line on stderr that says why it stopped."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("kvprof: ")]
        assert len(lines) == 1, self.stderr
        assert "Traceback" not in self.stderr
        return lines[0]


def kvprof(*arguments: Any) -> Finished:
    """Run ``kvprof`` with `arguments` and return its exit code and both streams."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return Finished(result.exit_code, result.stdout, result.stderr)


def result_of(command: str, folder: Path, *arguments: Any, code: int = 0) -> dict[str, Any]:
    """Run a command and return its result, which is valid."""
    path = folder / "result.json"
    done = kvprof(command, *arguments, "--json", path, "--force")
    assert done.code == code, done.stderr
    result: dict[str, Any] = json.loads(path.read_text())
    validate_result(result)
    return result


def press_ctrl_c() -> None:
    """Press Ctrl-C once a command has put its own handler in place and worked a moment."""
    while "graceful" not in str(signal.getsignal(signal.SIGINT)):
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)


def words_of(line: str) -> list[str]:
    """Return the words of a command line."""
    return line.split()


def process_of(target: LoadTarget) -> ServerProcess:
    """Return the server that a load would start for a method."""
    assert isinstance(target, ServedTarget)
    assert isinstance(target._server, ServerProcess)
    return target._server


def over(usual: Sequence[Any], own: Sequence[Any]) -> list[Any]:
    """Return usual options and their values, less those that are among a command's own, and these.

    Of an option of one value that is given twice no command takes the last.
    """
    replaced = set(own) - {"--text", "--target"}  # which are repeatable
    pairs = zip(usual[::2], usual[1::2], strict=True)
    return [*(word for pair in pairs if pair[0] not in replaced for word in pair), *own]
