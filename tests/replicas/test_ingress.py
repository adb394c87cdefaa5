"""What a client reads, whatever becomes of the replica; replicas and Ray's handle are stood in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.types import Message

from kdecode.engine.async_engine import EngineStoppedError
from kdecode.replicas import asgi, ingress
from kdecode.replicas.ingress import Ingress
from kdecode.server.guard import Limits

LOST = ActorDiedError()
KEY = "a key"
BODY = json.dumps({"prompt": "x" * 100}).encode()


def _start(kind: str, status: int = 200) -> Message:
    headers = [(b"content-type", kind.encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


def _body(content: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


JSON = [_start("application/json"), _body(b"{}", more=False)]
EVENTS = [_start("text/event-stream; charset=utf-8"), _body(b"data: 1\n\n", more=True)]


class _Stream:
    """What `handle.remote` gives: batches, and perhaps a failure behind them."""

    def __init__(self, batches: Sequence[Sequence[Message]], end: Exception | None) -> None:
        self._batches, self._end = batches, end
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
        for batch in self._batches:
            yield batch
        if self._end is not None:
            raise self._end

    def cancel(self) -> None:
        self.is_cancelled = True


class _Endless(_Stream):
    async def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
        yield self._batches[0]
        await asyncio.Event().wait()


class _All:
    def __init__(self, results: list[Any] | Exception) -> None:
        self._results = results

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        if isinstance(self._results, Exception):
            raise self._results
        return self._results


class _Handle:
    """refusals: what replicas answer before one answers with the stream."""

    def __init__(
        self,
        stream: _Stream | None = None,
        results: Any = (),
        refusals: Sequence[_Stream] = (),
    ) -> None:
        self.stream, self.results, self.refusals = stream, results, list(refusals)
        self.calls: list[asgi.Call] = []

    def options(self, *, method_name: str, stream: bool) -> _Handle:
        assert (method_name, stream) == ("answer", True)
        return self

    def remote(self, call: asgi.Call) -> _Stream:
        self.calls.append(call)
        assert self.stream is not None
        return self.refusals.pop(0) if self.refusals else self.stream

    def broadcast(self, method: str, call: asgi.Call) -> _All:
        assert method == "document"
        self.calls.append(call)
        return _All(self.results)


async def _ask(handle: Any, path: str, keys: Sequence[str] = (), **scope: Any) -> list[Message]:
    """What the client of one request is sent."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": BODY, "more_body": False}

    app = Ingress(handle, keys, Limits(), 64).__serve_build_asgi_app__()
    await app({**asgi.get(path).scope, "method": "POST", **scope}, receive, send)
    return sent


def _answer(stream: _Stream) -> list[Message]:
    return asyncio.run(_ask(_Handle(stream), "/v1/completions"))


def _error(messages: Sequence[Message]) -> tuple[int, str]:
    document = json.loads(b"".join(message.get("body", b"") for message in messages))
    return messages[0]["status"], document["error"]["code"]


def test_an_answer_passes_unchanged_and_the_request_has_its_names() -> None:
    handle = _Handle(_Stream([JSON[:1], JSON[1:]], None))
    assert asyncio.run(_ask(handle, "/v1/completions")) == JSON
    (call,) = handle.calls
    assert (call.body, call.scope["path"], len(call.names)) == (BODY, "/v1/completions", 1)
    # What comes behind a whole answer changes nothing of it.
    assert _answer(_Stream([JSON], LOST)) == JSON


def test_a_replica_that_dies_before_it_answers() -> None:
    assert _error(_answer(_Stream([], LOST))) == (503, "replica_lost")
    assert _error(_answer(_Stream([], None))) == (500, "internal_error")
    full = BackPressureError(num_queued_requests=3, max_queued_requests=3)
    assert _error(_answer(_Stream([], full))) == (503, "overloaded")


def test_a_replica_that_dies_in_a_stream() -> None:
    *before, last = _answer(_Stream([EVENTS], LOST))
    assert before == EVENTS
    assert not last["more_body"]
    error, done = last["body"].decode().strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert done == "data: [DONE]"


def test_a_replica_that_dies_in_a_document_breaks_the_connection() -> None:
    cut = [_start("application/json"), _body(b"{", more=True)]
    assert _answer(_Stream([cut], LOST)) == cut


def test_a_request_that_was_not_taken_goes_to_another_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ingress, "PAUSES_S", (0.0, 0.0))
    broken = _Stream([], EngineStoppedError("It broke."))
    handle = _Handle(_Stream([JSON], None), refusals=[broken, broken])
    assert asyncio.run(_ask(handle, "/v1/completions")) == JSON
    assert len(handle.calls) == 3
    # Where there is none, the client is told why.
    handle = _Handle(_Stream([JSON], None), refusals=[broken] * 3)
    answer = asyncio.run(_ask(handle, "/v1/completions"))
    assert _error(answer) == (503, "engine_stopped")
    # One that was begun is not sent again.
    handle = _Handle(_Stream([JSON], None), refusals=[_Stream([], LOST)])
    assert _error(asyncio.run(_ask(handle, "/v1/completions"))) == (503, "replica_lost")
    assert len(handle.calls) == 1


def test_a_client_that_leaves_ends_the_request() -> None:
    stream = _Endless([EVENTS], None)

    async def leave() -> None:
        task = asyncio.create_task(_ask(_Handle(stream), "/v1/completions"))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    asyncio.run(leave())
    assert stream.is_cancelled


def test_keys_are_checked_before_a_replica_is_asked() -> None:
    handle = _Handle(_Stream([JSON], None), [(200, b"")])
    refused = asyncio.run(_ask(handle, "/v1/completions", [KEY]))
    assert _error(refused) == (401, "invalid_api_key")
    assert not handle.calls
    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    assert asyncio.run(_ask(handle, "/v1/completions", [KEY], headers=headers)) == JSON
    assert asyncio.run(_ask(handle, "/health", [KEY]))[0]["status"] == 200


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([(200, b""), (503, b"")], 200),
        ([(200, b""), LOST], 200),
        ([(503, b""), LOST], 503),
        (TimeoutError(), 503),
    ],
)
def test_health_is_that_of_the_best_replica(results: Any, status: int) -> None:
    assert asyncio.run(_ask(_Handle(results=results), "/health"))[0]["status"] == status


def test_metrics_are_those_of_all_replicas_that_answer() -> None:
    texts = [f'# HELP n N\n# TYPE n counter\nn{{engine="{i}"}} {i}\n'.encode() for i in range(2)]
    results = [(200, texts[0]), LOST, (500, b"a fault"), (200, texts[1])]
    start, body = asyncio.run(_ask(_Handle(results=results), "/metrics"))
    assert start["status"] == 200
    assert body["body"].decode().splitlines()[2:] == ['n{engine="0"} 0', 'n{engine="1"} 1']


def test_no_replica_at_all() -> None:
    error = DeploymentUnavailableError("Replica")
    assert _error(_answer(_Stream([], error))) == (503, "replica_lost")
    assert asyncio.run(_ask(_Handle(results=error), "/ping"))[0]["status"] == 503
