"""Where the time of a request goes on a GPU: the sweeps of FDC's Fig. 1 and what goes with them.

Every part is a command line of ``kvprof bench --jct``, run in a process of its own, whose result
lies in the folder of records as soon as it is measured: a part that is there already is not
measured again. Some parts are cells of recipes too: ``--cells`` takes those from the folder of a
recipe's run. What the page needs of them is then written to ``jct.json``; ``--demo`` copies one
part's whole recording to where ``kvprof tui --demo`` looks for it.

    python benchmarks/jct.py --records jct-records --out docs/benchmarks
    python benchmarks/jct.py --records /tmp/small --out /tmp/small --small     # a CPU, in minutes
"""

import argparse
import gzip
import json
import shlex
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from recording import add_only, keep, measure_parts

from kvprof.records.files import read_result, write_result
from kvprof.reproduction.cells import CellStore, cell_digest, code_version
from kvprof.reproduction.machine import this_machine

METHODS = "full,palu,fdc,kq"
LONG = "128,1k,4k,16k,32k,64k,100k"
#: Shape, tensor parallelism and rate: a 70B model's figures are one of four GPUs' own part, at the
#: rate of the recipe fdc-fig-1, whose cells they are.
SHAPES = {"8b": ("Llama-3.1-8B", 1, 0.5), "70b": ("Llama-3.1-70B", 4, 0.57)}
ABLATIONS = "fdc,fdc:no-post-rope,fdc:no-adaptive-rates,fdc:no-balancing"
#: What `kvprof tui --demo` plays: all methods at seven lengths, in the time of a look.
DEMO = "outputs-8b"
TRACES = ("arxiv", "cocktail", "humaneval", "pg-19")


def parts() -> dict[str, str]:
    """Return the command line of every part, the most wanted first."""
    sweep = "--composed --model {} --tp {} --methods {} --rate {} --batch 1"
    found = {}
    for name, (shape, tp, rate) in SHAPES.items():
        own = sweep.format(shape, tp, METHODS, rate)
        found[f"inputs-{name}"] = f"{own} --input-len {LONG} --output-len 256 --repeats 7"
        found[f"outputs-{name}"] = f"{own} --input-len 256 --output-len {LONG} --repeats 7"
    found["instrumented"] = (
        "--real --model Llama-3.1-8B --layers 8 --methods full,fdc --batch 8 --input-len 8k "
        "--output-len 64 --kernels on"
    )
    found["ablations"] = (
        "--composed --model Llama-3.1-8B --rate 0.5 --batch 8 --input-len 100k --output-len 256 "
        f"--methods {ABLATIONS} --repeats 5"
    )
    for trace in TRACES:
        found[f"trace-{trace}"] = (
            f"--composed --model Mistral-7B-v0.3 --methods full,palu,{ABLATIONS} --rate 0.6 "
            f"--trace fdc/{trace} --requests 50 --repeats 5"
        )
    found["batch-8"] = (
        "--composed --model Llama-3.1-8B --methods full,palu,fdc,kq --rate 0.5 --batch 8 "
        "--input-len 100k --output-len 1k --repeats 7"
    )
    return found


def small(line: str, shape: Path) -> str:
    """Return a part small enough for two cores: other lengths, the reference model.

    Of a part that draws weights for some layers of a shape, it is the reference model's `shape`.
    """
    words, found = shlex.split(line), []
    changed = {
        "--input-len": "128,256",
        "--output-len": "16,32",
        "--batch": "1",
        "--layers": "2",
        "--model": str(shape) if "--layers" in words else "reference",
    }
    skipped = False
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if skipped:
            skipped = False
        elif word == "--trace":
            found += ["--input-len", "128", "--output-len", "16"]
            skipped = True
        elif word in ("--tp", "--requests", "--kernels", "--repeats"):
            skipped = True
        elif word in changed and value:
            found += [word, changed[word]]
            skipped = True
        else:
            found.append(word)
    return shlex.join([*found, "--device", "cpu"])


def reference_shape(records: Path) -> Path:
    """Return a folder with what the reference model's shape is read from, and no weights."""
    folder = records / "reference-shape"
    folder.mkdir(parents=True, exist_ok=True)
    config = files("kvprof") / "assets" / "reference" / "config.json"
    (folder / "config.json").write_text(config.read_text("utf-8"), "utf-8")
    return folder


