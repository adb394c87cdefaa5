"""What a server would have said at each place of a reply that it is given: its prompt's logprobs.

Owns the request, and reading the two forms in which servers answer it: `prompt_logprobs` as vLLM
has them, or OpenAI's `echo`. This is the prompt's path through a server, not the decode path: it
says whether the models agree, and how far two right computations of one server are from each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdecode.bench.serving.client import NUM_LOGPROBS, Client
from kdecode.bench.serving.http import HttpError, exchange
from kdecode.bench.serving.outputs import TokenChoice, choices
from kdecode.bench.serving.reply import Reply
from kdecode.bench.workloads.types import Request

_BY_ID = "token_id:"


@dataclass(frozen=True)
class Calibration:
    """Replies of one server, scored by itself. largest: by how much ln p of one token differed
    between its decode path and its prompt path; both are right, so it is rounding."""

    positions: int
    largest: float

    @property
    def near_tie(self) -> float:
        """Each of two tokens moves by at most `largest`, so their margin by at most twice that."""
        return 2 * self.largest


@dataclass(frozen=True)
class ForcedChoices:
    """The baseline's replies, given to the candidate. other: places where another token is
    likelier; beyond: of these, by more than a near-tie. widest: the largest such margin."""

    positions: int
    other: int
    beyond: int
    widest: float


def reply_ids(reply: Reply) -> list[int] | None:
    """The reply's tokens; None where the server does not name them by their numbers."""
    names = [choice.token for choice in choices(reply)]
    numbers = [name.removeprefix(_BY_ID) for name in names]
    is_known = len(names) == reply.output_tokens and all(
        name.startswith(_BY_ID) and number.isdecimal()
        for name, number in zip(names, numbers, strict=True)
    )
    return [int(number) for number in numbers] if is_known else None


async def score(
    client: Client, request: Request, ids: Sequence[int], salt: str | None
) -> list[dict[int, float]] | None:
    """ln p of the likeliest tokens and of the given one, at each place of the reply.

    None where the server does not tell.
    """
    if request.prompt_ids is None or not ids:
        return None
    document: dict[str, Any] = {
        "model": client.model,
        "prompt": [*request.prompt_ids, *ids],
        "max_tokens": 1,
        "temperature": 0,
        **({} if salt is None else {"cache_salt": salt}),
    }
    number = len(ids)
    own = {"prompt_logprobs": NUM_LOGPROBS}
    echo = {"echo": True, "logprobs": NUM_LOGPROBS, "return_tokens_as_token_ids": True}
    for extra, read in ((own, _prompt_logprobs), (echo, _echoed)):
        choice = await _ask(client, {**document, **extra})
        found = None if choice is None else read(choice, len(request.prompt_ids), number)
        if found is not None and all(t in at for t, at in zip(ids, found, strict=True)):
            return found
    return None


async def _ask(client: Client, document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    try:
        found = await exchange(
            client.target,
            "POST",
            "/v1/completions",
            document,
            headers=client.headers,
            timeout_s=client.timeout_s,
        )
        return json.loads(found.body)["choices"][0] if found.status == 200 else None
    except (HttpError, ValueError, LookupError, TypeError):
        return None


def _prompt_logprobs(
    choice: Mapping[str, Any], begin: int, number: int
) -> list[dict[int, float]] | None:
    """vLLM's form: an object for each token of the prompt, by the token's number."""
    try:
        places = choice["prompt_logprobs"][begin : begin + number]
        return _whole(
            [{int(t): float(told["logprob"]) for t, told in at.items()} for at in places], number
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _echoed(choice: Mapping[str, Any], begin: int, number: int) -> list[dict[int, float]] | None:
    """OpenAI's form: the prompt's tokens in front of the reply's."""
    try:
        told = choice["logprobs"]
        found = []
        for place in range(begin, begin + number):
            top = dict(told["top_logprobs"][place] or {})
            top[told["tokens"][place]] = told["token_logprobs"][place]
            found.append({int(t.removeprefix(_BY_ID)): float(v) for t, v in top.items()})
        return _whole(found, number)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _whole(found: list[dict[int, float]], number: int) -> list[dict[int, float]] | None:
    return found if len(found) == number else None


async def _scored(
    client: Client, pairs: Sequence[tuple[Request, Reply]], salt: str | None
) -> list[tuple[Reply, Sequence[int], list[dict[int, float]]]] | None:
    """Each reply with its ids and their `score`. None from the first that cannot be scored."""
    found = []
    for request, reply in pairs:
        ids = reply_ids(reply)
        places = None if ids is None else await score(client, request, ids, salt)
        if ids is None or places is None:
            return None
        found.append((reply, ids, places))
    return found


async def calibrate(
    client: Client, pairs: Sequence[tuple[Request, Reply]], salt: str | None
) -> Calibration | None:
    """The server's own replies, scored by itself. None where it does not tell enough."""
    scored = await _scored(client, pairs, salt)
    if scored is None:
        return None
    distances: list[float] = []
    for reply, ids, places in scored:
        distances += _distances(choices(reply), ids, places)
    return Calibration(len(distances), max(distances)) if distances else None


def _distances(
    said: Sequence[TokenChoice], ids: Sequence[int], places: Sequence[Mapping[int, float]]
) -> list[float]:
    return [
        abs(choice.top[choice.token] - at[token])
        for choice, token, at in zip(said, ids, places, strict=True)
        if choice.token in choice.top
    ]


async def force(
    client: Client,
    pairs: Sequence[tuple[Request, Reply]],
    near_tie: float,
    salt: str | None,
) -> ForcedChoices | None:
    """What the candidate would have said instead, at each place of the baseline's replies."""
    scored = await _scored(client, pairs, salt)
    if scored is None:
        return None
    margins: list[float] = []
    for _, ids, places in scored:
        margins += [max(at.values()) - at[t] for t, at in zip(ids, places, strict=True)]
    return ForcedChoices(
        positions=len(margins),
        other=sum(margin > 0 for margin in margins),
        beyond=sum(margin > near_tie for margin in margins),
        widest=max(margins, default=0.0),
    )
