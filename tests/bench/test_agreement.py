"""Divergence of greedy tokens and classes of teacher-forced mismatches."""

from __future__ import annotations

import math

import pytest

from kdecode.bench.agreement import (
    AgreementStep,
    DivergenceClass,
    NearTie,
    first_divergence,
    judge_prompt,
)

NEAR = NearTie(atol=0.1, rtol=0.01)
REFERENCE = (5, 6, 7, 8)


def steps(**wrong: float) -> list[AgreementStep]:
    """Teacher-forced choices: right everywhere but at p<position>, where the margin is given."""
    result = [AgreementStep(token, 0.0, 20.0) for token in REFERENCE]
    for name, margin in wrong.items():
        result[int(name[1:])] = AgreementStep(99, margin, 20.0)
    return result


@pytest.mark.parametrize(
    ("candidate", "position"),
    [((5, 6, 7, 8), None), ((5, 9, 7, 8), 1), ((5, 6), 2), ((5, 6, 7, 8, 9), 4), ((), 0)],
)
def test_first_divergence(candidate: tuple[int, ...], position: int | None) -> None:
    assert first_divergence(REFERENCE, candidate) == position


def test_identical() -> None:
    judged = judge_prompt(0, [REFERENCE] * 2, [REFERENCE] * 2, steps(), NEAR)
    assert judged.is_identical
    assert judged.agrees
    assert (judged.near_ties, judged.real, judged.positions) == (0, 0, 4)


@pytest.mark.parametrize(
    ("margin", "expected"), [(0.3, "near-tie"), (0.301, "real"), (math.nan, "real")]
)
def test_tolerance_is_atol_plus_rtol_of_the_maximum(
    margin: float, expected: DivergenceClass
) -> None:
    judged = judge_prompt(0, [REFERENCE], [(5, 6, 99)], steps(p2=margin), NEAR)
    assert (judged.divergence, judged.divergence_class) == (2, expected)
    assert judged.divergence_margin == pytest.approx(margin, nan_ok=True)
    assert judged.agrees == (expected == "near-tie")
    assert (judged.near_ties, judged.real) == ((1, 0) if expected == "near-tie" else (0, 1))


def test_real_mismatch_after_a_near_tie_counts() -> None:
    judged = judge_prompt(0, [REFERENCE], [(5, 99)], steps(p1=0.01, p3=4.0), NEAR)
    assert judged.divergence_class == "near-tie"
    assert (judged.near_ties, judged.real) == (1, 1)
    assert not judged.agrees


def test_divergence_that_teacher_forcing_does_not_explain_is_real() -> None:
    # The candidate's greedy run left the reference, yet given the same tokens it would not have.
    judged = judge_prompt(0, [REFERENCE], [(5, 6, 99)], steps(), NEAR)
    assert (judged.divergence_class, judged.divergence_margin) == ("real", None)
    assert not judged.agrees


def test_running_on_past_the_reference_is_real() -> None:
    judged = judge_prompt(0, [REFERENCE], [(*REFERENCE, 9)], steps(), NEAR)
    assert (judged.divergence, judged.divergence_class) == (4, "real")


def test_repetitions_that_differ_are_counted() -> None:
    other = (5, 6, 7, 9)
    judged = judge_prompt(0, [REFERENCE, other], [REFERENCE, other, other], steps(), NEAR)
    assert judged.unstable_runs == 3
    assert not judged.agrees


def test_refusals() -> None:
    with pytest.raises(ValueError, match="3 positions; the reference has 4 tokens"):
        judge_prompt(0, [REFERENCE], [REFERENCE], steps()[:3], NEAR)
    for atol in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"near_tie_atol is {atol}; it must be"):
            NearTie(atol, 0.0)
    for rtol in (-1.0, 1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"near_tie_rtol is {rtol}; it must be"):
            NearTie(0.0, rtol)
