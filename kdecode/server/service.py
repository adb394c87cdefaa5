"""Requests become jobs of the engine, and its events replies.

Owns what the two generation endpoints do between a checked body and a document: encoding, limits of
length, the choices of a request, and that whatever happens to a caller frees what it held. Does not
know routes.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kdecode.engine.async_engine import AsyncEngine, Job, RequestGroup
from kdecode.engine.request import (
    ChannelBudget,
    RequestError,
    SamplingParams,
    StructuredOutput,
)
from kdecode.model.chat import (
    CLOSE,
    END_OF_MSG,
    IM_END,
    OPEN,
    chat_format,
    encode_chat,
    end_of_reasoning,
)
from kdecode.server.errors import ApiError, api_error_of
from kdecode.server.languages import K3Grammar
from kdecode.server.metrics import Metrics, RequestWatch
from kdecode.server.parser import K3Parser, PlainParser, ReplyParser
from kdecode.server.schema import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    NamedTool,
    TokenIds,
    TokenizeRequest,
)
from kdecode.server.stream import (
    DONE,
    ChatChoice,
    Choice,
    CompletionChoice,
    Head,
    Json,
    Reply,
    sse,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A request that has been read: its jobs and the reply that they will fill."""

    jobs: list[Job]
    reply: Reply


class Service:
    """Generation for one engine. served_names: what clients may call the model; the first is it."""

    def __init__(
        self, engine: AsyncEngine, metrics: Metrics, served_names: Sequence[str], fingerprint: str
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self.served_names = tuple(served_names)
        self._fingerprint = fingerprint
        self._llm = engine.llm
        self._outputs_valid = engine.llm.resolved_config()["outputs_valid"]

    @property
    def max_context_tokens(self) -> int:
        return self._llm.engine_config.max_context_tokens

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.served_names:
            raise ApiError(
                404,
                f"The model {name!r} is not served here; {', '.join(self.served_names)} is.",
                "model_not_found",
                "model",
            )

    async def completion(self, body: CompletionRequest) -> Prepared:
        """Raises ApiError, RequestError."""
        self.check_model(body.model)
        prompts = await asyncio.to_thread(self._encode, body)
        number = len(prompts) * body.num_choices
        if not 0 < number <= MAX_CHOICES:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with n {body.num_choices} make {number} choices; there "
                f"must be from 1 to {MAX_CHOICES}.",
                "invalid_value",
            )
        await self._prepare(body.language)
        jobs: list[Job] = []
        choices: list[Choice] = []
        for prompt in prompts:
            # A reply of no tokens is one of which nothing is shown.
            most = self._reply_tokens(len(prompt), body.max_tokens or None, default=16)
            most = most if body.max_tokens != 0 else 1
            for index in range(body.num_choices):
                params = body.sampling(
                    index,
                    most,
                    stop=body.stops,
                    logprobs=body.logprobs,
                    structured=body.language,
                    prompt_logprobs=body.num_prompt_logprobs,
                )
                jobs.append(_job(prompt, params, body))
                choices.append(CompletionChoice(len(choices), self._llm.tokenizer, prompt, body))
        head = self._head("cmpl", body, sum(map(len, prompts)))
        return Prepared(jobs, Reply("text_completion", head, choices, body.num_choices))

    async def chat(self, body: ChatRequest) -> Prepared:
        """Raises ApiError, RequestError, ChatError."""
        self.check_model(body.model)
        tokenizer = self._llm.tokenizer
        tools = body.declared_tools
        prompt = await asyncio.to_thread(
            encode_chat, tokenizer, body.messages, tools, body.thinking, body.effort
        )
        is_k3 = chat_format(tokenizer) == "kimi_k3"
        end = tokenizer.special_id(END_OF_MSG if is_k3 else IM_END)
        channel = self._reasoning_budget(body, is_k3)
        structured = self._chat_language(body, is_k3)
        await self._prepare(structured)
        most = self._reply_tokens(len(prompt), body.reply_tokens, default=self.max_context_tokens)
        head = self._head("chatcmpl", body, len(prompt))
        jobs: list[Job] = []
        choices: list[Choice] = []
        for index in range(body.num_choices):
            params = body.sampling(
                index,
                most,
                # K3's stop strings act on the answer alone, which the parser knows.
                stop=() if is_k3 else body.stops,
                logprobs=body.num_logprobs,
                end_ids=() if body.ignore_eos else (end,),
                structured=structured,
                prompt_logprobs=body.prompt_logprobs,
                channel=channel,
            )
            parser: ReplyParser = PlainParser()
            if is_k3:
                parser = K3Parser(
                    tokenizer,
                    thinking=body.thinking,
                    has_tools=bool(tools),
                    stop=body.stops,
                    min_tokens=params.min_tokens,
                    max_calls=1 if body.parallel_tool_calls is False else None,
                )
            jobs.append(_job(prompt, params, body))
            calls = head.id.partition("-")[2]
            choices.append(ChatChoice(index, tokenizer, parser, prompt, calls, body))
        return Prepared(jobs, Reply("chat.completion", head, choices, body.num_choices))

    async def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Raises ApiError, ChatError."""
        self.check_model(body.model)
        tokenizer = self._llm.tokenizer
        if body.prompt is not None:
            return await asyncio.to_thread(tokenizer.encode_text, body.prompt)
        options = body.chat_template_kwargs
        thinking = options is None or options.thinking is not False
        effort = (options.thinking_effort if options else None) or "max"
        messages = body.messages or []
        return await asyncio.to_thread(
            encode_chat, tokenizer, messages, body.tools, thinking, effort
        )

    async def start(self, prepared: Prepared) -> Run:
        """Hands the jobs to the engine. Raises RequestError, EngineStoppedError."""
        start_ns = time.perf_counter_ns()
        group = await self.engine.submit(prepared.jobs)
        watches = [self.metrics.follow(len(job.prompt_ids), start_ns) for job in prepared.jobs]
        return Run(group, prepared.reply, watches)

    async def _prepare(self, structured: StructuredOutput | None) -> None:
        """Compiles a language here, so that the engine's steps need not wait for it."""
        if structured is not None:
            await asyncio.to_thread(self._llm.languages.prepare, structured)

    def _reasoning_budget(self, body: ChatRequest, is_k3: bool) -> ChannelBudget | None:
        """The end of the reasoning, where it may have so many tokens only. Raises RequestError."""
        budget = body.thinking_token_budget
        if budget is None or not body.thinking:
            return None
        if not is_k3:
            raise RequestError(
                "thinking_token_budget is set; this model's chats have no reasoning."
            )
        tokenizer = self._llm.tokenizer
        marks = frozenset(map(tokenizer.special_id, (OPEN, CLOSE, END_OF_MSG)))
        return ChannelBudget(budget, end_of_reasoning(tokenizer), marks)

    def _chat_language(self, body: ChatRequest, is_k3: bool) -> StructuredOutput | None:
        """The language of a whole reply. Raises RequestError."""
        if not is_k3 or not (body.has_to_call or body.language):
            return body.language
        grammar = K3Grammar(self._llm.tokenizer, thinking=body.thinking)
        tools = body.declared_tools or []
        if body.language is not None:
            return grammar.answer(body.language, tools)
        name = None
        if isinstance(body.tool_choice, NamedTool):
            name = body.tool_choice.function.name
        return grammar.calls(tools, name=name, can_repeat=body.parallel_tool_calls is not False)

    def _encode(self, body: CompletionRequest) -> list[TokenIds]:
        encode = self._llm.tokenizer.encode_text
        return [encode(item) if isinstance(item, str) else item for item in body.prompts()]

    def _reply_tokens(self, prompt: int, asked: int | None, *, default: int) -> int:
        """max_tokens of a prompt of so many tokens. Raises ApiError when they cannot fit."""
        limit = self.max_context_tokens
        reply = asked if asked is not None else max(1, min(default, limit - prompt))
        if prompt + reply > limit:
            raise ApiError(
                400,
                f"This model's maximum context length is {limit:,} tokens. The prompt has "
                f"{prompt:,} and the reply may have {reply:,}, which makes {prompt + reply:,}.",
                "context_length_exceeded",
            )
        return reply

    def _head(self, prefix: str, body: GenerationRequest, prompt_tokens: int) -> Head:
        return Head(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=body.model or self.served_names[0],
            fingerprint=self._fingerprint,
            prompt_tokens=prompt_tokens,
            outputs_valid=self._outputs_valid,
        )


