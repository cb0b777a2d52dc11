"""A client of OpenAI-compatible servers: sends completions and records when each token came.

Prompts are random tokens, or words. Each load has new texts, so a prefix cache finds only prefixes
that the load itself shares. No text is stored.
"""

import asyncio
import json
import secrets
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from kvprof.errors import FailedError
from kvprof.serving.load.http import Address, Answer, HttpError, exchange, speaks_tls
from kvprof.serving.load.requests import Outcome, Request
from kvprof.sizes import MOST

__all__ = ["Client", "Dialect", "Prompts"]

_COMPLETIONS = "/v1/completions"
_FIRST_ID, _LAST_ID = 100, 1100  # in every vocabulary, and past most special tokens
_PROBE = Request(0, 0.0, 64, 4)
_PROBE_SECONDS = 120.0
_SPARE = 16  # pieces
_BAD_REQUEST = 400
#: No answer, and what a server answers to whom, or when, it answers nothing.
_WHATEVER_IS_ASKED = (0, 401, 403, 429, 503)
_TLS = "the port uses TLS; write https://"
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")


@dataclass(frozen=True)
class Dialect:
    """What a server takes, found out by asking it."""

    ids: bool = True  # prompts as token ids; else as words
    to_the_end: bool = True  # `ignore_eos`: every answer is as long as asked for
    counted: bool = True  # each piece of an answer says how many tokens were written so far
    tokens_per_word: float = 1.0  # of prompts in words, as the server counted them

    def lacks(self) -> list[str]:
        """Say what a reader must know of a server that takes less than all of it."""
        said = []
        if not self.ids:
            said.append("the server rejects token ids; prompts are words of about the same length")
        if not self.to_the_end:
            said.append("the server rejects ignore_eos; answers may be shorter than requested")
        if not self.counted:
            said.append("the server streams no token counts; each chunk counts as one token")
        return said


@dataclass
class Prompts:
    """Makes prompts; those of one load share what their requests say, and nothing with others'."""

    _salt: int = field(default_factory=lambda: secrets.randbits(63))

    def ids(self, request: Request) -> list[int]:
        """Return `request.prompt` token ids."""
        pieces: list[Any] = []
        if request.blocks:
            pieces = [self._drawn(1, block, request.block) for block in request.blocks]
        elif request.session is not None and request.prefix:
            pieces = [self._drawn(2, request.session, request.prefix)]
        length = sum(map(len, pieces))
        if length < request.prompt:
            pieces.append(self._drawn(3, request.number, request.prompt - length))
        found: list[int] = np.concatenate(pieces)[: request.prompt].tolist()
        return found

    def words(self, request: Request, tokens_per_word: float) -> str:
        """Return about `request.prompt` tokens of words."""
        count = max(1, round(request.prompt / tokens_per_word))
        drawn = self.ids(replace(request, prompt=count, prefix=min(request.prefix, count)))
        return " ".join(_WORDS[one % len(_WORDS)] for one in drawn)

    def _drawn(self, kind: int, number: int, count: int) -> Any:
        generator = np.random.default_rng([self._salt, kind, number % 2**63])
        return generator.integers(_FIRST_ID, _LAST_ID, count)


