"""Proposers for tests: drafts from a script, no drafts, and the target as its own draft."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.decode.runner import StepRunner
from kdecode.engine.engine import LLM
from kdecode.engine.speculation import Speculation
from kdecode.speculative.checkpoint import SlotCheckpoints
from kdecode.speculative.types import Proposal, Proposer, RoundRequest


def inner(llm: LLM) -> Proposer:
    """The proposer of an engine's draft model."""
    assert llm._worker.speculation is not None
    return llm._worker.speculation._proposer


def use(llm: LLM, proposer: Proposer) -> None:
    """Has an engine's drafts come from a proposer instead of its draft model."""
    worker = llm._worker
    assert worker.speculation is not None
    config = worker.speculation.config
    worker.speculation = Speculation(config, proposer, worker.runner, worker.caches)


def without_drafts(llm: LLM) -> None:
    """Has an engine with a draft model decode plainly; the draft's rows go on."""
    scheduler = llm.loop.scheduler
    scheduler._limits = replace(scheduler._limits, num_drafts=0)


@dataclass
class Observed:
    """A proposer that checks what it is told, and tells the draft model, whose rows go on.

    committed: tokens by slot.
    """

    inner: Proposer
    committed: dict[int, int] = field(default_factory=dict)

    def observe(self, batch: StepBatch, rows: Sequence[int], taps: Tensor | None) -> None:
        for request, count in zip(batch.requests, rows, strict=True):
            known = 0 if request.start == 0 else self.committed[request.slot]
            assert known == request.start, "a step does not follow what was committed before it"
            self.committed[request.slot] = known + count
        self.inner.observe(batch, rows, taps)


@dataclass
class Scripted(Observed):
    """Drafts of which a stated number is right. replies: of plain decoding, by request number.

    pattern(num_drafts): for each round in turn how many are right, and how many there are.
    """

    replies: Mapping[int, Sequence[int]] = field(default_factory=dict)
    prompts: Mapping[int, int] = field(default_factory=dict)
    vocab: int = 1000
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    _patterns: dict[int, Iterator[tuple[int, int]]] = field(default_factory=dict)

    def propose(self, requests: Sequence[RoundRequest]) -> list[Proposal]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: RoundRequest) -> Proposal:
        assert self.committed[request.slot] == request.anchor_position
        if request.number not in self._patterns:
            # Requests are out of step with each other.
            turns = itertools.cycle(every_acceptance(request.num_drafts))
            self._patterns[request.number] = itertools.islice(turns, 3 * request.number, None)
        right, count = next(self._patterns[request.number])
        count = min(count, request.num_drafts)
        right = min(right, count)
        reply = self.replies[request.number]
        place = request.anchor_position + 1 - self.prompts[request.number]
        drafts = list(reply[place : place + right])
        wrong = (reply[place + right : place + right + 1] or [0])[0]
        while len(drafts) < count:
            wrong = (wrong + 1) % self.vocab
            drafts.append(wrong)
        self.rounds.append((request.number, right, count))
        return Proposal(request.anchor_position, tuple(drafts))


def every_acceptance(num_drafts: int) -> Iterator[tuple[int, int]]:
    """(right, drafts): every number of right drafts, a round of none after each."""
    for right in range(num_drafts + 1):
        yield right, num_drafts
        yield 0, 0


@dataclass
class Silent(Observed):
    """Never has a draft."""

    def propose(self, requests: Sequence[RoundRequest]) -> list[Proposal]:
        return [Proposal(request.anchor_position, ()) for request in requests]


class SelfDraft(Observed):
    """The target as its own draft: it decodes ahead, and takes its slots back."""

    def __init__(self, inner: Proposer, runner: StepRunner, caches: Caches) -> None:
        super().__init__(inner)
        self._runner = runner
        self._checkpoints = SlotCheckpoints(caches)

    def propose(self, requests: Sequence[RoundRequest]) -> list[Proposal]:
        proposals = []
        for request in requests:
            self._checkpoints.save(request.slot, request.anchor_position)
            drafts: list[int] = []
            token = request.anchor
            for place in range(request.num_drafts):
                step = StepRequest(
                    (token,),
                    request.anchor_position + place,
                    request.slot,
                    request.pages,
                    is_decode=True,
                )
                token = int(self._runner.run(StepBatch((step,)))[0].argmax())
                drafts.append(token)
            self._checkpoints.restore(request.slot, request.anchor_position)
            proposals.append(Proposal(request.anchor_position, tuple(drafts)))
        return proposals
