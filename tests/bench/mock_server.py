"""A server of OpenAI's interface that is scripted: its times, its texts, its counters, its faults.

It computes nothing and never looks at the clock of the machine; in a simulated loop its times are
exact.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulated import SimulatedLoop, simulate

from kdecode.bench.serving.client import Client
from kdecode.bench.serving.http import Target
from kdecode.bench.serving.load import Load, PassResult, run_pass
from kdecode.bench.workloads.types import Workload

CONFIG: Mapping[str, Any] = {
    "decode_backend": "auto",
    "model": {"weights_digest": "d1"},
    "cache": {"dtype": "bf16", "page_tokens": 64},
    "speculative": None,
    "outputs_valid": True,
}
FIRST_ID = 1000
HARDWARE: Mapping[str, Any] = {"name": "test accelerator", "count": 8}


@dataclass
class MockServer:
    """chunks of tokens_per_chunk tokens: the first after prefill_ms, the others chunk_ms apart.

    noise: of a request's speed, log-normal. bias: of requests whose salt is a second arm's. words:
    text of each token, by position. margins: the runner-up there and how far it is behind. channel:
    "content" or "reasoning", for chats. coverage: share of decode steps that the counters call
    specialised; None: no such counters. changes_texts: from one timed reply to the next. config
    None: no fingerprint, as elsewhere. scores: tokens are told by their numbers, FIRST_ID and
    following, and scored as parts of a prompt in this form: what is likelier at a position, and by
    how much. rounding: how far ln p is then from what the decode path says. ids: of other tokens.
    """

    name: str = "auto"
    config: Mapping[str, Any] | None = field(default_factory=lambda: dict(CONFIG))
    hardware: Mapping[str, Any] = field(default_factory=lambda: dict(HARDWARE))
    prefill_ms: float = 200.0
    chunk_ms: float = 10.0
    tokens_per_chunk: int = 1
    noise: float = 0.0
    seed: int = 0
    words: Mapping[int, str] = field(default_factory=dict)
    margins: Mapping[int, tuple[str, float]] = field(default_factory=dict)
    channel: str = "content"
    usage: str = "continuous"
    cached_tokens: int | None = 0
    coverage: float | None = None
    reason: str = "the batch is larger than the plan"
    acceptance: float | None = None
    fail_every: int | None = None
    prompt_tokens: int | None = None
    has_logprobs: bool = True
    server_info: Mapping[str, Any] | None = None
    outputs_valid: bool = True
    max_output: int | None = None
    bias: float = 1.0
    changes_texts: bool = False
    scores: Mapping[int, tuple[int, float]] | None = None
    score_form: str = "prompt_logprobs"
    rounding: float = 0.0
    ids: Mapping[int, int] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Hashed: small whole numbers next to each other make similar generators.
        self._random = random.Random(str(self.seed))
        self._steps = {"specialized": 0, "standard": 0}
        self._step_seconds = 0.0
        self._generated = 0
        self._rounds = 0
        self._accepted = 0.0

    @asynccontextmanager
    async def running(self, port: int = 1) -> AsyncIterator[str]:
        """Serves under its name as the host, and yields its address."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        server = await asyncio.start_unix_server(self._serve, loop.path(self.name, port))
        try:
            yield f"http://{self.name}:{port}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                int(line.split(":")[1]) for line in head.split("\r\n") if "Content-Length" in line
            )
            body = await reader.readexactly(length)
            method, path, _ = head.split(" ", 2)
            self.paths.append(path)
            if method == "POST" and path.startswith("/v1/"):
                await self._reply(path, json.loads(body), writer)
            else:
                self._document(path, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _document(self, path: str, writer: asyncio.StreamWriter) -> None:
        texts = {
            "/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}),
            "/metrics": self.metrics(),
            "/version": json.dumps({"version": "1.0"}),
            "/reset_prefix_cache": "",
        }
        if self.config is not None:
            document = {"digest": "x", "config": self.config, "hardware": self.hardware}
            texts["/config/fingerprint"] = json.dumps(document)
        if self.server_info is not None:
            texts["/server_info?config_format=json"] = json.dumps(self.server_info)
        status = 200 if path in texts else 404
        _answer(writer, status, texts.get(path, "{}"))

    def metrics(self) -> str:
        lines = [f'vllm:generation_tokens_total{{model_name="m"}} {self._generated}']
        if self.coverage is not None:
            for path, reason in (("specialized", ""), ("standard", self.reason)):
                labels = f'path="{path}",reason="{reason}"'
                lines.append(f"kdecode:decode_steps_total{{{labels}}} {self._steps[path]}")
        count = sum(self._steps.values())
        for name, value in (("sum", self._step_seconds), ("count", count)):
            labels = 'kind="decode",path="specialized"'
            lines.append(f"kdecode:step_time_seconds_{name}{{{labels}}} {value}")
        if self.acceptance is not None:
            lines += [
                f"vllm:spec_decode_num_drafts_total {self._rounds}",
                f"vllm:spec_decode_num_draft_tokens_total {7 * self._rounds}",
                f"vllm:spec_decode_num_accepted_tokens_total {self._accepted}",
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} '
                f"{self._accepted}",
            ]
        return "\n".join(["# HELP x y", *lines]) + "\n"

    async def _reply(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.log.append(body)
        if self.fail_every and len(self.log) % self.fail_every == 0:
            _answer(writer, 500, json.dumps({"error": {"message": "scripted failure"}}))
            return
        if "stream" not in body:
            _answer(writer, 200, json.dumps({"choices": [self._scored(body)]}))
            return
        is_chat = path.endswith("/chat/completions")
        total = min(body["max_tokens"], self.max_output or body["max_tokens"])
        factor = self._random.lognormvariate(0, self.noise) if self.noise else 1.0
        if str(body.get("cache_salt")).endswith("-1"):
            factor *= self.bias
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            b"\r\n"
        )
        prompt = self.prompt_tokens or len(body.get("prompt") or body.get("messages"))
        done = 0
        while done < total:
            number = min(self.tokens_per_chunk, total - done)
            pause = self.prefill_ms if done == 0 else self.chunk_ms * factor
            await asyncio.sleep(pause / 1000)
            done += number
            is_last = done == total
            choice = self._choice(is_chat, range(done - number, done), body, is_last=is_last)
            document: dict[str, Any] = {"choices": [choice]}
            if not self.outputs_valid:
                document["outputs_valid"] = False
            if self.usage == "continuous":
                document["usage"] = self._usage(prompt, done)
            self._count(number, self.chunk_ms * factor / 1000, is_first=done == number)
            _chunk(writer, document)
        if self.usage in ("continuous", "end"):
            _chunk(writer, {"choices": [], "usage": self._usage(prompt, done)})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _choice(
        self, is_chat: bool, positions: range, body: dict[str, Any], *, is_last: bool
    ) -> dict[str, Any]:
        # Only of replies that are timed: what is judged has logprobs.
        mark = f"({len(self.log)})" if self.changes_texts and not body.get("logprobs") else ""
        words = [self.words.get(i, f"t{i}{mark} ") for i in positions]
        text = "".join(words)
        is_cut = positions.stop == body["max_tokens"]
        reason = "length" if is_cut else "stop"
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason if is_last else None}
        if is_chat:
            choice["delta"] = {self.channel: text}
        else:
            choice["text"] = text
        if body.get("logprobs") and self.has_logprobs:
            if self.scores is not None:
                words = [f"token_id:{self.ids.get(i, FIRST_ID + i)}" for i in positions]
            tops = [
                {word: -0.1, **self._second(i)} for i, word in zip(positions, words, strict=True)
            ]
            choice["logprobs"] = {"tokens": words, "top_logprobs": tops}
        return choice

    def _scored(self, body: dict[str, Any]) -> dict[str, Any]:
        """Of every token of the prompt; the reply that is scored begins with FIRST_ID."""
        ids = body["prompt"]
        begin = ids.index(FIRST_ID) if FIRST_ID in ids else len(ids)
        tops = []
        for place, token in enumerate(ids):
            own = -0.1 - self.rounding
            other, margin = (self.scores or {}).get(place - begin, (token, 0.0))
            tops.append({token: own, other: own + margin} if other != token else {token: own})
        if self.score_form not in body:
            return {"text": ""}
        if self.score_form == "prompt_logprobs":
            told = [{str(t): {"logprob": v} for t, v in top.items()} for top in tops]
            return {"text": "", "prompt_logprobs": [None, *told[1:]]}
        named = [{f"token_id:{t}": v for t, v in top.items()} for top in tops]
        logprobs = {
            "tokens": [f"token_id:{token}" for token in ids],
            "token_logprobs": [None, *(top[t] for t, top in zip(ids[1:], tops[1:], strict=True))],
            "top_logprobs": [None, *named[1:]],
        }
        return {"text": "", "logprobs": logprobs}

    def _second(self, position: int) -> dict[str, float]:
        """The runner-up at a position: its word and how far it is behind."""
        if position not in self.margins:
            return {}
        word, margin = self.margins[position]
        return {word: -0.1 - margin}

    def _usage(self, prompt: int, done: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": done}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage

    def _count(self, tokens: int, seconds: float, *, is_first: bool) -> None:
        self._generated += tokens
        if is_first:
            return
        total = sum(self._steps.values()) + 1
        is_special = self._steps["specialized"] < (self.coverage or 0) * total
        self._steps["specialized" if is_special else "standard"] += 1
        self._step_seconds += seconds
        if self.acceptance is not None:
            self._rounds += 1
            self._accepted += self.acceptance - 1


def _answer(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    body = text.encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def _chunk(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    data = b"data: " + json.dumps(document).encode() + b"\n\n"
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def play(folder: Path, server: MockServer, workload: Workload, load: Load) -> PassResult:
    """A pass of the workload against the server, in simulated time."""

    async def main() -> PassResult:
        async with server.running() as url:
            return await run_pass(Client("a", Target.from_url(url)), workload, load)

    result: PassResult = simulate(folder, main())
    return result
