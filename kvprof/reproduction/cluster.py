"""A Ray cluster that runs cells: the side of it that stays in kvprof's own process."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import urlsplit

from kvprof.child import child_environment, module_command
from kvprof.errors import ExitCode, FailedError, LackingError, UsageError
from kvprof.reproduction.cells import CellCommand, Ended, Outcome
from kvprof.reproduction.machine import Machine
from kvprof.reproduction.recipe import Needs, Profile
from kvprof.requirements import SMOLLM2_VARIABLE, extra_command, install_command

__all__ = ["AUTO", "Cluster", "ClusterMachine"]


@dataclass(frozen=True)
class ClusterMachine(Machine):
    """The machines of a cluster as one: where they are alike, the same as one of them."""

    def lacks(self, profile: Profile, *, model_given: bool) -> str | None:
        """Return why a profile cannot be run on this cluster; None where it can."""
        needs = profile.needs
        if needs.gpus > len(self.gpus):
            has = f"has more than {len(self.gpus)}" if self.gpus else "has one"
            wanted = "a GPU" if needs.gpus == 1 else f"{needs.gpus} GPUs"
            return f"it needs {wanted}, and no machine of the cluster {has}"
        for extra in needs.extras:
            if not self.has_extra(extra):
                return (
                    f"it needs the extra {extra} on every machine of the cluster, here: "
                    f"{extra_command(extra)}"
                )
        if not model_given:
            for name in needs.weights:
                if not self.has_weights(name):
                    return (
                        f"the weights of {name} are not on every machine of the cluster: hf "
                        f"download {name}, or --model FOLDER"
                    )
        return None


#: The address that leaves it to Ray to find a cluster, or starts one here.
AUTO = "auto"

_CLIENT = "ray://"
_REACH_SECONDS = 5.0
_CONNECT_SECONDS = 60.0
_DESCRIBE_SECONDS = 90.0  # the driver itself waits for less
_CANCEL_SECONDS = 30.0
_CLOSE_SECONDS = 15.0
_POLL_SECONDS = 0.2
_LAST = 300  # characters of what the driver said before it died


class Cluster:
    """A connection to a cluster, and the `Pool` that it is.

    Ray itself works in a process of its own (`kvprof.reproduction.cluster_driver`): it prints to
    stdout, waits without a bound, and ends the process that it is in when a cluster is lost.

    Parameters
    ----------
    address : str
        ``HOST:PORT``, ``ray://HOST:PORT``, or `AUTO`: the cluster that Ray finds, or else one of
        this machine alone, which ends with the connection.
    program : sequence of str, optional
        What Python is given to run a cell; kvprof when not given.
    patience : float
        Seconds that cells wait for a machine when no one is left that could run them.

    Raises
    ------
    UsageError
        For an address that is none.
    LackingError
        When a package is missing.
    """

    def __init__(
        self, address: str = AUTO, *, program: Sequence[str] | None = None, patience: float = 30.0
    ) -> None:
        if address == AUTO:  # Ray's own first rule
            address = os.environ.get("RAY_ADDRESS") or AUTO
        self._address = address
        self._program = None if program is None else list(program)
        self._patience = patience
        self._machine: ClusterMachine | None = None
        self._hosts: list[str] = []
        self._end_point = None if address == AUTO else _end_point(address)
        if find_spec("ray") is None:
            raise LackingError(f"--ray needs ray, which is missing: {extra_command('ray')}")
        if address.startswith(_CLIENT) and find_spec("grpc") is None:
            raise LackingError(
                f"--ray {address} goes through the Ray Client, and grpcio is missing: "
                f"{install_command('ray[client]')}"
            )

    def __enter__(self) -> Self:
        """Start the process that talks to Ray."""
        if self._end_point is not None:
            self._reach(*self._end_point)
        self._nowhere = tempfile.TemporaryDirectory(prefix="kvprof-ray-")
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            module_command("kvprof.reproduction.cluster_driver"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # The terminal's Ctrl-C is for this process, which says what is to end.
            start_new_session=True,
            # Ray gives its workers the folder of whoever connects as a place of code.
            cwd=self._nowhere.name,
            env=child_environment(),
        )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process, and with it what runs still."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
        self._nowhere.cleanup()

    def _reach(self, host: str, port: int) -> None:
        # Ray would try for minutes.
        try:
            socket.create_connection((host, port), _REACH_SECONDS).close()
        except OSError as problem:
            said = problem.strerror or str(problem) or "no answer"
            raise LackingError(
                f"--ray {self._address}: no cluster can be reached there ({said}); ray start "
                "--head starts one, and without an address this machine alone is used"
            ) from None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: the next event says so
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def machine(self, version: str, needs: Sequence[Needs]) -> ClusterMachine:
        """Connect, and return what the cluster has.

        Parameters
        ----------
        version : str
            From `kvprof.reproduction.cells.code_version`; every machine must have the same.
        needs : sequence of Needs
            Whose extras and weights are looked for.

        Raises
        ------
        LackingError
            When there is no cluster, one of its machines does not answer, or has another kvprof.
        """
        extras = list(dict.fromkeys(one for need in needs for one in need.extras))
        weights = list(dict.fromkeys(one for need in needs for one in need.weights))
        self._send(
            {
                "address": self._address,
                "version": version,
                "extras": extras,
                "weights": weights,
                "folder": str(Path.cwd()),
            }
        )
        self._expect("connected", _CONNECT_SECONDS)
        found = self._expect("machines", _DESCRIBE_SECONDS)["machines"]
        self._hosts = [one["host"] for one in found]
        most = int(max(one["ray_gpus"] for one in found))
        names = dict.fromkeys(name for one in found if one["ray_gpus"] >= 1 for name in one["gpus"])
        self._machine = ClusterMachine(
            # Whichever of them runs a cell: results of machines that differ have both names.
            " or ".join(sorted({one["cpu"] for one in found})),
            (" or ".join(sorted(names)) or "a GPU",) * most,
            lambda name: all(name in one["extras"] for one in found),
            lambda name: all(name in one["weights"] for one in found),
        )
        return self._machine

    @property
    def hosts(self) -> list[str]:
        """The machines that run cells, by name."""
        return list(self._hosts)

    def _expect(self, event: str, seconds: float) -> dict[str, Any]:
        try:
            found = self._events.get(timeout=seconds)
        except queue.Empty:
            self._process.kill()
            # Ray remembers the last cluster of a machine, also one that was killed.
            old = "; ray stop makes Ray forget one that is gone" if self._address == AUTO else ""
            raise LackingError(
                f"--ray {self._address}: no answer of a Ray cluster in {seconds:.0f} s{old}"
            ) from None
        if found is None:
            raise FailedError(f"--ray {self._address}: {self._last_words()}")
        if found["event"] == "failed":
            raise LackingError(f"--ray {self._address}: {found['message']}")
        assert found["event"] == event
        return found

    def run_all(
        self,
        cells: Mapping[str, CellCommand],
        tell: Callable[[str, str], None],
        should_stop: Callable[[], bool],
    ) -> Iterator[Ended]:
        """Run cells wherever there is room; see `kvprof.reproduction.cells.Pool`.

        A cell whose machine is lost runs again on another one; one that fails by itself does not.
        """
        if not cells:
            return
        left = dict(cells)
        self._send(
            {
                "cells": [
                    {"digest": digest, "words": list(cell.words), "gpus": self._gpus(cell)}
                    for digest, cell in cells.items()
                ],
                "program": self._program,
                "environment": _carried(),
                "patience": self._patience,
            }
        )
        for event in self._until_done(should_stop):
            if event["event"] == "failed":
                problem = event["message"]
                break
            digest = event["digest"]
            del left[digest]
            outcome = Outcome(event["result"], event["code"], event["message"])
            if outcome.code != ExitCode.INTERRUPTED:
                again = f", attempt {event['attempt']}" if event["attempt"] > 1 else ""
                tell(digest, f"{_where(event)}{again}: ")
            yield Ended(digest, outcome, event["seconds"])
        else:
            problem = self._last_words()
        for digest in left:
            if should_stop():
                yield Ended(digest, Outcome(None, int(ExitCode.INTERRUPTED), "interrupted"), None)
            else:
                yield Ended(digest, Outcome(None, int(ExitCode.FAILED), problem), None)

    def _gpus(self, cell: CellCommand) -> int:
        # As on one machine: what is not told to use the CPU uses the GPU that is there.
        assert self._machine is not None
        return max(cell.gpus, int(self._machine.device(cell.words) != self._machine.cpu))

    def _until_done(self, should_stop: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """Yield the driver's events until it is done, has died, or does not stop when told."""
        give_up: float | None = None
        while True:
            if give_up is None and should_stop():
                self._send({"stop": True})
                give_up = time.monotonic() + _CANCEL_SECONDS
            if give_up is not None and time.monotonic() > give_up:
                return
            try:
                event = self._events.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if event is None or event["event"] == "done":
                return
            yield event

    def _last_words(self) -> str:
        self._errors.seek(0)
        said = " ".join(self._errors.read().decode("utf-8", "replace").split())[-_LAST:]
        return f"the connection to Ray was lost{': ' + said if said else ''}"


def _where(event: Mapping[str, Any]) -> str:
    if event["host"] is None:
        return "failed"
    took = f" in {event['seconds']:.1f} s" if event["seconds"] is not None else ""
    return f"{'done' if event['result'] is not None else 'failed'} on {event['host']}{took}"


def _carried() -> dict[str, str | None]:
    """Return the variables that a cell has as it would have them here."""
    # Ray sets the number of threads for its workers, and with it the order of sums.
    carried: dict[str, str | None] = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
    for name in ("HF_HUB_OFFLINE", "TRITON_INTERPRET", SMOLLM2_VARIABLE):
        if name in os.environ:
            carried[name] = os.environ[name]
    return carried


def _end_point(address: str) -> tuple[str, int]:
    """Return host and port of an address.

    Raises
    ------
    UsageError
        When it has none.
    """
    problem = UsageError(
        f"--ray {address}: write HOST:PORT or ray://HOST:PORT, or no address at all"
    )
    try:
        parts = urlsplit("//" + address.removeprefix(_CLIENT))
        host, port = parts.hostname, parts.port
    except ValueError:
        raise problem from None
    if not host or port is None or parts.path or parts.query or parts.username is not None:
        raise problem
    return host, port
