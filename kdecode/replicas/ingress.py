"""Where requests come in: keys and limits are checked, and a replica answers.

Owns the way between Ray's HTTP proxy and a replica, and what a client is told when a replica ends
under its request. Which replica it is, the router decides by the names that are found here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kdecode.engine.async_engine import EngineStoppedError
from kdecode.replicas import asgi
from kdecode.replicas.exposition import merged
from kdecode.replicas.prefixes import prefix_names
from kdecode.server.api import METRICS_TYPE
from kdecode.server.errors import ApiError, response_of
from kdecode.server.guard import Guard, Limits
from kdecode.server.stream import DONE, sse

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

HEALTH_PATHS = frozenset(("/health", "/ping"))
# In which replicas have to answer what all of them are asked.
ASK_SECONDS = 5.0
# The code of requests that a replica did not take, because its engine had broken before. They go to
# another one when that one has left.
NOT_TAKEN = "engine_stopped"
PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)
# Bodies above this are read in a thread, so that nobody's stream waits for it.
LARGE_BODY = 256 * 1024

log = logging.getLogger(__name__)


class Ingress:
    """A deployment. first_bytes: see `prefixes`."""

    def __init__(
        self,
        replicas: DeploymentHandle,
        api_keys: Sequence[str],
        limits: Limits,
        first_bytes: int,
    ) -> None:
        self._app = Guard(Front(replicas, first_bytes), api_keys, limits)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Ray, which gives the application its requests."""
        return self._app


class Front:
    """The ASGI application. Its requests have passed the guard, which has read their bodies."""

    def __init__(self, replicas: DeploymentHandle, first_bytes: int) -> None:
        self._replicas = replicas
        self._answers = replicas.options(method_name="answer", stream=True)
        self._first_bytes = first_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] != "http":
            return
        elif scope["path"] == "/metrics":
            await (await self._metrics())(scope, receive, send)
        elif scope["path"] in HEALTH_PATHS:
            await (await self._health())(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: bytes = (await receive())["body"]
        call = asgi.call_of(scope, body, await self._names(body, scope))
        answer = _Answer(send)
        error = await self._attempt(call, answer)
        for pause_s in PAUSES_S:
            if error is None or error.code != NOT_TAKEN:
                break
            await asyncio.sleep(pause_s)
            error = await self._attempt(call, answer)
        if error is not None:
            await answer.break_off(error, scope, receive)

    async def _attempt(self, call: asgi.Call, answer: _Answer) -> ApiError | None:
        """Sends what a replica answers; returns why that is not a whole answer."""
        messages = self._answers.remote(call)
        try:
            async for batch in messages:
                for message in batch:
                    await answer.send(message)
            error = ApiError(500, "The server has a fault.", "internal_error")
        except asyncio.CancelledError:
            # The client has gone, and nobody waits for an end of this; so does the replica's part.
            messages.cancel()
            return None
        except EngineStoppedError as raised:
            error = ApiError(503, str(raised), NOT_TAKEN)
        except BackPressureError:
            error = ApiError(503, "Too many requests wait for a replica.", "overloaded")
        except (RayError, RayServeException) as raised:
            log.warning("a replica ended under a request to %s: %s", call.scope["path"], raised)
            error = ApiError(503, "The replica that served this request has ended.", "replica_lost")
        return None if answer.is_complete else error

    async def _names(self, body: bytes, scope: Scope) -> tuple[str, ...]:
        arguments = (body, scope["headers"], self._first_bytes)
        if len(body) > LARGE_BODY:
            return await asyncio.to_thread(prefix_names, *arguments)
        return prefix_names(*arguments)

    async def _ask_all(self, path: str) -> list[tuple[int, bytes]]:
        """What every replica answers; those that do not are left out."""
        call = self._replicas.broadcast("document", asgi.get(path))
        try:
            found = await call.results_async(timeout_s=ASK_SECONDS, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            log.warning("replicas were asked for %s: %s", path, error)
            return []
        return [answer for answer in found if not isinstance(answer, BaseException)]

    async def _metrics(self) -> Response:
        answers = await self._ask_all("/metrics")
        texts = [body.decode() for status, body in answers if status == 200]
        return PlainTextResponse(merged(texts), media_type=METRICS_TYPE)

    async def _health(self) -> Response:
        """200 while one replica serves."""
        if any(status == 200 for status, _ in await self._ask_all("/health")):
            return Response(status_code=200)
        return response_of(ApiError(503, "No replica runs.", "engine_stopped"))


class _Answer:
    """How far an answer has come to its client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self.is_complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self.is_complete = not message.get("more_body", False)
        await self._send(message)

    async def break_off(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Ends the answer with an error that its client can read, whatever it has read so far."""
        if self._start is None:
            await response_of(error)(scope, receive, self._send)
        elif _is_stream(self._start):
            end = sse(error.body()) + DONE
            await self._send({"type": "http.response.body", "body": end, "more_body": False})
        # Else the body stays cut, which breaks the connection: an error to every client.


def _is_stream(start: Message) -> bool:
    headers: dict[bytes, bytes] = dict(start["headers"])
    return headers.get(b"content-type", b"").startswith(b"text/event-stream")


async def _live(receive: Receive, send: Send) -> None:
    """Nothing has to be done at the start and at the end."""
    kind: Any = None
    while kind != "lifespan.shutdown":
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
