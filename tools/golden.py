"""What kvprof says today, kept to be held against what it says after a change of structure.

``python tools/golden.py keep FOLDER`` runs every command on the reference model, shows every
committed record at 80 and 120 columns, and follows the recorded demo in the live view; it writes
what was said, figures of time and of the machine left out, as one text file per case. ``python
tools/golden.py hold FOLDER`` does it again and prints what differs, exit code 1 if anything does.
The folder lies outside the project, made by the version to compare with: another machine's
arithmetic differs in the last digits.

``--kernels`` adds what every compiled form of a kernel needs (minutes); ``--only WORD`` keeps to
cases with that word in their name.
"""

import argparse
import asyncio
import contextlib
import difflib
import html
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WIDTHS = (80, 120)
_TEXT = "--calibrate-tokens 1k --seq-len 128 --sequences 2"
_SMALL = f"{_TEXT} --tasks none"
_BENCH = "--model Llama-3.1-8B --seq 256,512 --batch 1 --device cpu --repeats 3 --dtype float32"
_REQUEST = "--jct --composed --input-len 256 --output-len 8 --device cpu --repeats 3"
_LOAD = "bench --load --simulate --lengths in=2k,out=32 --requests 24 --slo ttft=2s,tbt=50ms"

#: Commands that measure what does not change with time: reports and results are held whole.
EXACT = (
    {
        "spectrum": "spectrum --tokens 2k --removal 0.05,0.3",
        "spectrum-text": "spectrum --tokens 1k --source prose --per-query-head --paired",
        "stability": "stability --tokens 512,1k --against prose --against-tokens 1k --seeds 2",
        "plan-compare": "plan --method kq --rate 0.3 --context 2k --calibrate text",
        "plan-fit": "plan --fit 80GB",
        "eval": f"eval --method full,kq,fdc,palu,tale --rate 0.3 {_SMALL}",
        "eval-quantised": f"eval --method kq-4bit,fdc-8bit,per-token --rate 0.3 {_SMALL}",
        "eval-tasks": (
            "eval --method kq --rate 0.3 --tasks needle,niah-multikey-1,multi-rounds,arithmetic-2 "
            f"--task-items 1 --task-lengths 384,512 {_TEXT}"
        ),
        "eval-forced": f"eval --method kq,palu --rate 0.3 --teacher-forced {_SMALL}",
        "frontier": f"frontier --methods fdc,kq --points 2 --no-cache {_SMALL}",
        "sensitivity": "sensitivity --layers 0,1 --bits 4 --tokens 512 --seq-len 128",
        "load": f"{_LOAD} --rates 2,8,32 --methods full,fp8,fdc",
        "load-replicas": f"{_LOAD} --rates 4 --methods kq --replicas 2 --arrivals gamma:cv=2",
        "recipe-run": "recipe run example-sweep",
        "generate": "generate --method kq --rate 0.3 --max-new-tokens 12 --prompt 'The cat' --diff",
    }
    | {
        f"plan-{name}": f"plan --method {name} --rate 0.3 --describe --calibrate-tokens 1k"
        for name in (
            *("fdc", "fdc:paper", "zack", "zack:paper", "kq", "kq-4bit", "fdc-8bit", "svd-kv"),
            *("palu", "palu-3bit", "palu:paper", "tale", "tale+kivi", "strawman", "fdc+kvquant"),
        )
    }
    | {
        f"plan-{name}": f"plan --method {name} --describe"
        for name in ("full", "fp8", "kivi", "h2o")
    }
)

#: Commands that time: of their results the figures of time are left out, of their reports all.
TIMED = {
    "bench": f"bench {_BENCH} --methods full,fp8,fdc,uniform,palu --rate 0.5",
    "bench-decode": f"bench {_BENCH} --methods full,fdc-4bit,fdc-8bit,kq,tale --rate 0.5",
    "jct": f"bench {_REQUEST} --methods full,fdc,palu",
    "jct-real": "bench --jct --real --input-len 64 --output-len 4 --methods full,fdc",
    "doctor": "doctor",
}

#: Cases whose figures of time are a record's or a simulation's, and stay as they are.
STILL = ("show-", "export-", "compare", "replay", "load")

#: Records whose reports and exports are held.
RECORDS = (
    "kvprof/assets/demo",
    "docs/benchmarks/*.json",
    "docs/findings/*.json",
    "docs/reproduction/*.json",
)
EXPORTS = ("csv", "md", "html", "perfetto")

