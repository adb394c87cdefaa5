"""What a server's reply was: its chunks with their times and tokens, its texts, its usage.

Owns the reading of streamed chat and text completions. Tokens are counted by the server's usage; a
chunk is never taken for a token. Does not know HTTP or what a reply is compared with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kdecode.bench.metrics import MetricError, RequestTiming

# per_chunk: usage in every chunk says how many tokens it brought. one_each: usage at the end equals
# the number of chunks. total: usage at the end alone, so that no chunk's tokens are known.
TokenSource = Literal["usage per chunk", "usage at the end, one token a chunk", "usage at the end"]


@dataclass(frozen=True)
class Reply:
    """One reply. A quantity that the server did not tell is None.

    chunk_tokens: of each chunk; None where only their sum is known. answer_ns: the first text
    outside of the reasoning. logprobs: the server's, for requests that ask for them.
    """

    chunk_ns: tuple[int, ...]
    chunk_tokens: tuple[int, ...] | None
    token_source: TokenSource
    answer_ns: int | None
    reasoning: str
    content: str
    tool_calls: str
    finish_reason: str | None
    prompt_tokens: int | None
    output_tokens: int
    cached_tokens: int | None
    reasoning_tokens: int | None
    outputs_valid: bool
    logprobs: tuple[Mapping[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """All that the model said, channels apart."""
        return "\x1e".join((self.reasoning, self.content, self.tool_calls))

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"

    def timing(self, send_ns: int, intended_ns: int | None = None) -> RequestTiming:
        return RequestTiming(
            send_ns, self.chunk_ns, self.chunk_tokens, intended_ns, total_tokens=self.output_tokens
        )


def read_stream(reads: Sequence[tuple[int, bytes]]) -> Reply:
    """Reads a stream of server-sent events. Raises MetricError for one that is no whole reply."""
    builder = _Builder()
    for stamp, data in events(reads):
        if data == "[DONE]":
            builder.is_done = True
            continue
        try:
            document = json.loads(data)
        except ValueError:
            raise MetricError(f"An event of the stream is not JSON: {data[:200]!r}.") from None
        if not isinstance(document, dict):
            raise MetricError(f"An event of the stream is no object: {data[:200]!r}.")
        if document.get("error"):
            raise MetricError(f"The stream ended with an error: {document['error']}")
        builder.add(stamp, document)
    return builder.reply()


def events(reads: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, str]]:
    """(time of the read that completed it, data) of every event; comments and other fields go."""
    buffer = b""
    for stamp, piece in reads:
        buffer += piece
        *lines, buffer = buffer.split(b"\n")
        pending = b"\n".join(lines) + b"\n" if lines else b""
        # An event ends at an empty line; what is not complete goes back in front.
        blocks = pending.replace(b"\r\n", b"\n").split(b"\n\n")
        buffer = blocks.pop() + buffer
        for block in blocks:
            data = [
                line[5:].removeprefix(b" ")
                for line in block.split(b"\n")
                if line.startswith(b"data:")
            ]
            if data:
                yield stamp, b"\n".join(data).decode("utf-8", errors="replace")


class _Builder:
    """Adds up a stream's documents."""

    def __init__(self) -> None:
        self.is_done = False
        self._texts = {"reasoning": [""], "content": [""], "tool_calls": [""]}
        self._answer_ns: int | None = None
        self._finish: str | None = None
        self._usage: Mapping[str, Any] | None = None
        self._logprobs: list[Mapping[str, Any]] = []
        self._outputs_valid = True
        # Times of events with text; (time, tokens so far) of events with usage and a choice.
        self._text_ns: list[int] = []
        self._is_counted = True
        self._counts: list[tuple[int, int]] = []

    def add(self, stamp: int, document: Mapping[str, Any]) -> None:
        usage = document.get("usage")
        if isinstance(usage, Mapping):
            self._usage = usage
        if document.get("outputs_valid") is False:
            self._outputs_valid = False
        for choice in document.get("choices") or ():
            if choice.get("finish_reason"):
                self._finish = choice["finish_reason"]
            if choice.get("logprobs"):
                self._logprobs.append(choice["logprobs"])
            if self._add_texts(stamp, choice):
                self._text_ns.append(stamp)
                # Usage may come with the last choice alone, which then has all tokens and no text.
                self._is_counted &= isinstance(usage, Mapping)
            if isinstance(usage, Mapping):
                self._counts.append((stamp, int(usage.get("completion_tokens") or 0)))

    def _add_texts(self, stamp: int, choice: Mapping[str, Any]) -> bool:
        """Whether the choice brought any text."""
        delta = choice.get("delta") or {}
        content = delta.get("content") or choice.get("text") or ""
        # Two names of one text; a server may send either or both.
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        calls = "".join(
            (call.get("function") or {}).get(name) or ""
            for call in delta.get("tool_calls") or ()
            for name in ("name", "arguments")
        )
        for name, text in (("content", content), ("reasoning", reasoning), ("tool_calls", calls)):
            self._texts[name].append(text)
        if (content or calls) and self._answer_ns is None:
            self._answer_ns = stamp
        return bool(content or reasoning or calls)

    def reply(self) -> Reply:
        if not self.is_done:
            raise MetricError("The stream ended without [DONE].")
        if self._usage is None or self._usage.get("completion_tokens") is None:
            raise MetricError(
                "The server sent no usage, so output tokens cannot be counted; chunks are no "
                "tokens. It has to serve stream_options.include_usage."
            )
        usage, total = self._usage, int(self._usage["completion_tokens"])
        times, tokens, source = self._chunks(total)
        prompt = usage.get("prompt_tokens")
        return Reply(
            chunk_ns=times,
            chunk_tokens=tokens,
            token_source=source,
            answer_ns=self._answer_ns,
            reasoning="".join(self._texts["reasoning"]),
            content="".join(self._texts["content"]),
            tool_calls="".join(self._texts["tool_calls"]),
            finish_reason=self._finish,
            prompt_tokens=None if prompt is None else int(prompt),
            output_tokens=total,
            cached_tokens=_detail(usage, "prompt_tokens_details", "cached_tokens"),
            reasoning_tokens=_detail(usage, "completion_tokens_details", "reasoning_tokens"),
            outputs_valid=self._outputs_valid,
            logprobs=tuple(self._logprobs),
        )

    def _chunks(self, total: int) -> tuple[tuple[int, ...], tuple[int, ...] | None, TokenSource]:
        if self._is_counted and self._counts and self._counts[-1][1] == total:
            grown: list[tuple[int, int]] = []
            before = 0
            for stamp, so_far in self._counts:
                if so_far > before:
                    grown.append((stamp, so_far - before))
                    before = so_far
            return *_together(grown), "usage per chunk"
        if len(self._text_ns) == total:
            return *_together([(stamp, 1) for stamp in self._text_ns]), (
                "usage at the end, one token a chunk"
            )
        times, _ = _together([(stamp, 1) for stamp in self._text_ns])
        return times, None, "usage at the end"


def _together(chunks: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of one read arrived together, and are one chunk."""
    merged: dict[int, int] = {}
    for stamp, tokens in chunks:
        merged[stamp] = merged.get(stamp, 0) + tokens
    return tuple(merged), tuple(merged.values())


def _detail(usage: Mapping[str, Any], group: str, name: str) -> int | None:
    value = (usage.get(group) or {}).get(name)
    return None if value is None else int(value)