class Client:
    """Talks to servers of one model; a key is sent as a bearer token, and never kept."""

    def __init__(
        self,
        addresses: Sequence[Address],
        model: str,
        *,
        key: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.addresses = tuple(addresses)
        self.model = model
        self.dialect = Dialect()
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    async def find_dialect(self, longest: int | None = None) -> Dialect:
        """Ask the first server what it takes, from all to the least, and keep that."""
        said, probe = "", _probe(longest)
        for ids, to_the_end, counted in product((True, False), repeat=3):
            self.dialect = Dialect(ids, to_the_end, counted)
            status, said, usage = await self._probed(probe)
            if status == 200:
                read = (usage and usage.prompt_tokens) or 0
                if not ids and 2 * read >= probe.prompt:  # no word is less than half a token
                    self.dialect = replace(self.dialect, tokens_per_word=read / probe.prompt)
                if not usage and counted:
                    self.dialect = replace(self.dialect, counted=False)
                return self.dialect
            if status in _WHATEVER_IS_ASKED:
                break
        raise FailedError(f"the server does not answer completions: {said}")

    async def _probed(self, probe: Request) -> "tuple[int, str, _Usage | None]":
        """Ask for one short completion; return its status, what went wrong, and the usage."""
        body = self.body(probe, Prompts())
        try:
            async with (
                asyncio.timeout(_PROBE_SECONDS),
                exchange(
                    self.addresses[0], "POST", _COMPLETIONS, body=body, headers=self._headers
                ) as answer,
            ):
                if answer.status != 200:
                    return answer.status, f"HTTP {answer.status}", None
                reader = _Tokens(probe.output)
                await reader.read(answer)
                said = reader.failure or ("" if reader.times()[0] else "no token arrived")
                return (500 if said else 200), said, reader.usage
        except TimeoutError:
            return 0, "timeout", None
        except (OSError, HttpError) as wrong:
            return 0, await self._unanswered(wrong), None

    def body(self, request: Request, prompts: Prompts) -> bytes:
        """Return what is sent for a request."""
        dialect = self.dialect
        prompt: Any = (
            prompts.ids(request) if dialect.ids else prompts.words(request, dialect.tokens_per_word)
        )
        asked: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": request.output,
            "temperature": 0,
            "stream": True,
        }
        if dialect.to_the_end:
            asked["ignore_eos"] = True
        if dialect.counted:
            asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return json.dumps(asked, separators=(",", ":")).encode()

    async def complete(
        self, request: Request, body: bytes, *, start: float, server: int = 0
    ) -> Outcome:
        """Send a request now, and return what became of it, by the clock that began at `start`."""
        sent = time.perf_counter() - start
        reader = _Tokens(request.output, start)
        failure = None
        try:
            async with (
                asyncio.timeout(self._timeout),
                exchange(
                    self.addresses[server], "POST", _COMPLETIONS, body=body, headers=self._headers
                ) as answer,
            ):
                if answer.status == 200:
                    await reader.read(answer)
                    failure = reader.failure
                else:
                    failure = f"HTTP {answer.status}"
        except TimeoutError:
            failure = "timeout"
        except (OSError, HttpError) as wrong:
            failure = _connection_problem(wrong)
        times, uneven = reader.times()
        # Where pieces are counted in place of tokens, nobody knows whether some are missing.
        all_counted = self.dialect.to_the_end and self.dialect.counted
        if failure is None and (not times or (all_counted and len(times) < request.output)):
            failure = "ended early"
        return Outcome(request, sent, times, failure, uneven)

    async def models(self) -> tuple[str | None, int | None]:
        """Return the first server's model and how many tokens a request may have, as it tells."""
        answer = await self.fetch("/v1/models")
        try:
            entry = json.loads(answer or b"")["data"][0]
            most = entry.get("max_model_len")
            return str(entry["id"]), most if type(most) is int and 0 < most <= MOST else None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None, None

    async def fetch(self, path: str, server: int = 0, timeout: float = 10.0) -> bytes | None:
        """Return what a server has at a path; None where it has nothing, or does not answer."""
        try:
            async with (
                asyncio.timeout(timeout),
                exchange(self.addresses[server], "GET", path, headers=self._headers) as answer,
            ):
                return await answer.body() if answer.status == 200 else None
        except (TimeoutError, OSError, HttpError):
            return None

    async def status(self, server: int = 0, timeout: float = 10.0) -> int | str:
        """Return the status with which a server names its models, or why no HTTP comes."""
        try:
            async with (
                asyncio.timeout(timeout),
                exchange(
                    self.addresses[server], "GET", "/v1/models", headers=self._headers
                ) as answer,
            ):
                status = answer.status
        except TimeoutError:
            return "timeout"
        except (OSError, HttpError) as problem:
            return await self._unanswered(problem, server)
        # Some servers say to whom asks their TLS port without it what is wrong, as HTTP.
        plain = status == _BAD_REQUEST and not self.addresses[server].tls
        return _TLS if plain and await speaks_tls(self.addresses[server]) else status

    async def _unanswered(self, problem: Exception, server: int = 0) -> str:
        """Return why no HTTP came, and whether TLS is what the port wants."""
        address = self.addresses[server]
        if isinstance(problem, HttpError) and not address.tls and await speaks_tls(address):
            return _TLS
        return _connection_problem(problem)


