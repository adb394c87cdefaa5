"""HTTP/1.1 exchanges that keep the time of every socket read.

Owns the connection, the request's bytes, the framing of the response and the stamps. Does not know
what a body means: nothing is decoded before the exchange is over, so that the client's own work is
not in its times. The clock is the event loop's, in nanoseconds.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 64 * 1024
_PORTS = {"http": 80, "https": 443}


class HttpError(Exception):
    """An exchange that could not be made or that broke; the message says which and how."""


@dataclass(frozen=True)
class Target:
    """A server by its address; base: the path in front of every other, without a slash behind."""

    scheme: str
    host: str
    port: int
    base: str

    @classmethod
    def from_url(cls, url: str) -> Target:
        """Raises HttpError. A `/v1` at the end, which other clients want, is taken off."""
        no_address = f"{url!r} is no address of a server, such as http://127.0.0.1:8000."
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
        except ValueError:
            raise HttpError(no_address) from None
        try:
            port = parts.port
        except ValueError:
            raise HttpError(f"{url!r} has a port that is no number up to 65535.") from None
        if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
            raise HttpError(no_address)
        if port == 0 or not (parts.hostname + parts.path).isascii():
            raise HttpError(f"{url!r} has the port 0, or characters that are not ASCII.")
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], base)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass
class Exchange:
    """One request and what came back. reads: (time, bytes of the body) of every socket read.

    send_ns: the request was written to a connection that was open already. error: why the response
    ended early; what had been read until then is kept.
    """

    send_ns: int = 0
    end_ns: int = 0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    reads: list[tuple[int, bytes]] = field(default_factory=list)
    error: str | None = None

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.reads)


def now_ns() -> int:
    """The running loop's clock."""
    return round(asyncio.get_running_loop().time() * 1e9)


async def exchange(
    target: Target,
    method: str,
    path: str,
    document: Mapping[str, Any] | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
) -> Exchange:
    """Sends one request on a connection of its own. Raises HttpError when there is no response."""
    body = b"" if document is None else json.dumps(document, separators=(",", ":")).encode()
    head = {
        "Host": target.authority,
        "Connection": "close",
        "Accept-Encoding": "identity",
        **({"Content-Type": "application/json"} if body else {}),
        "Content-Length": str(len(body)),
        **(headers or {}),
    }
    lines = [f"{method} {target.base}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in head.items())]
    request = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
    loop = asyncio.get_running_loop()
    where = f"{method} {target.scheme}://{target.authority}{target.base}{path}"
    tls = ssl.create_default_context() if target.scheme == "https" else None
    try:
        async with asyncio.timeout(timeout_s):
            transport, protocol = await loop.create_connection(
                lambda: _Connection(loop), target.host, target.port, ssl=tls
            )
            try:
                protocol.found.send_ns = now_ns()
                transport.write(request)
                await protocol.done
            finally:
                transport.abort()
    except TimeoutError:
        raise HttpError(f"{where}: no complete response within {timeout_s:g} s") from None
    except (OSError, UnicodeError) as error:
        # A host's name with an empty or a long part is a UnicodeError.
        raise HttpError(f"{where}: {error}") from error
    if not protocol.found.status:
        raise HttpError(f"{where}: {protocol.found.error}")
    return protocol.found


async def fetch_json(
    target: Target, path: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 30.0
) -> dict[str, Any] | None:
    """The object at a path; None where the server has no such path. Raises HttpError."""
    where = f"GET {target.scheme}://{target.authority}{target.base}{path}"
    found = await exchange(target, "GET", path, headers=headers, timeout_s=timeout_s)
    if found.status in (404, 405):
        return None
    if found.status != 200 or found.error is not None:
        reason = found.error or excerpt(found.body)
        raise HttpError(f"{where}: status {found.status}: {reason}")
    try:
        document = json.loads(found.body)
    except (ValueError, RecursionError):
        raise HttpError(f"{where}: {excerpt(found.body)!r} is not JSON") from None
    if not isinstance(document, dict):
        raise HttpError(f"{where}: {excerpt(found.body)} is no object")
    return document


def excerpt(body: bytes, limit: int = 300) -> str:
    """A body as messages show it."""
    text = " ".join(body.decode(errors="replace").split())
    return text[:limit] + ("..." if len(text) > limit else "")


class _Connection(asyncio.Protocol):
    """Stamps what arrives, and knows when the response is complete."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._framing = _Framing()
        self.found = Exchange()
        self.done: asyncio.Future[None] = loop.create_future()

    def data_received(self, data: bytes) -> None:
        stamp = round(self._loop.time() * 1e9)
        if self.done.done():
            return
        try:
            piece = self._framing.feed(data)
        except HttpError as error:
            self._end(stamp, str(error))
            return
        self.found.status, self.found.headers = self._framing.status, self._framing.headers
        if piece:
            self.found.reads.append((stamp, piece))
        if self._framing.is_complete:
            self._end(stamp, None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        is_end = error is None and self._framing.ends_with_connection
        self._end(
            round(self._loop.time() * 1e9),
            None if is_end else f"the connection was closed in the middle of a response ({error})",
        )

    def _end(self, stamp: int, error: str | None) -> None:
        self.found.end_ns, self.found.error = stamp, error
        self.done.set_result(None)


class _Framing:
    """Where the head ends and which of the bytes behind it are the body."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._buffer = b""
        self._is_chunked = False
        # Bytes still to come of a body with a length, or of a chunk; None: not known yet.
        self._left: int | None = None

    @property
    def ends_with_connection(self) -> bool:
        return bool(self.status) and not self._is_chunked and self._left is None

    def feed(self, data: bytes) -> bytes:
        """The body's bytes among those that arrived. Raises HttpError."""
        self._buffer += data
        if not self.status and not self._read_head():
            return b""
        if self._is_chunked:
            return self._chunks()
        piece, self._buffer = self._buffer, b""
        if self._left is not None:
            piece = piece[: self._left]
            self._left -= len(piece)
            self.is_complete = self._left == 0
        return piece

    def _read_head(self) -> bool:
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise HttpError(f"The response's head is longer than {MAX_HEAD_BYTES} bytes.")
            return False
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdecimal():
            raise HttpError(f"{lines[0][:80]!r} is no first line of an HTTP/1.1 response.")
        pairs = (line.partition(":") for line in lines[1:])
        self.headers = {key.strip().lower(): value.strip() for key, _, value in pairs}
        self.status = int(words[1])
        self._buffer = rest
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if not self._is_chunked and length is not None:
            if not length.isdecimal():
                raise HttpError(f"The response's Content-Length is {length[:40]!r}.")
            self._left = int(length)
        if self.status in (204, 304):
            self._left = 0
        self.is_complete = self._left == 0 and not self._is_chunked
        return True

    def _chunks(self) -> bytes:
        pieces = []
        while not self.is_complete:
            if self._left is None:
                line, end, rest = self._buffer.partition(b"\r\n")
                if not end:
                    break
                size = line.split(b";")[0].strip()
                try:
                    self._left = int(size, 16)
                except ValueError:
                    raise HttpError(f"{size[:40]!r} is no size of a chunk.") from None
                self._buffer = rest
                self.is_complete = self._left == 0
                continue
            piece = self._buffer[: self._left]
            pieces.append(piece)
            self._left -= len(piece)
            self._buffer = self._buffer[len(piece) :]
            if self._left or len(self._buffer) < 2:
                break
            self._buffer, self._left = self._buffer[2:], None
        return b"".join(pieces)
