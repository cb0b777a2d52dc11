"""Cells as tasks of Ray, on a cluster of this machine."""

import pytest

from kvprof.reproduction.cells import CellCommand
from kvprof.reproduction.on_ray import ray_pool
from kvprof.reproduction.resolve import Cell

# It loads no torch.
CELL = ("bench", "--load", "--simulate", "--request-rate", "1", "--requests", "8")


@pytest.mark.slow
def test_results_come_back_and_a_failure_says_why() -> None:
    ray = pytest.importorskip("ray")
    try:
        pool, _ = ray_pool("local")
        cells: dict[str, CellCommand] = {
            "good": Cell("good", (*CELL, "--methods", "full")),
            "bad": Cell("bad", (*CELL, "--methods", "no-such")),
        }
        ended = dict(pool(cells, lambda: False))
        assert not list(pool(cells, lambda: True))  # stopped before one ends
    finally:
        ray.shutdown()
    good, bad = ended["good"].outcome, ended["bad"].outcome
    assert good.result is not None
    assert good.result["kind"] == "load"
    assert bad.result is None
    assert "no-such" in bad.message
