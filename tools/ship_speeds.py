"""Gathers the speeds of a record of `benchmarks/kernel_speed.py` that ship beside frontiers.

It measures nothing. Of the methods that ``kvprof bench`` times by name, at their default widths, it
keeps what decoded over 102,400 tokens; rows on widths that were given by hand stay where they are.

    python tools/ship_speeds.py docs/benchmarks/kernels.json --to kvprof/assets/bench/h200.json
"""

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

from kvprof.evaluation.recorded_speeds import LONG_CONTEXT
from kvprof.records.files import read_result, write_result
from kvprof.records.result import build_result

# Full width and FP8 have no widths to give; the others were timed at bench's own.
_PARTS = {"decode": ("full", "fp8"), "defaults": ("fdc", "kq", "palu", "tale")}


def gathered(record: dict[str, Any]) -> dict[str, Any]:
    """Return a result of ``bench`` with the rows that ship.

    Parameters
    ----------
    record : dict
        Of `benchmarks/kernel_speed.py`.
    """
    rows = [
        row
        for part, methods in _PARTS.items()
        for row in record["data"][part]["rows"]
        if row["method"] in methods and row["phase"] == "decode" and row["seq"] == LONG_CONTEXT
    ]
    first = record["data"]["defaults"]
    batches = sorted({row["batch"] for row in rows})
    return build_result(
        "bench",
        environment=record["environment"],
        inputs={
            "model": first["shape"]["name"],
            "seqs": [LONG_CONTEXT],
            "batches": batches,
            "rate": 0.5,
            "ranks": None,
            "phases": ["decode"],
            "methods": list(dict.fromkeys(row["method"] for row in rows)),
            "dtype": rows[0]["dtype"],
            "repeats": record["inputs"]["repeats"],
            "device": "cuda:0",
            "seed": 0,
            "gathered_from": "kernels.json",
        },
        data={
            "rows": [{**row, "baseline_seconds": None} for row in rows],
            "shape": first["shape"],
            "ranks": first["ranks"],
            "bandwidth": first["bandwidth"],
            "baselines": [],
            "stopped": None,
        },
        warnings=sorted({text for part in _PARTS for text in record["data"][part]["warnings"]}),
        created=datetime.fromisoformat(record["created"]),
    )


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    write_result(options.to, gathered(read_result(options.record)), force=True)


if __name__ == "__main__":
    main()
