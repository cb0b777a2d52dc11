"""The records that are committed can be read, and each has its row of the index."""

import json
from pathlib import Path

from kvprof.records.files import read_result

RECORDS = Path(__file__).parents[1] / "records"


def test_each_record_can_be_read_and_has_a_row() -> None:
    rows = [json.loads(line) for line in (RECORDS / "index.jsonl").read_text().splitlines()]
    files = [row["file"] for row in rows]
    assert len(set(files)) == len(files)
    for row in rows:
        result = read_result(RECORDS / row["file"])
        assert result["created"].startswith(row["date"])
        assert row["command"]
    kept = {path.name for path in RECORDS.glob("*.json")}
    assert set(files) <= kept
    assert all(name.startswith("ledger-") for name in kept - set(files))
    assert len(list(RECORDS.iterdir())) <= 40
