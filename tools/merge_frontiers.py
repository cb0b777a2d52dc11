r"""Join frontiers of one model on one sample into one record that can be committed.

    python tools/merge_frontiers.py RESULT.json … --to docs/findings/frontier-random.json
    python tools/merge_frontiers.py docs/findings/frontier-random.json AGAIN.json … \
        --replace fdc+kvquant --to docs/findings/frontier-random.json
    python tools/merge_frontiers.py docs/findings/frontier-random.json --brief \
        --to kvprof/assets/frontier/reference.json

Methods can be searched by several processes at once; rows that were interrupted are left out but
for those that --interrupted names, which keep that word as their reason. Results of rows that need
no calibration, run without ``--calibrate``, join those of any: of ``full`` and ``fp8``, which stand
in all, the first calibrated result's is taken. What is left out is printed. The worst tokens of
every evaluation are left out. Rows that --replace names are those of the last result that has them.
The environment is the first result's; ``inputs.joined`` says which rows another one brought, when,
and with which commit of kvprof. --speeds are results of ``kvprof bench`` at 100k tokens, whose
speeds rows of their rates get. --brief keeps of every method the one point that met the target
furthest out (or the lowest), and adds the model's shape: what ``kvprof plan --fit`` needs ships
with kvprof. --fingerprint gives the model the fingerprint that it has by now, where kvprof reckoned
it otherwise when the rows were measured; ``inputs.fingerprint_before`` keeps that.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvprof.benchmark.shapes import load_shape
from kvprof.evaluation.recorded_speeds import attach_speeds, load_speeds
from kvprof.methods.named import ALWAYS
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
    "seed",
)


def merged(
    results: list[dict[str, Any]], interrupted: list[str], replace: Sequence[str] = ()
) -> dict[str, Any]:
    """Return one result with the complete rows of all, and of the interrupted ones those named.

    Parameters
    ----------
    results : list of dict
    interrupted : list of str
        Labels of rows to keep though they were interrupted.
    replace : sequence of str
        Labels of rows that were measured again: the last result's is the one.

    Raises
    ------
    ValueError
        When two are of unlike samples, or have unlike rows under one label; when nothing brings a
        row that should be replaced.
    """
    first = json.loads(json.dumps(results[0]))
    asked = next((x["inputs"]["calibrate"] for x in results if x["inputs"]["calibrate"]), None)
    first["inputs"]["calibrate"] = asked
    rows: dict[str, dict[str, Any]] = {}
    calibration: dict[str, Any] = {}
    joined: list[dict[str, Any]] = first["inputs"].get("joined", [])
    again: set[str] = set()
    for index, result in enumerate(results):
        brought = []
        for key in _SAMPLE:
            if result["inputs"][key] != first["inputs"][key]:
                raise ValueError(f"{key}: {result['inputs'][key]} is not {first['inputs'][key]}")
        free = asked is not None and result["inputs"]["calibrate"] is None
        if not free and result["inputs"]["calibrate"] != asked:
            raise ValueError(f"calibrate: {result['inputs']['calibrate']} is not {asked}")
        own, others = ({**one["inputs"].get("targets", {})} for one in (first, result))
        if own and others and own != others:  # records of one target do not name it twice
            raise ValueError(f"targets: {others} is not {own}")
        for row in result["data"]["methods"]:
            stopped = row["reason"] == "interrupted" and row["label"] not in interrupted
            if stopped or not row["points"]:
                continue
            label = row["label"]
            if free and label in ALWAYS:
                continue
            if free and label in result["inputs"]["calibration"]:
                raise ValueError(f"{label} is calibrated on its own data, not on {asked}")
            if label in replace and label in rows:
                again.add(label)
            elif label in rows:
                if rows[label]["max_rate"] != row["max_rate"]:
                    raise ValueError(f"{label} has two unlike rows")
                continue
            rows[label] = row
            brought.append(label)
            if label in result["inputs"]["calibration"]:
                calibration[label] = result["inputs"]["calibration"][label]
        if index and brought:
            joined = [_without(one, brought) for one in joined]
            git = result["environment"]["kvprof"]["git"]
            commit = git["commit"] if git else None
            joined.append({"methods": brought, "created": result["created"], "commit": commit})
    if missing := set(replace) - again:
        raise ValueError(f"nothing to replace: {', '.join(sorted(missing))}")
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
        "merged_from": sum(result["inputs"].get("merged_from", 1) for result in results),
        "joined": [one for one in joined if one["methods"]],
    }
    first["created"] = max(result["created"] for result in results)
    first["warnings"] = sorted(
        {w for result in results for w in result["warnings"] if "interrupted" not in w}
    )
    first["complete"], first["incomplete_reason"] = True, None
    return first


def _without(one: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    return {**one, "methods": [label for label in one["methods"] if label not in labels]}


def left_out(results: list[dict[str, Any]], kept: dict[str, Any]) -> list[str]:
    """Return which rows no result brought whole, each with its reason."""
    have = {row["label"] for row in kept["data"]["methods"]}
    reasons = {
        row["label"]: row["reason"] or "nothing was measured"
        for result in results
        for row in result["data"]["methods"]
    }
    return [f"{label}: {reason}" for label, reason in reasons.items() if label not in have]


def brief(result: dict[str, Any]) -> dict[str, Any]:
    """Keep one point of every row, and say what shape the model has."""
    for row in result["data"]["methods"]:
        points = sorted(row["points"], key=lambda point: point["rate"])
        row["points"] = [p for p in points if p["rate"] == row["max_rate"]][:1] or points[:1]
    result["inputs"]["points_kept"] = "one per method"
    shape = load_shape(result["inputs"]["model"])
    names = ("layers", "num_heads", "num_kv_heads", "head_dim")
    result["inputs"]["shape"] = {name: getattr(shape, name) for name in names}
    return result


def identified(result: dict[str, Any], fingerprint: str) -> dict[str, Any]:
    """Give a record's model another fingerprint, and keep its own beside it."""
    inputs = result["inputs"]
    if inputs["fingerprint"] != fingerprint:
        inputs["fingerprint_before"] = inputs["fingerprint"]
        inputs["fingerprint"] = fingerprint
    return result


def main() -> None:
    """Merge every result named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--interrupted", action="append", default=[], metavar="LABEL")
    parser.add_argument("--replace", action="append", default=[], metavar="LABEL")
    parser.add_argument("--brief", action="store_true", help="one point of every method")
    parser.add_argument("--speeds", action="append", default=[], type=Path, metavar="BENCH")
    parser.add_argument("--fingerprint", metavar="HEX", help="of the model, as it is by now")
    arguments = parser.parse_args()
    results = [read_result(path) for path in arguments.results]
    result = merged(results, arguments.interrupted, arguments.replace)
    for line in left_out(results, result):
        print(f"left out: {line}")
    if arguments.speeds:
        attach_speeds(result["data"], load_speeds(arguments.speeds))
    if arguments.brief:
        result = brief(result)
    if arguments.fingerprint:
        result = identified(result, arguments.fingerprint)
    validate_result(result)
    write_result(arguments.to, result, force=True)


if __name__ == "__main__":
    main()
