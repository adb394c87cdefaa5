"""Whether two servers say the same: greedy replies to the same requests, read token by token.

Owns where two replies part and by how much. The margin is the server's own, in natural logarithms:
the probability of the token it took over that of the other arm's token. Behind a URL nothing can be
teacher-forced on the decode path, so what follows a near-tie is another text and is not judged
here; what the prompt's path says of it is `forced`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdecode.bench.agreement import (
    Agreement,
    DivergenceClass,
    PromptAgreement,
    first_divergence,
)
from kdecode.bench.serving.reply import Reply


@dataclass(frozen=True)
class TokenChoice:
    """A token of a reply and the likeliest ones at its place, by their texts."""

    token: str
    top: Mapping[str, float]


@dataclass(frozen=True)
class Judged:
    """agreement: of greedy replies, made one at a time. identical, compared: timed replies with the
    text of the same arm's reply there, of all timed ones; other requests of the same step may move
    a near-tie, so these decide nothing where requests run together.
    """

    agreement: Agreement
    identical: tuple[int, int]
    compared: tuple[int, int]


def choices(reply: Reply) -> list[TokenChoice]:
    """The reply token by token; empty where the server gave no logprobs."""
    return [choice for logprobs in reply.logprobs for choice in _choices(logprobs)]


def _choices(logprobs: Mapping[str, Any]) -> Iterator[TokenChoice]:
    for entry in logprobs.get("content") or ():
        top = {item["token"]: item["logprob"] for item in entry.get("top_logprobs") or ()}
        yield TokenChoice(entry["token"], {**top, entry["token"]: entry["logprob"]})
    tokens = logprobs.get("tokens") or ()
    values, tops = (logprobs.get(name) or () for name in ("token_logprobs", "top_logprobs"))
    for place, token in enumerate(tokens):
        top = (tops[place] if place < len(tops) else None) or {}
        own = {token: values[place]} if place < len(values) else {}
        yield TokenChoice(token, {**top, **own})


def judge_replies(
    number: int, reference: Reply, candidate: Reply, near_tie: float, unstable_runs: int
) -> PromptAgreement:
    """One request, answered by both arms. near_tie: a margin up to this is one."""
    ours, theirs = choices(reference), choices(candidate)
    tokens = ([choice.token for choice in ours], [choice.token for choice in theirs])
    # Where both give tokens, these decide: several may have one text.
    has_tokens = all(tokens)
    divergence = first_divergence(*tokens) if has_tokens else None
    margin: float | None = None
    kind: DivergenceClass | None = None
    if divergence is not None:
        margin = _margin(ours, theirs, divergence)
        kind = "near-tie" if margin is not None and 0 <= margin <= near_tie else "real"
    elif reference.text != candidate.text:
        # In a channel without logprobs, or in replies without: no margin, and no excuse.
        divergence, kind = first_divergence(list(reference.text), list(candidate.text)), "real"
    return PromptAgreement(
        prompt=number,
        positions=min(reference.output_tokens, candidate.output_tokens),
        divergence=divergence,
        divergence_margin=margin,
        divergence_class=kind,
        near_ties=int(kind == "near-tie"),
        real=int(kind == "real"),
        unstable_runs=unstable_runs,
    )


def _margin(ours: Sequence[TokenChoice], theirs: Sequence[TokenChoice], place: int) -> float | None:
    """The candidate's, for its own token over the reference's; None where it is not told."""
    if place >= len(ours) or place >= len(theirs):
        return None
    top, taken, other = theirs[place].top, theirs[place].token, ours[place].token
    if taken not in top or other not in top:
        return None
    return top[taken] - top[other]


def judge(
    references: Sequence[Reply],
    candidates: Sequence[Reply],
    timed: tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]],
    *,
    near_tie: float,
    is_sequential: bool,
) -> Judged:
    """All requests. timed: of each arm, the texts of the timed replies to each request."""
    judged, identical, compared = [], [0, 0], [0, 0]
    for number, pair in enumerate(zip(references, candidates, strict=True)):
        changed = 0
        for arm, reply in enumerate(pair):
            same = [text == reply.text for text in timed[arm][number]]
            identical[arm] += sum(same)
            compared[arm] += len(same)
            changed += len(same) - sum(same)
        unstable = changed if is_sequential else 0
        judged.append(judge_replies(number, *pair, near_tie, unstable))
    return Judged(
        Agreement(tuple(judged)),
        (identical[0], identical[1]),
        (compared[0], compared[1]),
    )
