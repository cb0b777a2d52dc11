"""Frontiers of one sample are joined row by row."""

from copy import deepcopy
from typing import Any

import pytest

from tests.views.synthetic_frontier import frontier_result
from tools.merge_frontiers import brief, identified, left_out, merged


def _named(labels: list[str], rate: float, commit: str) -> dict[str, Any]:
    """Return a result with these rows alone, of one rate."""
    result = deepcopy(frontier_result())
    row = result["data"]["methods"][0]
    result["data"]["methods"] = [{**deepcopy(row), "label": x, "max_rate": rate} for x in labels]
    result["inputs"] |= {"metric": "accuracy", "target": 0.99, "calibrate": None, "seed": 0}
    result["inputs"]["calibration"] = {x: {"source": commit} for x in labels}
    result["environment"]["kvprof"]["git"] = {"commit": commit, "dirty": False}
    return result


def test_rows_of_one_label_must_agree_unless_one_was_measured_again() -> None:
    old, new = _named(["fdc", "kq"], 0.2, "a"), _named(["kq", "palu"], 0.3, "b")
    with pytest.raises(ValueError, match="kq has two unlike rows"):
        merged([old, new], [])
    found = merged([old, new], [], ["kq"])
    rates = {row["label"]: row["max_rate"] for row in found["data"]["methods"]}
    assert rates == {"fdc": 0.2, "kq": 0.3, "palu": 0.3}
    # The environment is the first one's, so what came with another kvprof is named.
    assert found["environment"]["kvprof"]["git"]["commit"] == "a"
    (joined,) = found["inputs"]["joined"]
    assert (joined["methods"], joined["commit"]) == (["kq", "palu"], "b")
    assert found["inputs"]["calibration"]["kq"] == {"source": "b"}
    assert found["inputs"]["merged_from"] == 2
    with pytest.raises(ValueError, match="nothing to replace: tale"):
        merged([old, new], [], ["kq", "tale"])


def test_a_row_that_is_measured_a_third_time_is_named_once() -> None:
    results = [_named(["fdc", "kq"], 0.1 * n, "abc"[n - 1]) for n in (1, 2, 3)]
    second = merged(results[:2], [], ["fdc", "kq"])
    third = merged([second, results[2]], [], ["fdc", "kq"])
    assert [one["commit"] for one in third["inputs"]["joined"]] == ["c"]
    assert third["inputs"]["merged_from"] == 3


def test_what_ships_keeps_one_point_a_row_the_shape_and_both_fingerprints() -> None:
    one = merged([_named(["fdc"], 0.2, "a")], [])
    one["inputs"]["model"] = "reference"
    before = one["inputs"]["fingerprint"]
    kept = identified(brief(one), "c" * 32)
    assert [len(row["points"]) for row in kept["data"]["methods"]] == [1]
    shape = {"layers": 6, "num_heads": 8, "num_kv_heads": 4, "head_dim": 128}
    assert kept["inputs"]["shape"] == shape
    assert (kept["inputs"]["fingerprint"], kept["inputs"]["fingerprint_before"]) == (
        "c" * 32,
        before,
    )
    assert (
        "fingerprint_before"
        not in identified(merged([_named(["fdc"], 0.2, "a")], []), before)["inputs"]
    )


def _calibrated_on(data: str | None, labels: list[str], commit: str) -> dict[str, Any]:
    """Return a result of rows that --calibrate gave these data, or of rows that need none."""
    result = _named([*labels, "full", "fp8"], 0.5, commit)
    result["inputs"]["calibrate"] = data
    source = data or "random"
    named = ["fp8", *(labels if data else ())]
    result["inputs"]["calibration"] = {x: {"source": source} for x in named}
    return result


def test_rows_that_need_no_calibration_join_those_of_any() -> None:
    text, free = (
        _calibrated_on("calibration", ["kq"], "a"),
        _calibrated_on(None, ["per-token"], "b"),
    )
    for order in ([text, free], [free, text]):
        found = merged(order, [])
        assert found["inputs"]["calibrate"] == "calibration"
        assert {row["label"] for row in found["data"]["methods"]} == {
            "kq", "per-token", "full", "fp8",
        }  # fmt: skip
        # Not FP8's of the result that calibrated it on something else.
        assert found["inputs"]["calibration"]["fp8"] == {"source": "calibration"}
    with pytest.raises(ValueError, match="calibrate: random:8k is not calibration"):
        merged([text, _calibrated_on("random:8k", ["fdc"], "c")], [])
    own = _named(["kq-wf"], 0.5, "d")
    with pytest.raises(ValueError, match="kq-wf is calibrated on its own data"):
        merged([text, own], [])


def test_what_is_left_out_is_named() -> None:
    stopped = _named(["fdc", "kq"], 0.2, "a")
    stopped["data"]["methods"][0]["reason"] = "interrupted"
    again = _named(["palu"], 0.2, "a")
    again["data"]["methods"][0] |= {"points": [], "reason": "no such heads"}
    found = merged([stopped, again], [])
    assert left_out([stopped, again], found) == ["fdc: interrupted", "palu: no such heads"]
