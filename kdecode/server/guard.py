"""What every HTTP request has to pass before a route sees it: the key, the size, the time.

Owns API keys and the limits of bodies. Plain ASGI, so that routes still see a disconnect.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kdecode.server.errors import ApiError, response_of

log = logging.getLogger(__name__)

# Answered without a key, as monitoring expects; none of them tells what anybody wrote.
OPEN_PATHS = frozenset(("/", "/health", "/ping", "/metrics", "/version"))


@dataclass(frozen=True)
class Limits:
    """max_body_bytes: of one request. body_s: seconds in which its body has to arrive."""

    max_body_bytes: int = 32 * 2**20
    body_s: float = 60.0


class Guard:
    def __init__(self, app: ASGIApp, api_keys: Sequence[str], limits: Limits) -> None:
        self._app = app
        # Digests have one length, so that a comparison takes one time.
        self._keys = [_digest(key.encode()) for key in api_keys]
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._serve(scope, receive, send)
        except asyncio.CancelledError:
            # Only the end of the process cancels a request, and waits for nothing behind this.
            log.warning("a request to %s was cut off by the end of the server", scope["path"])

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_key(scope)
            body = await self._read(scope, receive)
        except ApiError as error:
            await response_of(error)(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _check_key(self, scope: Scope) -> None:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        digest = _digest(given.strip())
        # All keys are compared, whichever fits.
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(401, "The API key is missing or wrong.", "invalid_api_key")

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None when the client went away before it was complete."""
        limit = self._limits.max_body_bytes
        announced = _header(scope, b"content-length")
        if announced.isdigit() and int(announced[:20]) > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > limit:
                        raise _too_large(limit)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise ApiError(
                408,
                f"The request's body did not arrive in {self._limits.body_s:g} seconds.",
                "request_timeout",
            ) from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, and then whatever else happens to the connection."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _too_large(limit: int) -> ApiError:
    message = f"The request's body is larger than {limit:,} bytes, the limit of this server."
    return ApiError(413, message, "request_too_large")