def _job(prompt: Sequence[int], params: SamplingParams, body: GenerationRequest) -> Job:
    return Job(prompt, params, body.priority or 0, body.cache_salt or "")


class Run:
    """A request on its way. `close` frees all that it holds, however far it is."""

    def __init__(self, group: RequestGroup, reply: Reply, watches: Sequence[RequestWatch]) -> None:
        self._group = group
        self._reply = reply
        self._watches = watches

    def close(self) -> None:
        self._group.close()
        for watch in self._watches:
            watch.finish("abort")

    async def whole(self) -> Json:
        """The document. Raises ApiError, EngineStoppedError."""
        async for _ in self._pieces():
            pass
        return self._reply.whole()

    async def stream(self, body: GenerationRequest) -> AsyncIterator[bytes]:
        """The events of the stream; an error becomes one of them."""
        try:
            async for piece in self._pieces():
                yield sse(self._reply.chunk(piece, has_usage=body.has_usage_everywhere))
            if body.has_usage_chunk:
                yield sse(self._reply.usage_chunk())
        except Exception as error:
            api_error = api_error_of(error)
            if api_error.code == "internal_error":
                log.exception("a stream broke")
            yield sse(api_error.body())
        yield DONE

    async def _pieces(self) -> AsyncIterator[Json]:
        async for index, event in self._group.events():
            watch, choice = self._watches[index], self._reply.choices[index]
            watch.on_event(event)
            if event.finish_reason == "error":
                output = self._group.outputs[index]
                watch.finish("error")
                message = output.error if output is not None else "no output"
                if output is not None and output.is_refusal:
                    raise ApiError(400, f"The request ended: {message}.", "nothing_can_follow")
                raise ApiError(500, f"The request broke: {message}", "request_failed")
            piece = choice.feed(event)
            if choice.finish_reason is not None:
                # A stop string that the parser found: the engine does not know of it.
                self._group.abort(index)
                is_length = choice.finish_reason == "length"
                watch.finish("length" if is_length else "stop")
            if piece is not None:
                yield piece
