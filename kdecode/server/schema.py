"""What clients send: the requests' fields, their limits, and the sampling that they mean.

Owns which fields exist. A field that is not listed here is accepted when it is null, when its value
is the one that acts like its absence (`NEUTRAL`), or when it cannot change a reply (`IGNORED`);
anything else is refused, because ignoring it would change what the client gets without telling.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from kdecode.engine.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    ChannelBudget,
    SamplingParams,
    StructuredOutput,
)
from kdecode.server.schema_language import LanguageFields, StrictModel

# Fields without influence on a reply's content.
IGNORED = frozenset(
    (
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
    )
)
# Fields that are not served, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True, False),
    "best_of": (1,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
MAX_CHOICES = 128
MAX_STOPS = 64
MAX_BIASES = 1024
MAX_SALT = 1024

TokenIds = list[int]
# Read by `model.chat`, which knows what has an encoding; the descriptions are for clients.
Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "user", "assistant", "tool"]},
                "content": {"type": ["string", "array", "null"]},
                "reasoning": {"type": "string"},
                "reasoning_content": {"type": "string"},
                "tool_calls": {"type": "array", "items": {"type": "object"}},
                "tool_call_id": {"type": "string"},
                "name": {"type": "string"},
            },
        }
    ),
]
Tool = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": "string"},
                        "parameters": {"type": "object"},
                    },
                },
            },
        }
    ),
]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]


def _describe_others(schema: dict[str, Any]) -> None:
    """Adds the fields that are accepted without being served; others may only be null."""
    for name, values in NEUTRAL.items():
        schema["properties"].setdefault(name, {"enum": [*values, None]})
    for name in sorted(IGNORED):
        schema["properties"][name] = {}
    schema["additionalProperties"] = {"type": "null"}


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(LanguageFields):
    """What completions and chats have in common."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra=_describe_others)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BIASES)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not re.fullmatch("[0-9]{1,9}", key, re.ASCII):
                raise ValueError(f"{key[:20]!r} is not the id of a token.")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED:
                continue
            if name not in NEUTRAL:
                raise ValueError(f"{name!r} is not a field that this server knows.")
            if value not in NEUTRAL[name]:
                allowed = " or ".join(map(repr, NEUTRAL[name]))
                raise ValueError(f"{name} is {value!r}; this server serves only {allowed}.")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is set, but stream is not true.")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is set and stream is true; streams have none.")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def has_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_usage_everywhere(self) -> bool:
        return self.has_usage_chunk and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(
        self,
        choice: int,
        max_tokens: int,
        *,
        stop: tuple[str, ...],
        logprobs: int | None,
        end_ids: tuple[int, ...] = (),
        structured: StructuredOutput | None = None,
        prompt_logprobs: int | None = None,
        channel: ChannelBudget | None = None,
    ) -> SamplingParams:
        """Parameters of one choice; the choices of a seeded request have seeds that count up.

        Raises RequestError.
        """
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            min_p=float(self.min_p or 0.0),
            seed=None if self.seed is None else self.seed + choice,
            stop_token_ids=tuple(dict.fromkeys((*end_ids, *(self.stop_token_ids or ())))),
            stop=stop,
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            presence_penalty=float(self.presence_penalty or 0.0),
            frequency_penalty=float(self.frequency_penalty or 0.0),
            repetition_penalty=float(
                1.0 if self.repetition_penalty is None else self.repetition_penalty
            ),
            logit_bias=tuple((int(key), float(v)) for key, v in (self.logit_bias or {}).items()),
            allowed_token_ids=(
                None if self.allowed_token_ids is None else tuple(self.allowed_token_ids)
            ),
            bad_words=tuple(self.bad_words or ()),
            structured=structured,
            channel=channel,
        )


class CompletionRequest(GenerationRequest):
    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0; without echo, it must be at least 1.")
        return self

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Those that were asked for, and those that echo shows."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    def prompts(self) -> list[str] | list[TokenIds]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TemplateOptions(StrictModel):
    """chat_template_kwargs: what K3's encoding can be told."""

    model_config = ConfigDict(strict=True, extra="forbid")

    thinking: bool | None = None
    thinking_effort: str | None = None


class NamedFunction(StrictModel):
    name: str


class NamedTool(StrictModel):
    """tool_choice: this tool has to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateOptions | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.has_to_call and not self.tools:
            raise ValueError("tool_choice asks for a call, but tools declares none.")
        if self.has_to_call and self.language is not None:
            raise ValueError("tool_choice asks for a call; the answer can have no language then.")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is set, but logprobs is not true.")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens "
                f"{self.max_completion_tokens}; give one of them."
            )
        efforts = {self.reasoning_effort, self._options.thinking_effort} - {None}
        if len(efforts) > 1:
            raise ValueError(
                f"reasoning_effort is {self.reasoning_effort!r} and thinking_effort "
                f"{self._options.thinking_effort!r}; give one of them."
            )
        if self.reasoning_effort == "none" and self._options.thinking:
            raise ValueError("reasoning_effort is 'none', but thinking is true.")
        return self

    @property
    def _options(self) -> TemplateOptions:
        return self.chat_template_kwargs or TemplateOptions()

    @property
    def reply_tokens(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @property
    def thinking(self) -> bool:
        return self._options.thinking is not False and self.reasoning_effort != "none"

    @property
    def effort(self) -> str:
        effort = self.reasoning_effort or self._options.thinking_effort
        return "max" if effort in (None, "none") else str(effort)

    @property
    def has_to_call(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")

    @property
    def declared_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(StrictModel):
    """A text, or a conversation as the chat endpoint would encode it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("Give either prompt or messages.")
        return self


class DetokenizeRequest(StrictModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    tokens: TokenIds
