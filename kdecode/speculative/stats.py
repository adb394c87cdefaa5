"""Counts of rounds: what was drafted, what was accepted, and the figures made of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kdecode.speculative.types import Verdict


@dataclass
class RoundStats:
    """Figures are None before there is anything to divide by, never 0.

    drafted_at, accepted_at: rounds that had, and that accepted, a draft at each place.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    # Whether any round was decided at stated rates: its text is then no answer of the model.
    is_synthetic: bool = False

    def record(self, verdict: Verdict) -> None:
        self.rounds += 1
        self.drafted += verdict.num_drafts
        self.accepted += verdict.accepted
        self.drafted_at.update(range(verdict.num_drafts))
        self.accepted_at.update(range(verdict.accepted))
        self.is_synthetic = self.is_synthetic or verdict.is_synthetic

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round as verified, the target's own one included."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts of all drafts."""
        return self.accepted / self.drafted if self.drafted else None

    def rate_at(self, place: int) -> float | None:
        """How often a draft at this place is accepted, of the rounds that had one there."""
        count = self.drafted_at[place]
        return self.accepted_at[place] / count if count else None
