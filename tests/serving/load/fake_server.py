"""An OpenAI-compatible server with known queueing: so many slots, so many seconds a token.

Run by itself (``python -m tests.serving.load.fake_server --port N``) it is a child as
``kvprof serve`` would be.
"""

import argparse
import asyncio
import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Behaviour:
    slots: int = 4
    token_seconds: float = 0.002
    #: Of a token, for each 1,000 tokens that all running requests hold.
    context_seconds: float = 0.0
    prefill_seconds: float = 0.0  # of a prompt token
    takes_ids: bool = True
    takes_ignore_eos: bool = True
    takes_counts: bool = True
    refusal: int = 400  # the status of an answer to what it does not take
    marks: bool = True
    pieces: int = 1  # tokens in a piece
    longest: int | None = 100_000
    fails: dict[int, str] = field(default_factory=dict)  # n-th completion: 503, hang, cut, error
    dies_after: int | None = None
    lingers: float = 0.0  # seconds that it answers 500 before it dies, as one without its engine
    key: str | None = None


class FakeServer:
    def __init__(self, behaviour: Behaviour | None = None, port: int = 0) -> None:
        self.behaviour = behaviour or Behaviour()
        self.port = port
        self.bodies: list[dict[str, Any]] = []
        self.running = self.waiting = self.held = 0
        self.totals = dict.fromkeys(("ended", "queue", "prefill", "decode", "whole"), 0.0)
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None

    # --- As a context manager: in a thread of this process.

    def __enter__(self) -> "FakeServer":
        self._thread = threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        assert self._thread is not None
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._over.set)

    async def serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._slots = asyncio.Semaphore(self.behaviour.slots)
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=2**24)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        length = next(
            int(line.split(":")[1])
            for line in head.splitlines()
            if "content-length" in line.lower()
        )
        body = await reader.readexactly(length)
        key = self.behaviour.key
        if key is not None and f"Authorization: Bearer {key}" not in head:
            return self._plain(writer, 401, {"error": "no key"})
        if path == "/v1/models":
            entry = {"id": "fake", "max_model_len": self.behaviour.longest}
            return self._plain(writer, 200, {"data": [entry]})
        if path == "/version":
            return self._plain(writer, 200, {"version": "9.9"})
        if path == "/metrics" and self.behaviour.marks:
            return self._write(writer, 200, "text/plain", self._marks().encode())
        if path != "/v1/completions":
            return self._plain(writer, 404, {"error": "nothing there"})
        await self._complete(json.loads(body), writer)
        return None

    async def _complete(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        behaviour = self.behaviour
        self.bodies.append(asked)
        number = len(self.bodies)
        if behaviour.dies_after is not None and number > behaviour.dies_after:
            if behaviour.lingers:
                dies = (os.getpid(), signal.SIGKILL)
                threading.Timer(behaviour.lingers, os.kill, dies).start()
                return self._plain(writer, 500, {"error": "engine is dead"})
            os.kill(os.getpid(), signal.SIGKILL)
        refused = (
            (isinstance(asked["prompt"], list) and not behaviour.takes_ids)
            or ("ignore_eos" in asked and not behaviour.takes_ignore_eos)
            or ("stream_options" in asked and not behaviour.takes_counts)
        )
        if refused:
            if behaviour.refusal != 200:
                return self._plain(writer, behaviour.refusal, {"error": "unknown field"})
            event = b'data: {"error": {"message": "unknown field"}}\n\n'
            return self._write(writer, 200, "text/event-stream", event)
        ids = len(asked["prompt"]) if isinstance(asked["prompt"], list) else 0
        if behaviour.longest is not None and ids + asked["max_tokens"] > behaviour.longest:
            return self._plain(writer, 400, {"error": "too long"})
        fault = behaviour.fails.get(number)
        if fault is not None and fault.isdecimal():
            return self._plain(writer, int(fault), {"error": "busy"})
        prompt = asked["prompt"]
        held = len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split())
        came = time.perf_counter()
        self.waiting += 1
        async with self._slots:
            self.waiting -= 1
            self.running += 1
            self.held += held
            began = time.perf_counter()
            try:
                await self._write_tokens(asked, held, fault, writer, came, began)
            finally:
                self.running -= 1
                self.held -= held
        return None

    async def _write_tokens(
        self,
        asked: dict[str, Any],
        prompt: int,
        fault: str | None,
        writer: asyncio.StreamWriter,
        came: float,
        began: float,
    ) -> None:
        behaviour = self.behaviour
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        if fault == "hang":
            await asyncio.sleep(60)
        await asyncio.sleep(behaviour.prefill_seconds * prompt)
        first = time.perf_counter()
        total, written = asked["max_tokens"], 0
        counted = "stream_options" in asked
        while written < total:
            more = min(behaviour.pieces, total - written)
            at = first + (written + more - 1) * behaviour.token_seconds
            pause = at - time.perf_counter() if not behaviour.context_seconds else 0.0
            if behaviour.context_seconds:
                pause = behaviour.token_seconds + behaviour.context_seconds * self.held / 1000
            if pause > 0:
                await asyncio.sleep(pause)
            written += more
            choice = {"text": "x" * more, "finish_reason": "length" if written == total else None}
            piece: dict[str, Any] = {"choices": [choice]}
            if counted:
                piece["usage"] = {"completion_tokens": written, "prompt_tokens": prompt}
            if fault == "cut" and written > 1:
                return
            if fault == "error" and written > 1:
                piece = {"error": {"message": "out of memory"}}
            self._chunk(writer, f"data: {json.dumps(piece)}\n\n".encode())
            await writer.drain()
        done = time.perf_counter()
        for name, seconds in (
            ("queue", began - came),
            ("prefill", first - began),
            ("decode", done - first),
            ("whole", done - came),
            ("ended", 1.0),
        ):
            self.totals[name] += seconds
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _marks(self) -> str:
        totals, labels = self.totals, '{engine="0",model_name="fake"}'
        lines = [
            "# HELP vllm:num_requests_running running",
            f"vllm:num_requests_running{labels} {self.running}.0",
            f"vllm:num_requests_waiting{labels} {self.waiting}.0",
            f"vllm:kv_cache_usage_perc{labels} {self.running / self.behaviour.slots}",
            f"vllm:num_preemptions_total{labels} 0.0",
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0',
            f"vllm:e2e_request_latency_seconds_count{labels} {totals['ended']}",
            f"vllm:e2e_request_latency_seconds_sum{labels} {totals['whole']}",
            f"vllm:request_queue_time_seconds_sum{labels} {totals['queue']}",
            f"vllm:request_prefill_time_seconds_sum{labels} {totals['prefill']}",
            f"vllm:request_decode_time_seconds_sum{labels} {totals['decode']}",
        ]
        return "\n".join(lines) + "\n"

    def _plain(self, writer: asyncio.StreamWriter, status: int, entry: dict[str, Any]) -> None:
        self._write(writer, status, "application/json", json.dumps(entry).encode())

    def _write(self, writer: asyncio.StreamWriter, status: int, kind: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--behaviour", default="{}")
    given = parser.parse_args()
    asyncio.run(FakeServer(Behaviour(**json.loads(given.behaviour)), given.port).serve())
