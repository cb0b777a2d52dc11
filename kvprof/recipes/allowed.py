"""What a cell may ask for: a recipe is a stranger's file, and its cells run as whoever runs it.

Asked of the very words that are run, after placeholders, matrix and settings have been filled in.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path

from kvprof.results import KINDS

__all__ = ["CELL_COMMANDS", "REMOTE_CODE", "forbidden"]

#: Commands that measure something, which is what a cell is for.
CELL_COMMANDS = ("spectrum", "stability", "plan", "eval", "frontier", "generate", "bench")

#: Runs code that a model brings; whoever runs the recipe has to allow it.
REMOTE_CODE = "--trust-remote-code"

# Of commands without a request's class. They measure, and neither write nor read files.
_FREE = frozenset(
    (
        "--arrivals",
        "--baseline",
        "--batch",
        "--composed",
        "--device",
        "--dtype",
        "--gguf",
        "--input-len",
        "--jct",
        "--kernels",
        "--layers",
        "--load",
        "--memory",
        "--method",
        "--methods",
        "--output-len",
        "--phase",
        "--rate",
        "--real",
        "--refine",
        "--repeats",
        "--replicas",
        "--requests",
        "--router",
        "--seconds",
        "--seed",
        "--seq",
        "--simulate",
        "--slo",
        "--timeout",
        "--tp",
    )
)
# What they name may be a file or a folder, which then is the recipe's own or the user's word.
_READ = frozenset(
    (
        "--lengths",
        "--model",
        "--plan",
        "--ranks",
        "--request-rate",
        "--tokenizer",
        "--trace",
    )
)
# Names of the harness's own tasks; a file of tasks can hold code.
_NAMES = "--harness"
_FIRST = "--model"  # what stands first
_FILE_OF_TASKS = re.compile(r"[/\\]|\.ya?ml")
_KEPT = frozenset(("--json", "--out", "--csv", "--svg", "--png", "--force"))
# Never files of that name, whatever lies in the folder of the run.
_EMBEDDED = frozenset(("reference", "prose", "code", "tasks", "calibration"))


@cache
def _options(command: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return a command's options that are free, and those that may name a file."""
    if command not in KINDS:
        return _FREE, _READ
    request = getattr(import_module(f"kvprof.commands.{command}"), command).request
    free, reads = request.recipe_options()
    return free, reads | {_FIRST}


def forbidden(
    words: Sequence[str], folder: Path, given: Collection[str] = (), *, trusted: bool = True
) -> str | None:
    """Return what a cell's words ask for that no recipe may, or None."""
    if words[0] not in CELL_COMMANDS:
        return f"command {words[0]!r} cannot run in a recipe; use {', '.join(CELL_COMMANDS)}"
    free, read = _options(words[0])
    for word in words[1:]:
        option = word.partition("=")[0]
        if option in _KEPT:
            return f"leave out {option}: recipe run saves the results"
        if option == REMOTE_CODE and not trusted:
            return (
                "runs code from a model's repository; if you trust it, use kvprof recipe run "
                f"{REMOTE_CODE}"
            )
        if word.startswith("-") and option not in {*free, *read, _NAMES, REMOTE_CODE}:
            return f"No such option in a recipe: {option} (recipes cannot write files)"
    if tasks := [value for value in _given_to(_NAMES, words) if _FILE_OF_TASKS.search(value)]:
        return f"{_NAMES} {tasks[0]}: use the harness's task names; a task file can contain code"
    known = {piece for value in given for piece in (value, *value.split(","))}
    for value, may_be_file in _values(words, read):
        for piece in value.split(","):
            if not piece or piece in known or value in known:
                continue
            if _is_outside(piece, folder, may_be_file):
                return (
                    f"{piece} is not in the recipe's folder ({folder}); write {{data}} there "
                    "and run with --set data=FILE"
                )
    return None


def _given_to(option: str, words: Sequence[str]) -> Iterator[str]:
    for before, word in pairwise(words):
        if before == option:
            yield word
        if word.startswith(f"{option}="):
            yield word.partition("=")[2]


def _values(words: Sequence[str], read: Collection[str]) -> Iterator[tuple[str, bool]]:
    """Yield what is given to options or stands alone, and whether it can be the name of a file."""
    option = _FIRST
    for word in words[1:]:
        value = word
        if word.startswith("-"):
            option, equals, value = word.partition("=")
            if not equals:
                continue
        yield value, option in read


def _is_outside(piece: str, folder: Path, may_be_file: bool) -> bool:
    path = Path(piece)
    suspicious = path.is_absolute() or piece.startswith("~") or ".." in path.parts
    try:
        there = may_be_file and piece not in _EMBEDDED and path.exists()
        if not (suspicious or there):
            return False
        return not path.expanduser().resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # too long for a name, no such user, a loop
        return suspicious
