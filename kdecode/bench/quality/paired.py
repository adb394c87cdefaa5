"""Grades of two arms on the same items, and whether they differ.

Owns the statistics: averages over repetitions with their error, McNemar's exact test of paired
grades that are right or wrong, a bootstrap over items of others. Truncated replies are counted
apart. Does not know servers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SIGNIFICANT = 0.05
_NUM_RESAMPLES = 10_000


@dataclass(frozen=True)
class ScoreKey:
    """What a score belongs to; scores of two keys are never put side by side."""

    task: str
    version: str
    endpoint: str
    max_tokens: int
    temperature: float
    repeats: int

    def __str__(self) -> str:
        return (
            f"{self.task} ({self.version}), {self.endpoint}, max_tokens {self.max_tokens}, "
            f"temperature {self.temperature:g}, avg@{self.repeats}"
        )


@dataclass(frozen=True)
class GradedReply:
    """One reply. is_truncated: it was cut by the limit, so that a 0 may be no wrong answer."""

    item: str
    repeat: int
    grade: float
    is_truncated: bool
    output_tokens: int


@dataclass(frozen=True)
class Score:
    """Of one arm. error: standard error over items."""

    mean: float
    error: float
    items: int
    truncated: int
    replies: int


def score(replies: Sequence[GradedReply]) -> Score:
    means = [np.mean(grades) for grades in _by_item(replies).values()]
    spread = float(np.std(means, ddof=1)) if len(means) > 1 else math.nan
    return Score(
        mean=float(np.mean(means)),
        error=spread / math.sqrt(len(means)),
        items=len(means),
        truncated=sum(reply.is_truncated for reply in replies),
        replies=len(replies),
    )


@dataclass(frozen=True)
class PairedGrades:
    """only_a, only_b: pairs that one arm alone got right; None for grades between right and wrong.

    p_value: of no difference. difference, low, high: b less a, with a 95 % interval.
    """

    pairs: int
    only_a: int | None
    only_b: int | None
    p_value: float
    difference: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        return self.p_value < SIGNIFICANT


def pair(
    a: Sequence[GradedReply], b: Sequence[GradedReply], *, in_steps: bool, seed: int
) -> PairedGrades:
    """Pairs by item and repetition. McNemar's test takes each pair as one; items are resampled."""
    first = {(reply.item, reply.repeat): reply.grade for reply in a}
    second = {(reply.item, reply.repeat): reply.grade for reply in b}
    if first.keys() != second.keys() or not first:
        raise ValueError("Two arms have to have replies to the same items, and at least one.")
    only_a = sum(first[key] > second[key] for key in first)
    only_b = sum(first[key] < second[key] for key in first)
    low, high, difference = _interval(first, second, seed)
    return PairedGrades(
        pairs=len(first),
        only_a=None if in_steps else only_a,
        only_b=None if in_steps else only_b,
        # Of grades in steps this is the sign test, which is McNemar's on who was better.
        p_value=mcnemar(only_a, only_b),
        difference=difference,
        low=low,
        high=high,
    )


def mcnemar(only_a: int, only_b: int) -> float:
    """The exact test: how likely so uneven a split of the discordant pairs is by chance."""
    total = only_a + only_b
    tail = sum(math.comb(total, k) for k in range(min(only_a, only_b) + 1)) / 2**total
    return min(1.0, 2 * tail)


def _interval(
    first: dict[tuple[str, int], float], second: dict[tuple[str, int], float], seed: int
) -> tuple[float, float, float]:
    """Repetitions of an item are not independent, so whole items are drawn."""
    items: dict[str, list[float]] = {}
    for key, grade in first.items():
        items.setdefault(key[0], []).append(second[key] - grade)
    means = np.array([np.mean(differences) for differences in items.values()])
    draws = np.random.default_rng(seed).integers(0, means.size, size=(_NUM_RESAMPLES, means.size))
    low, high = np.quantile(means[draws].mean(axis=1), [0.025, 0.975])
    return float(low), float(high), float(means.mean())


def _by_item(replies: Sequence[GradedReply]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for reply in replies:
        found.setdefault(reply.item, []).append(reply.grade)
    return found
