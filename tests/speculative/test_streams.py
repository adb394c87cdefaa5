"""Keyed random numbers: uniform, and independent of each other and of everything else."""

from __future__ import annotations

import torch

from kdecode.speculative.streams import Streams


def test_every_part_of_the_key_matters() -> None:
    keys = [
        (seed, anchor, purpose, place)
        for seed in (0, 1, 2**63)
        for anchor in (0, 1, 7)
        for purpose in ("draft", "accept", "extra")
        for place in range(4)
    ]
    numbers = {Streams(s, a).uniform(purpose, place) for s, a, purpose, place in keys}
    assert len(numbers) == len(keys)
    assert Streams(5, 6).uniform("draft", 2) == Streams(5, 6).uniform("draft", 2)
    assert Streams(5, 6).uniforms("accept", 3)[2] == Streams(5, 6).uniform("accept", 2)


def test_a_position_is_met_with_new_numbers_in_the_next_round() -> None:
    """Position 8 is draft 2 of the round at 5 and draft 1 of the round at 6."""
    for purpose in ("draft", "accept"):
        assert Streams(0, 5).uniform(purpose, 2) != Streams(0, 6).uniform(purpose, 1)


def test_numbers_are_uniform_and_uncorrelated() -> None:
    count = 5_000
    columns = [
        [Streams(seed, 3).uniform("draft") for seed in range(count)],
        [Streams(seed, 3).uniform("accept") for seed in range(count)],
        [Streams(seed, 3).uniform("extra") for seed in range(count)],
        [Streams(9, anchor).uniform("accept") for anchor in range(count)],
        [Streams(9, 3).uniform("accept", place) for place in range(count)],
    ]
    numbers = torch.tensor(columns, dtype=torch.float64)
    assert bool(((numbers >= 0) & (numbers < 1)).all())
    cells = torch.stack([torch.bincount((row * 20).long(), minlength=20) for row in numbers])
    chi_square = ((cells - count / 20) ** 2 / (count / 20)).sum(-1)
    # 19 degrees of freedom: a million-to-one chance is 64.
    assert bool((chi_square < 64).all())
    correlation = torch.corrcoef(numbers) - torch.eye(5, dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / count**0.5
