"""How many drafts are verified: what pays, and nothing that tells of a draft's own token."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kdecode.speculative.accept import (
    Accepted,
    chances,
    residual,
    run_chances,
    run_weights,
)
from kdecode.speculative.adaptive import StepCosts, lengths, survivals

FLAT = StepCosts.of({1: 1.0, 64: 1.0}, draft=0.5)
STEEP = StepCosts.of({1: 1.0, 2: 2.0}, draft=0.0)


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = StepCosts.of({1: 1.0, 4: 2.5, 8: 2.4}, draft=0.25)
    # A larger step that was faster is noise.
    expected = {1: 1.0, 2: 1.5, 4: 2.5, 6: 2.5, 8: 2.5, 12: 2.5}
    assert {rows: costs.round(rows) - 0.25 for rows in expected} == pytest.approx(expected)
    assert STEEP.round(5) == pytest.approx(5.0)
    assert StepCosts.of({2: 1.0}, draft=0.0).round(4) == 2.0
    with pytest.raises(ValueError, match="No step"):
        StepCosts.of({}, draft=1.0)


@pytest.mark.parametrize("is_uniform", [False, True])
def test_free_rows_are_all_used_and_dear_ones_are_not(is_uniform: bool) -> None:
    confidences = [(0.9, 0.8, 0.7), (0.5, 0.5, 0.5)]
    assert lengths(confidences, FLAT, 2, is_uniform=is_uniform) == [3, 3]
    assert lengths(confidences, STEEP, 2, is_uniform=is_uniform) == [0, 0]
    assert lengths([], FLAT, 1, is_uniform=is_uniform) == []
    assert lengths([(), ()], FLAT, 2, is_uniform=is_uniform) == [0, 0]


def test_the_likeliest_runs_get_the_rows() -> None:
    costs = StepCosts.of({2: 1.0, 3: 1.2, 8: 3.2}, draft=0.1)
    found = lengths([(0.95, 0.9, 0.9), (0.2, 0.2, 0.2)], costs, 2, is_uniform=False)
    assert found[0] > found[1] == 0
    assert survivals((0.95, 0.9, 0.9)) == pytest.approx([0.95, 0.855, 0.7695])
    # The other way round, and with one request that has no drafts in the step.
    found = lengths([(0.2, 0.2), (), (0.95, 0.9)], costs, 3, is_uniform=False)
    assert (found[0], found[1]) == (0, 0)


@pytest.mark.parametrize("is_uniform", [False, True])
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_each_draft_that_is_admitted_pays(is_uniform: bool, scale: float) -> None:
    """Tokens per cost with what was chosen are at least those of each shorter choice on the way."""
    costs = StepCosts.of({1: 1.0, 4: 1.0 + 0.4 * scale, 12: 1.0 + 2.0 * scale}, draft=0.2)
    confidences = [(0.9, 0.6, 0.4), (0.8, 0.8, 0.8), (0.3, 0.9, 0.9)]
    runs = [survivals(c) for c in confidences]
    found = lengths(confidences, costs, 3, is_uniform=is_uniform)

    def value(chosen: list[int]) -> float:
        gained = sum(sum(run[:count]) for run, count in zip(runs, chosen, strict=True))
        return (3 + gained) / costs.round(3 + sum(chosen))

    assert value(found) >= value([0, 0, 0])
    if is_uniform:
        assert len(set(found)) == 1
        assert all(value(found) >= value([n] * 3) for n in range(found[0]))


# Three tokens, two drafts: the target, the draft and its confidence by the token before.
VOCAB = 3
P = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.6, 0.1, 0.3]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.2, 0.7], [0.4, 0.4, 0.2]], dtype=torch.float64)
CONFIDENCE = (0.9, 0.4, 0.7)
COSTS = StepCosts.of({1: 1.0, 2: 1.45, 3: 1.95}, draft=0.1)


Choose = Callable[[int, tuple[int, ...]], int]


def _choose(anchor: int, drafts: tuple[int, ...]) -> int:
    before = (anchor, *drafts[:-1])
    confidence = tuple(CONFIDENCE[token] for token in before)
    return lengths([confidence], COSTS, 1, is_uniform=False)[0]


def test_the_number_of_drafts_does_not_depend_on_the_last_one_or_on_those_cut_off() -> None:
    seen = set()
    for anchor in range(VOCAB):
        for drafts in itertools.product(range(VOCAB), repeat=2):
            count = _choose(anchor, drafts)
            seen.add(count)
            for place in range(count, 2):
                # Any other tokens from there on would have been cut off, too.
                for others in itertools.product(range(VOCAB), repeat=2 - place):
                    assert _choose(anchor, (*drafts[:place], *others)) == count
    assert seen == {0, 1, 2}


def _emitted(anchor: int, method: str, choose: Choose = _choose) -> Tensor:
    """Probability of the next two tokens [V, V], by enumeration of everything that can happen.

    What a round does not emit is the target's own, as the next round's would be.
    """
    total = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for drafts in itertools.product(range(VOCAB), repeat=2):
        chance = float(Q[anchor, drafts[0]] * Q[drafts[0], drafts[1]])
        count = choose(anchor, drafts)
        kept = torch.tensor([drafts[:count]]).view(1, count).long()
        before = [anchor, *drafts[:count]]
        p, q = P[before].unsqueeze(0), Q[before[:-1]].unsqueeze(0)
        for accepted, share, weight in _outcomes(p, kept, q, method):
            rows = residual(p, kept, q, Accepted(torch.tensor([accepted]), weight))
            rows = rows / rows.sum()
            for token in range(VOCAB):
                run = [*drafts[:accepted], token]
                mass = chance * share * float(rows[0, token])
                if len(run) == 1:
                    total[run[0]] += mass * P[run[0]]
                else:
                    total[run[0], run[1]] += mass
    return total


def _outcomes(p: Tensor, drafts: Tensor, q: Tensor, method: str) -> list[tuple[int, float, Tensor]]:
    """(accepted, its probability, weight of the target's row) of one round."""
    count = drafts.shape[1]
    if method == "standard":
        ratio = chances(p, drafts, q)[0].clamp_max(1.0).tolist()
        reach = list(itertools.accumulate([1.0, *ratio], lambda a, b: a * b))
        ends = [reach[n] * (1 - ratio[n]) if n < count else reach[n] for n in range(count + 1)]
        one = torch.ones(1, dtype=torch.float64)
        return [(n, share, one) for n, share in enumerate(ends) if share > 0]
    good = run_chances(p, drafts, q)[0].tolist()[:count]
    weights = run_weights(p, drafts, q)
    found, left = [], 1.0
    for n in range(count, 0, -1):
        found.append((n, left * good[n - 1], weights[:, n]))
        left *= 1 - good[n - 1]
    found.append((0, left, weights[:, 0]))
    return [entry for entry in found if entry[1] > 0]


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("anchor", range(VOCAB))
def test_two_tokens_are_distributed_as_the_target_s(anchor: int, method: str) -> None:
    expected = P[anchor].unsqueeze(1) * P
    assert torch.allclose(_emitted(anchor, method), expected, atol=1e-12)


def test_a_choice_that_looks_at_the_draft_itself_bends_the_distribution() -> None:
    """The enumeration sees it: the number of drafts decided by the second draft's own token."""

    def peek(anchor: int, drafts: tuple[int, ...]) -> int:
        return 2 if drafts[1] == 0 else 1

    for anchor in range(VOCAB):
        expected = P[anchor].unsqueeze(1) * P
        assert float((_emitted(anchor, "standard", peek) - expected).abs().max()) > 1e-3
