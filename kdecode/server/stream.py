"""Replies in OpenAI's shapes, as chunks of a stream and whole.

Owns the two documents, which are put together from the same pieces, so that a stream adds up to the
whole. Does not know HTTP, the engine or how requests are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kdecode.engine.loop import Event
from kdecode.engine.request import TokenLogprobs
from kdecode.model.tokenizer import Tokenizer
from kdecode.server.errors import dumps
from kdecode.server.parser import Delta, PlainParser, ReplyParser
from kdecode.server.schema import ChatRequest, CompletionRequest, GenerationRequest

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
_LOGPROB_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def sse(document: Json) -> bytes:
    return b"data: " + dumps(document) + b"\n\n"


@dataclass(frozen=True)
class Head:
    """What every document of one reply begins with. prompt_tokens: of all prompts together.

    outputs_valid: False where drafts are accepted at stated rates, and every document says so.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    prompt_tokens: int
    outputs_valid: bool = True


class Choice(ABC):
    """One choice of a reply, fed with the events of its request. body: which ids it tells."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        parser: ReplyParser,
        prompt: Sequence[int],
        body: GenerationRequest,
    ) -> None:
        tells_ids = bool(body.return_token_ids)
        self.index = index
        # vLLM's form of the prompt's logprobs, for a request that asks for it.
        self.prompt_logprobs: list[Json | None] | None = None
        self._prompt = prompt
        self.num_tokens = 0
        # Of the prompt, taken over from the caches; known with the first event.
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._parser = parser
        self._ids: list[int] | None = [] if tells_ids else None
        self._has_told_prompt = not tells_ids
        # Of tokens in logprobs: texts, which several tokens may share, or `token_id:N`.
        self._names_ids = bool(body.return_tokens_as_token_ids)

    def _shown(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._names_ids else self._tokenizer.decode([token_id])

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    def feed(self, event: Event) -> Json | None:
        """The chunk's entry in `choices`; None while nothing new can be seen."""
        deltas = self._parser.push(event)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = self._vllm_logprobs(event.prompt_logprobs)
        self.num_tokens += event.token_id is not None
        self.cached_tokens = event.cached_tokens
        if self._parser.is_stopped:
            self.finish_reason = "stop"
        elif event.finish_reason is not None:
            self.finish_reason = event.finish_reason
        return self._piece(deltas, event)

    def prompt_ids_once(self) -> Json:
        """The prompt's ids, for the choice's first chunk, where ids are told."""
        if self._has_told_prompt:
            return {}
        self._has_told_prompt = True
        return self.prompt_ids()

    def prompt_ids(self) -> Json:
        return {} if self._ids is None else {"prompt_token_ids": list(self._prompt)}

    def _reply_ids(self) -> Json:
        return {} if self._ids is None else {"token_ids": self._ids}

    def _new_ids(self, event: Event) -> Json:
        """The id that the event added, where ids are told; each belongs to one chunk."""
        if self._ids is None or event.token_id is None:
            return {}
        self._ids.append(event.token_id)
        return {"token_ids": [event.token_id]}

    def _vllm_logprobs(self, told: Sequence[TokenLogprobs]) -> list[Json | None]:
        """By token id: the likeliest ones and the prompt's own; nothing of its first token."""
        entries: list[Json | None] = [None]
        for token, entry in zip(self._prompt[1:], told, strict=True):
            ranked = [(i, value, rank) for rank, (i, value) in enumerate(entry.top, start=1)]
            if all(i != token for i, _, _ in ranked):
                ranked.append((token, entry.logprob, entry.rank))
            entries.append(
                {
                    str(i): {
                        "logprob": value,
                        "rank": rank,
                        "decoded_token": self._tokenizer.decode([i]),
                    }
                    for i, value, rank in ranked
                }
            )
        return entries

    @abstractmethod
    def _piece(self, deltas: Sequence[Delta], event: Event) -> Json | None: ...

    @abstractmethod
    def whole(self) -> Json: ...


