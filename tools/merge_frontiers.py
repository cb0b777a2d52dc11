r"""Join frontiers of one model on one sample into one record that can be committed.

    python tools/merge_frontiers.py RESULT.json … --to docs/findings/frontier-random.json
    python tools/merge_frontiers.py docs/findings/frontier-random.json --brief \
        --to kvprof/assets/frontier/reference.json

Methods can be searched by several processes at once; rows that were interrupted are left out but
for those that --interrupted names, which keep that word as their reason. The worst tokens of every
evaluation are left out. --brief keeps of every method the one point that met
the target furthest out (or the lowest): what ``kvprof plan --fit`` needs ships with kvprof.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from kvprof.records.files import read_result, write_result
from kvprof.records.schema import validate_result

# What must be equal for rows to stand in one table.
_SAMPLE = (
    "fingerprint",
    "text",
    "sequences",
    "seq_len",
    "tasks",
    "task_items",
    "protocol",
    "metric",
    "target",
    "calibrate",
    "seed",
)


def merged(results: list[dict[str, Any]], interrupted: list[str]) -> dict[str, Any]:
    """Return one result with the complete rows of all, and of the interrupted ones those named.

    Raises
    ------
    ValueError
        When two are of unlike samples, or have unlike rows under one label.
    """
    first = json.loads(json.dumps(results[0]))
    rows: dict[str, dict[str, Any]] = {}
    calibration: dict[str, Any] = {}
    for result in results:
        for key in _SAMPLE:
            if result["inputs"][key] != first["inputs"][key]:
                raise ValueError(f"{key}: {result['inputs'][key]} is not {first['inputs'][key]}")
        for row in result["data"]["methods"]:
            stopped = row["reason"] == "interrupted" and row["label"] not in interrupted
            if stopped or not row["points"]:
                continue
            known = rows.setdefault(row["label"], row)
            if known["max_rate"] != row["max_rate"]:
                raise ValueError(f"{row['label']} has two unlike rows")
            if row["label"] in result["inputs"]["calibration"]:
                calibration[row["label"]] = result["inputs"]["calibration"][row["label"]]
    for row in rows.values():
        for point in row["points"]:
            point["worst_tokens"] = []
    first["data"]["baseline"]["worst_tokens"] = []
    first["data"]["methods"] = list(rows.values())
    first["inputs"] |= {
        "methods": ",".join(rows),
        "calibration": calibration,
        "points": max(result["inputs"]["points"] for result in results),
        "evaluations_found": 0,
        "evaluations_measured": sum(len(row["points"]) for row in rows.values()),
        "worst_tokens": "left out",
        "merged_from": len(results),
    }
    first["created"] = max(result["created"] for result in results)
    first["warnings"] = sorted(
        {w for result in results for w in result["warnings"] if "interrupted" not in w}
    )
    first["complete"], first["incomplete_reason"] = True, None
    return first


def brief(result: dict[str, Any]) -> dict[str, Any]:
    """Keep one point of every row."""
    for row in result["data"]["methods"]:
        points = sorted(row["points"], key=lambda point: point["rate"])
        row["points"] = [p for p in points if p["rate"] == row["max_rate"]][:1] or points[:1]
    result["inputs"]["points_kept"] = "one per method"
    return result


def main() -> None:
    """Merge every result named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--interrupted", action="append", default=[], metavar="LABEL")
    parser.add_argument("--brief", action="store_true", help="one point of every method")
    arguments = parser.parse_args()
    result = merged([read_result(path) for path in arguments.results], arguments.interrupted)
    if arguments.brief:
        result = brief(result)
    validate_result(result)
    write_result(arguments.to, result, force=True)


if __name__ == "__main__":
    main()
