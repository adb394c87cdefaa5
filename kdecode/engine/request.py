"""A request: what was asked for, how far it is, and what came out of it.

Owns sampling parameters and their limits, the life cycle and its legal moves, and the record that a
finished request leaves. Does not know how steps are composed (`scheduler`) or run (`worker`).

Life cycle: waiting -> prefill -> decode -> finished. A preempted request goes back to waiting with
every token it has, is prefilled again over all of them, and continues with the next one. `abort`
and errors lead to finished from anywhere. A request is in decode once the tokens it had when it was
admitted are in the caches: that is its state, and no count of tokens stands in for it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kdecode.speculative.stats import RoundStats

if TYPE_CHECKING:
    from kdecode.engine.controls import Controls

RequestState = Literal["waiting", "prefill", "decode", "finished"]
FinishReason = Literal["length", "stop", "abort", "error"]

_MOVES: dict[RequestState, tuple[RequestState, ...]] = {
    "waiting": ("prefill", "finished"),
    "prefill": ("decode", "waiting", "finished"),
    "decode": ("waiting", "finished"),
    "finished": (),
}


# The likeliest tokens that a request may ask for at each position.
MAX_LOGPROBS = 20
# A logit moved by so much decides: no other one is as far from the rest.
MAX_LOGIT_BIAS = 100.0
LanguageKind = Literal["json_schema", "regex", "grammar", "choice"]


class RequestError(ValueError):
    """A request that cannot be served; the message names the value and the limit."""


@dataclass(frozen=True)
class StructuredOutput:
    """A language that a reply has to be in.

    text: a JSON schema, a regular expression, a grammar (Lark or GBNF), or a JSON list of texts to
    choose from. frame: a Lark grammar of the whole reply that names this language as @content, for
    replies in which only a part is bound by it.
    """

    kind: LanguageKind
    text: str
    frame: str | None = None


@dataclass(frozen=True)
class ChannelBudget:
    """How long the channel may be in which a reply begins.

    When the reply has num_tokens tokens, `closing` follows, whatever the logits are; unless one of
    `marks` is among them, with which the reply has left the channel by itself.
    """

    num_tokens: int
    closing: tuple[int, ...]
    marks: frozenset[int]


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    temperature 0 takes the largest logit, the lowest id of equal ones. top_k 0, top_p 1 and min_p 0
    are off; the three act in this order on the probabilities at the given temperature. seed None:
    the engine derives one, the same in every run of the same engine seed. Neither an end token nor
    a stop string ends a request before min_tokens; end tokens are not even sampled. ignore_eos
    leaves the model's own end token without effect, not those of stop_token_ids. logprobs: how many
    of the likeliest tokens are told beside each chosen one; None tells nothing. prompt_logprobs:
    the same for the tokens of the prompt.

    What comes before temperature and filters, in this order (`controls.py`): channel, whose closing
    tokens leave no choice; allowed_token_ids, the only tokens there are; bad_words, texts whose
    last token is not chosen after the others; the language of `structured`, at the end of which the
    reply ends; logit_bias, pairs of token and what is added; repetition_penalty, which divides
    (multiplies, below 0) logits of tokens in prompt and reply; frequency_penalty and
    presence_penalty, subtracted for each and for any occurrence in the reply.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured: StructuredOutput | None = None
    channel: ChannelBudget | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be at least 1.")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; it must be from 0 to max_tokens, "
                f"{self.max_tokens}."
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature is {self.temperature}; it must be 0 or more.")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; it must be 0 (off) or more.")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p is {self.min_p}; it must be from 0 to 1.")
        self._check_controls()
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(self, name)
            if number is not None and not 0 <= number <= MAX_LOGPROBS:
                raise RequestError(f"{name} is {number}; it must be from 0 to {MAX_LOGPROBS}.")
        if isinstance(self.stop, str):
            raise RequestError(f"stop is the text {self.stop!r}; it must be a tuple of texts.")
        if any(not text for text in self.stop):
            raise RequestError("stop has an empty text, which every output would match.")

    def _check_controls(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -2 <= value <= 2:
                raise RequestError(f"{name} is {value}; it must be from -2 to 2.")
        # Also refuses NaN. A penalty near 0 would make logits that are not finite.
        if not 0.01 <= self.repetition_penalty <= 100:
            raise RequestError(
                f"repetition_penalty is {self.repetition_penalty}; it must be from 0.01 to 100."
            )
        for token, bias in self.logit_bias:
            if not abs(bias) <= MAX_LOGIT_BIAS:
                raise RequestError(
                    f"logit_bias of token {token} is {bias}; it must be from "
                    f"{-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}."
                )
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids is empty, which leaves nothing to choose from.")
        if any(not word.strip() for word in self.bad_words):
            raise RequestError("bad_words has a text of nothing but white space.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_controls(self) -> bool:
        """Something acts on the logits themselves, before temperature and filters."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.structured is not None
            or self.channel is not None
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before temperature and every filter.

    top: (token id, logprob) of the likeliest tokens, likeliest first, the lower id of equal ones.
    rank: 1 for the likeliest token.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int


