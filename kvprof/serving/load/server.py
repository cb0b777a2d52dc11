"""Servers that a load is sent to: those that run already, and one that is started for a method."""

import os
import re
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kvprof.child import Leash, module_command
from kvprof.errors import FailedError, LackingError
from kvprof.printable import printable
from kvprof.serving.load.http import Address
from kvprof.serving.settings import RUNNER_VARIABLE, model_runner, option_value

__all__ = [
    "EngineSettings",
    "Served",
    "Server",
    "ServerProcess",
    "free_port",
    "serve_command",
    "served_by_engine",
    "server_variables",
    "told_variables",
]

_STOP_SECONDS = 20.0
_TAIL = 400  # lines of what a server said
_ERROR = re.compile(r"\w*(error|exception):\s", re.IGNORECASE)
#: What a process of an engine's says that tells of another's error, some lines before.
_ELSEWHERE = ("See root cause above", "See stack trace for root cause")
_LACKING = 3


class Server(ABC):
    """One or several addresses at which one method is served."""

    method: str
    addresses: tuple[Address, ...]
    own = False  # whether it is started here, and so can be stopped

    def start(self) -> None:  # noqa: B027 - one that runs already needs no start
        """Start it, without waiting until it is ready."""

    @abstractmethod
    def ended(self) -> str | None:
        """Return why it has ended, in a line; None while it runs, as far as can be told."""

    def stop(self) -> None:  # noqa: B027 - what was not started here goes on
        """End it, and give its memory back."""

    def settings(self) -> Mapping[str, str]:
        """Return what it was started with; no address, no path."""
        return {}


class Served(Server):
    """Servers that run already."""

    def __init__(self, method: str, addresses: Sequence[Address]) -> None:
        self.method = method
        self.addresses = tuple(addresses)

    def ended(self) -> str | None:
        """Return None: what happens to another's process cannot be told."""
        return None


