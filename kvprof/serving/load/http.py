"""A minimal HTTP/1.1 client on h11: one request a connection, without redirects or proxies.

httpx takes several times as long for each chunk, which would distort token times.
"""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

import h11

from kvprof.errors import UsageError

__all__ = ["Address", "Answer", "HttpError", "exchange", "parse_address", "speaks_tls"]

_MOST_HEAD = 2**16  # bytes of an answer's status and headers, or of what frames a piece
_MOST_LINE = 2**20
_MOST_BODY = 2**22
_PIECE = 2**16
_NO_HTTP = "no HTTP answer"
_LOST = "connection lost"


class HttpError(Exception):
    """No answer of HTTP came, or it broke off; in a few words, as an `Outcome` has it."""


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    path: str = ""  # before every path that is asked for; no slash at its end
    tls: bool = False

    def request(self, method: str, path: str, headers: Mapping[str, str]) -> h11.Request:
        """Return the head of a request; ValueError or h11's error for what no head can hold."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        own = {
            "Host": f"{host}:{self.port}",
            "Connection": "close",
            "Accept-Encoding": "identity",
        }
        return h11.Request(
            method=method, target=self.path + path, headers=list((own | dict(headers)).items())
        )


def parse_address(url: str) -> Address:
    """Read ``http://127.0.0.1:8000/v1``; refuse users and keys, which would enter records."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        tls = parts.scheme == "https"
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode()  # else a name nobody can look up
        path = parts.path.rstrip("/").removesuffix("/v1")
        address = Address(host, (443 if tls else 80) if port is None else port, path, tls)
        address.request("GET", "/", {})
    except (ValueError, h11.LocalProtocolError):
        # Without what stands before an @, or behind the path, which may be a key.
        shown = re.split(r"[?#]", url.rpartition("@")[2])[0][:60]
        raise UsageError(f"--url {shown} is not an address; try http://127.0.0.1:8000") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(
            "--url must not contain a key; put the key in an environment variable (--key-env)"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"--url {url[:60]}: write http://127.0.0.1:8000 or https://…")
    if port == 0:
        raise UsageError(
            f"--url {url[:60]}: port 0 is not a server's port; try http://127.0.0.1:8000"
        )
    return address


class Answer:
    """An answer whose head has come, and what reads the rest of it."""

    status: int

    def __init__(self, protocol: h11.Connection, reader: asyncio.StreamReader) -> None:
        self._protocol = protocol
        self._reader = reader

    async def begin(self) -> None:
        """Read the head; answers of 1xx before it say nothing."""
        try:
            while not isinstance(event := self._protocol.next_event(), h11.Response):
                if event is h11.NEED_DATA:
                    self._protocol.receive_data(await self._reader.read(_PIECE))
        except h11.RemoteProtocolError as wrong:
            began, ended = self._protocol.trailing_data
            cut = ended and b"HTTP/".startswith(began[:5])
            raise HttpError(_LOST if cut else _NO_HTTP) from wrong
        except OSError as wrong:
            raise HttpError(_LOST) from wrong
        self.status = event.status_code

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes; HttpError where it breaks off."""
        try:
            while not isinstance(event := self._protocol.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Data):
                    yield event.data
                else:
                    self._protocol.receive_data(await self._reader.read(_PIECE))
        except (h11.RemoteProtocolError, OSError) as wrong:
            raise HttpError(_LOST) from wrong

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the body's lines as they come, but for empty ones; HttpError as `pieces`."""
        rest = b""
        async for piece in self.pieces():
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                if line := line.rstrip(b"\r"):
                    yield line
            if len(rest) > _MOST_LINE:
                raise HttpError(_LOST)
        if rest:
            yield rest

    async def body(self) -> bytes:
        """Return the whole body; HttpError where it breaks off, or is longer than any of use."""
        found = bytearray()
        async for piece in self.pieces():
            found += piece
            if len(found) > _MOST_BODY:
                raise HttpError("too long an answer")
        return bytes(found)


@asynccontextmanager
async def exchange(
    address: Address,
    method: str,
    path: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[Answer]:
    """Send a request on a connection of its own; OSError without one, HttpError without HTTP."""
    context = _tls() if address.tls else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    try:
        protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEAD)
        head = address.request(method, path, {**(headers or {}), "Content-Length": str(len(body))})
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        writer.write(b"".join(protocol.send(event) or b"" for event in events))  # one packet
        with suppress(ConnectionError):  # who reads no more may still have said why
            await writer.drain()
        answer = Answer(protocol, reader)
        await answer.begin()
        yield answer
    finally:
        # Not `close`: it would wait for a server that reads no more to take what is left to send.
        writer.transport.abort()
        with suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()


async def speaks_tls(address: Address) -> bool:
    """Whether a port that was asked without TLS speaks it, whoever certifies it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection(
            address.host, address.port, ssl=context, ssl_handshake_timeout=5.0
        )
    except OSError:
        return False
    writer.transport.abort()
    return True


@cache
def _tls() -> ssl.SSLContext:
    """Return what certificates are checked against: reading them takes tens of milliseconds."""
    return ssl.create_default_context()
