"""A small, valid result of each kind."""

from datetime import UTC, datetime
from typing import Any

from kvprof.records.result import build_result

CREATED = datetime(2026, 7, 4, 12, 0, tzinfo=UTC)
"""So that two results of the same facts are equal in whatever second they are made."""

ENVIRONMENT: dict[str, Any] = {
    "kvprof": {"version": "0.1.0", "git": None},
    "python": "3.12.1",
    "platform": "Linux",
    "cpu": {"model": "some CPU", "cores": None, "threads": 2},
    "memory_bytes": 2**34,
    "packages": {"torch": "2.13.0", "triton": None},
    "gpus": [],
}


def spectrum_result(**changes: Any) -> dict[str, Any]:
    """Two layers that differ in heads and in width."""
    from tests.views.synthetic import spectrum_result as spectra  # which loads torch

    made = spectra(heads=[2, 1], widths=[3, 2], pairs=("qk", "vo"), rates=(0.05,))
    for row in made["data"]["removal"]:
        row["dim_rate_without_first"] = 0.2
    known = {name: made[name] for name in ("environment", "inputs", "data")}
    return build_result("spectrum", **{"created": CREATED} | known | changes)


def stability_result() -> dict[str, Any]:
    """A head's row of a curve, and an average."""
    from tests.views.synthetic_stability import made as stability

    result = stability()
    curves = result["data"]["curves"]
    result["data"]["curves"] = [
        next(row for row in curves if row["kv_head"] == 0),
        next(row for row in curves if row["kv_head"] is None),
    ]
    return result


def benchmark_result(**inputs: Any) -> dict[str, Any]:
    named = {"benchmark": "some_program"} | inputs
    data = {"rows": [{"tokens": 1024, "total_s": 0.5}]}
    return build_result(
        "benchmark", environment=ENVIRONMENT, inputs=named, data=data, created=CREATED
    )
