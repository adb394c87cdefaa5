"""Small machines that run rounds: caches with a plan, requests past their prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from auto_cases import Request, Session, make_model, tokens_of
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.decode.auto import run_standard
from kdecode.decode.plan import DecodePlan
from kdecode.kernels.contract import Tolerance
from kdecode.speculative.loop import Judge, SpeculativeLoop, judge_greedily
from kdecode.speculative.rollback import Deferred, Recomputation
from kdecode.speculative.stats import RoundStats
from kdecode.speculative.types import Proposal, Rollback, Verdict

# A step of several rows rounds in another order than steps of one, and a rounding may change an
# expert: RMS ratios of up to 0.044, 0.024 and 0.015 were seen. A window that is off by one token
# has 0.66 and more, a recurrent state 0.076 and more.
STATE = {
    "window": Tolerance(rtol=0.5, atol=0.5, rms_ratio=0.1),
    "recurrent": Tolerance(rtol=0.5, atol=0.3, rms_ratio=0.05),
    "rows": Tolerance(rtol=0.5, atol=0.5, rms_ratio=0.05),
}
PROMPTS = (tokens_of(5, 1), tokens_of(17, 2), tokens_of(1, 3))


@dataclass
class Machine:
    """Caches and the plan that moves them."""

    plan: DecodePlan
    caches: Caches
    form: str = "deferred"

    def forward(self, batch: StepBatch) -> Tensor:
        # A copy, as a later step overwrites the buffer.
        return run_standard(self.plan, batch).clone()

    @property
    def rollback(self) -> Rollback:
        if self.form == "recomputed":
            return Recomputation(self.forward, self.caches)
        return Deferred(self.caches)

    def start(self, prompt: Sequence[int]) -> tuple[Request, Tensor]:
        """A request whose prompt has run, and the logits behind it."""
        request = Request(self.caches.allocate_slot(), self.caches.allocate_pages(100))
        logits = self.forward(StepBatch((request.take(list(prompt)),)))
        request.is_decode = True
        return request, logits[0]

    def state(self, slot: int, pages: tuple[int, ...], num_tokens: int) -> dict[str, Tensor]:
        caches = self.caches
        found = {f"window.{n}": x[slot].clone() for n, x in caches.conv.items()}
        found |= {f"recurrent.{n}": x[slot].clone() for n, x in caches.recurrent.items()}
        for layer, pool in caches.pages.items():
            rows = pool[list(pages)].flatten(0, 1)[:num_tokens]
            found[f"rows.{layer}"] = rows.clone()
        return found


@dataclass
class ActiveRequest:
    """A request past its prompt. The caches hold all of its tokens but the anchor, the last."""

    token_ids: list[int]
    slot: int
    pages: tuple[int, ...]

    @property
    def anchor_position(self) -> int:
        return len(self.token_ids) - 1

    @property
    def step(self) -> StepRequest:
        anchor = (self.token_ids[-1],)
        return StepRequest(anchor, self.anchor_position, self.slot, self.pages, is_decode=True)


@dataclass
class Counted(SpeculativeLoop):
    """A loop whose verdicts are counted."""

    stats: RoundStats = field(default_factory=RoundStats)


def run_round(
    loop: Counted,
    actives: Sequence[ActiveRequest],
    proposals: Sequence[Proposal],
    judge: Judge = judge_greedily,
) -> list[Verdict]:
    """One round, and the requests' tokens moved on."""
    verdicts = loop.round(StepBatch(tuple(one.step for one in actives)), proposals, judge)
    for one, proposal, verdict in zip(actives, proposals, verdicts, strict=True):
        new = verdict.tokens(proposal)
        one.token_ids += new
        loop.stats.record(verdict, len(new))
    return verdicts


def make_tiny(
    model_form: str, rollback: str = "deferred", fill: str = "nan"
) -> Callable[[], Machine]:
    model = make_model(model_form)

    def make() -> Machine:
        session = Session(model)
        if fill == "bytes":
            # What a wrong read finds is then finite, and nowhere near right.
            for pool in session.pools:
                pool.view(torch.uint8).fill_(0x3D)
        return Machine(session.plan, session.caches, rollback)

    return make
