"""What the programs of this folder share: their record, and parts measured one after another."""

import argparse
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvprof.environment import collect_environment
from kvprof.records.files import write_result
from kvprof.records.result import build_result

Data = dict[str, Any]


def keep(
    path: Path, inputs: Mapping[str, Any], data: Mapping[str, Any], warnings: Sequence[str] = ()
) -> None:
    """Write a record in place of the one that is there.

    Parameters
    ----------
    path : Path
    inputs : mapping
        What was asked; ``benchmark`` names the program.
    data : mapping
    warnings : sequence of str
    """
    record = build_result(
        "benchmark",
        environment=collect_environment(),
        inputs=inputs,
        data=data,
        warnings=warnings,
    )
    write_result(path, record, force=True)


def add_only(parser: argparse.ArgumentParser, known: Collection[str]) -> None:
    """Let a program be asked for some of its parts.

    Parameters
    ----------
    parser : argparse.ArgumentParser
    known : collection of str
        All parts, the most wanted first.
    """

    def parts(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"there is no part {name}; choose from {', '.join(known)}"
                )
        return names

    parser.add_argument(
        "--only", type=parts, default=list(known), help="parts, separated by commas"
    )


def measure_parts(
    names: Sequence[str],
    measure: Callable[[str], Data],
    show: Callable[[str, Data], None],
    keep_all: Callable[[Data], None],
) -> Data:
    """Measure parts one after another; one that fails says why, and the rest goes on.

    Parameters
    ----------
    names : sequence of str
    measure : callable
        Returns what a part found.
    show : callable
        Prints a part.
    keep_all : callable
        Writes all parts measured so far; called after each.

    Returns
    -------
    dict
        By part. ``failed`` of one that ended in an error is a sentence.
    """
    data: Data = {}
    for name in names:
        start = time.perf_counter()
        try:
            data[name] = measure(name)
        except Exception as problem:
            data[name] = {"failed": f"{type(problem).__name__}: {problem}"[:2000]}
        print(f"{name}: {time.perf_counter() - start:.1f} s")
        if data[name].get("failed"):
            print(f"  {data[name]['failed']}")
        show(name, data[name])
        sys.stdout.flush()
        keep_all(data)
    return data