class CompletionChoice(Choice):
    """Text alone; with echo, the prompt in front; with max_tokens 0, nothing behind it."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, prompt: Sequence[int], body: CompletionRequest
    ) -> None:
        super().__init__(index, tokenizer, PlainParser(), prompt, body)
        self._texts: list[str] = []
        self._echo = tokenizer.decode(prompt, skip_special=True) if body.echo else ""
        self._echoes_logprobs = body.logprobs is not None and bool(body.echo)
        self._num_top = body.logprobs or 0
        self._has_reply = body.max_tokens != 0
        self._tells_prompt = body.prompt_logprobs
        self._logprobs: Json | None = None
        self._offset = 0

    def _piece(self, deltas: Sequence[Delta], event: Event) -> Json | None:
        text = "".join(delta.text for delta in deltas) if self._has_reply else ""
        if not self._has_reply:
            self.num_tokens, self.finish_reason = 0, "length"
        if self._echo:
            text, self._echo = self._echo + text, ""
        logprobs = self._entries(event)
        ids = self._new_ids(event) if self._has_reply else {}
        if not text and logprobs is None and not ids and self.finish_reason is None:
            return None
        self._texts.append(text)
        return {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
            **ids,
            **self.prompt_ids_once(),
        }

    def _entries(self, event: Event) -> Json | None:
        """Logprobs of what the event added: its token, and before the first one the prompt."""
        entries: Json = {name: [] for name in _LOGPROB_FIELDS}
        if self._echoes_logprobs and event.prompt_logprobs is not None:
            self._add(entries, self._prompt[0], None)
            for token, told in zip(self._prompt[1:], event.prompt_logprobs, strict=True):
                self._add(entries, token, told)
        if event.logprobs is not None and event.token_id is not None and self._has_reply:
            self._add(entries, event.token_id, event.logprobs)
        if not entries["tokens"]:
            return None
        if self._logprobs is None:
            self._logprobs = {name: [] for name in entries}
        for name, values in entries.items():
            self._logprobs[name] += values
        return entries

    def _add(self, entries: Json, token_id: int, told: TokenLogprobs | None) -> None:
        """One token's; nothing is known of a prompt's first one."""
        top = None
        if told is not None:
            top = {self._shown(i): value for i, value in told.top[: self._num_top]}
        entries["tokens"].append(self._shown(token_id))
        entries["token_logprobs"].append(None if told is None else told.logprob)
        entries["top_logprobs"].append(top)
        entries["text_offset"].append(self._offset)
        self._offset += len(self._tokenizer.decode([token_id]))

    def whole(self) -> Json:
        return {
            "index": self.index,
            "text": "".join(self._texts),
            "logprobs": self._logprobs,
            "finish_reason": self.finish_reason,
            **({} if self._tells_prompt is None else {"prompt_logprobs": self.prompt_logprobs}),
            **self._reply_ids(),
            **self.prompt_ids(),
        }


class ChatChoice(Choice):
    """A message: reasoning under both of its names, content, tool calls."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        parser: ReplyParser,
        prompt: Sequence[int],
        call_prefix: str,
        body: ChatRequest,
    ) -> None:
        super().__init__(index, tokenizer, parser, prompt, body)
        self._shows_reasoning = body.include_reasoning is not False
        self._call_prefix = f"call_{call_prefix}_{index}_"
        self._has_begun = False
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[Json] = []
        self._logprobs: list[Json] | None = None

    def _piece(self, deltas: Sequence[Delta], event: Event) -> Json | None:
        delta: Json = {}
        if not self._has_begun:
            self._has_begun = True
            delta = {"role": "assistant", "content": ""}
        reasoning = "".join(item.text for item in deltas if item.kind == "reasoning")
        content = "".join(item.text for item in deltas if item.kind == "content")
        calls = self._call_pieces(deltas)
        if reasoning and self._shows_reasoning:
            delta["reasoning"] = delta["reasoning_content"] = reasoning
            self._reasoning.append(reasoning)
        if content:
            delta["content"] = content
            self._content.append(content)
        if calls:
            delta["tool_calls"] = calls
        if self._calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        logprobs = self._entry(event)
        ids = self._new_ids(event)
        if not delta and logprobs is None and not ids and self.finish_reason is None:
            return None
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
            **ids,
        }

    def _call_pieces(self, deltas: Sequence[Delta]) -> list[Json]:
        """The chunk's pieces of calls; the same texts are added to the whole calls."""
        pieces: list[Json] = []
        for delta in deltas:
            if delta.kind == "tool_name":
                call_id = f"{self._call_prefix}{delta.call}"
                head = {"id": call_id, "type": "function"}
                pieces.append(
                    {
                        "index": delta.call,
                        **head,
                        "function": {"name": delta.text, "arguments": ""},
                    }
                )
                self._calls.append({**head, "function": {"name": delta.text, "arguments": ""}})
            elif delta.kind == "tool_arguments":
                self._calls[delta.call]["function"]["arguments"] += delta.text
                if not pieces or pieces[-1]["index"] != delta.call:
                    pieces.append({"index": delta.call, "function": {"arguments": ""}})
                pieces[-1]["function"]["arguments"] += delta.text
        return pieces

    def _entry(self, event: Event) -> Json | None:
        """Logprobs of a token of the answer's text; other channels have none."""
        told = event.logprobs
        if told is None or event.token_id is None or not self._parser.in_answer:
            return None
        entry = self._token(event.token_id, told.logprob)
        entry["top_logprobs"] = [self._token(i, value) for i, value in told.top]
        if self._logprobs is None:
            self._logprobs = []
        self._logprobs.append(entry)
        return {"content": [entry], "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._shown(token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def whole(self) -> Json:
        reasoning = "".join(self._reasoning) or None
        content = "".join(self._content)
        message: Json = {
            "role": "assistant",
            # Null where there is nothing but calls, as clients of tools expect.
            "content": None if self._calls and not content else content,
            "reasoning": reasoning,
            "reasoning_content": reasoning,
            "refusal": None,
        }
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        return {
            "index": self.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
            **self._reply_ids(),
        }


class Reply:
    """A reply of several choices. kind: "text_completion" or "chat.completion".

    per_prompt: choices of one prompt, which are neighbours.
    """

    def __init__(
        self, kind: str, head: Head, choices: Sequence[Choice], per_prompt: int = 1
    ) -> None:
        self._kind = kind
        self._head = head
        self._per_prompt = per_prompt
        self.choices = choices

    def usage(self) -> Json:
        completion = sum(choice.num_tokens for choice in self.choices)
        reasoning = sum(choice.num_reasoning_tokens for choice in self.choices)
        # A prompt counts once, as in prompt_tokens: as its first choice found it.
        cached = sum(choice.cached_tokens for choice in self.choices[:: self._per_prompt])
        return {
            "prompt_tokens": self._head.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._head.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def chunk(self, piece: Json, *, has_usage: bool) -> Json:
        usage = {"usage": self.usage()} if has_usage else {}
        # A completion's piece has had them already.
        prompt = self.choices[piece["index"]].prompt_ids_once()
        return {**self._document(is_chunk=True), "choices": [piece], **usage, **prompt}

    def usage_chunk(self) -> Json:
        return {**self._document(is_chunk=True), "choices": [], "usage": self.usage()}

    def whole(self) -> Json:
        choices = [choice.whole() for choice in self.choices]
        document = {**self._document(is_chunk=False), "choices": choices, "usage": self.usage()}
        # A chat has one prompt, whatever its choices.
        first = self.choices[0]
        if self._kind == "chat.completion":
            document |= first.prompt_ids()
            if first.prompt_logprobs is not None:
                document["prompt_logprobs"] = first.prompt_logprobs
        return document

    def _document(self, *, is_chunk: bool) -> Json:
        is_chat_chunk = is_chunk and self._kind == "chat.completion"
        return {
            "id": self._head.id,
            "object": "chat.completion.chunk" if is_chat_chunk else self._kind,
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.fingerprint,
            **({} if self._head.outputs_valid else {"outputs_valid": False}),
        }
