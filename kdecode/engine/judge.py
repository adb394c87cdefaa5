"""Which tokens follow: one behind a plain step, or a verdict on a round's drafts.

Every sampling control, ban and filter acts on each row of a round as it would on that row's token
alone: row i is adjusted as if the first i drafts had been taken. Owns that, and the choice between
greedy and random verification; the rules of acceptance are `speculative/accept.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kdecode.config_speculative import SpeculativeConfig
from kdecode.engine.controls import Controls
from kdecode.engine.request import Request
from kdecode.engine.sampling import (
    BadLogits,
    Choice,
    Draw,
    adjusted,
    filtered_probabilities,
    sample,
)
from kdecode.speculative.accept import verify, verify_greedy
from kdecode.speculative.streams import Streams
from kdecode.speculative.types import Proposal, Verdict


def choose(logits: Tensor, requests: Sequence[Request]) -> list[Choice | BadLogits]:
    """Each request's next token: sampled, or the next one of the reply that it follows."""
    tokens = sample(logits, [draw_of(request, 0, request.controls) for request in requests])
    choices: list[Choice | BadLogits] = []
    for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
        if isinstance(token, BadLogits):
            choices.append(token)
            continue
        if request.forced_ids is not None:
            token = request.forced_ids[len(request.output_ids)]
        choices.append(Choice((token,), logits[row : row + 1]))
    return choices


def draw_of(request: Request, offset: int, controls: Controls | None) -> Draw:
    """The choice of the request's next token but ``offset``; controls: as they are there."""
    banned: tuple[int, ...] = ()
    if len(request.output_ids) + offset < request.params.min_tokens:
        banned = tuple(sorted(request.end_token_ids))
    return Draw(
        params=request.params,
        seed=request.seed,
        position=request.num_tokens + offset,
        banned_ids=banned,
        controls=controls,
    )


@dataclass
class Judge:
    """Decides the rounds of one step, request by request; `choices` has what each of them gets.

    A request whose logits are bad gets BadLogits, and keeps the anchor's row until it ends.
    """

    requests: Sequence[Request]
    config: SpeculativeConfig
    choices: dict[int, Choice | BadLogits] = field(default_factory=dict)

    def __call__(self, index: int, proposal: Proposal, logits: Tensor) -> Verdict:
        """logits [N + 1, vocab]."""
        verdict = self._decide(self.requests[index], proposal, logits)
        if isinstance(verdict, BadLogits):
            self.choices[index] = verdict
            return Verdict(0, 0, proposal.num_drafts)
        tokens = verdict.tokens(proposal)
        self.choices[index] = Choice(tokens, logits[: len(tokens)], verdict)
        return verdict

    def _decide(self, request: Request, proposal: Proposal, logits: Tensor) -> Verdict | BadLogits:
        if not proposal.num_drafts:
            (choice,) = choose(logits, [request])
            return choice if isinstance(choice, BadLogits) else Verdict(0, choice.tokens[0], 0)
        if request.forced_ids is not None:
            return _followed(request, proposal, logits)
        rates = self.config.acceptance_rates() if self.config.is_synthetic else None
        streams = Streams(request.seed, proposal.anchor_position)
        rows = _Rows(request, proposal, logits, has_all=rates is not None)
        if request.params.is_greedy:
            verdict = verify_greedy(proposal, rows.best(), streams, rates)
        else:
            method = self.config.rejection_sample_method
            exact = "standard" if method == "synthetic" else method
            verdict = verify(proposal, rows.probabilities(), streams, exact, rates)
        return rows.bad.get(verdict.accepted, verdict)


def _followed(request: Request, proposal: Proposal, logits: Tensor) -> Verdict | BadLogits:
    """The drafts are the reply's own next tokens, so all of them hold."""
    assert request.forced_ids is not None
    for token in sample(logits, [draw_of(request, 0, None)] * logits.shape[0]):
        if isinstance(token, BadLogits):
            return token
    place = len(request.output_ids) + proposal.num_drafts
    return Verdict(proposal.num_drafts, request.forced_ids[place], proposal.num_drafts)


class _Rows:
    """What the target says behind each draft of one request.

    has_all: drafts may hold whatever the target thinks of them, so every row counts. Else the rows
    behind a draft that cannot hold are irrelevant, and hold anything. `bad`: rows without a choice.
    """

    def __init__(
        self, request: Request, proposal: Proposal, logits: Tensor, *, has_all: bool
    ) -> None:
        self._request = request
        self._drafts = proposal.drafts
        self._logits = logits
        self._has_all = has_all
        self.bad: dict[int, BadLogits] = {}

    def best(self) -> list[int]:
        """The first choice of each row; 0 for irrelevant ones."""
        request, count = self._request, len(self._drafts) + 1
        if request.controls is None:
            draws = [draw_of(request, place, None) for place in range(count)]
            return [self._token(*row) for row in enumerate(sample(self._logits, draws))]
        controls = request.controls.fork()
        chosen: list[int] = []
        for place in range(count):
            draw = draw_of(request, place, controls)
            (found,) = sample(self._logits[place : place + 1], [draw])
            token = self._token(place, found)
            chosen.append(token)
            if place in self.bad or not self._goes_on(controls, place, token == self._draft(place)):
                break
        return chosen + [0] * (count - len(chosen))

    def probabilities(self) -> Tensor:
        """The target's distribution of each row, [N + 1, vocab]."""
        request, count = self._request, len(self._drafts) + 1
        controls = None if request.controls is None else request.controls.fork()
        rows: list[Tensor] = []
        for place in range(count):
            logits = adjusted(self._logits[place], draw_of(request, place, controls))
            if isinstance(logits, BadLogits):
                self.bad[place] = logits
                size = self._logits.shape[1]
                rows.append(torch.full((size,), 1.0 / size, dtype=torch.float64))
                break
            rows.append(filtered_probabilities(logits, request.params))
            draft = self._draft(place)
            is_possible = draft is not None and float(rows[-1][draft]) > 0
            if not self._goes_on(controls, place, is_possible):
                break
        return torch.stack(rows + [rows[-1]] * (count - len(rows)))

    def _goes_on(self, controls: Controls | None, place: int, can_hold: bool) -> bool:
        """Takes the draft of a place on trial; False when what follows is irrelevant."""
        draft = self._draft(place)
        if draft is None or not (can_hold or self._has_all):
            return False
        if controls is None:
            return True
        controls.take(draft)
        return not controls.is_complete

    def _draft(self, place: int) -> int | None:
        return self._drafts[place] if place < len(self._drafts) else None

    def _token(self, place: int, found: int | BadLogits) -> int:
        if isinstance(found, BadLogits):
            self.bad[place] = found
            return 0
        return found
