"""Speculative rounds inside of an engine's decode steps.

Owns their order: drafts are proposed for the requests that the scheduler gave room, the target runs
anchors and drafts as one step, each request is judged, and one number of rows moves all of its
caches, the draft's included. Every other step only tells the proposer what was committed. Does not
know models, nor requests' life cycles.
"""

from __future__ import annotations

import time

from kdecode.cache.caches import Caches
from kdecode.config import ConfigError, EngineConfig, ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.config_speculative import SpeculativeConfig
from kdecode.decode.inspect_draft import TimedDraft
from kdecode.decode.runner import StepRunner
from kdecode.engine.draft import DraftWeights, make_forward
from kdecode.engine.judge import Judge
from kdecode.engine.sampling import BadLogits, Choice
from kdecode.engine.scheduler import ScheduledStep, Share
from kdecode.engine.step_costs import measure_costs
from kdecode.model.layout import PackedModel
from kdecode.speculative.adaptive import StepCosts, lengths
from kdecode.speculative.dspark import DsparkProposer
from kdecode.speculative.loop import SpeculativeLoop, with_drafts
from kdecode.speculative.rollback import Deferred
from kdecode.speculative.stats import RoundTimes
from kdecode.speculative.types import Proposal, Proposer, RoundRequest


def draft_config(engine: EngineConfig, target: ModelConfig) -> DraftConfig | None:
    """The draft of an engine's configuration, if it has one. Raises ConfigError."""
    speculative = engine.speculative
    if speculative is None:
        return None
    draft = DraftConfig.from_checkpoint(speculative.model, speculative.tap_stream)
    draft.check_target(target)
    if speculative.num_speculative_tokens > draft.max_drafts:
        raise ConfigError(
            f"num_speculative_tokens is {speculative.num_speculative_tokens}; the draft in "
            f"{speculative.model} was trained for at most {draft.max_drafts}."
        )
    if speculative.enable_adaptive_verification and not draft.has_confidence:
        raise ConfigError(
            f"enable_adaptive_verification is set; the draft in {speculative.model} has no "
            "confidence head to go by."
        )
    return draft


def verify_rows(engine: EngineConfig) -> tuple[int, ...]:
    """Rows of one request of the steps that judge drafts."""
    speculative = engine.speculative
    if speculative is None:
        return ()
    most = 1 + speculative.num_speculative_tokens
    return tuple(range(2, most + 1)) if speculative.enable_adaptive_verification else (most,)


class Speculation:
    """The rounds of one worker."""

    def __init__(
        self,
        config: SpeculativeConfig,
        proposer: Proposer,
        runner: StepRunner,
        caches: Caches,
        costs: StepCosts | None = None,
    ) -> None:
        self.config = config
        # What verification adapts to; None where every draft is verified.
        self.costs = costs
        self._proposer = proposer
        self._runner = runner
        self._loop = SpeculativeLoop(runner.run, Deferred(caches))

    @staticmethod
    def of(
        engine: EngineConfig,
        draft: DraftConfig,
        weights: DraftWeights,
        packed: PackedModel,
        runner: StepRunner,
        caches: Caches,
    ) -> Speculation:
        """The rounds that an engine's configuration asks for."""
        assert engine.speculative is not None
        forward = make_forward(weights, draft, engine, packed, runner, caches)
        proposer = DsparkProposer(engine.speculative, forward)
        costs = None
        if engine.speculative.enable_adaptive_verification:
            count = engine.speculative.num_speculative_tokens
            costs = measure_costs(runner, caches, forward, count)
        return Speculation(engine.speculative, proposer, runner, caches, costs)

    @property
    def timed_draft(self) -> TimedDraft | None:
        """The draft's forward, if there is one whose rounds can be timed."""
        forward = self._proposer.forward if isinstance(self._proposer, DsparkProposer) else None
        return forward if isinstance(forward, TimedDraft) else None

    @property
    def times(self) -> RoundTimes:
        return self._loop.times

    def observe(self, step: ScheduledStep) -> None:
        """A step without drafts has run."""
        rows = [len(request.token_ids) for request in step.batch.requests]
        self._proposer.observe(step.batch, rows, self._runner.last_taps)

    def round(self, step: ScheduledStep) -> list[Choice | BadLogits]:
        """Runs a decode step of which at least one request has room for drafts."""
        begin = time.perf_counter_ns()
        proposals = self._worthwhile(self._propose(step))
        drafted = time.perf_counter_ns()
        judge = Judge([share.request for share in step.shares], self.config)
        verdicts = self._loop.round(step.batch, proposals, judge)
        judged = time.perf_counter_ns()
        batch = with_drafts(step.batch, proposals)
        rows = [verdict.committed_rows for verdict in verdicts]
        self._proposer.observe(batch, rows, self._runner.last_taps)
        self.times.draft_ns += drafted - begin
        self.times.commit_ns += time.perf_counter_ns() - judged
        return [judge.choices[index] for index in range(len(verdicts))]

    def _worthwhile(self, proposals: list[Proposal]) -> list[Proposal]:
        """Each request's drafts as far as they pay, where verification adapts."""
        if self.costs is None or any(p.confidence is None for p in proposals if p.num_drafts):
            return proposals
        chosen = lengths(
            [proposal.confidence or () for proposal in proposals],
            self.costs,
            len(proposals),
            # Steps of unequal numbers of drafts have no prepared plan.
            is_uniform=self._runner.engine.decode_backend == "latency_specialized",
        )
        return [p.shortened(count) for p, count in zip(proposals, chosen, strict=True)]

    def _propose(self, step: ScheduledStep) -> list[Proposal]:
        """One proposal for each request; none of its drafts where it has no room for any."""
        asked = [share for share in step.shares if share.num_drafts and not _is_followed(share)]
        requests = [_round_request(share) for share in asked]
        found = iter(self._proposer.propose(requests) if requests else [])
        proposals = []
        for share in step.shares:
            position = share.request.num_cached
            if _is_followed(share):
                proposals.append(Proposal(position, _next_of_reply(share)))
            elif share.num_drafts:
                proposals.append(next(found))
            else:
                proposals.append(Proposal(position, ()))
        return proposals


def _is_followed(share: Share) -> bool:
    return share.request.forced_ids is not None


def _next_of_reply(share: Share) -> tuple[int, ...]:
    request = share.request
    assert request.forced_ids is not None
    known = len(request.output_ids)
    return request.forced_ids[known : known + share.num_drafts]


def _round_request(share: Share) -> RoundRequest:
    request = share.request
    assert request.slot is not None
    return RoundRequest(
        number=request.number,
        anchor=request.output_ids[-1],
        anchor_position=request.num_cached,
        num_drafts=share.num_drafts,
        slot=request.slot,
        pages=tuple(request.pages),
        temperature=request.params.temperature,
        seed=request.seed,
    )