def of_recipe(line: str, cells: Path) -> dict[str, Any] | None:
    """Return what a recipe measured with the same command, code and machine."""
    words = ("bench", "--jct", *shlex.split(line))
    digest = cell_digest(words, this_machine().device(words), code_version())
    return CellStore(cells / "cells").get(digest)


def whole(path: Path) -> bool:
    """Return whether a result is there and complete."""
    return path.is_file() and bool(read_result(path)["complete"])


def run(name: str, line: str, records: Path, limit: float) -> str | None:
    """Measure a part; returns why it has no result."""
    folder = records / name
    if whole(folder / "result.json"):
        return None
    command = [sys.executable, "-m", "kvprof", "bench", "--jct", *shlex.split(line)]
    command += ["--out", str(folder), "--force"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            _, said = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            # An interrupt, which keeps what was measured until then.
            child.send_signal(signal.SIGINT)
            try:
                child.communicate(timeout=30.0)
            except subprocess.TimeoutExpired:
                child.kill()
            return f"it took more than {limit:.0f} s"
    if child.returncode:
        return f"exit {child.returncode}: {said.strip()[-400:]}"
    return None


def condensed(result: dict[str, Any]) -> dict[str, Any]:
    """Return what the page needs of a result: cases and parts."""
    data = result["data"]
    kept = {name: data[name] for name in ("mode", "shape", "baseline", "cases")}
    keys = (
        "case",
        "method",
        "batch",
        "input_len",
        "output_len",
        "phase",
        "part",
        "seconds",
        "share",
        "by_difference",
    )
    kept["parts"] = [{key: row[key] for key in keys} for row in data["parts"]]
    kept["requests"] = data.get("requests")
    kept["warnings"], kept["inputs"] = result["warnings"], result["inputs"]
    return kept


def show(name: str, part: dict[str, Any]) -> None:
    """Print a part's cases, in a line each."""
    for case in part.get("cases", ()):
        if case["jct_seconds"] is None:
            print(f"  {case['case']}: it was not measured to the end")
            continue
        line = (
            f"  {case['case']}: {case['jct_seconds']:.4g} s, first token {case['ttft_seconds']:.4g}"
        )
        if case["tbt_seconds"] is not None:
            line += f", a step {1e3 * case['tbt_seconds']:.4g} ms"
        if case["unattributed_share"] is not None:
            line += f", unattributed {100 * case['unattributed_share']:.1f} %"
        print(line)
    for text in part.get("warnings", ()):
        print(f"  note: {text}"[:240])


def keep_demo(folder: Path, target: Path) -> None:
    """Copy a recording to where the package keeps its demonstration, without where it lay."""
    events = folder / "events.jsonl"
    if not events.is_file():
        raise SystemExit(f"{events}: there is no recording; measure {DEMO} without --cells")
    first, *others = events.read_text("utf-8").splitlines(keepends=True)
    started = json.loads(first)
    words = started["command"]
    started["command"] = words[: words.index("--out")] if "--out" in words else words
    target.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(target / "events.jsonl.gz", "wb", mtime=0) as file:
        file.write("".join([json.dumps(started) + "\n", *others]).encode())


def main() -> None:
    """Measure the parts asked for."""
    known = parts()
    parser = argparse.ArgumentParser(description=__doc__)
    add_only(parser, known)
    parser.add_argument("--records", type=Path, required=True, help="folder of whole results")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a part")
    parser.add_argument("--cells", type=Path, help="folder of `kvprof recipe run --out`")
    parser.add_argument("--small", action="store_true", help="lengths and a model for a CPU")
    parser.add_argument("--demo", type=Path, help=f"where the part {DEMO} is copied to")
    arguments = parser.parse_args()

    def measure(name: str) -> dict[str, Any]:
        line = known[name]
        if arguments.small:
            line = small(line, reference_shape(arguments.records))
        path = arguments.records / name / "result.json"
        found = of_recipe(line, arguments.cells) if arguments.cells else None
        if found is not None and not whole(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_result(path, found, force=True)
        problem = run(name, line, arguments.records, arguments.limit)
        kept = condensed(read_result(path)) if path.is_file() else {}
        return {**kept, "command": f"kvprof bench --jct {line}", "failed": problem}

    def keep_all(data: dict[str, Any]) -> None:
        keep(arguments.out / "jct.json", {"benchmark": "jct", "parts": list(data)}, data)

    data = measure_parts(arguments.only, measure, show, keep_all)
    if arguments.demo is not None and not data.get(DEMO, {"failed": "not run"})["failed"]:
        keep_demo(arguments.records / DEMO, arguments.demo)


if __name__ == "__main__":
    main()
