import math
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path

import numpy as np
import pytest

from kvprof.records.result import SCHEMA, build_result, to_plain
from tests.records.sample import ENVIRONMENT, spectrum_result


def test_the_envelope_is_what_the_architecture_says() -> None:
    result = spectrum_result(warnings=["slow first run"])
    assert result["schema"] == SCHEMA == "kvprof/1"
    assert result["kind"] == "spectrum"
    assert result["complete"] is True
    assert result["warnings"] == ["slow first run"]
    assert {"created", "environment", "inputs", "data"} <= result.keys()


def test_created_is_utc_whatever_zone_it_came_in() -> None:
    moment = datetime(2026, 3, 1, 1, 30, tzinfo=timezone(timedelta(hours=2)))
    assert spectrum_result(created=moment)["created"] == "2026-02-28T23:30:00Z"


def test_an_incomplete_result_says_why() -> None:
    assert spectrum_result(complete=False)["incomplete_reason"] == "interrupted"
    out_of_memory = spectrum_result(complete=False, incomplete_reason="out of memory")
    assert out_of_memory["incomplete_reason"] == "out of memory"
    assert spectrum_result()["incomplete_reason"] is None
    with pytest.raises(ValueError, match="complete"):
        spectrum_result(incomplete_reason="interrupted")


def test_arrays_paths_and_enums_become_plain() -> None:
    class Kind(Enum):
        RANDOM = "random"

    plain = to_plain(
        {
            "array": np.arange(4, dtype=np.float32).reshape(2, 2),
            "scalar": np.int64(3),
            "path": Path("a/b"),
            "kind": Kind.RANDOM,
            "pair": (1, None, True),
        }
    )
    assert plain == {
        "array": [[0.0, 1.0], [2.0, 3.0]],
        "scalar": 3,
        "path": "a/b",
        "kind": "random",
        "pair": [1, None, True],
    }
    assert type(plain["scalar"]) is int


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_not_finite_is_refused_with_its_place(bad: float) -> None:
    with pytest.raises(ValueError, match=r"data\.curve\[1\]\.ratio"):
        build_result(
            "spectrum",
            environment=ENVIRONMENT,
            inputs={},
            data={"curve": [{"ratio": 1.0}, {"ratio": bad}]},
        )


def test_what_json_cannot_hold_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"inputs\.seeds: .* set"):
        spectrum_result(inputs={"seeds": {1, 2}})
    with pytest.raises(TypeError, match="key 3"):
        spectrum_result(inputs={3: "three"})
