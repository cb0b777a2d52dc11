"""Make results small enough to be committed.

    python tools/trim_record.py RESULT.json … --to docs/findings [--pairs q,k,v]

Of a stability result the rows of single heads go, so that the averages stay; of a spectrum every
number keeps four significant digits, and with `--pairs` only these pairs stay. What is left says so
in its inputs; the same command with `--json` writes the rest.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvprof.records.files import read_result, write_result

DIGITS = 4


def trimmed(result: dict[str, Any], pairs: Sequence[str] = ()) -> dict[str, Any]:
    """Return a result of `kvprof stability` or `kvprof spectrum` without what makes it long.

    Parameters
    ----------
    result : dict
        The result; it is changed.
    pairs : sequence of str
        The pairs of a spectrum that stay; empty for all.

    Raises
    ------
    SystemExit
        For a result of another kind, and for pairs that it does not have.
    """
    if missing := set(pairs) - set(result.get("data", {}).get("pairs", ())):
        raise SystemExit(f"a result of {result['kind']} without {', '.join(sorted(missing))}")
    if result["kind"] == "stability":
        curves = result["data"]["curves"]
        result["data"]["curves"] = [row for row in curves if row["layer"] is None]
        result["inputs"]["rows_of_single_heads"] = "left out"
    elif result["kind"] == "spectrum":
        result["data"]["pairs"] = _rounded(result["data"]["pairs"])
        result["inputs"]["numbers"] = f"{DIGITS} significant digits"
        if pairs:
            data, inputs = result["data"], result["inputs"]
            inputs["pairs_left_out"] = [name for name in data["pairs"] if name not in pairs]
            inputs["pairs"] = [name for name in data["pairs"] if name in pairs]
            data["pairs"] = {name: data["pairs"][name] for name in inputs["pairs"]}
            if not {"qk", "vo"} <= set(pairs):
                data["removal"] = []
    else:
        raise SystemExit(f"a result of {result['kind']}: only stability and spectrum are trimmed")
    return result


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def main() -> None:
    """Trim every result named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--pairs", default="", metavar="NAME,…")
    arguments = parser.parse_args()
    for path in arguments.results:
        result = trimmed(read_result(path), [name for name in arguments.pairs.split(",") if name])
        write_result(arguments.to / path.name, json.loads(json.dumps(result)), force=True)


if __name__ == "__main__":
    main()
