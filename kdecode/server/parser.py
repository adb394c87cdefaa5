"""A chat reply taken apart while it grows: reasoning, answer, tool calls.

Owns K3's reply markup as token ids; text that only looks like markup stays text, because markers
are found by id and never by their names. Every token is handled on its own, so the deltas of a
reply, put together, do not depend on how its tokens arrived. Does not know HTTP or JSON responses.

The reply begins inside the channel that the prompt opened. A channel may be left without being
closed, and a reply may be cut anywhere. Stop strings act on the answer's text alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kdecode.engine.loop import Event
from kdecode.engine.text import TextStream
from kdecode.model.chat import K3_MARKERS
from kdecode.model.tokenizer import IncrementalDetokenizer, Tokenizer

_ATTRIBUTE = re.compile(r' ([^\s="]+)="([^"]*)"')


@dataclass(frozen=True)
class Delta:
    """A piece of a reply. tool_name begins call number `call`; its JSON text follows in pieces."""

    kind: Literal["reasoning", "content", "tool_name", "tool_arguments"]
    text: str
    call: int = 0


class ReplyParser(Protocol):
    """is_stopped: a stop string ended the reply. in_answer: the last token was part of its text."""

    is_stopped: bool
    in_answer: bool
    num_reasoning_tokens: int

    def push(self, event: Event) -> list[Delta]: ...


class PlainParser:
    """A reply without channels: the engine's own text, stop strings included."""

    def __init__(self) -> None:
        self.is_stopped = False
        self.in_answer = False
        self.num_reasoning_tokens = 0

    def push(self, event: Event) -> list[Delta]:
        self.in_answer = event.token_id is not None and not event.is_end_token
        return [Delta("content", event.text)] if event.text else []


class K3Parser:
    """K3's channels: think, response, tools. Without `has_tools` the tools channel is left out."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        thinking: bool,
        has_tools: bool = False,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        max_calls: int | None = None,
    ) -> None:
        self.is_stopped = False
        self.in_answer = False
        self.num_reasoning_tokens = 0
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._open, self._close, self._sep, self._end = map(tokenizer.special_id, K3_MARKERS)
        self._channel = "think" if thinking else "response"
        # The tag that is being read: its opening marker and its tokens so far.
        self._tag_opener: int | None = None
        self._tag: list[int] = []
        self._reasoning = IncrementalDetokenizer(tokenizer)
        self._answer = TextStream(IncrementalDetokenizer(tokenizer), stop)
        self._calls = _ToolCalls(tokenizer, max_calls) if has_tools else None
        self._is_over = False

    def push(self, event: Event) -> list[Delta]:
        """What the event's token added; with the last event, the rest of the reply, too."""
        self.in_answer = False
        deltas: list[Delta] = []
        token = event.token_id
        # A token of stop_token_ids that ended the reply is no part of it.
        if token is not None and (not event.is_end_token or token == self._end):
            deltas += self.push_token(token)
        if event.finish_reason is not None or self.is_stopped:
            deltas += self.close()
        return deltas

    def push_token(self, token: int) -> list[Delta]:
        """What one token of the reply added."""
        self._num_tokens += 1
        if self._is_over:
            return []
        if token in (self._open, self._close):
            self._tag_opener, self._tag = token, []
            return []
        if token == self._end:
            self._is_over = True
            return self._calls.end_call() if self._calls else []
        if token == self._sep:
            return self._tag_read()
        if self._tag_opener is not None:
            self._tag.append(token)
            return []
        # Other special tokens have no text.
        return [] if self._tokenizer.is_special(token) else self._body(token)

    def close(self) -> list[Delta]:
        """What was held back, at the end of the reply."""
        self._is_over = True
        deltas = _delta("reasoning", self._reasoning.flush())
        deltas += _delta("content", self._answer.close())
        self.is_stopped = self._answer.is_stopped
        return deltas

    def _body(self, token: int) -> list[Delta]:
        if self._channel == "think":
            self.num_reasoning_tokens += 1
            return _delta("reasoning", self._reasoning.push(token))
        if self._channel == "response":
            self.in_answer = True
            can_stop = self._num_tokens >= self._min_tokens
            text = self._answer.push(token, can_stop=can_stop)
            self.is_stopped = self._answer.is_stopped
            return _delta("content", text)
        return self._calls.push(token) if self._calls else []

    def _tag_read(self) -> list[Delta]:
        """The tag is complete: a channel or an element begins or ends."""
        opener, self._tag_opener = self._tag_opener, None
        if opener is None:
            return []
        tag = self._tokenizer.decode(self._tag, skip_special=True)
        name = tag.split(" ")[0]
        if opener == self._open:
            self._channel = name
        elif name == self._channel:
            self._channel = ""
        if self._calls is None:
            return []
        return self._calls.opened(name, tag) if opener == self._open else self._calls.closed(name)


