"""Speeds beside a frontier: measured at the row's own rate, or a dash and the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvprof.errors import UsageError
from kvprof.evaluation.recorded_speeds import attach_speeds, load_speeds, speeds_of
from kvprof.records.files import read_result, write_result
from tests.views.synthetic_frontier import frontier_result

SHIPPED = Path("kvprof/assets/bench/h200.json")


def bench(path: Path, **changes: Any) -> Path:
    """Write a result of bench: the one that ships, its rows of kq changed."""
    result = json.loads(json.dumps(read_result(Path(__file__).parents[2] / SHIPPED)))
    for row in result["data"]["rows"]:
        if row["method"] == "kq":
            row |= changes
    write_result(path, result)
    return path


def test_what_ships_names_its_gpu_and_its_shape() -> None:
    speeds = load_speeds()
    assert {(one.device, one.shape, one.origin) for one in speeds} == {
        ("NVIDIA H200", "Llama-3.1-8B", "shipped")
    }
    record = read_result(Path(__file__).parents[2] / "docs/benchmarks/kernels.json")
    rows = [*record["data"]["decode"]["rows"], *record["data"]["defaults"]["rows"]]
    known = {(row["method"], row["batch"], row["speedup"]) for row in rows}
    assert {(one.method, one.batch, one.speedup) for one in speeds} <= known
    # What its run warned of goes with each speed, to be said beside it.
    shipped = read_result(Path(__file__).parents[2] / SHIPPED)
    assert all(one.described()["warnings"] == shipped["warnings"] for one in speeds)


def test_a_speed_is_of_the_rows_own_rate_and_dtype(tmp_path: Path) -> None:
    speeds = load_speeds([bench(tmp_path / "b.json", rate=0.41, speedup=1.6)])
    found, reason = speeds_of("kq", 0.415, "bfloat16", speeds)
    assert [(one.batch, one.speedup, one.source) for one in found] == [(8, 1.6, "b.json")]
    assert reason is None
    for label, rate, dtype, says in (
        ("kq", 0.45, "bfloat16", "measured at a rate of 0.410 and 0.500 alone"),
        ("kq", 0.41, "float32", "measured in bfloat16 alone"),
        ("kq:grid=32", 0.41, "bfloat16", "no record has a speed of it"),
    ):
        found, reason = speeds_of(label, rate, dtype, speeds)
        assert found == []
        assert reason is not None
        assert says in reason
    # A record that is given overrules what ships.
    again = load_speeds([bench(tmp_path / "c.json", speedup=1.7)])
    assert [one.speedup for one in speeds_of("kq", 0.5, "bfloat16", again)[0]] == [1.7]


def test_bits_that_a_search_chose_are_told_by_the_rate(tmp_path: Path) -> None:
    timed = bench(tmp_path / "b.json", method="per-token:group=64,bits=4", rate=0.7)
    speeds = load_speeds([timed])
    for label, rate, found in (
        ("per-token:group=64", 0.7, True),
        ("per-token:bits=4,group=64", 0.7, False),  # named so by nobody
        ("per-token:group=64", 0.75, False),  # of 3 bits
        ("per-token", 0.7, False),  # of another group
        ("kivi:group=64", 0.7, False),
    ):
        assert bool(speeds_of(label, rate, "bfloat16", speeds)[0]) == found, label
    # A saved plan has its file's name, which may look like anything.
    named = load_speeds([bench(tmp_path / "n.json", method="a=1,kq", rate=0.7)])
    assert not speeds_of("per-token", 0.7, "bfloat16", named)[0]
    # What TALE stores unquantised is no number of bits, and a paper's setting no option.
    others = load_speeds([bench(tmp_path / "t.json", method="tale:bits=none", rate=0.225)])
    assert not speeds_of("tale", 0.225, "bfloat16", others)[0]
    assert speeds_of("tale:bits=none", 0.225, "bfloat16", others)[0]


def test_rows_get_a_speed_or_the_reason(tmp_path: Path) -> None:
    data = frontier_result()["data"] | {"dtype": "bfloat16"}
    for method in data["methods"]:
        refused = "tokens are evicted" if method["label"] == "fdc" else None
        for point in method["points"]:
            point["kernel"] = {"layers": 6, "of": 6, "reason": refused}
            point["long_context"] = {"context": 102_400, "rate": point["rate"]}
    attach_speeds(data, load_speeds([bench(tmp_path / "b.json", rate=0.41, speedup=1.6)]))
    by_label = {method["label"]: method for method in data["methods"]}
    assert [one["speedup"] for one in by_label["kq"]["speeds"]] == [1.6]
    assert by_label["kq"]["speed_reason"] is None
    assert [one["batch"] for one in by_label["fp8"]["speeds"]] == [1, 8]
    assert by_label["fdc"]["speed_reason"] == "no kernel runs it here: tokens are evicted"
    assert by_label["palu"]["speed_reason"] == "no rate of it meets the target"
    assert by_label["palu"]["speeds"] == []
    before = frontier_result()["data"]
    attach_speeds(before, load_speeds())
    assert "not in the record" in before["methods"][0]["speed_reason"]


def test_records_without_a_speed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    write_result(path, frontier_result())
    with pytest.raises(UsageError, match="of kind frontier has no speeds"):
        load_speeds([path])
    result = json.loads(bench(tmp_path / "b.json").read_text())
    for row in result["data"]["rows"]:
        row["seq"] = 4096
    write_result(tmp_path / "s.json", result)
    with pytest.raises(UsageError, match="--seq 100k"):
        load_speeds([tmp_path / "s.json"])
