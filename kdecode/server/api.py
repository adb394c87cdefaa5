"""The HTTP application: routes, and how a request ends when its client does.

Owns paths and status codes of the OpenAI-compatible interface. What requests mean is `schema`'s and
`service`'s; the process around it (sockets, signals) is the command's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import metadata, resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kdecode.engine.async_engine import AsyncEngine
from kdecode.engine.engine import LLM
from kdecode.engine.hardware import hardware
from kdecode.server import errors
from kdecode.server.errors import ApiError, JsonResponse
from kdecode.server.guard import Guard, Limits
from kdecode.server.metrics import Metrics
from kdecode.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from kdecode.server.service import Prepared, Run, Service

# Nobody reads this answer: its client has gone.
CLIENT_CLOSED = 499
# The status page brings all that it needs; nothing else may be loaded by it.
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class ServerConfig:
    """served_names: what clients call the model. api_keys: none for a server open to all.

    engine: the label of this engine in metrics, where several are read together.
    """

    served_names: Sequence[str]
    api_keys: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)
    engine: str = "0"


def create_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """The application around a running engine, which it stops when it ends."""
    fingerprint = config_fingerprint(engine.llm)
    metrics = Metrics(engine.llm, config.served_names[0], config.engine)
    engine.llm.loop.watcher = metrics.on_step
    service = Service(engine, metrics, config.served_names, fingerprint["digest"])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.stop()

    app = FastAPI(
        title="kdecode", version=metadata.version("kdecode"), lifespan=lifespan, docs_url=None
    )
    app.add_middleware(Guard, api_keys=config.api_keys, limits=config.limits)
    errors.install(app)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_information(app, service, fingerprint)
    _add_page(app)
    app.openapi_schema = _description(app, config.served_names)
    return app


def config_fingerprint(llm: LLM) -> dict[str, Any]:
    """What the engine resolved, a digest that two equal configurations share, and the hardware."""
    config = llm.resolved_config()
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()[:16]
    found = hardware(config["device"], config["tensor_parallel_size"])
    return {"digest": digest, "config": config, "hardware": found}


def _add_generation(app: FastAPI, service: Service) -> None:
    async def answer(prepared: Prepared, body: GenerationRequest, request: Request) -> Response:
        run = await service.start(prepared)
        if body.stream:
            return _RunResponse(run, body)
        return await _whole_or_gone(run, request)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answer(await service.completion(body), body, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answer(await service.chat(body), body, request)


def _add_tokens(app: FastAPI, service: Service) -> None:
    tokenizer = service.engine.llm.tokenizer

    @app.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        ids = await service.tokenize(body)
        document: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": service.max_context_tokens,
            "tokens": ids,
        }
        if body.return_token_strs:
            document["token_strs"] = [tokenizer.decode([token]) for token in ids]
        return JsonResponse(document)

    @app.get("/tokenizer_info", response_model=None)
    async def tokenizer_info() -> Response:
        config = service.engine.llm.model_config
        ids = {"bos_token": config.bos_id, "eos_token": config.eos_id, "pad_token": config.pad_id}
        names = {name: tokenizer.decode([token]) for name, token in ids.items()}
        return JsonResponse({**names, "vocab_size": tokenizer.vocab_size})

    @app.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        return JsonResponse({"prompt": tokenizer.decode(body.tokens)})


def _add_information(app: FastAPI, service: Service, fingerprint: dict[str, Any]) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "kdecode",
            "root": service.served_names[0],
            "parent": None,
            "max_model_len": service.max_context_tokens,
        }

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [*map(card, service.served_names)]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        service.check_model(name)
        return JsonResponse(card(name))

    @app.get("/health", response_model=None)
    @app.get("/ping", response_model=None)
    async def health() -> Response:
        if not service.engine.is_running:
            raise ApiError(503, "The engine runs no more.", "engine_stopped")
        return Response(status_code=200)

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return JsonResponse({"version": app.version})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.text(), media_type=METRICS_TYPE)

    @app.get("/config/fingerprint", response_model=None)
    async def config() -> Response:
        return JsonResponse(fingerprint)


def _add_page(app: FastAPI) -> None:
    page = resources.files("kdecode.server").joinpath("status.html").read_text("utf-8")
    headers = {"Content-Security-Policy": _PAGE_POLICY, "X-Content-Type-Options": "nosniff"}

    @app.get("/", response_model=None, include_in_schema=False)
    async def status_page() -> Response:
        return HTMLResponse(page, headers=headers)


def _description(app: FastAPI, served_names: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI description, in which `model` is one of the names that are served."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for schema in document["components"]["schemas"].values():
        field = schema.get("properties", {}).get("model")
        if field is not None:
            field["anyOf"] = [{"type": "string", "enum": list(served_names)}, {"type": "null"}]
    return document


class _RunResponse(StreamingResponse):
    """A stream that frees its request however it ends, a client that leaves included."""

    def __init__(self, run: Run, body: GenerationRequest) -> None:
        super().__init__(
            run.stream(body),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._run.close()


async def _whole_or_gone(run: Run, request: Request) -> Response:
    """The document, unless the client leaves before it is complete."""
    reply = asyncio.ensure_future(run.whole())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({reply, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not reply.done():
            return Response(status_code=CLIENT_CLOSED)
        return JsonResponse(reply.result())
    finally:
        run.close()
        for task in (reply, gone):
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
