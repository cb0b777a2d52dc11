"""Cells as tasks of Ray, on a cluster of this machine."""

import pytest

from kvprof.recipes.on_ray import ray_runner
from kvprof.recipes.resolve import Cell
from kvprof.recipes.runs import CellCommand

# It loads no torch.
CELL = ("bench", "--load", "--simulate", "--request-rate", "1", "--requests", "8")


@pytest.mark.slow
def test_results_come_back_and_a_failure_says_why() -> None:
    ray = pytest.importorskip("ray")
    try:
        runner, _ = ray_runner("local")
        cells: dict[str, CellCommand] = {
            "good": Cell("good", (*CELL, "--methods", "full")),
            "bad": Cell("bad", (*CELL, "--methods", "no-such")),
        }
        ended = dict(runner(cells, lambda: False))
        assert not list(runner(cells, lambda: True))  # stopped before one ends
    finally:
        ray.shutdown()
    good, bad = ended["good"].outcome, ended["bad"].outcome
    assert good.result is not None
    assert good.result["kind"] == "load"
    assert bad.result is None
    assert "no-such" in bad.message
