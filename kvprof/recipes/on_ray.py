"""Cells as tasks of Ray, which says where and when each runs."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvprof.errors import ExitCode, LackingError
from kvprof.recipes.runs import CellCommand, CellRun, Outcome, Runner, run_child
from kvprof.requirements import extra_command

__all__ = ["ray_runner"]

_POLL_SECONDS = 0.2


def ray_runner(address: str) -> tuple[Runner, int]:
    """Connect to a Ray cluster; return its runner, and the most GPUs of one of its machines."""
    try:
        import ray
    except ImportError:
        raise LackingError(f"--ray needs ray: {extra_command('ray')}") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as problem:
        raise LackingError(f"--ray {address}: {' '.join(str(problem).split())}") from None
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def run(words: tuple[str, ...]) -> CellRun:
        start = time.monotonic()
        return CellRun(run_child(words, lambda: False), time.monotonic() - start)

    def run_all(
        cells: Mapping[str, CellCommand], should_stop: Callable[[], bool]
    ) -> Iterator[tuple[str, CellRun]]:
        # Without a GPU a cell has a machine for itself: what shares CPUs disturbs its timings.
        cpus = min(one.get("CPU", 0.0) for one in machines if one.get("CPU"))
        running: dict[Any, str] = {}
        for key, cell in cells.items():
            placed = ray.remote(run).options(num_gpus=cell.gpus, num_cpus=1 if cell.gpus else cpus)
            running[placed.remote(cell.words)] = key
        while running:
            if should_stop():
                for task in running:
                    ray.cancel(task, force=True)
                return
            ended, _ = ray.wait(list(running), num_returns=1, timeout=_POLL_SECONDS)
            for task in ended:
                try:
                    done = ray.get(task)
                except ray.exceptions.RayError as problem:
                    said = str(problem).strip().splitlines()[-1]
                    done = CellRun(Outcome(None, int(ExitCode.FAILED), said))
                yield running.pop(task), done

    return run_all, int(max(one.get("GPU", 0.0) for one in machines))
