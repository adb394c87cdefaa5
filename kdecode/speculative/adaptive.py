"""How many drafts a step verifies: as many as pay, by what the draft expects of them.

A draft's *survival* is the product of the confidences up to it: how likely its whole run holds. A
step over R requests and so many drafts is expected to give R tokens and the sum of the survivals,
at the cost of its rows. Drafts are admitted one after the other while tokens per cost grow.

Exact in distribution: whether a draft is admitted follows from its survival and from drafts that
were admitted before it, which tell nothing of its own token, as a confidence sees only the tokens
in front. The first draft that does not pay is the last one that is looked at: looking further would
let a choice depend on the token that it is about.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul


@dataclass(frozen=True)
class StepCosts:
    """Time of a verify step by its rows, measured at some numbers and straight between them.

    draft: time of proposing, which every round pays. Any unit.
    """

    rows: tuple[int, ...]
    times: tuple[float, ...]
    draft: float

    @staticmethod
    def of(measured: Mapping[int, float], draft: float) -> StepCosts:
        """More rows never cost less: a time that says so is noise."""
        if not measured:
            raise ValueError("No step was measured.")
        rows = tuple(sorted(measured))
        return StepCosts(rows, tuple(accumulate((measured[r] for r in rows), max)), draft)

    def round(self, rows: int) -> float:
        """Of a whole round that verifies so many rows."""
        return self.draft + self._step(rows)

    def _step(self, rows: int) -> float:
        place = bisect_left(self.rows, rows)
        if place < len(self.rows) and self.rows[place] == rows:
            return self.times[place]
        if len(self.rows) == 1:
            return self.times[0] * rows / self.rows[0]
        # Outside of what was measured, the nearest line goes on.
        high = min(max(place, 1), len(self.rows) - 1)
        (x0, x1), (y0, y1) = self.rows[high - 1 : high + 1], self.times[high - 1 : high + 1]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


def survivals(confidence: Sequence[float]) -> list[float]:
    return list(accumulate(confidence, mul))


def lengths(
    confidences: Sequence[Sequence[float]],
    costs: StepCosts,
    num_requests: int,
    *,
    is_uniform: bool,
) -> list[int]:
    """How many of its drafts each request verifies.

    confidences: of the requests that have drafts; num_requests: of the whole step. is_uniform:
    every request has as many as the others, as far as it has any, which a prepared plan asks for.
    """
    chosen = [0] * len(confidences)
    runs = [survivals(confidence) for confidence in confidences]
    tokens, rows = float(num_requests), num_requests
    for group in _levels(runs) if is_uniform else _likeliest(runs):
        gained = sum(runs[index][chosen[index]] for index in group)
        more = rows + len(group)
        if (tokens + gained) / costs.round(more) <= tokens / costs.round(rows):
            break
        tokens, rows = tokens + gained, more
        for index in group:
            chosen[index] += 1
    return chosen


def _levels(runs: Sequence[Sequence[float]]) -> list[list[int]]:
    """The next draft of all requests that have one, place by place."""
    longest = max(map(len, runs), default=0)
    return [
        [index for index, run in enumerate(runs) if len(run) > place] for place in range(longest)
    ]


def _likeliest(runs: Sequence[Sequence[float]]) -> list[list[int]]:
    """One draft at a time, the one of the largest survival that is next in its request."""
    order: list[list[int]] = []
    waiting = [(-run[0], index, 0) for index, run in enumerate(runs) if run]
    heapq.heapify(waiting)
    while waiting:
        _, index, place = heapq.heappop(waiting)
        order.append([index])
        if place + 1 < len(runs[index]):
            heapq.heappush(waiting, (-runs[index][place + 1], index, place + 1))
    return order