#: Screens of the live view, by the keys that lead to them, and the shares of the demo's time at
#: which it is followed; at the end it is whole.
SCREENS = {"overview": [], "layers": ["2"], "balance": ["3"], "cache": ["4"], "log": ["5"]}
FOLLOWED = (0.3, 0.7, 1.0)
LOAD_SCREENS = {"load": [], "load-method": ["m"]}
_SVG_TEXT = re.compile(r'<text [^>]*\bx="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>')

_SAYS_WHEN = re.compile(r"\d+(\.\d+)? (ms|µs|s|min|h)\b|\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?Z?")
# The row of an evaluation's report that says how long each method took.
_TIMES = re.compile(r"(?m)^( *seconds +).*$")
# A cell's digest is of the code as well.
_LEFT_OUT = (
    *("created", "environment", "kvprof_version", "digest"),
    *("events", "seconds", "ready_seconds"),
)
# When a simulated load was written, in a report whose other times are the simulation's.
_WRITTEN = re.compile(r"(?m)^(written +)\S+ *$")
# Of what is timed: what another run on the same machine may have otherwise. What full width moves
# and buffers may differ too: its kernel is the one that was the fastest.
_CHANGES = (
    *("warnings", "telemetry", "peak", "source", "label", "baseline", "best"),
    *("available_bytes", "labels"),
)
_TIMED_KEYS = re.compile(
    r"second|_s$|^s$|time|speedup|share|bandwidth|clock|memory|load|drift|doubt"
)


def lines() -> Iterator[tuple[str, str]]:
    """Yield a name and a command line of what measures nothing."""
    yield from (("recipes", "recipe list"), ("recipe", "recipe show fdc-table-10"))
    yield "recipe-validate", "recipe validate fdc-table-10 zack-fig-14"
    yield "runs", "runs kvprof/assets"
    yield "warm", "warm --method kq --rate 0.3 --calibrate-tokens 1k"
    # Without vLLM; what is served is held by tests.
    yield "serve", "serve reference --method kq --rate 0.3"
    yield "serve-nothing", "serve reference --port 8001 --tp 2"
    for word in ("list", "show", "validate", "run", "report", "new"):
        yield f"help-recipe-{word}", f"recipe {word} --help"
    yield (
        "recipe-report",
        "recipe report docs/reproduction/smoke-cpu.json --md /dev/stdout --html /dev/null --force",
    )
    yield "compare", "compare docs/findings/frontier-text.json docs/findings/frontier-text-64k.json"
    yield "replay", "tui kvprof/assets/demo"
    yield "schema", "export --schema jct"
    for command in ("", *_commands()):
        yield f"help-{command or 'all'}", f"{command} --help"
    for pattern in RECORDS:
        for path in sorted(ROOT.glob(pattern)):
            record = path.relative_to(ROOT)
            yield f"show-{path.stem}", f"show {record}"
            for form in EXPORTS:
                yield f"export-{path.stem}-{form}", f"export {record} --to {form} --output -"


def _commands() -> list[str]:
    from kvprof.cli import COMMANDS

    return [one.name for one in COMMANDS]


def said(line: str, columns: int, *, still: bool = False) -> tuple[int, str, str]:
    """Run a command in a process of its own, forked from this one; code, stdout and errors.

    Figures of time are left out unless they are `still` from run to run.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        child = os.fork()
        if not child:
            _run(line, columns, out, err)
        _, status = os.waitpid(child, 0)
        told = [one for one in err.read_text(errors="replace").splitlines() if "kvprof: " in one]
        text = out.read_text(errors="replace")
        if still:
            if line.startswith(("bench", "show /")):  # of this run, and no record's
                text = _WRITTEN.sub(r"\1(when)", text)
        else:
            text = _TIMES.sub(r"\1(figures)", _SAYS_WHEN.sub("(when)", text))
        return os.waitstatus_to_exitcode(status), text, "".join(f"{one}\n" for one in told)


def _run(line: str, columns: int, out: Path, err: Path) -> None:
    os.environ |= {"COLUMNS": str(columns), "NO_COLOR": "1", "XDG_CACHE_HOME": str(out.parent)}
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
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


def measured(name: str, line: str, timed: bool) -> Iterator[tuple[str, str]]:
    """Yield the report at both widths, and the result without what differs from run to run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        code, text, told = said(f"{line} --json {path}", WIDTHS[0], still=_still(name))
        yield f"{name}.txt", f"exit {code}\n{told}" + ("" if timed else text)
        if not path.exists():
            return
        if not timed:
            yield f"{name}-{WIDTHS[1]}.txt", said(f"show {path}", WIDTHS[1], still=_still(name))[1]
        found = json.loads(path.read_text())
    yield f"{name}.json", json.dumps(_plain(found, timed), indent=1, ensure_ascii=False) + "\n"


