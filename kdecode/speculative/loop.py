"""Verify and commit: rounds of several requests over a forward that moves the caches.

A round is one step over each request's anchor and drafts, a verdict for each, and the caches moved
to what was committed. Rejected rows are taken back by recomputation: the KDA slots return to the
checkpoint from before the step, and the committed tokens run once more, without logits; MLA rows
are overwritten by those. It costs a second step, and serves as the oracle of faster forms.

Owns the order of these and that one number moves every cache. Knows no draft model, no sampling
controls and no request's life cycle: proposals come in, and ``judge`` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.speculative.accept import verify_greedy
from kdecode.speculative.checkpoint import SlotCheckpoints
from kdecode.speculative.stats import RoundStats
from kdecode.speculative.streams import Streams
from kdecode.speculative.types import Proposal, Verdict

# One step: logits of every row that is asked for them.
Forward = Callable[[StepBatch], Tensor]
# (index of the request, its proposal, logits [N + 1, vocab]) -> verdict.
Judge = Callable[[int, Proposal, Tensor], Verdict]


@dataclass
class ActiveRequest:
    """A request past its prompt. The caches hold all of its tokens but the anchor, the last."""

    token_ids: list[int]
    slot: int
    pages: tuple[int, ...]

    @property
    def anchor_position(self) -> int:
        return len(self.token_ids) - 1


def judge_greedily(index: int, proposal: Proposal, logits: Tensor) -> Verdict:
    """For greedy requests: the first of the largest logits, as the sampler chooses."""
    best = logits.argmax(-1).tolist()
    return verify_greedy(proposal, best, Streams(0, proposal.anchor_position))


@dataclass
class SpeculativeLoop:
    """Runs rounds. A request may sit out rounds, or have no drafts in them; both are plain."""

    forward: Forward
    caches: Caches
    stats: RoundStats = field(default_factory=RoundStats)
    checkpoints: SlotCheckpoints = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoints = SlotCheckpoints(self.caches)

    def round(
        self,
        requests: Sequence[ActiveRequest],
        proposals: Sequence[Proposal],
        judge: Judge = judge_greedily,
    ) -> list[Verdict]:
        """One round of every request; their token ids grow by what was accepted and one.

        Raises ValueError, with nothing run, for proposals that are not these requests' own. What
        ``judge`` raises ends the round between step and commit: the requests keep their tokens,
        but their caches have moved past them and are to be freed.
        """
        _check(requests, proposals)
        for request, proposal in zip(requests, proposals, strict=True):
            if proposal.num_drafts:
                self.checkpoints.save(request.slot, request.anchor_position)
        rows = [(r.token_ids[-1], *p.drafts) for r, p in zip(requests, proposals, strict=True)]
        logits = self.forward(_step(requests, rows, needs_logits=True))
        verdicts = []
        parts = torch.split(logits, [len(tokens) for tokens in rows])
        for index, (proposal, part) in enumerate(zip(proposals, parts, strict=True)):
            verdicts.append(judge(index, proposal, part))
        self._take_back(requests, rows, verdicts)
        for request, proposal, verdict in zip(requests, proposals, verdicts, strict=True):
            request.token_ids += verdict.tokens(proposal)
            self.stats.record(verdict)
        return verdicts

    def _take_back(
        self,
        requests: Sequence[ActiveRequest],
        rows: Sequence[tuple[int, ...]],
        verdicts: Sequence[Verdict],
    ) -> None:
        """Moves the caches of requests with rejected rows to their committed rows."""
        rejected, kept = [], []
        for request, tokens, verdict in zip(requests, rows, verdicts, strict=True):
            if verdict.committed_rows < len(tokens):
                self.checkpoints.restore(request.slot, request.anchor_position)
                rejected.append(request)
                kept.append(tokens[: verdict.committed_rows])
        if rejected:
            self.forward(_step(rejected, kept, needs_logits=False))


def _step(
    requests: Sequence[ActiveRequest], rows: Sequence[tuple[int, ...]], *, needs_logits: bool
) -> StepBatch:
    return StepBatch(
        tuple(
            StepRequest(
                token_ids=tokens,
                start=request.anchor_position,
                slot=request.slot,
                pages=request.pages,
                is_decode=True,
                needs_logits=needs_logits,
                all_logits=needs_logits,
            )
            for request, tokens in zip(requests, rows, strict=True)
        )
    )


def _check(requests: Sequence[ActiveRequest], proposals: Sequence[Proposal]) -> None:
    if len(requests) != len(proposals):
        raise ValueError(f"{len(requests)} requests have {len(proposals)} proposals.")
    for index, (request, proposal) in enumerate(zip(requests, proposals, strict=True)):
        if proposal.anchor_position != request.anchor_position:
            raise ValueError(
                f"The proposal for request {index} has its anchor at {proposal.anchor_position}; "
                f"the request's last token is at {request.anchor_position}."
            )
