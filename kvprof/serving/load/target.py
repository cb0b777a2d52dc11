"""What a load is sent to: one method at one or several servers, or the simulator in their place."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from kvprof.errors import FailedError, KvprofError
from kvprof.serving.load.client import Client, Prompts
from kvprof.serving.load.marks import Marks, added, difference, engine_name, parse_marks
from kvprof.serving.load.requests import Outcome, Request
from kvprof.serving.load.server import Server, ServerProcess

__all__ = ["ROUTERS", "LoadObserver", "LoadOutcome", "LoadTarget", "ServedTarget", "ServerInfo"]

Stop = Callable[[], bool]

ROUTERS = ("shortest-queue", "round-robin")

_TICK = 0.2  # seconds between two looks at whether to stop
_WANT_KEY = (401, 403)  # statuses
_SAMPLES = 200  # of a rate, but no more often than every tick
_MOMENT = 0.005
_SWITCH = 0.0005  # seconds that a thread may hold another
_TIMER = 0.0012  # seconds before a request is due from which on no timer is trusted
_AHEAD = 16  # requests whose prompts are ready before they are due
_GRACE = 1.0  # seconds for connections to notice that their server has gone
_OTHER_FILES = 256
_REFUSED = 10  # in a row: nobody is there any more
_LOST = ("connection refused", "connection lost")
_BROKEN = "HTTP 500"  # of a server whose engine has gone, before it goes itself
_MARKS_SECONDS = 2.0
_ENDS = 5.0  # seconds that it may take for that


@dataclass
class ServerInfo:
    """What is known of a target once it is ready; see `kvprof.records.events.LoadServer`."""

    servers: int = 1
    engine: str | None = None
    cache_tokens: int | None = None
    cache_bytes: int | None = None
    settings: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    longest: int | None = None  # tokens that a request may have, prompt and output
    bound: str | None = None  # what says so, where it is no server


class LoadObserver(Protocol):
    """Is told what happens while a load runs."""

    def outcome(self, outcome: Outcome, server: int) -> None:
        """Take a request that has ended or failed."""

    def sample(self, at: float, sent: int, marks: Marks | None) -> None:
        """Take the state at a moment; `sent` have not ended, as the client sees it."""


@dataclass(frozen=True)
class LoadOutcome:
    """What became of a load as a whole; see `kvprof.records.events.LoadRateFinished`."""

    reason: str | None = None
    engine: dict[str, float] = field(default_factory=dict)
    gone: bool = False  # whether the target answers no more
    client_busy_share: float | None = None


class LoadTarget(Protocol):
    """What serves the requests of one method."""

    method: str
    waits_for: str  # what opening it takes time for, in a few words

    def open(self, stop: Stop) -> ServerInfo:
        """Start it, and wait until it is ready; KvprofError when it cannot be."""

    def alone(self, request: Request) -> float | str:
        """Serve one request by itself; return its seconds, or how it fails."""

    def run(self, requests: Sequence[Request], observer: LoadObserver, stop: Stop) -> LoadOutcome:
        """Serve requests that arrive at their times, and tell `observer` what becomes of them."""

    def close(self) -> None:
        """End it."""


class ServedTarget:
    """A method behind OpenAI-compatible servers; `router` spreads the requests."""

    waits_for = "waiting for the server"

    def __init__(
        self,
        server: Server,
        *,
        model: str | None = None,
        key: str | None = None,
        timeout: float = 600.0,
        ready: float = 900.0,
        router: str = "shortest-queue",
    ) -> None:
        self.method = server.method
        self._server = server
        self._model = model
        self._key = key
        self._timeout = timeout
        self._ready = ready
        self._router = router
        self._client: Client | None = None

    def open(self, stop: Stop) -> ServerInfo:
        """Start the server, wait until it answers, and find out what it takes."""
        self._server.start()
        return asyncio.run(self._opened(stop))

    async def _opened(self, stop: Stop) -> ServerInfo:
        client = self._new_client(self._model or "")
        until = time.monotonic() + self._ready
        name, longest = await client.models()
        while name is None:
            if (said := self._server.ended()) is not None:
                raise self._problem(said)
            if not self._server.own or stop():
                break
            if time.monotonic() > until:
                raise FailedError(
                    f"{self.method}: the server was not ready after {self._ready:.0f} s"
                )
            await asyncio.sleep(_TICK)
            name, longest = await client.models()
        if stop():
            return ServerInfo(servers=len(self._server.addresses))
        for number in range(1, len(self._server.addresses)):
            await self._wait_for(client, number, until, stop)
        if self._model is None and name is None:
            status = await client.status()
            if isinstance(status, str):
                raise FailedError(f"{self.method}: no server answers at --url: {status}")
            if status in _WANT_KEY:
                way = "name the environment variable with its key (--key-env)"
                raise FailedError(
                    f"{self.method}: the server refuses /v1/models (HTTP {status}); "
                    + (way if self._key is None else "it does not accept the key of --key-env")
                )
            raise FailedError(
                f"{self.method}: the server lists no model at /v1/models; name one with "
                "--served-model"
            )
        client.model = self._model or name or ""
        dialect = await client.find_dialect(longest)
        texts = [await client.fetch("/metrics", n) for n in range(len(self._server.addresses))]
        marks = added([parse_marks(text) if text else None for text in texts])
        engine = next((engine_name(text) for text in texts if text), None)
        version = await client.fetch("/version")
        warnings = dialect.lacks()
        if marks is None:
            warnings.append(
                "the server has no metrics at /metrics: running and waiting requests, cache use "
                "and preemptions are unknown"
            )
        self._client = client
        return ServerInfo(
            servers=len(self._server.addresses),
            engine=_with_version(engine, version),
            cache_tokens=marks.cache_tokens if marks is not None else None,
            cache_bytes=marks.cache_bytes if marks is not None else None,
            settings=dict(self._server.settings()),
            warnings=[f"{self.method}: {one}" for one in warnings],
            longest=longest,
        )

    async def _wait_for(self, client: Client, number: int, until: float, stop: Stop) -> None:
        while await client.fetch("/v1/models", number) is None:
            if (said := self._server.ended()) is not None:
                raise self._problem(said)
            if not self._server.own or time.monotonic() > until:
                raise FailedError(f"{self.method}: server {number + 1} does not answer")
            if stop():
                return
            await asyncio.sleep(_TICK)

    def _problem(self, said: str) -> KvprofError:
        if isinstance(self._server, ServerProcess):
            return self._server.problem(said)
        return FailedError(said)

    def _new_client(self, model: str) -> Client:
        return Client(self._server.addresses, model, key=self._key, timeout=self._timeout)

    def alone(self, request: Request) -> float | str:
        """Serve one request by itself on every server; return the longest time, or what failed."""
        client = self._opened_client()
        prompts = Prompts()

        async def ask() -> float | str:
            found = 0.0
            for number in range(len(client.addresses)):
                start = time.perf_counter()
                body = client.body(request, prompts)
                outcome = await client.complete(request, body, start=start, server=number)
                if outcome.failure is not None or not outcome.tokens:
                    return outcome.failure or "no token arrived"
                found = max(found, outcome.tokens[-1] - outcome.sent)
            return found

        return asyncio.run(ask())

    def run(self, requests: Sequence[Request], observer: LoadObserver, stop: Stop) -> LoadOutcome:
        """Send requests at their times, each on a connection of its own."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH)  # else threads that write prompts hold tokens for 5 ms
        try:
            running = _Running(self._opened_client(), self._server, self._router)
            return asyncio.run(running.run(requests, observer, stop))
        finally:
            sys.setswitchinterval(interval)

    def close(self) -> None:
        """Stop the server, where it was started here."""
        self._server.stop()

    def _opened_client(self) -> Client:
        if self._client is None:
            raise RuntimeError("the target is not open")
        return self._client


