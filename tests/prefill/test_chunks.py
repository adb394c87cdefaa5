"""The split of prompts into steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdecode.prefill.chunks import ALIGNMENT, room_to_boundary, share_budget, split_prompt


@pytest.mark.parametrize(
    ("tokens", "budget", "chunks"),
    [
        (1, 512, (1,)),
        (512, 512, (512,)),
        (513, 512, (512, 1)),
        (700, 300, (256, 256, 188)),
        (130, 64, (64, 64, 2)),
        (5, 2, (2, 2, 1)),
        (0, 64, ()),
    ],
)
def test_split_prompt(tokens: int, budget: int, chunks: tuple[int, ...]) -> None:
    assert split_prompt(tokens, budget) == chunks


@pytest.mark.parametrize(
    ("remaining", "budget", "shares"),
    [
        ((), 512, ()),
        ((10, 20, 30), 512, (10, 20, 30)),
        ((10, 20, 30), 0, (0, 0, 0)),
        ((600, 20), 512, (512, 0)),
        # The second one is cut on a multiple of the alignment; a sliver is left for the next step.
        ((100, 600), 512, (100, 384)),
        ((500, 600), 512, (500, 0)),
        ((500, 12, 7), 512, (500, 12, 0)),
        ((30,), 20, (20,)),
    ],
)
def test_share_budget(remaining: tuple[int, ...], budget: int, shares: tuple[int, ...]) -> None:
    assert share_budget(remaining, budget) == shares


@given(st.lists(st.integers(1, 900), max_size=6), st.integers(1, 600))
def test_shares_are_within_the_budget_and_make_progress(remaining: list[int], budget: int) -> None:
    shares = share_budget(remaining, budget)
    assert len(shares) == len(remaining)
    assert sum(shares) <= budget
    assert not remaining or shares[0] > 0
    cut = [i for i, share in enumerate(shares) if share < remaining[i]]
    # Requests behind the one that is cut wait.
    assert all(shares[i] == 0 for i in cut[1:])
    for i in cut:
        assert shares[i] % ALIGNMENT == 0 or (i == 0 and budget < ALIGNMENT)


@given(st.integers(0, 3000), st.integers(1, 600))
def test_chunks_add_up(tokens: int, budget: int) -> None:
    chunks = split_prompt(tokens, budget)
    assert sum(chunks) == tokens
    assert all(0 < chunk <= budget for chunk in chunks)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        share_budget((1,), -1)
    with pytest.raises(ValueError, match="no tokens left"):
        share_budget((3, 0), 8)
    with pytest.raises(ValueError, match="at least 1"):
        split_prompt(3, 0)


@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 900)), min_size=1, max_size=4),
    st.integers(64, 600),
    st.sampled_from((64, 128, 192, 512)),
)
def test_no_chunk_goes_beyond_the_interval(
    spans: list[tuple[int, int]], budget: int, interval: int
) -> None:
    remaining = [tokens for _, tokens in spans]
    rooms = [room_to_boundary(start, interval) for start, _ in spans]
    shares = share_budget(remaining, budget, rooms)
    assert sum(shares) <= budget
    assert shares[0] > 0
    for (start, _), share in zip(spans, shares, strict=True):
        assert share == 0 or (start + share - 1) // interval == start // interval


def test_a_prompt_cut_at_the_interval_leaves_the_rest_to_the_next() -> None:
    assert share_budget((600, 600), 512, (128, 512)) == (128, 384)
    assert share_budget((100, 600, 5), 512, (64, 100, 64)) == (64, 100, 5)
