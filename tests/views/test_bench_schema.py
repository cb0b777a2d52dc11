"""The schema of a bench's result: what it needs, and what it refuses."""

from typing import Any

import pytest

from kvprof.records.schema import validate_result
from tests.views.synthetic_bench import SWEEP, bench_result


@pytest.mark.parametrize("settings", [{}, SWEEP], ids=["plain", "sweep"])
def test_the_schema_knows_the_result(settings: dict[str, Any]) -> None:
    validate_result(bench_result(**settings))


ROW_KEYS = [
    "method", "phase", "batch", "seq", "dtype", "schedule", "ranks", "rate", "seconds",
    "seconds_interval", "bytes_moved", "cache_bytes", "tb_per_s", "bandwidth_share", "flop_per_s",
    "baseline", "speedup", "error", "makespan_over_mean",
]  # fmt: skip


@pytest.mark.parametrize("key", ROW_KEYS)
def test_a_row_needs_every_key(key: str) -> None:
    result = bench_result()
    added = {"baseline_seconds", "speedup_interval", "buffer_bytes"}  # older records do without
    assert set(result["data"]["rows"][0]) - added == set(ROW_KEYS)
    del result["data"]["rows"][1][key]
    with pytest.raises(ValueError, match=rf"^data\.rows\[1\]: .*'{key}'"):
        validate_result(result)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("rows", 0, "phase"), "both"),
        (("rows", 0, "batch"), 0),
        (("rows", 0, "seq"), 1.5),
        (("rows", 0, "rate"), 1.0),
        (("rows", 0, "seconds"), None),
        (("rows", 0, "seconds_interval"), [0.1]),
        (("rows", 0, "speedup"), "1.9×"),
        (("rows", 0, "ranks"), {"keys": [64]}),
        (("rows", 0, "ranks"), [64]),
        (("bandwidth", "tb_per_s"), "4.5"),
        (("shape", "head_dim"), None),
        (("ranks", "source"), None),
        (("baselines", 0, "seconds"), 0.1),
        (("baselines", 0, "reason"), 3),
    ],
)
def test_what_is_no_figure_is_refused(path: tuple[Any, ...], value: Any) -> None:
    result = bench_result()
    target: Any = result["data"]
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    with pytest.raises(ValueError, match=rf"data\.{path[0]}"):
        validate_result(result)


def test_the_inputs_are_described_too() -> None:
    result = bench_result()
    del result["inputs"]["seqs"]
    with pytest.raises(ValueError, match=r"^inputs: 'seqs'"):
        validate_result(result)
