"""A process that talks to Ray: what Ray prints and dies of ends with it.

Started by `kvprof.reproduction.cluster`, which writes JSON lines to its stdin (first where to
connect, then the cells, then anything to stop) and reads JSON lines from its stdout.
"""

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from kvprof.environment import usable_threads
from kvprof.reproduction import cluster_task
from kvprof.reproduction.cells import WHOLE_BYTES, named_files

__all__ = ["cpus_of_cell", "main"]

_STORE_BYTES = 100 << 20  # results are small
_ATTEMPTS = 4
_ANSWER_SECONDS = 60.0
_CANCEL_SECONDS = 10.0
_POLL_SECONDS = 0.3


class _RefusedError(Exception):
    """What the user is told in a line."""


def main() -> None:
    """Connect, describe the machines, run the cells."""
    # Ray and its threads print to stdout as well; what is said to kvprof must stay whole.
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        _serve(sys.stdin, said)
    except _RefusedError as problem:
        _say(said, event="failed", message=str(problem))
    except (Exception, SystemExit) as problem:
        text = " ".join(str(problem).split()) or type(problem).__name__
        _say(said, event="failed", message=f"Ray: {text}")


def _say(said: IO[str], **event: Any) -> None:
    said.write(json.dumps(event) + "\n")
    said.flush()


def _serve(lines: IO[str], said: IO[str]) -> None:
    request = json.loads(lines.readline())
    import ray

    ray.cloudpickle.register_pickle_by_value(cluster_task)
    _connect(request["address"])
    try:
        _say(said, event="connected")
        machines = _machines(request)
        _say(said, event="machines", machines=machines)
        if text := lines.readline():
            stop = threading.Event()
            threading.Thread(target=_listen, args=(lines, stop), daemon=True).start()
            known = {key: request[key] for key in ("version", "folder")}
            _Cells({**json.loads(text), **known}, machines, said, stop).run()
    finally:
        ray.shutdown()


def _listen(lines: IO[str], stop: threading.Event) -> None:
    lines.readline()  # a line, or the end of a parent that died
    stop.set()


def _connect(address: str) -> None:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address, **quiet)
    except ConnectionError:
        if address != "auto":
            raise
        _start_here(quiet)


def _start_here(quiet: dict[str, Any]) -> None:
    """Start a cluster of this machine alone, which nobody else's machine can reach.

    Raises
    ------
    _RefusedError
        When Ray would listen beyond the loopback interface.
    """
    import ray
    from ray._private import ray_constants

    # Ray's own word for a machine without a cluster: everything listens on the loopback interface.
    # It has read the variable already; the processes that it starts read it now.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    ray.init(
        "local",
        num_cpus=usable_threads(),
        object_store_memory=_STORE_BYTES,
        include_dashboard=False,
        **quiet,
    )
    own = {node["NodeManagerAddress"] for node in ray.nodes()}
    if own != {"127.0.0.1"}:
        ray.shutdown()
        raise _RefusedError(
            f"Ray {ray.__version__} would listen on {', '.join(sorted(own))}, where other machines "
            "reach it; start a cluster yourself (ray start --head) and give its address"
        )


def _nodes() -> list[dict[str, Any]]:
    """Return the machines on which a cell can run: Ray's heads often have no CPU for tasks."""
    import ray

    return [
        node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0.0) >= 1
    ]


def _machines(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what every machine has.

    Raises
    ------
    _RefusedError
        When one does not answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked: dict[Any, dict[str, Any]] = {}
    for node in _nodes():
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        # No CPUs: a machine that is busy with something else answers as well.
        describe = ray.remote(cluster_task.describe).options(
            num_cpus=0, max_retries=0, scheduling_strategy=there
        )
        known = (request[key] for key in ("version", "extras", "weights", "folder"))
        asked[describe.remote(*known)] = node
    ready, late = _wait_for_all(list(asked), _ANSWER_SECONDS)
    if late:
        hosts = ", ".join(asked[one]["NodeManagerHostname"] for one in late)
        raise _RefusedError(f"no answer in {_ANSWER_SECONDS:.0f} s from {hosts}")
    found = []
    for one in ready:
        resources, host = asked[one]["Resources"], asked[one]["NodeManagerHostname"]
        try:
            answer = ray.get(one)
        except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):
            continue  # it has just left
        except ray.exceptions.RayError as problem:
            raise _RefusedError(f"{host}: {_first_line(problem)}") from None
        if answer["problem"] is not None:
            raise _RefusedError(f"{host} {answer['problem']}")
        own = {"host": host, "cpus": resources["CPU"], "ray_gpus": resources.get("GPU", 0.0)}
        found.append({**answer, **own})
    if not found:
        raise _RefusedError("the cluster has no machine with a CPU for cells")
    return found


def _wait_for_all(references: list[Any], seconds: float) -> tuple[list[Any], list[Any]]:
    """Return which have ended by then, and which have not."""
    import ray

    if not references:
        return [], []
    ended, left = ray.wait(references, num_returns=len(references), timeout=seconds)
    return ended, left


def _first_line(problem: BaseException) -> str:
    own = getattr(problem, "cause", None) or problem
    return next((line for line in str(own).splitlines() if line), type(own).__name__)


