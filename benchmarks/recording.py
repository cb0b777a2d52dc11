"""What the programs of this folder share: their records, and parts measured one after another."""

import argparse
import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvprof.environment import collect_environment
from kvprof.records.files import read_result, write_text_atomic
from kvprof.records.result import build_result

Data = dict[str, Any]

#: One file for each benchmark and GPU, written over: git has the earlier ones.
RECORDS = Path(__file__).resolve().parents[1] / "records"
INDEX = "index.jsonl"
#: Keys of samples; of more than so many a record keeps the median alone.
_SAMPLES, _MOST_SAMPLES = ("seconds", "tpot_s", "itl_s"), 4
_DIGITS = 6


def keep(
    folder: Path,
    inputs: Mapping[str, Any],
    data: Mapping[str, Any],
    headline: Mapping[str, Any],
    warnings: Sequence[str] = (),
) -> Path:
    """Write a benchmark's record and its row of the index.

    Parameters
    ----------
    folder : Path
        `RECORDS`, or another for a trial.
    inputs : mapping
        What was asked; ``benchmark`` names the program.
    data : mapping
    headline : mapping
        The figures of the index: few, with names that have their unit.
    warnings : sequence of str

    Returns
    -------
    Path
    """
    result = build_result(
        "benchmark",
        environment=collect_environment(),
        inputs=inputs,
        data=data,
        warnings=warnings,
    )
    words = [f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    return keep_result(folder, inputs["benchmark"], result, f"python {shlex.join(words)}", headline)


def keep_result(
    folder: Path,
    benchmark: str,
    result: Mapping[str, Any],
    command: str,
    headline: Mapping[str, Any],
) -> Path:
    """Write any result as the record of a benchmark, and its row of the index.

    Parameters
    ----------
    folder : Path
    benchmark : str
        Begins the file's name; the GPU ends it.
    result : mapping
    command : str
        That makes the record.
    headline : mapping

    Returns
    -------
    Path
    """
    environment = result["environment"]
    gpu = gpu_word(environment)
    path = folder / f"{benchmark.replace(' ', '-').replace('_', '-')}-{gpu}.json"
    # On one line: git has no use for more, and a quarter of the bytes would be indentation.
    kept = json.dumps({**result, "data": compact(result["data"])}, separators=(",", ":"))
    write_text_atomic(path, f"{kept}\n", force=True)
    row = {
        "file": path.name,
        "benchmark": benchmark,
        "gpu": gpu,
        "command": command,
        "commit": ((environment.get("kvprof") or {}).get("git") or {}).get("commit"),
        "date": result["created"][:10],
        "headline": headline,
    }
    index = folder / INDEX
    rows = [json.loads(line) for line in index.read_text().splitlines()] if index.is_file() else []
    rows = [own for own in rows if own["file"] != path.name] + [row]
    rows.sort(key=lambda own: str(own["file"]))
    write_text_atomic(
        index, "".join(json.dumps(own, ensure_ascii=False) + "\n" for own in rows), force=True
    )
    return path


def earlier_record(folder: Path, benchmark: str) -> dict[str, Any] | None:
    """Return the record that `keep` would write over, if there is one."""
    path = folder / f"{benchmark}-{gpu_word(collect_environment())}.json"
    return read_result(path) if path.is_file() else None


def gpu_word(environment: Mapping[str, Any]) -> str:
    """Return what a record's name calls its GPU: h200, h100, cpu without one."""
    gpus = environment.get("gpus") or []
    if not gpus:
        return "cpu"
    words = re.split(r"[^a-z0-9]+", gpus[0]["name"].lower())
    return next((word for word in words if any(map(str.isdigit, word))), words[-1])


def compact(value: Any, key: str = "", digits: int = _DIGITS) -> Any:
    """Return data in so many digits, with the median in place of samples that are many."""
    if isinstance(value, Mapping):
        return {name: compact(own, name, digits) for name, own in value.items()}
    if isinstance(value, float) and not value.is_integer():
        return float(f"{value:.{digits}g}")
    if not isinstance(value, (list, tuple)):
        return value
    if key in _SAMPLES and len(value) > _MOST_SAMPLES:
        return compact([statistics.median(value)], digits=digits)
    return [compact(own, digits=digits) for own in value]


def speedups(part: Mapping[str, Any]) -> dict[str, float]:
    """Return a headline: what rows of `kvprof bench` say of speed, without the uncompressed."""
    return {
        f"{row['method'].removesuffix('.plan')} {row['phase']} b{row['batch']} {row['seq']}: "
        "speed-up": round(row["speedup"], 3)
        for row in part.get("rows", ())
        if row["speedup"] and row["method"] != "full"
    }


def times_of_full(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return a headline: times between tokens over the uncompressed cache's."""
    return {
        f"{row['method']} {row['context']} x {row['batch']}: of full's time": round(
            row["times_full"], 3
        )
        for row in rows
        if row.get("times_full") and row["method"] != "full"
    }


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


def add_out(parser: argparse.ArgumentParser) -> None:
    """Let a program be told where its record goes."""
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the record")


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
