"""Choice of tokens: limits, independence of batch mates, distribution, bad rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdecode.engine.request import SamplingParams
from kdecode.engine.sampling import (
    BadLogits,
    Draw,
    filtered_probabilities,
    sample,
    stream_seed,
)

NAN, INF = float("nan"), float("inf")


def _logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def _random(seed: int = 0, position: int = 0, **settings_: float) -> Draw:
    return Draw(SamplingParams(temperature=1.0, **settings_), seed, position)  # type: ignore[arg-type]


GREEDY = Draw(SamplingParams(), 0, 0)


def test_greedy_takes_the_first_of_equal_largest() -> None:
    assert sample(_logits([0.0, 2.0, 2.0, 1.0], [5.0, 1.0, 1.0, 1.0]), [GREEDY, GREEDY]) == [1, 0]


def test_banned_tokens_are_never_chosen() -> None:
    logits = _logits([0.0, 9.0, 8.0])
    assert sample(logits, [Draw(SamplingParams(), 0, 0, banned_ids=(1,))]) == [2]
    for position in range(30):
        draw = Draw(SamplingParams(temperature=1.0), 0, position, banned_ids=(1, 2))
        assert sample(logits, [draw]) == [0]
    (none_left,) = sample(logits, [Draw(SamplingParams(), 0, 0, banned_ids=(0, 1, 2))])
    assert isinstance(none_left, BadLogits)


@pytest.mark.parametrize("bad", [[NAN, 1.0, 2.0], [INF, 1.0, 2.0], [-INF, -INF, -INF]])
@pytest.mark.parametrize("draw", [GREEDY, _random()])
def test_a_bad_row_spoils_no_other(bad: list[float], draw: Draw) -> None:
    first, second = sample(_logits(bad, [0.0, 0.0, 50.0]), [draw, draw])
    assert isinstance(first, BadLogits)
    assert second == 2


def test_rows_and_requests_must_match() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1 requests"):
        sample(torch.zeros(2, 4), [GREEDY])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 10**6), mates=st.integers(0, 4))
def test_a_draw_does_not_depend_on_batch_mates(seed: int, position: int, mates: int) -> None:
    logits = torch.randn(mates + 1, 40, generator=torch.Generator().manual_seed(3))
    draws = [_random(seed + i, position) for i in range(mates + 1)]
    together = sample(logits, draws)
    torch.manual_seed(0)
    assert together == [sample(logits[i : i + 1], [draws[i]])[0] for i in range(mates + 1)]


def test_draws_follow_the_probabilities() -> None:
    logits = _logits([0.0, 1.0, 2.0, -1.0])
    count = 4000
    drawn = sample(logits.expand(count, 4), [_random(7, i, top_p=1.0) for i in range(count)])
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / count
    expected = torch.softmax(logits[0], 0)
    # Five standard deviations of a share at this count are below 0.04.
    assert torch.allclose(shares, expected, atol=0.04)


def test_temperature_scales_logits() -> None:
    logits = torch.tensor([0.0, 1.0, 3.0])
    params = SamplingParams(temperature=0.5)
    expected = torch.softmax(logits.double() / 0.5, 0)
    assert torch.allclose(filtered_probabilities(logits, params), expected)
    cold = filtered_probabilities(logits, SamplingParams(temperature=1e-6))
    assert cold.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0, top_k=2), {2, 3}),
        (SamplingParams(temperature=1.0, top_k=99), {0, 1, 2, 3}),
        # 0.4 is below 0.6, so the second is needed; 0.4 + 0.3 reaches it.
        (SamplingParams(temperature=1.0, top_p=0.6), {2, 3}),
        (SamplingParams(temperature=1.0, top_p=1e-9), {3}),
        (SamplingParams(temperature=1.0, min_p=0.5), {1, 2, 3}),
        (SamplingParams(temperature=1.0, min_p=1.0), {3}),
        # top_k leaves 0.4, 0.3 and 0.2 of 0.9; their shares are 0.44, 0.33, 0.22.
        (SamplingParams(temperature=1.0, top_k=3, top_p=0.75), {2, 3}),
    ],
)
def test_filters_keep_the_right_tokens(params: SamplingParams, kept: set[int]) -> None:
    probabilities = torch.tensor([0.1, 0.2001, 0.3, 0.3999])
    found = filtered_probabilities(probabilities.log(), params)
    assert set(found.nonzero().flatten().tolist()) == kept
    assert float(found.sum()) == pytest.approx(1.0)
    ratio = found[3] / probabilities[3]
    for token in kept:
        assert float(found[token]) == pytest.approx(float(probabilities[token] * ratio), rel=1e-5)


def test_the_lower_id_wins_between_equal_ones() -> None:
    found = filtered_probabilities(torch.zeros(5), SamplingParams(temperature=1.0, top_k=2))
    assert found.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]


def test_stream_seeds_are_distinct_and_in_range() -> None:
    seeds = {stream_seed(seed, position) for seed in range(50) for position in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)
