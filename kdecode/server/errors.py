"""Errors as clients of OpenAI's API read them.

Owns the shape, the codes and which of our exceptions is whose fault. Does not know routes.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kdecode.engine.async_engine import EngineStoppedError
from kdecode.engine.request import RequestError
from kdecode.model.chat import ChatError
from kdecode.model.tokenizer import TokenizerError


class ApiError(Exception):
    """An answer that is an error; `code` is what clients branch on."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 401:
            kind = "authentication_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


class JsonResponse(Response):
    """JSON in ASCII, so that every text a client may send can be sent back."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


def dumps(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def response_of(error: Exception) -> Response:
    """The answer to a request that ended with this error."""
    api_error = api_error_of(error)
    headers = {"WWW-Authenticate": "Bearer"} if api_error.status == 401 else None
    return JsonResponse(api_error.body(), status_code=api_error.status, headers=headers)


def api_error_of(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError | ChatError | TokenizerError):
        return ApiError(400, str(error), "invalid_value")
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error), "engine_stopped")
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), "http_error")
    return ApiError(500, f"The server has a fault: {type(error).__name__}.", "internal_error")


def install(app: FastAPI) -> None:
    """Makes the app answer every error in this shape."""

    async def handle(request: Request, error: Exception) -> Response:
        return response_of(error)

    kinds: tuple[type[Exception], ...] = (
        ApiError,
        RequestError,
        ChatError,
        TokenizerError,
        EngineStoppedError,
        RequestValidationError,
        HTTPException,
        Exception,
    )
    for kind in kinds:
        app.add_exception_handler(kind, handle)


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong, with its place; a union's members are one place."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not JSON: {first['ctx']['error']}.", "invalid_json")
    if first["type"] in ("model_attributes_type", "model_type") and not place:
        message = "The body must be a JSON object, with Content-Type application/json."
        return ApiError(400, message, "invalid_json")
    text = f"{place}: {message}" if place else message
    return ApiError(400, text, "invalid_value", place or None)
