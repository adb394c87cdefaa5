"""DSpark's proposals: a draft model over states tapped from the target.

Owns which rows the draft's cache gets, how drafts are chosen from logits (greedy or drawn, left to
right) and that the draft never works on a cache of another length than its request's. Does not know
how the draft's forward runs: `DraftForward` is the torch form or a faster one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kdecode.cache.batch import StepBatch
from kdecode.config_speculative import SpeculativeConfig
from kdecode.decode.draft_standard import (
    Choose,
    ContextRows,
    DraftBlock,
    DraftRequest,
    first_choices,
)
from kdecode.speculative.accept import draw
from kdecode.speculative.streams import Streams
from kdecode.speculative.types import Proposal, RoundRequest


class DraftForward(Protocol):
    """See `StandardDraft`."""

    def append(self, parts: Sequence[ContextRows]) -> None: ...

    def block(
        self, requests: Sequence[DraftRequest], num_drafts: int, choose: Choose
    ) -> DraftBlock: ...


class DsparkProposer:
    """A `Proposer`. A greedy request's drafts are first choices, whatever the drafting method."""

    def __init__(self, config: SpeculativeConfig, forward: DraftForward) -> None:
        self._num_drafts = config.num_speculative_tokens
        self._is_drawn = config.draft_sample_method == "probabilistic"
        self.forward = forward
        # Rows of the draft's cache, by the request's slot.
        self._num_tokens: dict[int, int] = {}

    def observe(self, batch: StepBatch, rows: Sequence[int], taps: Tensor | None) -> None:
        """Raises RuntimeError where the step has no taps, or does not follow the cached rows."""
        if taps is None:
            raise RuntimeError("The step handed out no taps; the draft has nothing to read.")
        parts, first = [], 0
        for request, count in zip(batch.requests, rows, strict=True):
            known = self._num_tokens.get(request.slot, 0)
            if request.start == 0 or request.is_resumed:
                known = request.start
            if known != request.start:
                raise RuntimeError(
                    f"The draft's cache of slot {request.slot} has {known} rows; the step began "
                    f"at {request.start}."
                )
            parts.append(ContextRows(request.start, request.pages, taps[first : first + count]))
            self._num_tokens[request.slot] = request.start + count
            first += len(request.token_ids)
        self.forward.append(parts)

    def propose(self, requests: Sequence[RoundRequest]) -> list[Proposal]:
        """The block is as long for every request, however few of its drafts are asked for."""
        for request in requests:
            known = self._num_tokens.get(request.slot, 0)
            if known != request.anchor_position:
                raise RuntimeError(
                    f"The draft's cache of slot {request.slot} has {known} rows; the anchor is at "
                    f"{request.anchor_position}."
                )
        policy = _Policy(requests, is_drawn=self._is_drawn)
        targets = [DraftRequest(r.anchor, r.anchor_position, r.pages) for r in requests]
        choose = policy.choose if policy.draws else first_choices
        block = self.forward.block(targets, self._num_drafts, choose)
        proposals = []
        for row, request in enumerate(requests):
            proposal = Proposal(
                anchor_position=request.anchor_position,
                drafts=block.tokens[row],
                probabilities=policy.probabilities(row),
                confidence=None if block.confidence is None else block.confidence[row],
            )
            proposals.append(proposal.shortened(request.num_drafts))
        return proposals


class _Policy:
    """How the drafts of one round are chosen. Probabilities are fp64, as in verification."""

    def __init__(self, requests: Sequence[RoundRequest], *, is_drawn: bool) -> None:
        self._requests = requests
        self._drawn = [
            row for row, request in enumerate(requests) if is_drawn and request.temperature > 0
        ]
        self._rows: dict[int, list[Tensor]] = {row: [] for row in self._drawn}

    @property
    def draws(self) -> bool:
        """Whether any draft of the round is no first choice."""
        return bool(self._drawn)

    def choose(self, place: int, logits: Tensor) -> list[int]:
        tokens = first_choices(place, logits)
        for row in self._drawn:
            request = self._requests[row]
            scaled = logits[row].cpu().double() / request.temperature
            probabilities = torch.softmax(scaled, dim=-1)
            streams = Streams(request.seed, request.anchor_position)
            uniform = torch.tensor([streams.uniform("draft", place)], dtype=torch.float64)
            tokens[row] = int(draw(probabilities.unsqueeze(0), uniform))
            self._rows[row].append(probabilities)
        return tokens

    def probabilities(self, row: int) -> Tensor | None:
        """[N, vocab] that a request's drafts were drawn from; None for first choices."""
        return torch.stack(self._rows[row]) if row in self._rows else None
