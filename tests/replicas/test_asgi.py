"""An application across a border: messages as they come, and a client that leaves."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from kdecode.replicas import asgi

CALL = asgi.get("/there")


async def _all(app: Any, call: asgi.Call = CALL) -> list[list[Message]]:
    return [batch async for batch in asgi.messages(app, call)]


def test_what_is_there_comes_at_once_and_the_rest_as_it_comes() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["path"] == "/there"
        assert (await receive()) == {"type": "http.request", "body": b"ask", "more_body": False}
        await send({"n": 1})
        await send({"n": 2})
        await asyncio.sleep(0.01)
        await send({"n": 3})

    call = asgi.Call(CALL.scope, b"ask")
    assert asyncio.run(_all(app, call)) == [[{"n": 1}, {"n": 2}], [{"n": 3}]]


def test_an_application_that_fails_ends() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"n": 1})
        raise ValueError

    assert asyncio.run(_all(app)) == [[{"n": 1}]]


def test_one_that_nobody_reads_sees_its_client_leave() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"n": 1})
        seen.append(await receive())

    async def leave() -> None:
        messages = asgi.messages(app, CALL)
        await anext(messages)
        await messages.aclose()

    asyncio.run(leave())
    assert seen == [{"type": "http.disconnect"}]


def test_only_what_can_cross_is_taken_of_a_scope() -> None:
    scope = {**CALL.scope, "extensions": {}, "app": object(), "state": object()}
    assert asgi.call_of(scope, b"body", ("name",)) == asgi.Call(CALL.scope, b"body", ("name",))


def test_a_whole_answer() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    assert asyncio.run(asgi.document(app, CALL)) == (201, b"ab")
