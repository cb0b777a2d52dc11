"""Measure the size of this repository, and hold each measure under its ceiling.

    python tools/house.py             # the measures, as JSON
    python tools/house.py --trace     # also how many files three commands run: some minutes
    python tools/house.py --check     # what CI runs: a measure above its ceiling fails

Run it in the repository's root. It reads what git tracks.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Measures = dict[str, float]

#: The largest value of each measure that CI accepts: today's. A commit that raises one says why.
#: Package lines by issue, in this order: 105K, 107K, 107K, 98K, 99K, 90K, 90K.
CEILINGS: Measures = {
    "package_lines": 93_832,
    "package_files": 415,
    "docstring_share": 0.11,
    "raises": 1078,
    "functions_with_12_parameters": 68,
    "modules_with_one_importer": 98,
    "test_lines": 57_908,
    "test_functions": 2653,
    "tests_of_wording": 599,
    "document_words": 21_511,
    "readme_lines": 120,
    "tracked_megabytes_outside_the_package": 6.0,
    # With --trace alone.
    "files_executed_spectrum": 49,
    "files_executed_eval": 92,
    "files_executed_bench": 167,
}

#: What --trace runs.
TRACED = {
    "spectrum": "spectrum --tokens 256",
    "eval": "eval --method kq --rate 0.3 --sequences 2 --seq-len 64 --tasks none",
    "bench": "bench --seq 256 --phase decode",
}

#: Runs a command, then prints how many of the package's files had a function called.
TRACER = """
import os, sys, threading
seen = set()
def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and "/kvprof/" in code.co_filename and code.co_name != "<module>":
        seen.add(code.co_filename)
def leave(code=0):
    raise SystemExit(code)
os._exit = leave  # a command that ends at once ends here
threading.setprofile(note)
sys.setprofile(note)
from kvprof.cli import main
try:
    main()
except SystemExit:
    pass
finally:
    sys.setprofile(None)
    print("FILES", len(seen), file=sys.stderr)
"""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_WORD = re.compile(r"[A-Za-z]{2,}")


def tracked(*patterns: str) -> list[Path]:
    """Return the files that git tracks and that are there."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], capture_output=True, text=True, check=True
    ).stdout
    return [path for name in listed.split("\0") if name and (path := Path(name)).is_file()]


def lines(paths: list[Path]) -> int:
    """Return how many lines files have together."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def module_of(path: Path) -> str:
    """Return the name by which a file is imported."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.Module) -> Iterator[str]:
    """Yield every name that might be a module and that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def docstring_lines(node: ast.AST) -> int:
    """Return how many lines a node's docstring has; 0 where none can be."""
    if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Module)):
        return 0
    if ast.get_docstring(node, clean=False) is None:
        return 0
    text = node.body[0]
    return (text.end_lineno or text.lineno) - text.lineno + 1


def parameters(node: ast.AST) -> int:
    """Return how many parameters a function has, without ``*`` and ``**``."""
    if not isinstance(node, _FUNCTIONS):
        return 0
    return len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)


def is_sentence(node: ast.AST) -> bool:
    """Say whether a node is a string of three words or more."""
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and " " in node.value
        and len(_WORD.findall(node.value)) >= 3
    )


def asserts_wording(test: ast.AST) -> bool:
    """Say whether a test compares with a sentence, or matches an error's text."""
    for node in ast.walk(test):
        if isinstance(node, ast.Assert) and any(map(is_sentence, ast.walk(node))):
            return True
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "pytest.raises"
            and any(keyword.arg == "match" for keyword in node.keywords)
        ):
            return True
    return False


def package_measures() -> Measures:
    """Measure the package."""
    trees = {path: ast.parse(path.read_text()) for path in tracked("kvprof/*.py")}
    modules = {module_of(path) for path in trees}
    importers: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for name in modules.intersection(imports(tree)) - {module_of(path)}:
            importers[name].add(module_of(path))
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    size = lines(list(trees))
    return {
        "package_lines": size,
        "package_files": len(trees),
        "docstring_share": round(sum(map(docstring_lines, nodes)) / size, 3),
        "raises": sum(isinstance(node, ast.Raise) for node in nodes),
        "functions_with_12_parameters": sum(parameters(node) >= 12 for node in nodes),
        "modules_with_one_importer": sum(len(found) == 1 for found in importers.values()),
    }


def test_measures() -> Measures:
    """Measure the tests."""
    files = tracked("tests/*.py")
    tests = [
        node
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, _FUNCTIONS) and node.name.startswith("test")
    ]
    return {
        "test_lines": lines(files),
        "test_functions": len(tests),
        "tests_of_wording": sum(map(asserts_wording, tests)),
    }


def document_measures() -> Measures:
    """Measure the documents, and what is tracked beside the package."""
    documents = [path for path in tracked("*.md") if "assets" not in path.parts]
    beside = [path for path in tracked() if path.parts[0] != "kvprof"]
    return {
        "document_words": sum(len(path.read_text(errors="replace").split()) for path in documents),
        "readme_lines": lines([Path("README.md")]),
        "tracked_megabytes_outside_the_package": round(
            sum(path.stat().st_size for path in beside) / 1e6, 1
        ),
    }


def traced_measures() -> Measures:
    """Run three commands, and count the files whose functions they call."""
    found: Measures = {}
    for name, command in TRACED.items():
        ended = subprocess.run(
            [sys.executable, "-c", TRACER, *command.split()], capture_output=True, text=True
        )
        counts = re.findall(r"^FILES (\d+)", ended.stderr, re.MULTILINE)
        if not counts:
            raise SystemExit(f"house: kvprof {command} was not traced:\n{ended.stderr[-2000:]}")
        found[f"files_executed_{name}"] = int(counts[-1])
    return found


def main() -> None:
    """Print the measures, or compare them with their ceilings."""
    parser = argparse.ArgumentParser(description="Measure the size of this repository.")
    parser.add_argument("--trace", action="store_true", help="also count the files commands run")
    parser.add_argument("--check", action="store_true", help="fail where a ceiling is exceeded")
    arguments = parser.parse_args()
    found = package_measures() | test_measures() | document_measures()
    if arguments.trace:
        found |= traced_measures()
    print(json.dumps(found, indent=1))
    above = {name: value for name, value in found.items() if value > CEILINGS[name]}
    if arguments.check and above:
        for name, value in above.items():
            print(f"house: {name} is {value:,}, above its ceiling {CEILINGS[name]:,}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
