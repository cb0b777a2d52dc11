"""Wall time of whole commands from the shell, imports included, on the reference model.

python benchmarks/command_line.py --out docs/benchmarks

The last one, a frontier of five methods, takes a quarter of an hour on two cores.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from recording import keep

COMMANDS = (
    ("--help", 7),
    ("spectrum", 3),
    ("stability", 1),
    ("plan --method kq --rate 0.2", 3),
    ("eval --method kq --rate 0.2", 3),
    ("eval --method palu --rate 0.5", 1),
    ("frontier --no-cache", 1),
)


def seconds(command: str) -> float:
    """Return the wall time of one run of ``kvprof command``."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "kvprof.cli", *command.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - start


def main() -> None:
    """Time every command and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    rows = []
    for command, repeats in COMMANDS:
        samples = [seconds(command) for _ in range(repeats)]
        rows.append({"command": command, "median": statistics.median(samples), "seconds": samples})
        sys.stdout.write(f"kvprof {command}: {statistics.median(samples):.2f} s of {repeats}\n")
        sys.stdout.flush()
    inputs = {"benchmark": "command_line", "cores": len(os.sched_getaffinity(0))}
    keep(arguments.out / "command-line.json", inputs, {"rows": rows})


if __name__ == "__main__":
    main()