class _Running:
    """One load on its way."""

    def __init__(self, client: Client, server: Server, router: str) -> None:
        self._client = client
        self._server = server
        self._router = router
        self._in_flight = [0] * len(client.addresses)
        self._next_server = 0
        self._refused = [0] * len(client.addresses)  # in a row, of each
        self._last_lost = False  # whether the request that ended last was, with or without a server
        self._start = 0.0

    async def run(
        self, requests: Sequence[Request], observer: LoadObserver, stop: Stop
    ) -> LoadOutcome:
        _allow_connections(len(requests))
        before = await self._marks()
        bodies: asyncio.Queue[bytes | Exception] = asyncio.Queue(_AHEAD)
        making = asyncio.create_task(self._make(requests, bodies))
        while bodies.qsize() < min(_AHEAD, len(requests)) and not making.done():
            await asyncio.sleep(_MOMENT)  # before the clock starts
        self._start = time.perf_counter()
        worked, busy = time.thread_time(), None
        every = max(_TICK, (requests[-1].arrival if requests else 0.0) / _SAMPLES)
        sampling = asyncio.create_task(self._sample(every, observer))
        tasks: set[asyncio.Task[None]] = set()
        reason = None
        try:
            for request in requests:
                body = await bodies.get()
                if isinstance(body, Exception):
                    raise body
                if (reason := await self._due(request, stop)) is not None:
                    break
                server = self._route()
                self._in_flight[server] += 1
                tasks.add(asyncio.create_task(self._one(request, body, server, observer)))
                tasks = _unfinished(tasks)
            # Not to the last answer: who waits for a few that are slow is idle.
            if (spent := time.perf_counter() - self._start) >= _TICK:
                busy = (time.thread_time() - worked) / spent
            while tasks and reason is None:
                await asyncio.wait(tasks, timeout=_TICK)
                tasks = _unfinished(tasks)
                reason = self._why_stop(stop)
            if reason is None and self._last_lost:
                reason = await self._why_silent()
            gone = reason is not None and not stop()
            if tasks and gone:  # what was lost is counted as lost
                _, tasks = await asyncio.wait(tasks, timeout=_GRACE)
        finally:
            for task in (making, sampling, *tasks):
                task.cancel()
            await asyncio.gather(making, sampling, *tasks, return_exceptions=True)
        after = None if gone else await self._marks()
        return LoadOutcome(reason, difference(before, after), gone, busy)

    async def _make(
        self, requests: Sequence[Request], bodies: "asyncio.Queue[bytes | Exception]"
    ) -> None:
        """Write prompts before they are due, beside the loop that waits for tokens."""
        prompts = Prompts()
        try:
            for request in requests:
                await bodies.put(await asyncio.to_thread(self._client.body, request, prompts))
        except Exception as problem:  # whoever waits for the next one raises it
            await bodies.put(problem)

    async def _due(self, request: Request, stop: Stop) -> str | None:
        """Wait for a request's time; return why it shall not be sent any more."""
        while True:
            if (reason := self._why_stop(stop)) is not None:
                return reason
            left = request.arrival - self._now()
            if left > _TIMER:
                await asyncio.sleep(min(left - _TIMER, _TICK))
                continue
            while self._now() < request.arrival:  # a timer is late by up to a millisecond
                await asyncio.sleep(0)
            return None

    def _why_stop(self, stop: Stop) -> str | None:
        if stop():
            return "interrupted"
        if (said := self._server.ended()) is not None:
            return said
        # One of several is enough: who answers nothing has the shortest queue, and would get all.
        gone = [number for number, lost in enumerate(self._refused, 1) if lost >= _REFUSED]
        if len(gone) == len(self._refused):
            return f"{self._server.method}: the server stopped answering"
        if gone:
            return f"{self._server.method}: server {gone[0]} stopped answering"
        return None

    async def _why_silent(self) -> str | None:
        """Return why nobody answers after the last request was lost; None where all still do.

        A server that dies late in a rate loses too few requests to be missed, and takes seconds to
        end behind an engine that is gone.
        """
        until = time.monotonic() + _ENDS
        while (said := self._server.ended()) is None and self._server.own:
            if time.monotonic() > until:
                break
            await asyncio.sleep(_TICK)
        for number in range(len(self._in_flight)):
            if said is None and isinstance(await self._client.status(number), str):
                said = f"{self._server.method}: server {number + 1} stopped answering"
        return said

    def _route(self) -> int:
        count = len(self._in_flight)
        servers = [(self._next_server + n) % count for n in range(count)]
        if self._router == "round-robin":
            server = servers[0]
        else:
            server = min(servers, key=lambda n: self._in_flight[n])
        self._next_server = (server + 1) % count
        return server

    async def _one(
        self, request: Request, body: bytes, server: int, observer: LoadObserver
    ) -> None:
        outcome = await self._client.complete(request, body, start=self._start, server=server)
        self._in_flight[server] -= 1
        lost = outcome.failure in _LOST
        self._refused[server] = self._refused[server] + 1 if lost else 0
        self._last_lost = lost or outcome.failure == _BROKEN
        observer.outcome(outcome, server)

    async def _sample(self, every: float, observer: LoadObserver) -> None:
        while True:
            marks = await self._marks()
            observer.sample(self._now(), sum(self._in_flight), marks)
            await asyncio.sleep(every)

    async def _marks(self) -> Marks | None:
        """Read what the engines say on a loop of its own: reading it takes no token's time."""
        return await asyncio.to_thread(asyncio.run, self._read_marks())

    async def _read_marks(self) -> Marks | None:
        fetched = (
            self._client.fetch("/metrics", number, timeout=_MARKS_SECONDS)
            for number in range(len(self._in_flight))
        )
        texts = await asyncio.gather(*fetched)
        return added([parse_marks(text) if text else None for text in texts])

    def _now(self) -> float:
        return time.perf_counter() - self._start


def _unfinished(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Return those that go on; what one of the others failed with is raised, not lost."""
    for task in tasks:
        if task.done():
            task.result()
    return {task for task in tasks if not task.done()}


def _allow_connections(count: int) -> None:
    """Let the process have a connection open for every request, as far as the system lets it."""
    if os.name != "posix":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _with_version(engine: str | None, answer: bytes | None) -> str | None:
    version = ""
    if answer:
        with suppress(ValueError, AttributeError, RecursionError):
            version = str(json.loads(answer).get("version") or "")[:40]
    return f"{engine or 'an engine'} {version}" if version else engine
