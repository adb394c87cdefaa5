"""Requests to one server, each as a measured record.

Owns the request's document and what is kept of the answer. Does not know when requests are sent or
what the records are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdecode.bench.metrics import MetricError, RequestMetrics, RequestTiming, request_metrics
from kdecode.bench.serving.http import Exchange, HttpError, Target, excerpt, exchange, now_ns
from kdecode.bench.serving.reply import Reply, read_stream
from kdecode.bench.workloads.types import Request

# Choices beside the one taken, of requests that ask for the margin at a divergence.
NUM_LOGPROBS = 5
# Several tokens may have one text, the parts of a character for instance.
_BY_ID = {"return_tokens_as_token_ids": True}


@dataclass(frozen=True)
class ServedRecord:
    """One request as this client saw it; timing and reply are None where it failed.

    end_ns: the last byte was read, or the failure was known.
    """

    request_id: str
    session: str
    turn: int
    send_ns: int
    end_ns: int
    timing: RequestTiming | None
    reply: Reply | None
    error: str | None

    def metrics(self) -> RequestMetrics | None:
        return None if self.timing is None else request_metrics(self.timing)

    @property
    def answer_s(self) -> float | None:
        """Time to the first token outside of the reasoning."""
        if self.reply is None or self.reply.answer_ns is None:
            return None
        return (self.reply.answer_ns - self.send_ns) / 1e9


@dataclass(frozen=True)
class Client:
    """One server. ignore_eos: replies have exactly as many tokens as asked for; for speed only."""

    name: str
    target: Target
    model: str | None = None
    api_key: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    timeout_s: float = 600.0

    @property
    def headers(self) -> Mapping[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    async def send(
        self,
        request: Request,
        *,
        salt: str | None = None,
        intended_ns: int | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        has_logprobs: bool = False,
    ) -> ServedRecord:
        """Sends one request and reads its stream; a failure is a record, too.

        salt: requests of another salt share no cached prefix. messages: in the place of the
        request's own.
        """
        document = self.document(request, messages, has_logprobs=has_logprobs)
        if salt is not None:
            document["cache_salt"] = salt
        path = "/v1/chat/completions" if "messages" in document else "/v1/completions"
        begin_ns = now_ns()
        try:
            found = await exchange(
                self.target,
                "POST",
                path,
                document,
                headers=self.headers,
                timeout_s=self.timeout_s,
            )
        except HttpError as error:
            return self._record(request, begin_ns, now_ns(), error=str(error))
        return self._read(request, found, intended_ns)

    def document(
        self,
        request: Request,
        messages: Sequence[Mapping[str, Any]] | None = None,
        *,
        has_logprobs: bool = False,
    ) -> dict[str, Any]:
        document: dict[str, Any] = {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        if self.model is not None:
            document["model"] = self.model
        if self.ignore_eos:
            document["ignore_eos"] = True
        if messages is not None or request.messages is not None:
            document["messages"] = list(messages or request.messages or ())
            if request.tools:
                document["tools"] = list(request.tools)
            if has_logprobs:
                document |= {"logprobs": True, "top_logprobs": NUM_LOGPROBS, **_BY_ID}
            return document
        ids = request.prompt_ids
        document["prompt"] = request.prompt if ids is None else list(ids)
        if has_logprobs:
            document |= {"logprobs": NUM_LOGPROBS, **_BY_ID}
        return document

    def _read(self, request: Request, found: Exchange, intended_ns: int | None) -> ServedRecord:
        times = (found.send_ns, found.end_ns)
        if found.status != 200:
            error = f"status {found.status}: {excerpt(found.body)}"
            return self._record(request, *times, error=error)
        if found.error is not None:
            return self._record(request, *times, error=found.error)
        try:
            reply = read_stream(found.reads)
            timing = reply.timing(found.send_ns, intended_ns)
        except MetricError as error:
            return self._record(request, *times, error=str(error))
        return self._record(request, *times, timing=timing, reply=reply)

    def _record(
        self,
        request: Request,
        send_ns: int,
        end_ns: int,
        *,
        timing: RequestTiming | None = None,
        reply: Reply | None = None,
        error: str | None = None,
    ) -> ServedRecord:
        return ServedRecord(
            request_id=request.id,
            session=request.session,
            turn=request.turn,
            send_ns=send_ns,
            end_ns=end_ns,
            timing=timing,
            reply=reply,
            error=error,
        )
