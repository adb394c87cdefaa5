"""What a drafter hands to verification, and what verification hands back.

A *round* is one proposal and its verdict. Its anchor is the newest token of the request, sampled
but not yet run through the target; the drafts follow it. A round of N drafts runs N + 1 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from kdecode.cache.batch import StepBatch


@dataclass(frozen=True)
class Proposal:
    """The drafts of one request for one round; none is a proposal too.

    anchor_position: position of the anchor; draft j (from 0) is meant for anchor_position + 1 + j.
    probabilities: [N, vocab], row j the distribution that draft j was drawn from; None where the
    drafts are to be taken as given, as first choices are.
    confidence: what the draft expects of each of its drafts, that it holds if all before it do.
    """

    anchor_position: int
    drafts: tuple[int, ...]
    probabilities: Tensor | None = None
    confidence: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.anchor_position < 0:
            raise ValueError(f"The anchor's position is {self.anchor_position}, below 0.")
        if any(token < 0 for token in self.drafts):
            raise ValueError(f"The drafts are {self.drafts}; a token is never negative.")
        rows = self.num_drafts if self.probabilities is None else self.probabilities.shape[0]
        if rows != self.num_drafts:
            raise ValueError(f"There are {self.num_drafts} drafts and {rows} distributions.")
        if self.confidence is not None and len(self.confidence) != self.num_drafts:
            raise ValueError(
                f"There are {self.num_drafts} drafts and {len(self.confidence)} confidences."
            )

    @property
    def num_drafts(self) -> int:
        return len(self.drafts)

    def shortened(self, count: int) -> Proposal:
        """The first ``count`` drafts. To choose it, only look at what came before those cut off."""
        if not 0 <= count <= self.num_drafts:
            raise ValueError(f"{count} of {self.num_drafts} drafts cannot be kept.")
        return replace(
            self,
            drafts=self.drafts[:count],
            probabilities=None if self.probabilities is None else self.probabilities[:count],
            confidence=None if self.confidence is None else self.confidence[:count],
        )


@dataclass(frozen=True)
class Verdict:
    """The result of a round: the first ``accepted`` drafts and the target's own next token."""

    accepted: int
    token: int
    num_drafts: int
    # Accepted at a stated rate, not by the target: the text is no answer of the model.
    is_synthetic: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.num_drafts:
            raise ValueError(f"{self.accepted} of {self.num_drafts} drafts cannot be accepted.")

    @property
    def committed_rows(self) -> int:
        """Rows of the step whose effect on every cache stays: the anchor's and the accepted ones'.

        One number for all layers and for the draft's cache; the new token is the next anchor.
        """
        return self.accepted + 1

    def tokens(self, proposal: Proposal) -> tuple[int, ...]:
        """The new tokens of the request, one at least."""
        if proposal.num_drafts != self.num_drafts:
            raise ValueError(
                f"The verdict is about {self.num_drafts} drafts; the proposal has "
                f"{proposal.num_drafts}."
            )
        return (*proposal.drafts[: self.accepted], self.token)


@dataclass(frozen=True)
class RoundRequest:
    """A request of a round as a proposer sees it.

    number: of the request. anchor, anchor_position: its newest token. num_drafts: as many as it may
    have, 1 at least. temperature, seed: of the request's draws.
    """

    number: int
    anchor: int
    anchor_position: int
    num_drafts: int
    slot: int
    pages: tuple[int, ...]
    temperature: float = 0.0
    seed: int = 0


class Proposer(Protocol):
    """Makes drafts. Told of every token that the caches hold, it may keep caches of its own."""

    def propose(self, requests: Sequence[RoundRequest]) -> list[Proposal]:
        """A proposal for each request, of its num_drafts drafts or fewer."""

    def observe(self, batch: StepBatch, rows: Sequence[int], taps: Tensor | None) -> None:
        """A step was committed: of each of its requests the first so many tokens.

        A request that starts at 0 is a new one in its slot. taps [rows of the step, taps, M].
        """


class Rollback(Protocol):
    """How rejected rows of a step leave the target's caches. One step at a time."""

    def before(self, batch: StepBatch) -> StepBatch:
        """A step over anchors and drafts is about to run; returns it as it has to be run."""

    def keep(self, batch: StepBatch, rows: Sequence[int]) -> None:
        """That step has run; the first so many rows of each request stay, 1 at least.

        Raises ValueError, with nothing moved, for a number that the step does not have.
        """


def check_kept(batch: StepBatch, rows: Sequence[int]) -> None:
    """Raises ValueError unless there is a number for each request, from 1 to its rows."""
    if len(rows) != len(batch.requests):
        raise ValueError(f"{len(batch.requests)} requests have {len(rows)} numbers of kept rows.")
    for index, (request, count) in enumerate(zip(batch.requests, rows, strict=True)):
        if not 1 <= count <= len(request.token_ids):
            raise ValueError(
                f"{count} rows of request {index} cannot be kept; the step ran "
                f"{len(request.token_ids)}."
            )
