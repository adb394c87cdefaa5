"""Verify and commit: rounds of several requests over a forward that moves the caches.

A round is one step over each request's anchor and drafts, a verdict for each, and the caches moved
to what was committed, by a `Rollback`.

Owns the order of these and that one number moves every cache. Knows no draft model, no sampling
controls and no request's life cycle: proposals come in, and ``judge`` decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kdecode.cache.batch import StepBatch
from kdecode.speculative.accept import verify_greedy
from kdecode.speculative.stats import RoundTimes
from kdecode.speculative.streams import Streams
from kdecode.speculative.types import Proposal, Rollback, Verdict

# One step: logits of every row that is asked for them.
Forward = Callable[[StepBatch], Tensor]
# (index of the request, its proposal, logits [N + 1, vocab]) -> verdict.
Judge = Callable[[int, Proposal, Tensor], Verdict]


def judge_greedily(index: int, proposal: Proposal, logits: Tensor) -> Verdict:
    """For greedy requests: the first of the largest logits, as the sampler chooses."""
    best = logits.argmax(-1).tolist()
    return verify_greedy(proposal, best, Streams(0, proposal.anchor_position))


@dataclass
class SpeculativeLoop:
    """Runs rounds. A request may sit out rounds, or have no drafts in them; both are plain."""

    forward: Forward
    rollback: Rollback
    times: RoundTimes = field(default_factory=RoundTimes)

    def round(
        self,
        anchors: StepBatch,
        proposals: Sequence[Proposal],
        judge: Judge = judge_greedily,
    ) -> list[Verdict]:
        """One round of every request. anchors: their plain decode step, with room for the drafts.

        Raises ValueError, with nothing run, for proposals that are not these requests' own. What
        ``judge`` raises ends the round between step and commit: the slots of requests with drafts
        are as they were before it.
        """
        _check(anchors, proposals)
        begin = time.perf_counter_ns()
        batch = self.rollback.before(with_drafts(anchors, proposals))
        logits = self.forward(batch)
        verdicts = []
        parts = torch.split(logits, [len(part.token_ids) for part in batch.requests])
        for index, (proposal, part) in enumerate(zip(proposals, parts, strict=True)):
            verdicts.append(judge(index, proposal, part))
        judged = time.perf_counter_ns()
        self.rollback.keep(batch, [verdict.committed_rows for verdict in verdicts])
        self.times.steps += 1
        self.times.verify_ns += judged - begin
        self.times.commit_ns += time.perf_counter_ns() - judged
        return verdicts


def with_drafts(anchors: StepBatch, proposals: Sequence[Proposal]) -> StepBatch:
    """The step over each request's anchor and drafts."""
    return StepBatch(
        tuple(
            replace(
                request,
                token_ids=(*request.token_ids, *proposal.drafts),
                needs_logits=True,
                all_logits=True,
            )
            for request, proposal in zip(anchors.requests, proposals, strict=True)
        )
    )


def _check(anchors: StepBatch, proposals: Sequence[Proposal]) -> None:
    if len(anchors.requests) != len(proposals):
        raise ValueError(f"{len(anchors.requests)} requests have {len(proposals)} proposals.")
    for index, (request, proposal) in enumerate(zip(anchors.requests, proposals, strict=True)):
        if not request.is_decode or len(request.token_ids) != 1:
            raise ValueError(
                f"Request {index} of a round has {len(request.token_ids)} tokens; it must have its "
                "anchor alone, behind its prompt."
            )
        if proposal.anchor_position != request.start:
            raise ValueError(
                f"The proposal for request {index} has its anchor at {proposal.anchor_position}; "
                f"the request's last token is at {request.start}."
            )
