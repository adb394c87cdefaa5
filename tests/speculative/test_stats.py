"""Figures of rounds: from raw counts, equal to those from each round, and absent without any."""

from __future__ import annotations

import pytest

from kdecode.speculative.stats import RoundStats
from kdecode.speculative.types import Verdict


def _stats(*rounds: tuple[int, int]) -> RoundStats:
    stats = RoundStats()
    for accepted, drafted in rounds:
        stats.record(Verdict(accepted, 0, drafted), accepted + 1)
    return stats


def test_nothing_is_not_zero() -> None:
    stats = RoundStats()
    assert (stats.acceptance_length, stats.acceptance_rate, stats.rate_at(0)) == (None, None, None)
    plain = _stats((0, 0), (0, 0))
    assert (plain.rounds, plain.acceptance_length, plain.acceptance_rate) == (0, None, None)
    assert (plain.emitted_length, plain.rates) == (None, [])


def test_none_and_all() -> None:
    assert _stats((0, 3), (0, 3)).acceptance_rate == 0.0
    full = _stats((3, 3), (3, 3))
    assert (full.acceptance_rate, full.acceptance_length) == (1.0, 4.0)


def test_rates_of_uneven_rounds() -> None:
    rounds = [(0, 3), (2, 3), (3, 3), (1, 1), (0, 0)]
    stats = _stats(*rounds)
    drafted = [accepted for accepted, count in rounds if count]
    assert stats.acceptance_length == sum(1 + accepted for accepted in drafted) / len(drafted)
    assert stats.emitted_length == stats.acceptance_length
    assert stats.acceptance_rate == pytest.approx(6 / 10)
    assert stats.rates == [3 / 4, 2 / 3, 1 / 3]
    assert stats.rate_at(3) is None
    assert not stats.is_synthetic
    stats.record(Verdict(1, 0, 1, is_synthetic=True), 2)
    stats.record(Verdict(1, 0, 1), 2)
    assert stats.is_synthetic


def test_tokens_behind_the_end_of_a_request_are_verified_and_not_emitted() -> None:
    stats = _stats((2, 3))
    stats.record(Verdict(3, 0, 3), 1)
    assert (stats.acceptance_length, stats.emitted_length) == (3.5, 2.0)


def test_counts_of_requests_add_up() -> None:
    whole, parts = _stats((0, 3), (2, 3), (1, 1)), RoundStats()
    for rounds in [((0, 3), (2, 3)), ((1, 1),)]:
        parts.merge(_stats(*rounds))
    assert parts == whole
