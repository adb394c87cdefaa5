"""From logits to tokens: greedy and random choice, one row a request.

A row's choice depends on its logits, its parameters, its own tokens (`controls`), its seed and its
position, and on nothing else: batch mates, preemption and the number of earlier draws in the
process do not matter. Logits come in as fp32; probabilities are fp64, so that sums over a large
vocabulary do not bend the cut of top_p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.engine.controls import ControlError, Controls
from kdecode.engine.request import SamplingParams, TokenLogprobs
from kdecode.speculative.types import Verdict

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Draw:
    """One row's choice. position: the new token's in the request.

    banned_ids: not chosen. A reply whose language has come to its end takes one all the same.
    """

    params: SamplingParams
    seed: int
    position: int
    banned_ids: tuple[int, ...] = ()
    controls: Controls | None = None

    @property
    def takes_largest(self) -> bool:
        """The choice is the largest logit as the model gave it, unless that is banned."""
        return self.params.is_greedy and self.controls is None


@dataclass(frozen=True)
class BadLogits:
    """A row that has no choice; the message says why.

    is_refusal: what the request asked for leaves none, and nothing is wrong with the model.
    """

    message: str
    is_refusal: bool = False


@dataclass(frozen=True)
class Choice:
    """What a step gave one request: tokens, one at least, and the logits of each [n, vocab].

    verdict: of the round that they come from, if it had drafts.
    """

    tokens: tuple[int, ...]
    logits: Tensor
    verdict: Verdict | None = None


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int | BadLogits]:
    """A token for each row of logits [R, vocab]; a row of bad numbers spoils no other row."""
    if logits.shape[0] != len(draws):
        raise ValueError(f"There are {logits.shape[0]} rows of logits for {len(draws)} requests.")
    if not draws:
        return []
    # The maximum is NaN when any logit is; argmax is the first of equal ones.
    tops, best = logits.max(dim=-1)
    chosen: list[int | BadLogits] = []
    for row, (top, token) in enumerate(zip(tops.tolist(), best.tolist(), strict=True)):
        draw = draws[row]
        is_finite = abs(top) < float("inf")
        if is_finite and draw.takes_largest and token not in draw.banned_ids:
            chosen.append(token)
        else:
            chosen.append(_choose(logits[row], draw))
    return chosen


def _choose(row: Tensor, draw: Draw) -> int | BadLogits:
    logits = adjusted(row, draw)
    if isinstance(logits, BadLogits):
        return logits
    if draw.params.is_greedy:
        return int(logits.argmax())
    probabilities = filtered_probabilities(logits, draw.params)
    generator = torch.Generator().manual_seed(stream_seed(draw.seed, draw.position))
    return int(torch.multinomial(probabilities, 1, generator=generator))


def adjusted(logits: Tensor, draw: Draw) -> Tensor | BadLogits:
    """Logits [vocab] as the request's controls and bans leave them.

    On the host, so that a seed draws the same token whatever the device.
    """
    logits = logits.cpu()
    top = float(logits.max())
    if not abs(top) < float("inf"):
        return BadLogits(f"the largest of {logits.numel()} logits is {top}")
    if draw.controls is not None:
        try:
            logits = draw.controls.adjust(logits)
        except ControlError as error:
            return BadLogits(str(error), is_refusal=True)
    if draw.banned_ids:
        others = logits.clone()
        others[list(draw.banned_ids)] = float("-inf")
        if float(others.max()) > float("-inf"):
            logits = others
        elif draw.params.structured is None:
            message = "min_tokens bans every token that has a finite logit"
            return BadLogits(message, is_refusal=True)
    return logits


def filtered_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [vocab] fp64 that the next token is drawn from, for a temperature above 0.

    top_k keeps the k largest, top_p the fewest of those whose sum reaches it, min_p those of at
    least so much of the largest; the lower id wins between equal ones. The largest always stays.
    """
    scaled = (logits.double() - logits.double().max()) / params.temperature
    probabilities = torch.softmax(scaled, dim=-1)
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return probabilities
    ordered, ids = torch.sort(probabilities, descending=True, stable=True)
    if 0 < params.top_k < ordered.numel():
        ordered[params.top_k :] = 0.0
    if params.top_p < 1.0:
        share = ordered / ordered.sum()
        before = share.cumsum(0) - share
        before[0] = 0.0
        ordered[before >= params.top_p] = 0.0
    if params.min_p > 0.0:
        ordered[ordered < params.min_p * ordered[0]] = 0.0
    kept = torch.zeros_like(probabilities).scatter_(0, ids, ordered)
    return kept / kept.sum()


def token_logprobs(logits: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """What the model itself gave to a chosen token, and to the likeliest ones; logits [vocab]."""
    values = torch.log_softmax(logits.cpu().double(), dim=-1)
    top: list[tuple[int, float]] = []
    if num_top:
        # topk does not say which of equal ones it takes, so the candidates are sorted here.
        least = values.topk(min(num_top, values.numel())).values[-1]
        candidates = torch.nonzero(values >= least).flatten().tolist()
        top = sorted(((i, float(values[i])) for i in candidates), key=lambda item: -item[1])
    rank = 1 + int((values > values[token]).sum())
    return TokenLogprobs(float(values[token]), tuple(top[:num_top]), rank)


def stream_seed(seed: int, position: int) -> int:
    """A generator seed for one draw: neighbouring seeds and positions give unrelated ones."""
    mixed = _splitmix(_splitmix(seed & _MASK) ^ (position & _MASK))
    # torch takes seeds of 63 bits without wrapping them.
    return mixed >> 1


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
