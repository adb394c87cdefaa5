"""What changes one request's logits before its token is chosen: penalties, bias, bans, a language.

Owns their order and the memory of the request's tokens that they need. Does not know temperature,
filters or random numbers (`sampling`), nor how a language is compiled (`structured`). Rounding: all
of it in fp32, the dtype that logits come in.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kdecode.engine.request import RequestError, SamplingParams
from kdecode.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kdecode.engine.structured import Languages


class ControlError(Exception):
    """No token can follow; the message says why."""


class Matcher(Protocol):
    """A text of a language as it grows, token by token."""

    @property
    def is_complete(self) -> bool: ...

    def allowed(self) -> Tensor:
        """Which tokens may follow, [vocab] bool. Raises ControlError."""
        ...

    def take(self, token: int) -> None: ...

    def fork(self) -> Matcher:
        """A copy that goes its own way."""
        ...


class Controls:
    """One request's. bad_ids: the token sequences of bad_words. matcher: of its language."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        bad_ids: Sequence[tuple[int, ...]] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self._params = params
        self._bad_ids = tuple(bad_ids)
        self._matcher = matcher
        self._reply: list[int] = []
        self._bias = _bias(params, vocab_size)
        self._counts: Tensor | None = None
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size)
        self._is_seen: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._is_seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._is_seen[list(prompt_ids)] = True

    @property
    def is_complete(self) -> bool:
        """The language is at an end, and nothing can follow."""
        return self._matcher is not None and self._matcher.is_complete

    def take(self, token: int) -> None:
        """The request got a token."""
        self._reply.append(token)
        if self._counts is not None:
            self._counts[token] += 1
        if self._is_seen is not None:
            self._is_seen[token] = True
        if self._matcher is not None:
            self._matcher.take(token)

    def fork(self) -> Controls:
        """A copy that may take tokens on trial, as drafts are."""
        other = copy.copy(self)
        other._reply = list(self._reply)
        other._counts = None if self._counts is None else self._counts.clone()
        other._is_seen = None if self._is_seen is None else self._is_seen.clone()
        other._matcher = None if self._matcher is None else self._matcher.fork()
        return other

    def adjust(self, logits: Tensor) -> Tensor:
        """Logits [vocab] as they are to be sampled from; a new tensor. Raises ControlError."""
        params = self._params
        closing = self._closing_token()
        if closing is not None:
            only = torch.full_like(logits, float("-inf"))
            only[closing] = 0.0
            return only
        logits = logits.clone() if self._bias is None else logits + self._bias
        if self._is_seen is not None:
            penalty = params.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self._is_seen, penalised, logits)
        if self._counts is not None:
            logits -= params.frequency_penalty * self._counts
            logits -= params.presence_penalty * (self._counts > 0)
        banned = self._banned()
        if banned:
            logits[banned] = float("-inf")
        if self._matcher is not None:
            logits.masked_fill_(~self._matcher.allowed(), float("-inf"))
        if float(logits.max()) == float("-inf"):
            raise ControlError("the request's own limits leave no token that could follow")
        return logits

    def _closing_token(self) -> int | None:
        """The one that has to follow where the reply's first channel has had its tokens."""
        channel = self._params.channel
        if channel is None:
            return None
        written = self._reply[channel.num_tokens :]
        place = len(self._reply) - channel.num_tokens
        if not 0 <= place < len(channel.closing) or written != [*channel.closing[:place]]:
            return None
        if not channel.marks.isdisjoint(self._reply[: channel.num_tokens]):
            return None
        return channel.closing[place]

    def _banned(self) -> list[int]:
        """The last tokens of bad words whose other tokens the reply ends with."""
        banned = []
        for *before, last in self._bad_ids:
            if not before or self._reply[-len(before) :] == before:
                banned.append(last)
        return banned


def controls_of(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    end_ids: Iterable[int],
    tokenizer: Tokenizer,
    languages: Languages,
) -> Controls | None:
    """A new request's controls; None for parameters without any. end_ids: tokens that end it.

    Raises RequestError for tokens that do not exist and a language that cannot be used.
    """
    if not params.has_controls:
        return None
    vocab_size = tokenizer.vocab_size
    _check("logit_bias", [token for token, _ in params.logit_bias], vocab_size)
    _check("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    matcher = None
    if params.structured is not None:
        matcher = languages.matcher(params.structured, end_ids)
    return Controls(params, prompt_ids, vocab_size, _bad_ids(params, tokenizer), matcher)


def _check(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} has the token {token}; the vocabulary has {vocab_size:,} ids."
            )


def _bad_ids(params: SamplingParams, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Each of bad_words as tokens, at the beginning of a text and inside of one."""
    words = [word.strip() for word in params.bad_words]
    forms = [form for word in words for form in (word, f" {word}")]
    return [*dict.fromkeys(tuple(tokenizer.encode_text(form)) for form in forms)]


def _bias(params: SamplingParams, vocab_size: int) -> Tensor | None:
    """What is added to every logit: logit_bias, and -inf outside of allowed_token_ids."""
    if not params.logit_bias and params.allowed_token_ids is None:
        return None
    bias = torch.zeros(vocab_size)
    if params.allowed_token_ids is not None:
        bias.fill_(float("-inf"))
        bias[list(params.allowed_token_ids)] = 0.0
    for token, value in params.logit_bias:
        bias[token] += value
    return bias
