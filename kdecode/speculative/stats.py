"""Counts of rounds: what was drafted, accepted and emitted, and the figures made of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kdecode.speculative.types import Verdict


@dataclass
class RoundStats:
    """Figures are None before there is anything to divide by, never 0.

    A round without drafts is plain decoding and is not counted. emitted: tokens that reached their
    requests, fewer than were verified where a request ended inside of an accepted run. drafted_at,
    accepted_at: rounds that had, and that accepted, a draft at each place.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    # Whether any round was decided at stated rates: its text is then no answer of the model.
    is_synthetic: bool = False

    def record(self, verdict: Verdict, emitted: int) -> None:
        """A round's verdict, and how many of its tokens reached the request."""
        if not verdict.num_drafts:
            return
        self.rounds += 1
        self.drafted += verdict.num_drafts
        self.accepted += verdict.accepted
        self.emitted += emitted
        self.drafted_at.update(range(verdict.num_drafts))
        self.accepted_at.update(range(verdict.accepted))
        self.is_synthetic = self.is_synthetic or verdict.is_synthetic

    def merge(self, other: RoundStats) -> None:
        """Adds the counts of other rounds."""
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.emitted += other.emitted
        self.drafted_at.update(other.drafted_at)
        self.accepted_at.update(other.accepted_at)
        self.is_synthetic = self.is_synthetic or other.is_synthetic

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round as verified, the target's own one included."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def emitted_length(self) -> float | None:
        """Tokens a round that reached their requests."""
        return self.emitted / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts of all drafts."""
        return self.accepted / self.drafted if self.drafted else None

    def rate_at(self, place: int) -> float | None:
        """How often a draft at this place is accepted, of the rounds that had one there."""
        count = self.drafted_at[place]
        return self.accepted_at[place] / count if count else None

    def figures(self) -> dict[str, Any]:
        """Counts and figures by name, as reports have them."""
        return {
            "rounds": self.rounds,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "emitted_tokens": self.emitted,
            "acceptance_length": self.acceptance_length,
            "emitted_length": self.emitted_length,
            "acceptance_rate": self.acceptance_rate,
            "rate_by_place": self.rates,
            "accepted_by_place": [self.accepted_at[place] for place in range(len(self.drafted_at))],
            "is_synthetic": self.is_synthetic,
        }

    @property
    def rates(self) -> list[float | None]:
        """`rate_at` of every place that had a draft."""
        return [self.rate_at(place) for place in range(len(self.drafted_at))]


@dataclass
class RoundTimes:
    """Time of whole steps with drafts, however many requests each served.

    draft_ns: proposing. verify_ns: the target's step and the verdicts. commit_ns: moving the
    target's caches and the draft's.
    """

    steps: int = 0
    draft_ns: int = 0
    verify_ns: int = 0
    commit_ns: int = 0