def cpus_of_cell(machines: list[dict[str, Any]], gpus: int) -> int:
    """Return how many CPUs a cell asks for: its share of a machine, so that timings stay apart.

    Without a GPU that is the whole of the smallest machine; with some, the part that belongs to so
    many of its GPUs.

    Parameters
    ----------
    machines : list of dict
        ``cpus`` and ``ray_gpus`` of each.
    gpus : int
    """
    if gpus == 0:
        return int(min(one["cpus"] for one in machines))
    there = [one for one in machines if one["ray_gpus"] >= gpus]
    return max(1, int(min(one["cpus"] * gpus / one["ray_gpus"] for one in there)))


class _Cells:
    """The cells of a run as Ray's tasks."""

    def __init__(
        self,
        request: dict[str, Any],
        machines: list[dict[str, Any]],
        said: IO[str],
        stop: threading.Event,
    ) -> None:
        self._request = request
        # This process has a folder of its own: Ray would let its workers take code from there.
        self._folder = Path(request["folder"])
        self._machines = machines
        self._said = said
        self._stop = stop
        self._running: dict[Any, dict[str, Any]] = {}
        self._attempts: dict[str, int] = {}
        self._put: dict[str, Any] = {}

    def run(self) -> None:
        import ray

        for cell in self._request["cells"]:
            self._start(cell)
        able_at = time.monotonic()
        while self._running:
            ready, _ = ray.wait(list(self._running), num_returns=1, timeout=_POLL_SECONDS)
            for one in ready:
                self._take(one)
            if self._stop.is_set():
                self._cancel("interrupted", 130)
            elif ready or self._able():
                able_at = time.monotonic()
            elif time.monotonic() - able_at > self._request["patience"]:
                self._cancel("no machine that could run it is left in the cluster", 1)
        _say(self._said, event="done")

    def _start(self, cell: dict[str, Any]) -> None:
        import ray

        digest, gpus = cell["digest"], cell["gpus"]
        self._attempts[digest] = self._attempts.get(digest, 0) + 1
        files = named_files(cell["words"], self._folder)
        travelling = [name for name in files if _travels(self._folder, name)]
        task = {
            "words": cell["words"],
            "program": self._request["program"],
            "version": self._request["version"],
            "folder": str(self._folder),
            "files": files,
            "contents": {name: [self._content(name)] for name in travelling},
            "environment": self._request["environment"],
        }
        # Not Ray's own retries: they are silent, and for want of memory without a bound.
        run_cell = ray.remote(cluster_task.run_cell).options(
            num_cpus=cpus_of_cell(self._machines, gpus), num_gpus=gpus, max_retries=0
        )
        self._running[run_cell.remote(task)] = cell

    def _content(self, name: str) -> Any:
        import ray

        if name not in self._put:
            self._put[name] = ray.put((self._folder / name).read_bytes())
        return self._put[name]

    def _take(self, one: Any) -> None:
        import ray
        from ray import exceptions

        cell = self._running.pop(one)
        try:
            found = ray.get(one, timeout=_ANSWER_SECONDS)
        except (
            exceptions.WorkerCrashedError,
            exceptions.NodeDiedError,
            exceptions.LocalRayletDiedError,
            exceptions.ObjectLostError,
            exceptions.GetTimeoutError,
        ) as problem:
            if self._attempts[cell["digest"]] < _ATTEMPTS:
                self._start(cell)
                return
            self._fail(cell, f"lost its machine {_ATTEMPTS} times: {_first_line(problem)}", 1)
        except exceptions.OutOfMemoryError:
            self._fail(cell, "Ray ended it: its machine ran out of memory", 1)
        except exceptions.RayError as problem:
            self._fail(cell, f"Ray: {_first_line(problem)}", 1)
        else:
            self._end(cell, found)

    def _able(self) -> bool:
        """Whether some machine could run a cell that waits, or runs it already."""
        resources = [node["Resources"] for node in _nodes()]
        wanted = {cell["gpus"] for cell in self._running.values()}
        return any(
            one["CPU"] >= cpus_of_cell(self._machines, gpus) and one.get("GPU", 0.0) >= gpus
            for one in resources
            for gpus in wanted
        )

    def _cancel(self, message: str, code: int) -> None:
        """End what runs; what has ended by now counts."""
        import ray

        for one in self._running:
            ray.cancel(one)
        ended, left = _wait_for_all(list(self._running), _CANCEL_SECONDS)
        for one in left:
            ray.cancel(one, force=True)
        for one in ended:
            try:
                found = ray.get(one, timeout=_ANSWER_SECONDS)
            except (ray.exceptions.RayError, KeyboardInterrupt):
                continue
            self._end(self._running.pop(one), found)
        for cell in self._running.values():
            self._fail(cell, message, code)
        self._running.clear()

    def _fail(self, cell: dict[str, Any], message: str, code: int) -> None:
        none = {"result": None, "seconds": None, "host": None}
        self._end(cell, {**none, "message": message, "code": code})

    def _end(self, cell: dict[str, Any], found: dict[str, Any]) -> None:
        digest = cell["digest"]
        _say(self._said, event="ended", digest=digest, attempt=self._attempts[digest], **found)


def _travels(folder: Path, name: str) -> bool:
    path = folder / name
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    return inside and path.is_file() and path.stat().st_size <= WHOLE_BYTES


if __name__ == "__main__":
    main()