def _probe(longest: int | None) -> Request:
    """Return a short request, no longer than a server takes."""
    most = _PROBE.prompt + _PROBE.output if longest is None else max(2, longest)
    output = min(_PROBE.output, most // 2)
    return replace(_PROBE, prompt=min(_PROBE.prompt, most - output), output=output)


def _connection_problem(problem: Exception) -> str:
    match problem:
        case ConnectionRefusedError():
            return "connection refused"
        case socket.gaierror():
            return "no such host"
        case ssl.SSLCertVerificationError():
            return f"its certificate is not trusted: {problem.verify_message}"
        case ssl.SSLError():
            return "no TLS answer; for a server without TLS write http://"
        case HttpError():
            return str(problem)
    return "connection lost"


_Count = Annotated[int, Field(strict=True, ge=0, le=MOST)]


class _Usage(BaseModel):
    """What a server counted."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Choice(BaseModel):
    text: str | None = None
    finish_reason: str | None = None


class _Piece(BaseModel):
    """An event of a stream, as far as it is read."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


#: What lines of an event stream begin with beside ``data:``.
_EVENT_LINES = (b":", b"event:", b"id:", b"retry:")


class _Tokens:
    """Read a stream of chunks and record each token's time; a chunk is a token unless counted."""

    def __init__(self, most: int, start: float = 0.0) -> None:
        self._most = most
        self._start = start
        self._pieces: list[float] = []  # each as one token
        self._counted: list[float] | None = []  # as the server counts, while it does of every piece
        self.usage: _Usage | None = None
        self.failure: str | None = None

    async def read(self, answer: Answer) -> None:
        """Read until the stream ends."""
        ended, strange, events = False, False, 0
        async for line in answer.lines():
            if not line.startswith(b"data:"):
                cut = b"data:".startswith(line.strip())  # an empty line, or one that was cut off
                strange = strange or not (cut or line.startswith(_EVENT_LINES))
                continue
            now = time.perf_counter() - self._start
            text = line[5:].strip()
            if text == b"[DONE]":
                ended = True
                break
            try:
                piece = _Piece.model_validate_json(text)
            except ValidationError:
                self.failure = "damaged answer"
                return
            if piece.error:
                self.failure = "server error"
                return
            ended, events = self._take(piece, now) or ended, events + 1
            # A piece may be empty; so many more than tokens asked for are a stream without end.
            if max(self._total(), events // 2 - _SPARE) > self._most:
                self.failure = "more tokens than asked for"
                return
        if not ended:
            came = self._pieces or self._counted
            self.failure = "no event stream" if strange and not came else "connection lost"

    def _take(self, piece: _Piece, now: float) -> bool:
        """Count the tokens of a piece; return whether it is the last with tokens."""
        self.usage = piece.usage or self.usage
        if not piece.choices:
            return False
        text, reason = piece.choices[0].text, piece.choices[0].finish_reason
        written = piece.usage.completion_tokens if piece.usage is not None else None
        # Before the first text nothing was written; later a token may be a part of a character.
        if text or (self._pieces and not reason):
            self._pieces.append(now)
            if not written:
                self._counted = None
        if written and self._counted is not None:
            self._counted += [now] * (min(written, self._most) - len(self._counted))
        if reason in ("abort", "error"):
            self.failure = "aborted"
        return bool(reason)

    def _total(self) -> int:
        """Return how many tokens the server says that it wrote; 0 where it does not say."""
        return (self.usage and self.usage.completion_tokens) or 0

    def times(self) -> tuple[tuple[float, ...], bool]:
        """Return a time for each token, and whether the server counted other ones than came."""
        known = self._counted or self._pieces
        came, total = len(known), min(self._total(), self._most)
        if not came or total in (0, came):
            return tuple(known), False
        # Spread over all pieces, of which each holds several, or some hold none.
        return tuple(known[(2 * n + 1) * came // (2 * total)] for n in range(total)), True