def _still(name: str) -> bool:
    return name.startswith(STILL)


def _plain(value: Any, timed: bool, key: str = "") -> Any:
    if isinstance(value, dict):
        left = (*_LEFT_OUT, *_CHANGES) if timed else _LEFT_OUT
        return {name: _plain(one, timed, name) for name, one in value.items() if name not in left}
    if isinstance(value, list):
        if timed and all(isinstance(one, float | int) for one in value) and len(value) > 2:
            return "(figures)"
        return [_plain(one, timed, key) for one in value]
    if isinstance(value, str):
        value = _SAYS_WHEN.sub("(when)", value)
        return re.sub(
            r"/tmp/\S+", "(file)", re.sub(r"\d+([.,]\d+)*", "#", value) if timed else value
        )
    if timed and (isinstance(value, float) or _TIMED_KEYS.search(key)):
        return "(figure)"
    return float(f"{value:.6g}") if isinstance(value, float) else value


def screens(only: str) -> Iterator[tuple[str, str]]:
    """Yield what the live view shows of the demo and of a simulated load, as lines of text."""
    demo = "kvprof/assets/demo"
    yield from _screens_of(demo, SCREENS, FOLLOWED, only)
    if not any(only in f"screen-{name}-100%-{width}" for name in LOAD_SCREENS for width in WIDTHS):
        return
    with tempfile.TemporaryDirectory() as folder:
        said(f"{_LOAD} --rates 2,8 --methods full,fdc --out {folder}/load", WIDTHS[0])
        # How long the simulator took is of this run; so it is shown whole, at its end.
        yield from _screens_of(f"{folder}/load", LOAD_SCREENS, FOLLOWED[-1:], only)


def _screens_of(
    run: str, chosen: dict[str, list[str]], shares: tuple[float, ...], only: str
) -> Iterator[tuple[str, str]]:
    from readme_svg import picture

    from kvprof.commands.tui import open_run

    last = open_run(run)
    last.source.jump()
    end = 0.0
    while events := last.source.poll(1000):
        end = max(end, events[-1].time)
    for screen, keys in chosen.items():
        for share in shares:
            for width in WIDTHS:
                name = f"screen-{screen}-{share:.0%}-{width}"
                if only not in name:
                    continue
                session = open_run(run)
                session.name = Path(run).name
                drawn = asyncio.run(picture(session, share * end, keys, (width, 50), light=False))
                yield f"{name}.txt", _lines_of(drawn)


def _lines_of(svg: str) -> str:
    rows: dict[float, list[tuple[float, str]]] = defaultdict(list)
    for x, y, text in _SVG_TEXT.findall(svg):
        rows[float(y)].append((float(x), html.unescape(text).replace("\xa0", " ")))
    lines = (" ".join(text for _, text in sorted(row)) for _, row in sorted(rows.items()))
    return "".join(f"{line}\n" for line in lines)


def kernels() -> str:
    """Return what each compiled form of each kernel needs, one a line."""
    command = [sys.executable, "-m", "kvprof.kernels.compile"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def everything(only: str, with_kernels: bool) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each case whose name has `only` in it."""
    for name, line in (EXACT | TIMED).items():
        if only in name:
            yield from measured(name, line, name in TIMED)
    for name, line in lines():
        if only in name:
            for columns in WIDTHS if "export" not in name else WIDTHS[:1]:
                code, text, told = said(line, columns, still=_still(name))
                yield f"{name}-{columns}.txt", f"exit {code}\n{told}{text}"
    yield from screens(only)
    if with_kernels:
        yield "kernels.txt", kernels()


def main() -> None:
    """Keep or hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("keep", "hold"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--kernels", action="store_true")
    given = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import torch
    import transformers  # noqa: F401 - so that no child has to

    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    different = 0
    for name, text in everything(given.only, given.kernels):
        path = given.folder / name
        if given.what == "keep":
            path.write_text(text)
            print(name, len(text), file=sys.stderr)
            continue
        before = path.read_text() if path.exists() else ""
        if before != text:
            different += 1
            lines = io.StringIO(before).readlines(), io.StringIO(text).readlines()
            differs = difflib.unified_diff(*lines, f"was/{name}", f"is/{name}")
            sys.stdout.writelines(islice(differs, 60))
    if given.what == "hold":
        print(f"{different} cases differ")
        sys.exit(bool(different))


if __name__ == "__main__":
    main()
