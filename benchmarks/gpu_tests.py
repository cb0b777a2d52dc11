"""The tests that need a GPU, in one run: what needs a GPU of its own comes last and by itself.

Three parts, each a pytest of its own: `together`, what is marked `gpu` and not `alone`, on many
processes; `kernels`, every operation against float64 (`tests/kernels/cases`, interpreted where
there is no GPU); `alone`, one test after another. All of them find compiled kernels in one folder,
so that what runs alone compiles little. What took longest in the records at hand begins first. When
`--seconds` are over the part in hand is ended, and the record says so. Only files that name the
mark are loaded.

The record has the GPU, versions, how many passed, failed and were skipped, and what the tests that
took five seconds or more took.

    python benchmarks/gpu_tests.py                                       # a GPU, all cores
    python benchmarks/gpu_tests.py --only alone --processes 4
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from recording import RECORDS, add_only, add_out, keep, measure_parts

from kvprof.child import child_python
from kvprof.environment import read_gpus, usable_threads
from kvprof.records.files import read_result

ROOT = Path(__file__).resolve().parents[1]
#: Where the plugin below writes, a line for each test as it ends.
REPORTS = "KVPROF_TEST_REPORTS"
KERNELS = "tests/kernels/cases"
PARTS = ("together", "kernels", "alone")
_LONG = 5.0  # seconds of a test that the record has
OUTCOMES = ("passed", "failed", "skipped")


@pytest.hookimpl(trylast=True)  # when what is not asked for has gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let every process begin with its longest test; pytest calls this where the file is a plugin.

    xdist gives each process a stretch of the list, the first ones the shorter where they are
    unlike, and one that has done its own the end of another's: every stretch falls from longest to
    shortest.
    """
    if REPORTS not in os.environ:
        return
    taken = recorded_seconds()
    items.sort(key=lambda item: -taken.get(item.nodeid, 0.0))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = [item for first in reversed(range(processes)) for item in items[first::processes]]


def recorded_seconds() -> dict[str, float]:
    """Return what each test of the records of all GPUs took, at most."""
    taken: dict[str, float] = {}
    for path in RECORDS.glob("gpu-tests-*.json"):
        for part in read_result(path)["data"].values():
            for test in part.get("tests", ()):
                taken[test["test"]] = max(test["seconds"], taken.get(test["test"], 0.0))
    return taken


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what became of a test; pytest calls this, where it loads the file as a plugin."""
    if REPORTS not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        return
    # A test that is skipped, or that fails to begin or to end, has no call to speak of.
    if report.when != "call" and report.passed:
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    why = None if crash is None else crash.message[:300]
    if isinstance(report.longrepr, tuple):  # of one that is skipped: file, line and reason
        why = report.longrepr[2]
    line = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": report.duration,
        "why": why,
    }
    with Path(os.environ[REPORTS]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def marked_files() -> list[str]:
    """Return the files whose tests are marked."""
    own = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in own if "pytest.mark.gpu" in path.read_text()]


def arguments_of(part: str, processes: int) -> list[str]:
    """Return what pytest is asked for."""
    if part == "alone":
        return [*marked_files(), "-m", "gpu and alone", "-n0"]
    many = [f"-n{processes}", "--dist=worksteal"]
    if part == "together":
        return [*marked_files(), "-m", "gpu and not alone", *many]
    own = sorted((ROOT / KERNELS).glob("*_cases.py"))
    return [*(str(path.relative_to(ROOT)) for path in own), *many]


def settings_of(reports: Path, compiled: Path) -> dict[str, str]:
    """Return pytest's environment, in which this file and what it imports are found.

    Parameters
    ----------
    reports : Path
        Where the plugin writes.
    compiled : Path
        A folder of compiled kernels, where the environment names none.
    """
    # Packages may lie in a folder that only the variable names.
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return {
        "TRITON_CACHE_DIR": str(compiled),
        **os.environ,
        REPORTS: str(reports),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "benchmarks"), *given)),
    }


def tested(part: str, processes: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Run a part; returns its counts and its tests, the longest first."""
    reports = folder / f"{part}.jsonl"
    settings = settings_of(reports, folder / "compiled")
    command = child_python(
        "-m", "pytest", "-q", "-p", "gpu_tests", "-p", "no:cacheprovider",
        "--no-header", "--tb=short", *arguments_of(part, processes),
    )  # fmt: skip
    begun = time.perf_counter()
    ended = True
    child = subprocess.Popen(command, cwd=ROOT, env=settings, start_new_session=True)
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        ended = False
        os.killpg(child.pid, 15)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
    taken = time.perf_counter() - begun
    lines = reports.read_text().splitlines() if reports.is_file() else []
    tests = sorted(map(json.loads, lines), key=lambda test: -test["seconds"])
    counts = Counter(test["outcome"] for test in tests)
    found: dict[str, Any] = {
        "counts": {name: counts[name] for name in OUTCOMES},
        "seconds": taken,
        "processes": 1 if part == "alone" else processes,
        "tests": tests,
    }
    if not ended:
        found["failed"] = f"ended after {seconds:.0f} s, with tests left"
    elif child.returncode:
        found["failed"] = f"pytest ended with {child.returncode}"
    return found


def totals(data: dict[str, Any]) -> dict[str, int]:
    """Return how many tests of all parts passed, failed and were skipped."""
    counts = [part.get("counts", {}) for part in data.values()]
    return {what: sum(own.get(what, 0) for own in counts) for what in OUTCOMES}


def shortened(data: dict[str, Any]) -> dict[str, Any]:
    """Return the parts with those tests alone that failed or took long."""
    return {
        name: {
            **part,
            "tests": [
                test
                for test in part.get("tests", ())
                if test["outcome"] == "failed" or test["seconds"] >= _LONG
            ],
        }
        for name, part in data.items()
    }


def show(name: str, part: dict[str, Any]) -> None:
    """Print a part's counts, what failed, and what took longest."""
    tests = part.get("tests", [])
    print("  " + ", ".join(f"{count} {what}" for what, count in part.get("counts", {}).items()))
    for test in tests:
        if test["outcome"] == "failed":
            print(f"  FAILED {test['test']}: {test['why']}")
    for test in tests[:8]:
        print(f"  {test['seconds']:6.1f} s {test['test']}")


def main() -> None:
    """Run the parts, and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_only(parser, PARTS)
    parser.add_argument("--processes", type=int, default=min(16, usable_threads()))
    parser.add_argument("--seconds", type=float, default=900.0, help="for all parts together")
    add_out(parser)
    arguments = parser.parse_args()
    gpus = read_gpus().devices
    if not gpus:
        raise SystemExit("gpu_tests: there is no NVIDIA GPU here, and every test needs one")
    inputs = {
        "benchmark": "gpu tests",
        "gpu": gpus[0].name,
        "gpus": len(gpus),
        "processes": arguments.processes,
    }
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvprof-") as folder:
        data = measure_parts(
            arguments.only,
            lambda name: tested(
                name,
                arguments.processes,
                max(1.0, arguments.seconds - (time.perf_counter() - begun)),
                Path(folder),
            ),
            show,
            lambda done: keep(arguments.out, inputs, shortened(done), totals(done)),
        )
    whole = time.perf_counter() - begun
    total = totals(data)
    print(f"{gpus[0].name}: {total}, {whole:.0f} s")
    if total["failed"] or any(part.get("failed") for part in data.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