class ServerProcess(Server):
    """Servers that are children of this process, and end with it."""

    own = True

    def __init__(
        self,
        method: str,
        commands: Callable[[int], Sequence[str]],  # of a port, returns the command of one server
        *,
        count: int = 1,  # how many; the n-th sees the n-th share of the GPUs
        settings: Mapping[str, str] | None = None,
        gpus: int = 0,  # of each server; 0 leaves the environment as it is
        unset: Sequence[str] = (),  # variables that they do not get
        variables: Mapping[str, str] | None = None,  # that they get beside this process's own
    ) -> None:
        self.method = method
        self._unset = unset
        self._variables = dict(variables or {})
        self._commands = commands
        self._count = count
        self._settings = dict(settings or {})
        self._gpus = gpus
        self._folder: TemporaryDirectory[str] | None = None
        self._running: list[tuple[subprocess.Popen[bytes], Leash, Path]] = []
        self.addresses = ()

    def settings(self) -> Mapping[str, str]:
        """Return what it was started with; no address, no path."""
        return self._settings

    def start(self) -> None:
        """Start the processes, each on a free port of loopback."""
        self._folder = TemporaryDirectory(prefix="kvprof-load-")
        addresses = []
        for number in range(self._count):
            port = free_port()
            log = Path(self._folder.name) / f"server-{number}.log"
            leash = Leash()
            try:
                with log.open("wb") as out:
                    child = leash.start(
                        list(self._commands(port)),
                        env=self._environment(number),
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
            except OSError as problem:
                raise FailedError(
                    f"{self.method}: cannot start the server: {problem.strerror}"
                ) from problem
            self._running.append((child, leash, log))
            addresses.append(Address("127.0.0.1", port))
        self.addresses = tuple(addresses)

    def ended(self) -> str | None:
        """Return why one of them has ended, with the last it said; None while all run."""
        for child, _, log in self._running:
            if (code := child.poll()) is not None:
                _kill_group(child.pid)  # what it started holds memory, and maybe a GPU's
                how = f"was killed (signal {-code})" if code < 0 else f"exited with code {code}"
                said = _last_words(log)
                return f"{self.method}: its server {how}{': ' + said if said else ''}"
        return None

    def refused(self) -> bool:
        """Whether one ended because the machine lacks something (exit code 3)."""
        return any(child.poll() == _LACKING for child, _, _ in self._running)

    def stop(self) -> None:
        """End them: as at SIGTERM first, and kill what does not end within seconds."""
        for child, _, _ in self._running:
            with suppress(OSError):
                child.terminate()
        until = time.monotonic() + _STOP_SECONDS
        for child, leash, _ in self._running:
            try:
                child.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            _kill_group(child.pid)
            leash.close()
        self._running = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def problem(self, said: str) -> FailedError | LackingError:
        """Return the error for a server that ended before it was ready."""
        return LackingError(said) if self.refused() else FailedError(said)

    def _environment(self, number: int) -> dict[str, str]:
        found = {name: value for name, value in os.environ.items() if name not in self._unset}
        found.update(self._variables)
        if not self._gpus or self._count == 1:
            return found
        stated = os.environ.get("CUDA_VISIBLE_DEVICES")
        known = stated.split(",") if stated else [str(n) for n in range(self._count * self._gpus)]
        if len(known) < self._count * self._gpus:
            raise LackingError(
                f"{self._count} servers with {self._gpus} GPUs each need more than the "
                f"{len(known)} GPUs in CUDA_VISIBLE_DEVICES"
            )
        own = known[number * self._gpus : (number + 1) * self._gpus]
        return {**found, "CUDA_VISIBLE_DEVICES": ",".join(own)}


def free_port() -> int:
    """Return a port of loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _kill_group(leader: int) -> None:
    """Kill what a process that has just ended left behind of the group that it led."""
    if os.name == "posix":
        with suppress(OSError):
            os.killpg(leader, signal.SIGKILL)


def _last_words(log: Path) -> str:
    """Return the last line of a log that tells its own error, or the last that is no mere note."""
    try:
        with log.open("rb") as file:
            lines = deque((line.decode("utf-8", "replace").strip() for line in file), _TAIL)
    except OSError:
        return ""
    said = [line for line in lines if line]
    errors = [
        line for line in said if _ERROR.search(line) and not any(way in line for way in _ELSEWHERE)
    ]
    said = [line for line in said if "INFO" not in line and "WARNING" not in line]
    return printable((errors or said or [""])[-1])[:200]


#: Baselines that vLLM serves by itself, and what it is told to store the cache in.
_OWN = {"full": "auto", "fp8": "fp8"}
_OWN_TYPES = re.compile(r"(fp8|turboquant)_\w+|\w+_per_token_head")


def served_by_engine(method: str) -> str | None:
    """Return the type of the cache in which vLLM itself serves a baseline; None for a method."""
    return _OWN.get(method, method if _OWN_TYPES.fullmatch(method) else None)


#: Variables that say how an engine runs, and what these are set to: no key, prompt or path.
_TOLD = re.compile(r"VLLM_(ALLREDUCE_)?USE_\w+")
_WORD = re.compile(r"\w{1,40}")


def server_variables(method: str, *, plan: bool = False) -> dict[str, str]:
    """Return a server's extra environment: vLLM's first model runner, except for TurboQuant."""
    stored = None if plan else served_by_engine(method)
    if stored is None:
        return {RUNNER_VARIABLE: model_runner()}
    return {RUNNER_VARIABLE: "1"} if stored.startswith("turboquant_") else {}


def told_variables(variables: Mapping[str, str]) -> str:
    """Return what a server's environment says of how it runs, ``NAME=VALUE NAME=VALUE``."""
    return " ".join(
        f"{name}={value}"
        for name, value in sorted({**os.environ, **variables}.items())
        if _TOLD.fullmatch(name) and _WORD.fullmatch(value)
    )


#: In vLLM's CPU build it counts for more than ``--kv-cache-memory-bytes``.
_CPU_MEMORY = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True)
class EngineSettings:
    """What every method's engine is started with; ``kvprof serve`` sets some more for its own."""

    #: Bytes of the cache of each GPU; None lets each engine take what it finds free.
    memory: int | None = None
    longest: int = 0  # tokens that a request may have
    tp: int = 1  # GPUs of tensor parallelism, and engines behind the engine's own router
    replicas: int = 1
    seed: int = 0
    #: Of weights, and of a cache that is not quantised: what a server chooses by itself is not the
    #: same for all.
    dtype: str = "auto"
    more: tuple[str, ...] = ()  # further options, as they were given

    @property
    def unset(self) -> tuple[str, ...]:
        """Variables of the environment that would say something else than these settings."""
        return () if self.memory is None else (_CPU_MEMORY,)

    @property
    def gpus(self) -> int:
        """GPUs of an engine: ranks of tensor parallelism, times the pipeline stages of `more`."""
        said = option_value(self.more, "--pipeline-parallel-size", least="--pi", short="-pp") or ""
        stages = int(said) if said.isdecimal() else 1
        return self.tp * stages

    def words(self) -> list[str]:
        """Return the options of vLLM, but for those that ``kvprof serve`` has itself."""
        words = ["--seed", str(self.seed), "--disable-uvicorn-access-log"]
        given = {word.partition("=")[0].replace("_", "-") for word in self.more}
        if "--dtype" not in given:
            words += ["--dtype", self.dtype]
        if self.longest and "--max-model-len" not in given:
            words += ["--max-model-len", str(self.longest)]
        if self.memory is not None:
            words += ["--kv-cache-memory-bytes", str(self.memory)]
        if self.replicas > 1:
            words += ["--data-parallel-size", str(self.replicas)]
        return [*words, *self.more]


def serve_command(
    model: str,
    port: int,
    settings: EngineSettings,
    *,
    method: str,
    options: Sequence[str] = (),
    plan: str | None = None,
    rate: float = 0.5,
) -> list[str]:
    """Return the command of a method's server: ``kvprof serve``, or for a baseline vLLM alone."""
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if plan is None and (stored := served_by_engine(method)) is not None:
        words = ["--model", model, *address, "--tensor-parallel-size", str(settings.tp)]
        words += ["--kv-cache-dtype", stored, *settings.words()]
        return module_command("kvprof.serving.load.engine", *words)
    chosen = ["--plan", plan] if plan is not None else ["--method", method, "--rate", repr(rate)]
    for entry in options if plan is None else ():
        chosen += ["--option", entry]
    words = [model, *chosen, *address, "--tp", str(settings.tp)]
    return module_command("kvprof", "serve", *words, "--", *settings.words())
