"""Drop the rows of single heads from stability results, so that the averages can be committed.

    python tools/trim_record.py RESULT.json … --to docs/findings

What is left says so in its inputs; `kvprof stability --json` with the same inputs writes the rest.
"""

import argparse
import json
from pathlib import Path

from kvprof.records.files import read_result, write_result


def main() -> None:
    """Trim every result named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    for path in arguments.results:
        result = read_result(path)
        curves = result["data"]["curves"]
        result["data"]["curves"] = [row for row in curves if row["layer"] is None]
        result["inputs"]["rows_of_single_heads"] = "left out"
        write_result(arguments.to / path.name, json.loads(json.dumps(result)), force=True)


if __name__ == "__main__":
    main()
