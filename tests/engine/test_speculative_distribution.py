"""What a round emits is distributed as the target's own tokens are, and as often as was asked."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from kdecode.config_speculative import SpeculativeConfig
from kdecode.engine.judge import Judge
from kdecode.engine.request import Request, SamplingParams, Timing
from kdecode.engine.sampling import Choice, filtered_probabilities
from kdecode.speculative.accept import (
    accept_block,
    accept_standard,
    draw,
    extra_tokens,
)
from kdecode.speculative.adaptive import StepCosts, lengths
from kdecode.speculative.streams import Streams
from kdecode.speculative.types import Proposal

VOCAB, NUM_DRAFTS = 6, 3
COSTS = StepCosts.of({1: 1.0, 2: 1.4, 3: 1.7, 4: 1.9}, draft=0.1)
PARAMS = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, max_tokens=10**6, ignore_eos=True)
# Chi-square: how far above its degrees of freedom, in standard deviations, a sum may lie.
MAX_SIGMAS = 4.0


def _tables(seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the target, its filtered distributions and the draft's, by the token before."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(VOCAB, VOCAB, generator=generator)
    target = torch.stack([filtered_probabilities(row, PARAMS) for row in logits])
    other = logits + torch.randn(VOCAB, VOCAB, generator=generator)
    # The draft knows of the temperature and of no filter.
    return logits, target, torch.softmax(other.double() / PARAMS.temperature, dim=-1)


def _sigmas(counts: Tensor, target: Tensor) -> float:
    """How far a chi-square of transition counts [V, V] lies above its mean, in deviations."""
    assert float(counts[target == 0].sum()) == 0, "a token that the filters exclude was emitted"
    expected = counts.sum(1, keepdim=True) * target
    is_possible = expected > 0
    chi = ((counts - expected).square()[is_possible] / expected[is_possible]).sum()
    freedom = float(is_possible.sum() - (counts.sum(1) > 0).sum())
    return (float(chi) - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("drafting", ["greedy", "probabilistic"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_fifty_thousand_draws(method: str, drafting: str) -> None:
    """4,200 chains at once, 12 tokens of each: a fixed number, as the end of a run tells of it."""
    _, target, own = _tables()
    generator = torch.Generator().manual_seed(0)
    chains, length = 4200, 12

    def uniforms(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    emitted = torch.zeros(chains, length + NUM_DRAFTS + 1, dtype=torch.long)
    known = torch.ones(chains, dtype=torch.long)
    accepted_drafts = 0
    while int(known.min()) <= length:
        rows = torch.arange(chains)
        tokens = [emitted[rows, (known - 1).clamp_max(length)]]
        for _ in range(NUM_DRAFTS):
            q = own[tokens[-1]]
            tokens.append(q.argmax(-1) if drafting == "greedy" else draw(q, uniforms(chains)))
        before = torch.stack(tokens, dim=1)  # [B, N + 1]
        drafts, p = before[:, 1:], target[before]
        given = None if drafting == "greedy" else own[before[:, :-1]]
        accept = accept_block if method == "block" else accept_standard
        accepted = accept(p, drafts, given, uniforms(chains, NUM_DRAFTS))
        extra = extra_tokens(p, drafts, given, accepted, uniforms(chains))
        accepted_drafts += int(accepted.count.sum())
        for row in rows[known <= length].tolist():
            held = int(accepted.count[row])
            new = [*drafts[row, :held].tolist(), int(extra[row])]
            place = int(known[row])
            emitted[row, place : place + len(new)] = torch.tensor(new)
            known[row] = place + len(new)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    pairs = emitted[:, :length] * VOCAB + emitted[:, 1 : length + 1]
    counts.view(-1).index_add_(0, pairs.flatten(), torch.ones(pairs.numel(), dtype=torch.float64))
    assert counts.sum() == chains * length > 50_000
    assert accepted_drafts > 0.1 * chains * length
    assert _sigmas(counts, target) < MAX_SIGMAS


def test_the_test_sees_a_wrong_temperature() -> None:
    """Counts from the target at temperature 1 are far off."""
    logits, target, _ = _tables()
    hot = SamplingParams(temperature=1.0, top_k=5, top_p=0.9)
    wrong = torch.stack([filtered_probabilities(row, hot) for row in logits])
    wrong = torch.where(target > 0, wrong, torch.zeros_like(wrong))
    assert _sigmas(8000 * wrong / wrong.sum(1, keepdim=True), target) > 10 * MAX_SIGMAS


def _request(seed: int, params: SamplingParams = PARAMS) -> Request:
    return Request(0, (0,), params, frozenset(), seed, Timing(0))


def _chain(config: SpeculativeConfig, num_tokens: int) -> tuple[list[int], int, int]:
    """One request over the judge itself: its tokens, accepted drafts, rounds.

    Where verification adapts, what the draft expects goes by the token before, as the head does.
    """
    logits, _, own = _tables()
    request = _request(seed=11)
    request.output_ids.append(0)
    accepted = rounds = 0
    is_drawn = config.draft_sample_method == "probabilistic"
    counts = Counter[int]()
    while len(request.output_ids) <= num_tokens:
        anchor = request.num_tokens - 1
        streams = Streams(request.seed, anchor)
        before = [request.output_ids[-1]]
        for place in range(NUM_DRAFTS):
            q = own[before[-1]]
            uniform = torch.tensor([streams.uniform("draft", place)], dtype=torch.float64)
            before.append(int(draw(q[None], uniform)) if is_drawn else int(q.argmax()))
        probabilities = own[before[:-1]] if is_drawn else None
        confidence = tuple(0.3 + 0.12 * token for token in before[:-1])
        proposal = Proposal(anchor, tuple(before[1:]), probabilities, confidence)
        if config.enable_adaptive_verification:
            (count,) = lengths([confidence], COSTS, 1, is_uniform=False)
            proposal, before = proposal.shortened(count), before[: count + 1]
            counts[count] += 1
        judge = Judge([request], config)
        verdict = judge(0, proposal, logits[before])
        choice = judge.choices[0]
        assert isinstance(choice, Choice)
        assert choice.tokens == verdict.tokens(proposal)
        request.output_ids += choice.tokens
        accepted, rounds = accepted + verdict.accepted, rounds + 1
    if config.enable_adaptive_verification:
        assert set(counts) == {0, 1, 2, 3}
        assert min(counts.values()) > 20
    return request.output_ids[: num_tokens + 1], accepted, rounds


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("drafting", ["greedy", "probabilistic"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_request_of_an_engine(method: str, drafting: str, is_adaptive: bool) -> None:
    """The same through the engine's judge, with the random numbers of its request."""
    config = SpeculativeConfig(
        "draft",
        NUM_DRAFTS,
        draft_sample_method=drafting,  # type: ignore[arg-type]
        rejection_sample_method=method,  # type: ignore[arg-type]
        enable_adaptive_verification=is_adaptive,
    )
    _, target, _ = _tables()
    tokens, accepted, rounds = _chain(config, 3000)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for before, after in itertools.pairwise(tokens):
        counts[before, after] += 1
    assert accepted > 0.2 * rounds
    assert _sigmas(counts, target) < MAX_SIGMAS


@pytest.mark.parametrize(("length", "num_drafts"), [(6.0, 7), (4.37, 7), (1.0, 3), (4.0, 3)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_synthetic_acceptance_over_two_thousand_steps(
    length: float, num_drafts: int, temperature: float
) -> None:
    config = SpeculativeConfig(
        "draft",
        num_drafts,
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=length,
    )
    request = _request(5, SamplingParams(temperature=temperature, max_tokens=10**6))
    logits = torch.randn(num_drafts + 1, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens = 0
    for _ in range(2000):
        proposal = Proposal(request.num_tokens - 1, tuple(n % VOCAB for n in range(num_drafts)))
        verdict = Judge([request], config)(0, proposal, logits)
        assert verdict.is_synthetic
        tokens += verdict.committed_rows
        request.output_ids += verdict.tokens(proposal)
    assert tokens / 2000 == pytest.approx(length, abs=0.02)
