"""Where the time of a request goes on a GPU: the sweeps of FDC's Fig. 1 and what goes with them.

Every part is a command line of ``kvprof bench --jct``, run in a process of its own, whose result
lies in the folder of records as soon as it is measured: a part that is there already is not
measured again. What the page needs of them is then written to ``jct.json``; ``--demo`` copies one
part's whole recording to where ``kvprof tui --demo`` looks for it.

    python benchmarks/jct.py --records jct-records --out docs/benchmarks
    python benchmarks/jct.py --records /tmp/small --out /tmp/small --small     # a CPU, in minutes
"""

import argparse
import gzip
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvprof.environment import collect_environment
from kvprof.records.files import read_result, write_result
from kvprof.records.result import build_result

METHODS = "full,palu,fdc,kq"
LONG = "128,1k,4k,16k,32k,64k,100k"
#: Shape and tensor parallelism: a 70B model's figures are one of four GPUs' own part.
SHAPES = {"8b": ("Llama-3.1-8B", 1), "70b": ("Llama-3.1-70B", 4)}
TRACES = ("arxiv", "cocktail", "humaneval", "pg-19")


def parts() -> dict[str, str]:
    """Return the command line of every part, the most wanted first."""
    sweep = "--composed --model {} --tp {} --methods {} --rate 0.5 --batch 1"
    found = {}
    for name, (shape, tp) in SHAPES.items():
        own = sweep.format(shape, tp, METHODS)
        found[f"inputs-{name}"] = f"{own} --input-len {LONG} --output-len 256"
        found[f"outputs-{name}"] = f"{own} --input-len 256 --output-len {LONG}"
    found["check"] = (
        "--check --model Llama-3.1-8B --layers 4 --methods full,fdc --batch 8 --input-len 32k "
        "--output-len 32"
    )
    found["instrumented"] = (
        "--real --model Llama-3.1-8B --layers 8 --methods full,fdc --batch 8 --input-len 32k "
        "--output-len 64 --kernels on"
    )
    found["ablations"] = (
        "--composed --model Llama-3.1-8B --rate 0.5 --batch 8 --input-len 100k --output-len 256 "
        "--methods fdc,fdc:no-post-rope,fdc:no-adaptive-rates,fdc:no-balancing,strawman"
    )
    for trace in TRACES:
        found[f"trace-{trace}"] = (
            "--composed --model Mistral-7B-v0.3 --methods full,palu,fdc --rate 0.5 --requests 100 "
            f"--trace fdc/{trace}"
        )
    found["demo"] = (
        "--composed --model Llama-3.1-8B --methods full,palu,fdc,kq --rate 0.5 --batch 8 "
        "--input-len 100k --output-len 1k"
    )
    return found


def small(line: str) -> str:
    """Return a part small enough for two cores: other lengths, the reference model's shape."""
    words, found = shlex.split(line), []
    changed = {"--input-len": "128,256", "--output-len": "16,32", "--batch": "1", "--layers": "2",
               "--model": "reference", "--tp": "1", "--requests": "3"}  # fmt: skip
    skipped = False
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if skipped:
            skipped = False
        elif word == "--trace":
            found += ["--input-len", "128", "--output-len", "16"]
            skipped = True
        elif word in ("--tp", "--requests", "--kernels"):
            skipped = True
        elif word in changed and value:
            found += [word, changed[word]]
            skipped = True
        else:
            found.append(word)
    return shlex.join([*found, "--device", "cpu"])


def run(name: str, line: str, records: Path, limit: float) -> str | None:
    """Measure a part; returns why it has no result."""
    folder = records / name
    if (folder / "result.json").is_file() and read_result(folder / "result.json")["complete"]:
        return None
    command = [sys.executable, "-m", "kvprof", "bench", "--jct", *shlex.split(line)]
    try:
        done = subprocess.run(
            [*command, "--out", str(folder), "--force"], capture_output=True, text=True,
            timeout=limit, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it took more than {limit:.0f} s"
    if done.returncode:
        return f"exit {done.returncode}: {done.stderr.strip()[-400:]}"
    return None


def condensed(result: dict[str, Any]) -> dict[str, Any]:
    """Return what the page needs of a result: cases, parts, and what was checked."""
    data = result["data"]
    kept = {name: data[name] for name in ("mode", "shape", "baseline", "cases")}
    keys = ("case", "method", "batch", "input_len", "output_len", "phase", "part", "seconds",
            "share", "by_difference")  # fmt: skip
    kept["parts"] = [{key: row[key] for key in keys} for row in data["parts"]]
    kept["requests"], kept["check"] = data.get("requests"), data.get("check")
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
        if case["overhead"] is not None:
            line += f", timing costs {100 * case['overhead']:.1f} %"
        print(line)
    for row in part.get("check") or ():
        print(f"  {name}: {json.dumps(row)[:240]}")
    for text in part.get("warnings", ()):
        print(f"  note: {text}"[:240])


def keep_demo(folder: Path, target: Path) -> None:
    """Copy a recording to where the package keeps its demonstration."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "result.json", target / "result.json")
    with gzip.GzipFile(target / "events.jsonl.gz", "wb", mtime=0) as file:
        file.write((folder / "events.jsonl").read_bytes())


def main() -> None:
    """Measure the parts asked for."""
    known = parts()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(known), help="parts, separated by commas")
    parser.add_argument("--records", type=Path, required=True, help="folder of whole results")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a part")
    parser.add_argument("--small", action="store_true", help="lengths and a model for a CPU")
    parser.add_argument("--demo", type=Path, help="where the part demo is copied to")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.only.split(",") if name not in known]:
        parser.error(f"there is no part {unknown[0]}; choose from {', '.join(known)}")
    data: dict[str, Any] = {}
    for name in arguments.only.split(","):
        line = small(known[name]) if arguments.small else known[name]
        start = time.perf_counter()
        problem = run(name, line, arguments.records, arguments.limit)
        print(f"{name}: {time.perf_counter() - start:.1f} s{f', {problem}' if problem else ''}")
        path = arguments.records / name / "result.json"
        found = condensed(read_result(path)) if path.is_file() else {}
        data[name] = {**found, "command": f"kvprof bench --jct {line}", "failed": problem}
        show(name, data[name])
        sys.stdout.flush()
        result = build_result(
            "benchmark", data=data,
            inputs={"benchmark": "jct", "parts": list(data)}, environment=collect_environment(),
        )  # fmt: skip
        write_result(arguments.out / "jct.json", result, force=True)
    if arguments.demo is not None and not data.get("demo", {"failed": "not run"})["failed"]:
        keep_demo(arguments.records / "demo", arguments.demo)


if __name__ == "__main__":
    main()
