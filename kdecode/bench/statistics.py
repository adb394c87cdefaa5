"""Ratios of paired measurements with an honest interval.

Owns the estimator: log ratios of pairs, the point estimate exp(mean), a bootstrap over *blocks*
(requests inside a block share the machine's mood, so they are not independent), the smallest effect
that the design could see. Does not know what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
POWER = 0.80
NUM_RESAMPLES = 10_000
# Resamples of fewer blocks are too few different ones to say anything of their spread.
MIN_RESAMPLED_BLOCKS = 4


@dataclass(frozen=True)
class RatioEstimate:
    """baseline / candidate; above 1 the candidate takes less of whatever was measured.

    low, high: 95 % interval. detectable: the smallest true ratio above 1 that this design would
    tell from 1 in 80 % of runs, at the spread seen between blocks. worst_block: the lowest block.
    """

    ratio: float
    low: float
    high: float
    num_blocks: int
    num_pairs: int
    detectable: float
    worst_block: float
    blocks: tuple[float, ...]


def estimate_ratio(
    blocks: Sequence[Sequence[tuple[float, float]]],
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
) -> RatioEstimate:
    """Estimates baseline / candidate from blocks of (baseline, candidate) pairs.

    A block weighs as many pairs as it has. The interval is center -+ quantile * standard error. The
    quantile is that of the studentised bootstrap over blocks, which sees what shape their spread
    has, held between Student's own for 95 % and for 99 %: it is never narrower than if blocks were
    normal, and where few blocks, or one far out among equal ones, leave resamples without a spread
    of their own, it does not become meaningless.
    """
    logs = [_log_ratios(block) for block in blocks if block]
    if len(logs) < 2:
        raise ValueError(f"An interval needs at least 2 blocks with pairs; there are {len(logs)}.")
    sums = np.array([block.sum() for block in logs])
    sizes = np.array([block.size for block in logs], dtype=np.float64)
    center, error = (float(value) for value in _mean_and_error(sums, sizes))
    quantile = _quantile(sums, sizes, seed, num_resamples)
    degrees = len(logs) - 1
    means = np.exp(sums / sizes)
    return RatioEstimate(
        ratio=math.exp(center),
        low=math.exp(center - quantile * error),
        high=math.exp(center + quantile * error),
        num_blocks=len(logs),
        num_pairs=int(sizes.sum()),
        detectable=math.exp((quantile + t_quantile(POWER, degrees)) * error),
        worst_block=float(means.min()),
        blocks=tuple(float(mean) for mean in means),
    )


def _mean_and_error(sums: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over pairs and its standard error over blocks, which are the last dimension."""
    number = sums.shape[-1]
    center = sums.sum(-1) / sizes.sum(-1)
    rest = (sums - center[..., None] * sizes) / sizes.mean(-1)[..., None]
    return center, np.sqrt(np.square(rest).sum(-1) / (number - 1) / number)


def _quantile(sums: np.ndarray, sizes: np.ndarray, seed: int, num_resamples: int) -> float:
    """How many standard errors the interval reaches to each side."""
    number = len(sums)
    least, most = (t_quantile(0.5 + share / 2, number - 1) for share in (CONFIDENCE, 0.99))
    if number < MIN_RESAMPLED_BLOCKS:
        return least
    draws = np.random.default_rng(seed).integers(0, number, size=(num_resamples, number))
    center, _ = _mean_and_error(sums, sizes)
    means, errors = _mean_and_error(sums[draws], sizes[draws])
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = np.abs(means - center) / errors
    # 0 / 0: equal blocks, of which every resample is the same.
    distances = np.where(np.isnan(distances), 0.0, distances)
    return float(np.clip(np.quantile(distances, CONFIDENCE, method="higher"), least, most))


def expected_detectable(spread: float, num_blocks: int) -> float:
    """The smallest true ratio above 1 that so many blocks would tell from 1 in 80 % of runs.

    spread: standard deviation of the blocks' log ratios, which are taken for normal.
    """
    draws = np.random.default_rng(0).normal(0.0, spread, size=(300, num_blocks))
    found = [estimate_ratio([[(math.exp(v), 1.0)] for v in row], 0, 500) for row in draws]
    # An effect moves the whole interval: it is seen where it is more than what was below 1.
    return math.exp(float(np.quantile([-math.log(one.low) for one in found], POWER)))


def _log_ratios(block: Sequence[tuple[float, float]]) -> np.ndarray:
    pairs = np.asarray(block, dtype=np.float64)
    if not (np.isfinite(pairs).all() and (pairs > 0).all()):
        raise ValueError(f"A ratio needs finite values above 0; a block has {block}.")
    return np.log(pairs[:, 0] / pairs[:, 1])


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t for a probability in [0.5, 1), by bisection on its distribution."""
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"No t quantile for probability {probability} and {degrees} degrees.")
    low, high = 0.0, 1.0
    while _t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if _t_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_cdf(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0, by the finite series for whole degrees of freedom."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine_squared = math.cos(theta) ** 2
    if degrees % 2:
        term, total = math.cos(theta), 0.0
        for k in range(3, degrees + 1, 2):
            total += term
            term *= cosine_squared * (k - 1) / k
        return 0.5 + (theta + math.sin(theta) * total) / math.pi
    term, total = 1.0, 0.0
    for k in range(2, degrees + 1, 2):
        total += term
        term *= cosine_squared * (k - 1) / k
    return 0.5 + math.sin(theta) * total / 2
