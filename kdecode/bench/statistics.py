"""Ratios of paired measurements with an honest interval.

Owns the estimator: log ratios of pairs, the point estimate exp(mean), a bootstrap over *blocks*
(requests inside a block share the machine's mood, so they are not independent), the smallest effect
that the design could see. Does not know what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
POWER = 0.80
NUM_RESAMPLES = 10_000


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

    A block weighs as many pairs as it has. The interval is the expanded percentile bootstrap: with
    few blocks, plain percentiles are too narrow, so the quantiles are moved outwards by what
    Student's t differs from the normal at this number of blocks. It is never narrower than
    Student's own interval of the blocks' means: no resample of 4 blocks is further out than 4 equal
    ones, which is not far enough.
    """
    logs = [_log_ratios(block) for block in blocks if block]
    if len(logs) < 2:
        raise ValueError(f"An interval needs at least 2 blocks with pairs; there are {len(logs)}.")
    sums = np.array([block.sum() for block in logs])
    sizes = np.array([block.size for block in logs])
    means = sums / sizes
    draws = np.random.default_rng(seed).integers(0, len(logs), size=(num_resamples, len(logs)))
    resampled = sums[draws].sum(axis=1) / sizes[draws].sum(axis=1)
    tail = _expanded_tail(len(logs))
    low, high = np.quantile(resampled, [tail, 1 - tail])
    center = sums.sum() / sizes.sum()
    reach = t_quantile(0.5 + CONFIDENCE / 2, len(logs) - 1) * _standard_error(means)
    return RatioEstimate(
        ratio=math.exp(center),
        low=math.exp(min(low, center - reach)),
        high=math.exp(max(high, center + reach)),
        num_blocks=len(logs),
        num_pairs=int(sizes.sum()),
        detectable=math.exp(_detectable_log_ratio(means)),
        worst_block=math.exp(means.min()),
        blocks=tuple(math.exp(mean) for mean in means),
    )


def _log_ratios(block: Sequence[tuple[float, float]]) -> np.ndarray:
    pairs = np.asarray(block, dtype=np.float64)
    if not (np.isfinite(pairs).all() and (pairs > 0).all()):
        raise ValueError(f"A ratio needs finite values above 0; a block has {block}.")
    return np.log(pairs[:, 0] / pairs[:, 1])


def _expanded_tail(num_blocks: int) -> float:
    t = t_quantile(0.5 + CONFIDENCE / 2, num_blocks - 1)
    return NormalDist().cdf(-math.sqrt(num_blocks / (num_blocks - 1)) * t)


def _detectable_log_ratio(means: np.ndarray) -> float:
    degrees = means.size - 1
    quantiles = t_quantile(0.5 + CONFIDENCE / 2, degrees) + t_quantile(POWER, degrees)
    return quantiles * _standard_error(means)


def _standard_error(means: np.ndarray) -> float:
    return float(means.std(ddof=1)) / math.sqrt(means.size)


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
