"""The ratio estimate: known values, coverage of the interval, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from kdecode.bench.statistics import estimate_ratio, t_quantile


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [
        (0.975, 1, 12.70620),
        (0.975, 2, 4.30265),
        (0.975, 5, 2.57058),
        (0.975, 30, 2.04227),
        (0.8, 5, 0.91954),
        (0.5, 4, 0.0),
    ],
)
def test_t_quantile(probability: float, degrees: int, expected: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(expected, abs=1e-5)


def test_point_estimate_is_the_geometric_mean_of_pairs() -> None:
    estimate = estimate_ratio([[(2.0, 1.0), (8.0, 1.0)], [(4.0, 1.0)]], seed=0)
    assert estimate.ratio == pytest.approx((2 * 8 * 4) ** (1 / 3))
    assert (estimate.num_blocks, estimate.num_pairs) == (2, 3)
    assert estimate.blocks == pytest.approx((4.0, 4.0))
    assert estimate.worst_block == pytest.approx(4.0)


def test_equal_blocks_leave_no_doubt() -> None:
    estimate = estimate_ratio([[(1.3, 1.0)]] * 6, seed=0)
    assert estimate.low == pytest.approx(1.3) == estimate.high
    assert estimate.detectable == pytest.approx(1.0)


def test_swapping_the_arms_inverts_everything() -> None:
    generator = np.random.default_rng(3)
    blocks = [[(a, b) for a, b in generator.uniform(1, 2, (4, 2))] for _ in range(7)]
    swapped = [[(b, a) for a, b in block] for block in blocks]
    one, other = estimate_ratio(blocks, seed=5), estimate_ratio(swapped, seed=5)
    assert one.ratio * other.ratio == pytest.approx(1)
    assert one.low * other.high == pytest.approx(1)
    assert one.detectable == pytest.approx(other.detectable)


def test_the_seed_decides_the_interval() -> None:
    logs = np.random.default_rng(0).normal(0, 0.02, 8)
    blocks = [[(math.exp(value), 1.0)] for value in logs]
    assert estimate_ratio(blocks, seed=1) == estimate_ratio(blocks, seed=1)
    assert estimate_ratio(blocks, seed=1).high != estimate_ratio(blocks, seed=2).high


@pytest.mark.parametrize("number", [2, 3, 4, 6, 9])
def test_width_is_between_students_for_95_and_for_99(number: int) -> None:
    generator = np.random.default_rng(number)
    for _ in range(50):
        logs = generator.exponential(0.02, number)
        estimate = estimate_ratio([[(math.exp(v), 1.0)] for v in logs], seed=0, num_resamples=500)
        error = float(np.std(logs, ddof=1)) / math.sqrt(number)
        reach = math.log(estimate.high / estimate.low) / 2
        assert reach >= t_quantile(0.975, number - 1) * error - 1e-12
        assert reach <= t_quantile(0.995, number - 1) * error + 1e-12
        assert math.log(estimate.ratio) == pytest.approx(np.mean(logs))


def test_one_block_far_out_among_equal_ones_leaves_an_interval() -> None:
    # A third of the resamples are without it, and have no spread at all.
    estimate = estimate_ratio([[(1.3, 1.0)]] * 5 + [[(1.5, 1.0)]], seed=0)
    assert 1.2 < estimate.low < 1.3 < estimate.high < 1.5


def test_a_block_weighs_as_many_pairs_as_it_has() -> None:
    # The error is that of the mean over pairs: a block of one pair that is far out moves it less.
    many, one = [(1.1, 1.0), (1.0, 1.1)] * 20, [(2.0, 1.0)]
    estimate = estimate_ratio([many, many, many, one], seed=0)
    center = math.log(2) / 121
    assert math.log(estimate.ratio) == pytest.approx(center)
    # Residuals of the blocks against the mean over pairs, over the mean size.
    rest = np.array([40 * center] * 3 + [math.log(2) - center]) / 30.25
    error = math.sqrt(np.sum(rest**2) / 3 / 4)
    reach = math.log(estimate.high / estimate.ratio)
    low, high = (t_quantile(share, 3) * error for share in (0.975, 0.995))
    assert low * 0.999 <= reach <= high * 1.001


def _even(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.normal(0, 0.02, shape)


def _one_sided(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """One arm is held up now and then, in each of its two passes."""
    return 0.025 * (generator.gamma(2, 1, shape) - 2)


def _spoilt(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A tenth of the blocks, in either arm."""
    rough = (generator.random(shape) < 0.1) * generator.choice([-0.2, 0.2], shape)
    return rough + generator.normal(0, 0.01, shape)


@pytest.mark.parametrize("noise", [_even, _one_sided, _spoilt])
@pytest.mark.parametrize("number", [4, 6, 8])
def test_interval_covers_whatever_shape_the_blocks_have(
    noise: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray], number: int
) -> None:
    """Blocks share a mood among their pairs: a bootstrap over pairs would cover far less often."""
    generator = np.random.default_rng(number)
    covered = 0
    for _ in range(1000):
        logs = (
            math.log(1.3) + noise(generator, (number, 1)) + generator.normal(0, 0.01, (number, 4))
        )
        blocks = [[(math.exp(value), 1.0) for value in block] for block in logs]
        estimate = estimate_ratio(blocks, seed=0, num_resamples=500)
        covered += estimate.low <= 1.3 <= estimate.high
    assert covered >= 930


def test_detectable_effect_is_detected_in_most_runs() -> None:
    generator = np.random.default_rng(1)
    spread = 0.01
    typical = [
        estimate_ratio([[(math.exp(v), 1.0)] for v in generator.normal(0, spread, 8)], 0, 500)
        for _ in range(200)
    ]
    # What a run says of itself depends on its own spread; their middle is the design's.
    effect = math.log(float(np.median([one.detectable for one in typical])))
    found = 0
    for _ in range(200):
        logs = generator.normal(effect, spread, 8)
        estimate = estimate_ratio([[(math.exp(v), 1.0)] for v in logs], 0, 500)
        found += estimate.low > 1
    assert 0.7 * 200 <= found < 0.95 * 200


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks with pairs; there are 1"):
        estimate_ratio([[(1.0, 1.0)], []], seed=0)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite values above 0"):
            estimate_ratio([[(1.0, 1.0)], [(bad, 1.0)]], seed=0)
    with pytest.raises(ValueError, match="No t quantile"):
        t_quantile(0.3, 5)