class _ToolCalls:
    """The calls of a reply as names and JSON texts of their arguments, piece by piece.

    Text arguments stream; others are kept until they are complete, and become text when they are
    not JSON. A `json` element is passed on as it is. Calls after max_calls are left out.
    """

    def __init__(self, tokenizer: Tokenizer, max_calls: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_calls = max_calls
        self._num_calls = 0
        self._is_open = False
        # The element being read inside the call, and whether the object has begun, or is raw.
        self._element: Literal["", "text", "value", "raw"] = ""
        self._decoder = IncrementalDetokenizer(tokenizer)
        self._value = ""
        self._has_object = False
        self._is_raw = False

    def opened(self, name: str, tag: str) -> list[Delta]:
        attributes = {key: _unescape(value) for key, value in _ATTRIBUTE.findall(tag)}
        if name == "call":
            deltas = self.end_call()
            if self._num_calls == self._max_calls:
                return deltas
            self._is_open, self._has_object, self._is_raw = True, False, False
            self._num_calls += 1
            return [*deltas, self._delta("tool_name", attributes.get("tool", ""))]
        if not self._is_open:
            return []
        if name == "argument" and not self._is_raw:
            return self._end_element() + self._begin_argument(attributes)
        if name == "json" and not self._has_object:
            deltas = self._end_element()
            self._element, self._is_raw = "raw", True
            return deltas
        return self.end_call() if name in ("think", "response", "tools") else self._end_element()

    def closed(self, name: str) -> list[Delta]:
        if name in ("call", "tools", "message"):
            return self.end_call()
        return self._end_element() if name in ("argument", "json") else []

    def push(self, token: int) -> list[Delta]:
        if not self._element:
            return []
        text = self._decoder.push(token)
        if self._element == "value":
            self._value += text
            return []
        return self._arguments(_escape(text) if self._element == "text" else text)

    def end_call(self) -> list[Delta]:
        if not self._is_open:
            return []
        deltas = self._end_element()
        if not self._is_raw:
            deltas += self._arguments("}" if self._has_object else "{}")
        self._is_open = False
        return deltas

    def _begin_argument(self, attributes: dict[str, str]) -> list[Delta]:
        is_text = attributes.get("type", "string") == "string"
        key = json.dumps(attributes.get("key", ""), ensure_ascii=False)
        begin = f"{', ' if self._has_object else '{'}{key}: "
        self._has_object = True
        self._element = "text" if is_text else "value"
        return self._arguments(begin + ('"' if is_text else ""))

    def _end_element(self) -> list[Delta]:
        element, self._element = self._element, ""
        rest = self._decoder.flush()
        value, self._value = self._value + rest, ""
        if element == "value":
            is_json = _is_json(value)
            return self._arguments(value.strip() if is_json else json.dumps(value))
        if element == "text":
            return self._arguments(_escape(rest) + '"')
        return self._arguments(rest) if element else []

    def _arguments(self, text: str) -> list[Delta]:
        return [self._delta("tool_arguments", text)] if text else []

    def _delta(self, kind: Literal["tool_name", "tool_arguments"], text: str) -> Delta:
        return Delta(kind, text, self._num_calls - 1)


def _delta(kind: Literal["reasoning", "content"], text: str) -> list[Delta]:
    return [Delta(kind, text)] if text else []


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _is_json(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True
