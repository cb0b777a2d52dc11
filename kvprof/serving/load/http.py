"""HTTP/1.1 as far as a load needs it: one request a connection, its answer line by line.

Python's own streams do: a library would cost more of the client's time for each token than reading
it does, and what is measured is when a token came. Answers are not compressed, redirections are not
followed, proxies are not asked.
"""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from kvprof.errors import UsageError

__all__ = ["Address", "Answer", "HttpError", "exchange", "parse_address"]

_LIMIT = 2**22  # bytes of a line
_MOST_BODY = 2**26
_PIECE = 2**16
_HEADERS = 200


class HttpError(Exception):
    """No answer of HTTP came, or it broke off."""


@dataclass(frozen=True)
class Address:
    """Where a server listens.

    Attributes
    ----------
    host : str
    port : int
    path : str
        Before every path that is asked for; no slash at its end.
    tls : bool
    """

    host: str
    port: int
    path: str = ""
    tls: bool = False


def parse_address(url: str) -> Address:
    """Read ``http://127.0.0.1:8000``, with or without ``/v1`` at its end.

    Raises
    ------
    UsageError
        When it is no such address, or holds a user or a key, which would enter records.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
        (parts.hostname or "").encode("idna")  # a name that cannot be looked up
    except ValueError:
        # Without what stands before an @, or behind the path, which may be a key.
        shown = re.split(r"[?#]", url.rpartition("@")[2])[0][:60]
        raise UsageError(f"--url {shown} is no address; write http://127.0.0.1:8000") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(
            "--url takes an address alone; a key belongs into an environment variable (--key-env)"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url {url[:60]}: write http://127.0.0.1:8000 or https://…")
    if port == 0:
        raise UsageError(
            f"--url {url[:60]}: no server listens at port 0; write http://127.0.0.1:8000"
        )
    tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.hostname, port or (443 if tls else 80), path, tls)


@dataclass
class Answer:
    """The beginning of an answer, and what reads the rest of it."""

    status: int
    headers: dict[str, str]
    _reader: asyncio.StreamReader

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the body's lines as they come, without their ends.

        Raises
        ------
        HttpError
            When it breaks off.
        """
        rest = b""
        async for piece in self._pieces():
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
            if len(rest) > _LIMIT:
                raise HttpError("a line has no end")
        if rest:
            yield rest

    async def body(self) -> bytes:
        """Return the whole body.

        Raises
        ------
        HttpError
            When it breaks off or is too long.
        """
        found = bytearray()
        async for piece in self._pieces():
            found += piece
            if len(found) > _MOST_BODY:
                raise HttpError("the answer is too long")
        return bytes(found)

    async def _pieces(self) -> AsyncIterator[bytes]:
        reader = self._reader
        try:
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int((await reader.readline()).split(b";")[0], 16):
                    if size < 0:
                        raise HttpError("the connection was lost")
                    while size:  # in pieces: a server may announce more than fits into memory
                        piece = await reader.readexactly(min(size, _PIECE))
                        size -= len(piece)
                        yield piece
                    await reader.readexactly(2)
            elif (length := self.headers.get("content-length")) is not None:
                left = int(length)
                while left > 0:
                    piece = await reader.read(min(left, _PIECE))
                    if not piece:
                        raise HttpError("the connection was lost")
                    left -= len(piece)
                    yield piece
            else:
                while piece := await reader.read(_PIECE):
                    yield piece
        except (ValueError, EOFError, OSError) as wrong:
            raise HttpError("the connection was lost") from wrong


@asynccontextmanager
async def exchange(
    address: Address,
    method: str,
    path: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[Answer]:
    """Send a request on a connection of its own, and yield the answer's beginning.

    Raises
    ------
    OSError
        When no connection can be made.
    HttpError
        When something else than HTTP answers, or nothing.
    """
    context = _tls() if address.tls else None
    reader, writer = await asyncio.open_connection(
        address.host, address.port, ssl=context, limit=_LIMIT
    )
    try:
        host = f"[{address.host}]" if ":" in address.host else address.host
        given = {
            "Host": f"{host}:{address.port}",
            "Connection": "close",
            "Accept-Encoding": "identity",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        writer.write(f"{method} {address.path}{path} HTTP/1.1\r\n{head}\r\n".encode())
        writer.write(body)
        try:
            await writer.drain()
            yield await _begun(reader)
        except (ConnectionError, EOFError) as wrong:
            raise HttpError("the connection was lost") from wrong
    finally:
        # Not `close`: it would wait for a server that reads no more to take what is left to send.
        writer.transport.abort()
        with suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()


@cache
def _tls() -> ssl.SSLContext:
    """Return what certificates are checked against: reading them takes tens of milliseconds."""
    return ssl.create_default_context()


async def _begun(reader: asyncio.StreamReader) -> Answer:
    try:
        words = (await reader.readline()).split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
            raise HttpError("no HTTP answer" if words else "the connection was lost")
        headers: dict[str, str] = {}
        for _ in range(_HEADERS):
            line = await reader.readline()
            if line in (b"\r\n", b"\n", b""):
                return Answer(int(words[1]), headers, reader)
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
    except ValueError as wrong:
        raise HttpError("no HTTP answer") from wrong
    raise HttpError("no HTTP answer")
