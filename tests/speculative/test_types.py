"""Proposals and verdicts refuse what cannot be."""

from __future__ import annotations

import pytest
import torch

from kdecode.speculative.types import Proposal, Verdict


def test_a_proposal_is_cut_as_a_whole() -> None:
    proposal = Proposal(3, (7, 8, 9), torch.arange(6.0).view(3, 2), (0.9, 0.5, 0.1))
    short = proposal.shortened(2)
    assert (short.drafts, short.confidence) == ((7, 8), (0.9, 0.5))
    assert short.probabilities is not None
    assert short.probabilities.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert Proposal(3, (7,)).shortened(0) == Proposal(3, ())
    with pytest.raises(ValueError, match="4 of 3 drafts"):
        proposal.shortened(4)


def test_a_verdict_counts_rows_and_tokens() -> None:
    proposal = Proposal(3, (7, 8, 9))
    verdict = Verdict(accepted=2, token=5, num_drafts=3)
    assert verdict.committed_rows == 3
    assert verdict.tokens(proposal) == (7, 8, 5)
    assert Verdict(0, 5, 0).tokens(Proposal(0, ())) == (5,)
    with pytest.raises(ValueError, match="about 3 drafts; the proposal has 1"):
        verdict.tokens(Proposal(3, (7,)))


def test_impossible_ones() -> None:
    with pytest.raises(ValueError, match="position is -1"):
        Proposal(-1, ())
    with pytest.raises(ValueError, match="a token is never negative"):
        Proposal(0, (1, -1))
    with pytest.raises(ValueError, match="2 drafts and 1 distributions"):
        Proposal(0, (1, 2), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="1 drafts and 2 confidences"):
        Proposal(0, (1,), confidence=(0.1, 0.2))
    with pytest.raises(ValueError, match="3 of 2 drafts"):
        Verdict(3, 0, 2)