@dataclass
class Timing:
    """When things happened, in nanoseconds of `time.perf_counter_ns`.

    start_ns: the request was handed to the engine. first_step_ns: the first step that computed any
    of it began. prefill_end_ns: its first token was known. token_ns: arrival of each token.
    prefill_ns: time inside the steps that prefilled this request, again after a preemption
    included.
    """

    start_ns: int
    prefill_end_ns: int | None = None
    token_ns: list[int] = field(default_factory=list)
    prefill_ns: int = 0
    first_step_ns: int | None = None


@dataclass(eq=False)
class Request:
    """One user generation, from the moment it is handed in.

    number: order of arrival; the lower one is older. end_token_ids: tokens that end it, the model's
    own included unless ignored. seed: of its random draws. forced_ids: a reply that is followed
    instead of the model's choice, to read the logits along it. controls: what changes its logits,
    for parameters that have any. prompt_logprobs[i]: of token i + 1 of the prompt, where asked for.
    priority: the lower one is served first. cache_salt: prefixes are shared between requests of the
    same one only.
    """

    number: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    end_token_ids: frozenset[int]
    seed: int
    timing: Timing
    forced_ids: tuple[int, ...] | None = None
    controls: Controls | None = None
    priority: int = 0
    cache_salt: str = ""
    state: RequestState = "waiting"
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Tokens whose cache entries exist, the slot that holds the state, the pages that hold the rest.
    num_cached: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    # The error is that nothing can follow what was asked for.
    is_refusal: bool = False
    num_preemptions: int = 0
    # Names of its full pages, as far as they were needed (`cache/prefix.py`); tokens that its last
    # admission found in the caches; tokens of the prompt that its first one did.
    page_names: list[bytes] = field(default_factory=list)
    num_resumed: int = 0
    num_reused: int = 0
    # Admissions of younger requests while it was not past its prompt.
    num_overtaken: int = 0
    # Decode steps that served this request, by (path, reason why not the specialised one).
    decode_steps: Counter[tuple[str, str]] = field(default_factory=Counter)
    rounds: RoundStats = field(default_factory=RoundStats)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens that are not in the caches yet; one for a request that decodes."""
        return self.num_tokens - self.num_cached

    @property
    def max_total_tokens(self) -> int:
        """The most tokens it can put into the caches: its last token never gets there."""
        return len(self.prompt_ids) + self.params.max_tokens - 1

    @property
    def is_finished(self) -> bool:
        return self.state == "finished"

    @property
    def is_complete(self) -> bool:
        """The reply is a whole text of its language, which nothing can follow."""
        return self.controls is not None and self.controls.is_complete

    def take(self, token: int) -> None:
        """Adds a token to the reply."""
        self.output_ids.append(token)
        if self.controls is not None:
            self.controls.take(token)

    def pending_ids(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens that have to be computed."""
        begin, end, prompt = self.num_cached, self.num_cached + count, len(self.prompt_ids)
        if begin >= prompt:
            return tuple(self.output_ids[begin - prompt : end - prompt])
        return (*self.prompt_ids[begin:end], *self.output_ids[: max(0, end - prompt)])

    def move(self, state: RequestState) -> None:
        if state not in _MOVES[self.state]:
            raise RuntimeError(f"request {self.number} cannot go from {self.state} to {state}.")
        self.state = state

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self.move("finished")
        self.finish_reason = reason
        self.error = error


@dataclass(frozen=True)
class Output:
    """What a finished request produced.

    token_ids: every token, a token that ended it included. text: the decoded tokens, without an end
    token and without a stop string or what follows it. error: set when finish_reason is "error";
    is_refusal: it is about what the request asked for.
    decode_steps: decode steps by (path, reason). logprobs: one a token when they were asked for.
    prompt_logprobs: one for each token of the prompt but the first, when they were asked for.
    rounds: of speculative decoding; where they are synthetic, the reply is no answer of the model.
    cached_tokens: of the prompt, taken over from the caches instead of computed.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    timing: Timing
    decode_steps: dict[tuple[str, str], int]
    num_preemptions: int = 0
    error: str | None = None
    is_refusal: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    rounds: RoundStats = field(default_factory=RoundStats)
    cached_tokens: int = 0
