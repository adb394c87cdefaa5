"""Whether two arms say the same: greedy tokens, and teacher-forced choices on one reference.

Owns: the first divergence of two generations, the classes near-tie and real, and the judgement over
all prompts. Does not know how an arm computes its logits.

A generation that took another token is another text from there on, so later positions of the two
cannot be compared. The teacher-forced run can: the candidate is given the reference tokens one by
one, and says at each which token it would have taken and by how much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

DivergenceClass = Literal["near-tie", "real"]


class AgreementStep(NamedTuple):
    """One teacher-forced position of an arm.

    argmax_token: what the arm would have taken. margin: its maximum logit less the logit of the
    reference token, 0 or more. max_logit: that maximum.
    """

    argmax_token: int
    margin: float
    max_logit: float


@dataclass(frozen=True)
class NearTie:
    """A margin up to atol + rtol * |max logit| is a tie that rounding may decide either way.

    Raises ValueError for tolerances that any choice would keep to.
    """

    atol: float
    rtol: float

    def __post_init__(self) -> None:
        if not (self.atol >= 0 and math.isfinite(self.atol)):
            raise ValueError(f"near_tie_atol is {self.atol}; it must be a finite number from 0 on.")
        if not 0 <= self.rtol < 1:
            raise ValueError(f"near_tie_rtol is {self.rtol}; it must be from 0 to below 1.")

    def classify(self, step: AgreementStep) -> DivergenceClass:
        limit = self.atol + self.rtol * abs(step.max_logit)
        # A NaN margin compares false, so it is real.
        return "near-tie" if step.margin <= limit else "real"


@dataclass(frozen=True)
class PromptAgreement:
    """One prompt: the candidate against the reference arm's greedy tokens.

    divergence: first position where the greedy tokens differ, or None. divergence_margin: the
    candidate's margin there; None when its teacher-forced choice there is the reference token (the
    greedy run cannot be explained by a tie) or there is no reference token. near_ties, real:
    teacher-forced positions with another choice. unstable_runs: repetitions, of either arm, whose
    tokens differ from that arm's first.
    """

    prompt: int
    positions: int
    divergence: int | None
    divergence_margin: float | None
    divergence_class: DivergenceClass | None
    near_ties: int
    real: int
    unstable_runs: int

    @property
    def is_identical(self) -> bool:
        return self.divergence is None

    @property
    def agrees(self) -> bool:
        return self.real == 0 and self.divergence_class != "real" and self.unstable_runs == 0


@dataclass(frozen=True)
class Agreement:
    """All prompts of a comparison."""

    prompts: tuple[PromptAgreement, ...]

    @property
    def agrees(self) -> bool:
        return all(prompt.agrees for prompt in self.prompts)

    @property
    def identical_prompts(self) -> int:
        return sum(prompt.is_identical for prompt in self.prompts)

    @property
    def positions(self) -> int:
        return sum(prompt.positions for prompt in self.prompts)

    @property
    def near_ties(self) -> int:
        return sum(prompt.near_ties for prompt in self.prompts)

    @property
    def real(self) -> int:
        return sum(prompt.real for prompt in self.prompts)

    @property
    def unstable_runs(self) -> int:
        return sum(prompt.unstable_runs for prompt in self.prompts)


def judge_prompt(
    prompt: int,
    reference_runs: Sequence[tuple[int, ...]],
    candidate_runs: Sequence[tuple[int, ...]],
    steps: Sequence[AgreementStep],
    near_tie: NearTie,
) -> PromptAgreement:
    """Judges one prompt. `steps` are the candidate's, one for each token of `reference_runs[0]`."""
    reference, candidate = reference_runs[0], candidate_runs[0]
    if len(steps) != len(reference):
        raise ValueError(
            f"The teacher-forced run of prompt {prompt} has {len(steps)} positions; the reference "
            f"has {len(reference)} tokens."
        )
    other = [
        near_tie.classify(step)
        for step, token in zip(steps, reference, strict=True)
        if step.argmax_token != token
    ]
    divergence = first_divergence(reference, candidate)
    margin: float | None = None
    divergence_class: DivergenceClass | None = None
    if divergence is not None:
        divergence_class = "real"
        has_choice = divergence < len(reference)
        if has_choice and steps[divergence].argmax_token != reference[divergence]:
            margin = steps[divergence].margin
            divergence_class = near_tie.classify(steps[divergence])
    return PromptAgreement(
        prompt=prompt,
        positions=len(reference),
        divergence=divergence,
        divergence_margin=margin,
        divergence_class=divergence_class,
        near_ties=other.count("near-tie"),
        real=other.count("real"),
        unstable_runs=sum(
            run != runs[0] for runs in (reference_runs, candidate_runs) for run in runs
        ),
    )


def first_divergence(reference: Sequence[object], candidate: Sequence[object]) -> int | None:
    """First position where two lists differ; where one ends, the other's next position."""
    for position, (a, b) in enumerate(itertools.zip_longest(reference, candidate)):
        if a != b:
            return position
    return None
