"""The ratio estimate: known values, coverage of the interval, refusals."""

from __future__ import annotations

import math

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
    # Two outliers on one side, where resamples reach further than Student's t.
    blocks = [[(1.0 + 0.001 * i, 1.0)] for i in range(14)] + [[(2.0, 1.0)], [(2.1, 1.0)]]
    assert estimate_ratio(blocks, seed=1) == estimate_ratio(blocks, seed=1)
    assert estimate_ratio(blocks, seed=1).high != estimate_ratio(blocks, seed=2).high


def test_never_narrower_than_students_interval() -> None:
    logs = [0.0, 0.01, 0.02, 0.04]
    estimate = estimate_ratio([[(math.exp(value), 1.0)] for value in logs], seed=0)
    reach = t_quantile(0.975, 3) * float(np.std(logs, ddof=1)) / 2
    assert math.log(estimate.low) <= np.mean(logs) - reach + 1e-12
    assert math.log(estimate.high) >= np.mean(logs) + reach - 1e-12


def test_interval_covers_when_blocks_are_few_and_requests_depend_on_them() -> None:
    # Six blocks that share a mood of 2 % among their pairs: a bootstrap over the 24 pairs would
    # take them for independent and cover far less often.
    generator = np.random.default_rng(0)
    covered, seen = 0, 0
    for _ in range(200):
        mood = generator.normal(0, 0.02, (6, 1))
        logs = math.log(1.3) + mood + generator.normal(0, 0.01, (6, 4))
        blocks = [[(math.exp(value), 1.0) for value in block] for block in logs]
        estimate = estimate_ratio(blocks, seed=0, num_resamples=2000)
        covered += estimate.low <= 1.3 <= estimate.high
        seen += estimate.detectable < 1.3
    assert covered >= 0.93 * 200
    assert seen == 200


def test_detectable_effect_is_detected_in_most_runs() -> None:
    generator = np.random.default_rng(1)
    # Eight blocks, standard deviation 1 % between them: t(0.975, 7) + t(0.8, 7) standard errors.
    effect = (t_quantile(0.975, 7) + t_quantile(0.8, 7)) * 0.01 / math.sqrt(8)
    found = 0
    for _ in range(200):
        logs = generator.normal(effect, 0.01, 8)
        estimate = estimate_ratio([[(math.exp(v), 1.0)] for v in logs], 0, 1000)
        found += estimate.low > 1
    assert found >= 0.7 * 200


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks with pairs; there are 1"):
        estimate_ratio([[(1.0, 1.0)], []], seed=0)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite values above 0"):
            estimate_ratio([[(1.0, 1.0)], [(bad, 1.0)]], seed=0)
    with pytest.raises(ValueError, match="No t quantile"):
        t_quantile(0.3, 5)
