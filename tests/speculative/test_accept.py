"""Verification keeps the target's distribution: exact enumeration, draws, and the edges."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from trees import Language, emitted, first_choice, fixed_language, random_language

from kdecode.config_speculative import schedule
from kdecode.speculative.accept import (
    Accepted,
    accept_block,
    accept_greedy,
    accept_standard,
    accept_synthetic,
    conditional_rates,
    draw,
    extra_tokens,
    residual,
    run_chances,
    verify,
    verify_greedy,
)
from kdecode.speculative.streams import Purpose, Streams
from kdecode.speculative.types import Proposal, Verdict

METHODS = {"standard": accept_standard, "block": accept_block}
# A million-to-one chance, by degrees of freedom.
CHI_SQUARE_LIMIT = {3: 30.7, 26: 76.0}


def _assert_is_target(found: dict[tuple[int, ...], float], target: Language, length: int) -> None:
    for tokens in itertools.product(range(target.vocab), repeat=length):
        assert found.get(tokens, 0.0) == pytest.approx(target.probability(tokens), abs=1e-14)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_enumeration_with_drawn_drafts(method: str, zeros: bool, num_drafts: int) -> None:
    target, drafter = random_language(3, 1, zeros), random_language(3, 2, zeros)
    found, _ = emitted(target, drafter, num_drafts, method, is_one_hot=False)
    _assert_is_target(found, target, num_drafts + 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_enumeration_with_given_drafts(method: str, num_drafts: int) -> None:
    """First choices, and drafts drawn by a chance that verification is not told of."""
    target, drafter = random_language(3, 3), random_language(3, 4)
    for source in (first_choice(drafter), drafter):
        found, _ = emitted(target, source, num_drafts, method, is_one_hot=True)
        _assert_is_target(found, target, num_drafts + 1)


def test_expected_length_of_the_worked_example() -> None:
    target = fixed_language((0.5, 0.3, 0.2), (0.2, 0.5, 0.3))
    drafter = fixed_language((0.2, 0.5, 0.3), (0.1, 0.2, 0.7))
    lengths = {m: emitted(target, drafter, 2, m, is_one_hot=False)[1] for m in METHODS}
    assert lengths["standard"] == pytest.approx(1.12, abs=1e-12)
    assert lengths["block"] == pytest.approx(1.21, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_block_never_accepts_fewer(seed: int) -> None:
    target, drafter = random_language(3, seed), random_language(3, 100 + seed)
    lengths = {m: emitted(target, drafter, 3, m, is_one_hot=False)[1] for m in METHODS}
    assert lengths["block"] >= lengths["standard"] - 1e-14


def test_a_perfect_drafter_is_always_believed() -> None:
    target = random_language(3, 5)
    for method in METHODS:
        assert emitted(target, target, 3, method, is_one_hot=False)[1] == pytest.approx(3.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_one_hot", [False, True])
def test_a_threshold_is_met_from_below(method: str, is_one_hot: bool) -> None:
    """u just below the chance of a draft accepts it; u at the chance does not."""
    target, drafter = random_language(4, 6), random_language(4, 7)
    p = torch.stack([target.next_token(()), target.next_token((2,))]).unsqueeze(0)
    q = None if is_one_hot else drafter.next_token(()).view(1, 1, -1)
    drafts = torch.tensor([[2]])
    ratio = p[0, 0, 2] / (1.0 if q is None else q[0, 0, 2])
    assert 0 < ratio < 1
    for uniform, count in ((ratio - 1e-12, 1), (ratio, 0)):
        found = METHODS[method](p, drafts, q, uniform.view(1, 1))
        assert found.count.tolist() == [count]


def _draw_drafts(
    drafter: Language, batch: int, num_drafts: int, generator: torch.Generator
) -> Tensor:
    """Drafts [B, N] and what every row of p and q needs: the prefixes of each round."""
    drafts = torch.zeros(batch, 0, dtype=torch.long)
    for _ in range(num_drafts):
        rows = _rows(drafter, drafts)[:, -1]
        token = draw(rows, torch.rand(batch, generator=generator, dtype=torch.float64))
        drafts = torch.cat([drafts, token.unsqueeze(-1)], dim=-1)
    return drafts


def _rows(language: Language, drafts: Tensor) -> Tensor:
    """[B, N + 1, vocab]: the language's row after each prefix of the drafts."""
    levels = []
    for length in range(drafts.shape[1] + 1):
        prefixes = list(itertools.product(range(language.vocab), repeat=length))
        table = torch.stack([language.next_token(prefix) for prefix in prefixes])
        index = torch.zeros(drafts.shape[0], dtype=torch.long)
        for place in range(length):
            index = index * language.vocab + drafts[:, place]
        levels.append(table[index])
    return torch.stack(levels, dim=1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_one_hot", [False, True])
def test_draws_have_the_target_distribution(method: str, is_one_hot: bool) -> None:
    """50,000 rounds of 2 drafts, continued by the target to 3 tokens: 27 cells."""
    target, drafter = random_language(3, 8), random_language(3, 9)
    batch = 50_000
    generator = torch.Generator().manual_seed(11)
    drafts = _draw_drafts(drafter, batch, 2, generator)
    p, q = _rows(target, drafts), _rows(drafter, drafts)[:, :-1]
    q = None if is_one_hot else q

    def uniforms(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    accepted = METHODS[method](p, drafts, q, uniforms(batch, 2))
    token = extra_tokens(p, drafts, q, accepted, uniforms(batch))
    tokens = torch.full((batch, 3), -1)
    for place in range(3):
        is_draft = place < accepted.count
        own = drafts[:, place] if place < 2 else token
        tokens[:, place] = torch.where(
            is_draft, own, torch.where(accepted.count == place, token, -1)
        )
        open_rows = tokens[:, place] < 0
        rows = _rows(target, tokens[:, :place].clamp_min(0))[:, -1]
        drawn = draw(rows, uniforms(batch))
        tokens[:, place] = torch.where(open_rows, drawn, tokens[:, place])
    counts = torch.bincount(tokens @ torch.tensor([9, 3, 1]), minlength=27)
    cells = itertools.product(range(3), repeat=3)
    expected = torch.tensor([batch * target.probability(cell) for cell in cells])
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < CHI_SQUARE_LIMIT[26]
    # The same test has to see a wrong distribution: the drafter's own.
    wrong = torch.bincount(
        _draw_drafts(drafter, batch, 3, generator) @ torch.tensor([9, 3, 1]), minlength=27
    )
    assert float(((wrong - expected) ** 2 / expected).sum()) > 10 * CHI_SQUARE_LIMIT[26]


@pytest.mark.parametrize("method", METHODS)
def test_rounds_share_no_random_number(method: str) -> None:
    """Two rounds by keyed numbers; keys of the token's position alone would bend the second one."""
    by_round = _two_rounds(method, lambda round_, place: (round_, place))
    by_position = _two_rounds(method, lambda round_, place: (round_ + place, 0))
    assert by_round < CHI_SQUARE_LIMIT[3]
    # A draft of the standard form is judged without a look at later ones, so that it could bear it.
    assert (by_position > 3 * CHI_SQUARE_LIMIT[3]) == (method == "block")


def _two_rounds(method: str, key: Callable[[int, int], tuple[int, int]]) -> float:
    """Chi-square of two tokens, 4 cells; key: (round, place) -> (anchor, place) of its numbers."""
    seeds, target, drafter = 10_000, (0.3, 0.7), (0.7, 0.3)
    p = torch.tensor([[target, target[::-1], target[::-1]]], dtype=torch.float64)
    q = torch.tensor([[drafter, drafter[::-1]]], dtype=torch.float64)
    p_next, q_next = p[:, [1, 1, 1]], q[:, [1, 1]]

    def numbers(round_: int, purpose: Purpose, count: int) -> Tensor:
        keys = [key(round_, place) for place in range(count)]
        rows = [[Streams(s, a).uniform(purpose, n) for a, n in keys] for s in range(seeds)]
        return torch.tensor(rows, dtype=torch.float64)

    def one_round(round_: int, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        p, q = p.expand(seeds, -1, -1), q.expand(seeds, -1, -1)
        own = numbers(round_, "draft", 2)
        drafts = torch.stack([draw(q[:, n], own[:, n]) for n in range(2)], dim=-1)
        accepted = METHODS[method](p, drafts, q, numbers(round_, "accept", 2))
        extra = extra_tokens(p, drafts, q, accepted, numbers(round_, "extra", 1)[:, 0])
        # The first two tokens of the round; the second one is none where no draft was accepted.
        first = torch.where(accepted.count > 0, drafts[:, 0], extra)
        second = torch.where(accepted.count > 1, drafts[:, 1], extra)
        return first, torch.where(accepted.count > 0, second, -1)

    first, second = one_round(0, p, q)
    second = torch.where(second < 0, one_round(1, p_next, q_next)[0], second)
    counts = torch.bincount(first * 2 + second, minlength=4)
    expected = seeds * (p[0, 0].unsqueeze(-1) * p[0, 1]).flatten()
    return float(((counts - expected) ** 2 / expected).sum())


def test_greedy_accepts_up_to_the_first_mismatch() -> None:
    best = torch.tensor([[4, 5, 6, 7]]).expand(5, 4)
    drafts = torch.tensor([[4, 5, 6], [4, 5, 0], [4, 0, 6], [0, 5, 6], [4, 5, -1]])
    count, token = accept_greedy(best, drafts)
    assert count.tolist() == [3, 2, 1, 0, 2]
    assert token.tolist() == [7, 6, 5, 4, 6]


@pytest.mark.parametrize("method", METHODS)
def test_no_drafts_is_plain_sampling(method: str) -> None:
    p = torch.tensor([[[0.25, 0.0, 0.75]]], dtype=torch.float64)
    drafts = torch.zeros(1, 0, dtype=torch.long)
    for q in (None, torch.zeros(1, 0, 3, dtype=torch.float64)):
        accepted = METHODS[method](p, drafts, q, torch.zeros(1, 0, dtype=torch.float64))
        assert accepted.count.tolist() == [0]
        assert torch.equal(residual(p, drafts, q, accepted), p[:, 0])
        for uniform, token in ((0.0, 0), (0.2499, 0), (0.25, 2), (1 - 2**-53, 2)):
            drawn = extra_tokens(
                p, drafts, q, accepted, torch.tensor([uniform], dtype=torch.double)
            )
            assert drawn.tolist() == [token]


@pytest.mark.parametrize("method", METHODS)
def test_certain_drafts_are_all_accepted(method: str) -> None:
    """p = q = one-hot: the denominator of block verification is 0."""
    rows = torch.eye(3, dtype=torch.float64)[torch.tensor([[0, 1, 2]])]
    drafts = torch.tensor([[0, 1]])
    high = torch.full((1, 2), 1 - 2**-53, dtype=torch.float64)
    for q in (None, rows[:, :2]):
        assert METHODS[method](rows, drafts, q, high).count.tolist() == [2]
    assert run_chances(rows, drafts, None).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("method", METHODS)
def test_an_impossible_draft_is_never_accepted(method: str) -> None:
    p = torch.tensor([[[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]], dtype=torch.float64)
    drafts = torch.tensor([[0]])
    low = torch.zeros(1, 1, dtype=torch.float64)
    for q in (None, torch.tensor([[[0.5, 0.5, 0.0]]], dtype=torch.float64)):
        accepted = METHODS[method](p, drafts, q, low)
        assert accepted.count.tolist() == [0]
        row = residual(p, drafts, q, accepted)[0]
        assert row[0] == 0
        assert float(row.sum()) > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_one_hot", [False, True])
def test_shorter_rounds_in_a_batch(method: str, is_one_hot: bool) -> None:
    """A batch of 0, 2 and 3 drafts equals three rounds alone, whatever the padding's rows hold."""
    generator = torch.Generator().manual_seed(17)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    for _ in range(40):
        p, q = rand(3, 4, 3), rand(3, 3, 3)
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
        drafts = torch.randint(0, 3, (3, 3), generator=generator)
        drafts[0, 0:], drafts[1, 2:] = -1, -1
        uniforms, extra = rand(3, 3), rand(3)
        own = None if is_one_hot else q
        accepted = METHODS[method](p, drafts, own, uniforms)
        tokens = extra_tokens(p, drafts, own, accepted, extra)
        for row, length in enumerate((0, 2, 3)):
            part = None if own is None else own[row : row + 1, :length]
            args = (p[row : row + 1, : length + 1], drafts[row : row + 1, :length], part)
            alone = METHODS[method](*args, uniforms[row : row + 1, :length])
            assert alone.count[0] == accepted.count[row]
            assert extra_tokens(*args, alone, extra[row : row + 1])[0] == tokens[row]


def test_padding_stands_only_at_the_end() -> None:
    p = torch.full((1, 3, 2), 0.5, dtype=torch.float64)
    with pytest.raises(ValueError, match="behind a -1"):
        accept_block(p, torch.tensor([[-1, 0]]), None, torch.zeros(1, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("length", "drafts", "rates"),
    [
        (4.5, 7, (1, 1, 1, 0.5, 0, 0, 0)),
        (3.25, 7, (1, 1, 0.25, 0, 0, 0, 0)),
        (6, 7, (1, 1, 1, 1, 1, 0, 0)),
        (1, 2, (0, 0)),
        (3, 2, (1, 1)),
    ],
)
def test_schedule_of_least_variance(length: float, drafts: int, rates: tuple[float, ...]) -> None:
    assert schedule(length, drafts) == rates
    assert 1 + sum(schedule(length, drafts)) == length


@pytest.mark.parametrize(
    "rates", [schedule(4.5, 7), schedule(6, 7), (0.9, 0.6, 0.6, 0.3, 0.0, 0.0, 0.0)]
)
def test_synthetic_long_run_mean(rates: tuple[float, ...]) -> None:
    """Each draft's own frequency and the mean, over 20,000 rounds."""
    batch = 20_000
    uniforms = torch.rand(batch, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    count = accept_synthetic(torch.zeros(batch, 7, dtype=torch.long), rates, uniforms).count
    assert 1 + float(count.double().mean()) == pytest.approx(1 + sum(rates), abs=0.03)
    for place, rate in enumerate(rates):
        assert float((count > place).double().mean()) == pytest.approx(rate, abs=0.015)


def test_synthetic_walk() -> None:
    assert conditional_rates((0.8, 0.4, 0.0, 0.0)) == pytest.approx([0.8, 0.5, 0.0, 0.0])
    drafts = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, -1]])
    uniforms = torch.tensor([[0.1, 0.4, 0.9], [0.1, 0.6, 0.1], [0.1, 0.1, 0.0]]).double()
    assert accept_synthetic(drafts, (0.8, 0.4, 0.4), uniforms).count.tolist() == [3, 1, 2]


def test_synthetic_text_is_marked_and_has_the_targets_last_word() -> None:
    streams = Streams(3, anchor_position=9)
    proposal = Proposal(9, (5, 6, 7))
    verdict = verify_greedy(proposal, [1, 2, 3, 4], streams, rates=(1.0, 1.0, 0.0))
    assert verdict == Verdict(2, 3, 3, is_synthetic=True)
    assert verdict.tokens(proposal) == (5, 6, 3)
    rows = torch.eye(8, dtype=torch.float64)[torch.tensor([1, 2, 7, 4])]
    # The target is sure of the draft that was rejected: no residual, so the token is its own.
    sampled = verify(proposal, rows, streams, rates=(1.0, 1.0, 0.0))
    assert sampled == Verdict(2, 7, 3, is_synthetic=True)


def test_greedy_is_the_limit_of_sampling() -> None:
    """One-hot rows: both exact methods give what comparing first choices gives."""
    best = [2, 0, 1]
    rows = torch.eye(3, dtype=torch.float64)[torch.tensor(best)]
    for drafts in itertools.product(range(3), repeat=2):
        proposal, streams = Proposal(4, drafts), Streams(1, 4)
        expected = verify_greedy(proposal, best, streams)
        assert verify(proposal, rows, streams, "standard") == expected
        assert verify(proposal, rows, streams, "block") == expected


def test_verify_checks_what_belongs_together() -> None:
    proposal = Proposal(4, (1, 2))
    with pytest.raises(ValueError, match="2 drafts need 3 rows; the target has 2"):
        verify(proposal, torch.ones(2, 4), Streams(0, 4))
    with pytest.raises(ValueError, match="of the round at 5"):
        verify(proposal, torch.ones(3, 4), Streams(0, 5))
    with pytest.raises(ValueError, match="2 drafts need 3 rows; the target has 1"):
        verify_greedy(proposal, [1], Streams(0, 4))
    with pytest.raises(ValueError, match="cannot be drawn"):
        draw(torch.zeros(1, 3), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="cannot be drawn"):
        draw(torch.tensor([[0.5, float("nan")]]), torch.zeros(1, dtype=torch.float64))


def test_block_weight_stays_with_its_run() -> None:
    """The residual behind a run that is less likely than its drafter claims is weighted by it."""
    p = torch.tensor([[[0.2, 0.8], [0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    q = torch.tensor([[[0.8, 0.2], [0.1, 0.9]]], dtype=torch.float64)
    drafts = torch.tensor([[0, 1]])
    accepted = Accepted(torch.tensor([1]), torch.tensor([0.25], dtype=torch.float64))
    assert residual(p, drafts, q, accepted)[0].tolist() == pytest.approx([0.025, 0.0])
