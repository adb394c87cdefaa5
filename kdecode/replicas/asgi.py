"""An ASGI application that is called from another process: a request in, its messages out.

Owns the value that crosses, and that an application sees its client leave when nobody reads its
messages any more. Does not know Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

# What an application may read of a request; other entries are objects of the server's process.
SCOPE_KEYS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)
# In which an application that has seen its client leave has to end.
LEAVE_SECONDS = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """A request as it goes to a replica. names: see `prefixes`; the router reads them."""

    scope: dict[str, Any]
    body: bytes = b""
    names: tuple[str, ...] = ()


def call_of(scope: Scope, body: bytes, names: tuple[str, ...]) -> Call:
    return Call({key: scope[key] for key in SCOPE_KEYS if key in scope}, body, names)


def get(path: str) -> Call:
    """A request for a document of the application itself."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [],
    }
    return Call(scope)


async def messages(app: ASGIApp, call: Call) -> AsyncIterator[list[Message]]:
    """What the application sends: at each time all that is there.

    An application that fails just ends; what it had not sent is for the caller to say.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    requests: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(call.scope, receive, sent.put)
        except Exception:
            log.exception("a request to %s broke", call.scope["path"])
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        is_over = False
        while not is_over:
            batch = [await sent.get()]
            while not sent.empty():
                batch.append(sent.get_nowait())
            is_over = batch[-1] is None
            if found := [message for message in batch if message is not None]:
                yield found
    finally:
        gone.set()
        # Cancelled if it does not end: it must not go on without anybody who reads it.
        await asyncio.wait({task}, timeout=LEAVE_SECONDS)
        task.cancel()


async def document(app: ASGIApp, call: Call) -> tuple[int, bytes]:
    """The status and the body of a whole answer."""
    status, body = 500, b""
    async for batch in messages(app, call):
        for message in batch:
            status = message.get("status", status)
            body += message.get("body", b"")
    return status, body
