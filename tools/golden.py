"""The `data` of every command's JSON on the reference model, held across a change of structure.

``python tools/golden.py keep FOLDER`` runs each case on the CPU and writes its `data`, one file a
case; ``python tools/golden.py hold FOLDER`` runs them again and prints what differs, exit code 1
if anything does. Numbers must agree to six digits; of commands that time, figures of time are left
out. Keep FOLDER outside the project, made on the same machine: another's last digits differ.
``--only WORD`` takes the cases with that word in their name.
"""

import argparse
import contextlib
import difflib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_TEXT = "--calibrate-tokens 1k --seq-len 128 --sequences 2"
_SMALL = f"{_TEXT} --tasks none"
_BENCH = "--model Llama-3.1-8B --seq 256,512 --batch 1 --device cpu --repeats 3 --dtype float32"
_REQUEST = "--jct --composed --input-len 256 --output-len 8 --device cpu --repeats 3"
_LOAD = "bench --load --simulate --lengths in=2k,out=32 --requests 24 --slo ttft=2s,tpot=50ms"

#: Commands that measure what does not change with time.
EXACT = (
    {
        "spectrum": "spectrum --tokens 2k --removal 0.05,0.3",
        "spectrum-text": "spectrum --tokens 1k --source prose --per-query-head --paired",
        "stability": "stability --tokens 512,1k --against prose --against-tokens 1k --seeds 2",
        "plan-compare": "plan --method kq --rate 0.3 --context 2k --calibrate text",
        "eval": f"eval --method full,kq,fdc,palu,tale --rate 0.3 {_SMALL}",
        "eval-quantised": f"eval --method kq-4bit,fdc-8bit,per-token --rate 0.75 {_SMALL}",
        "eval-tasks": (
            "eval --method kq --rate 0.3 --tasks needle,niah-multikey-1,multi-rounds,arithmetic-2 "
            f"--task-items 1 --task-lengths 384,512 {_TEXT}"
        ),
        "frontier": f"frontier --methods fdc,kq --points 2 --no-cache {_SMALL}",
        "sensitivity": "sensitivity --layers 0,1 --bits 4 --tokens 512 --seq-len 128",
        "load": f"{_LOAD} --request-rate 2,8,32 --methods full,fp8,fdc",
        "load-replicas": (
            f"{_LOAD} --request-rate 4 --methods kq --replicas 2 --arrivals gamma:cv=2"
        ),
        "recipe-run": "recipe run example-sweep",
        "generate": "generate --method kq --rate 0.3 --max-new-tokens 12 --prompt 'The cat' --diff",
    }
    | {
        f"plan-{name}": f"plan --method {name} --rate {rate} --describe --calibrate-tokens 1k"
        for rate, names in (
            (0.3, ("fdc", "fdc:paper", "zack", "zack:paper", "kq", "svd-kv", "palu", "palu:paper")),
            (0.3, ("tale", "strawman")),
            (0.75, ("kq-4bit", "fdc-8bit", "tale+kivi", "fdc+kvquant")),
            (0.9, ("palu-3bit",)),
        )
        for name in names
    }
    | {
        f"plan-{name}": f"plan --method {name} --describe"
        for name in ("full", "fp8", "kivi", "h2o")
    }
)

#: Commands that time: their figures of time are left out.
TIMED = {
    "bench": f"bench {_BENCH} --methods full,fp8,fdc,uniform,palu --rate 0.5",
    "bench-decode": f"bench {_BENCH} --methods full,fdc-4bit,fdc-8bit,kq,tale --rate 0.75",
    "jct": f"bench {_REQUEST} --methods full,fdc,palu",
    "jct-real": "bench --jct --real --input-len 64 --output-len 4 --methods full,fdc",
}

_WHEN = re.compile(r"\d+(\.\d+)? (ms|µs|s|min|h)\b|\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?Z?")
_LEFT_OUT = (
    *("created", "environment", "kvprof_version", "digest", "events"),
    *("seconds", "ready_seconds"),
)
#: Of what is timed: what another run on the same machine may have otherwise.
_CHANGES = ("warnings", "telemetry", "peak", "source", "label", "labels", "baseline", "best")
_TIMED_KEYS = re.compile(
    r"second|_s$|^s$|time|speedup|share|bandwidth|clock|memory|load|drift|doubt|available_bytes"
)


def data_of(line: str, timed: bool) -> str:
    """Run a command in a process forked from this one; its exit code and its result's `data`."""
    folder = Path(tempfile.mkdtemp())  # not TemporaryDirectory, which a child that ends removes
    path = folder / "result.json"
    child = os.fork()
    if not child:
        _run(f"{line} --json {path}", folder)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    data = json.loads(path.read_text())["data"] if path.exists() else None
    shutil.rmtree(folder)
    plain = {"exit": code, "data": _plain(data, timed)}
    return json.dumps(plain, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _run(line: str, folder: Path) -> None:
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1", "XDG_CACHE_HOME": str(folder)}
    for number, path in ((0, os.devnull), (1, str(folder / "out")), (2, str(folder / "err"))):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.argv = ["kvprof", *shlex.split(line)]
    code = 70
    try:
        from kvprof.__main__ import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _plain(value: Any, timed: bool, key: str = "") -> Any:
    if isinstance(value, dict):
        left = (*_LEFT_OUT, *_CHANGES) if timed else _LEFT_OUT
        return {name: _plain(one, timed, name) for name, one in value.items() if name not in left}
    if isinstance(value, list):
        if timed and len(value) > 2 and all(isinstance(one, float | int) for one in value):
            return "(figures)"
        return [_plain(one, timed, key) for one in value]
    if isinstance(value, str):
        value = _WHEN.sub("(when)", value)
        return re.sub(r"\d+([.,]\d+)*", "#", value) if timed else value
    if timed and (isinstance(value, float) or _TIMED_KEYS.search(key)):
        return "(figure)"
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    """Keep or hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("keep", "hold"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import torch
    import transformers  # noqa: F401 - so that no child has to

    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    different = 0
    for name, line in (EXACT | TIMED).items():
        if given.only not in name:
            continue
        is_now, path = data_of(line, name in TIMED), given.folder / f"{name}.json"
        if given.what == "keep":
            path.write_text(is_now)
            print(name, len(is_now), file=sys.stderr)
            continue
        was = path.read_text() if path.exists() else ""
        if was != is_now:
            different += 1
            both = was.splitlines(True), is_now.splitlines(True)
            sys.stdout.writelines(islice(difflib.unified_diff(*both, f"was/{name}", name), 60))
    if given.what == "hold":
        print(f"{different} cases differ")
        sys.exit(bool(different))


if __name__ == "__main__":
    main()
