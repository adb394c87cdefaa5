"""Positions and their ranks, and attention over parts: what ranks do, as a loop over them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kdecode.kernels.mla_attention.partial import merge, partial_attention
from kdecode.parallel.context import WHOLE, ContextShare
from kdecode.parallel.ranks import ALONE, Ranks

SIZES = (1, 2, 4, 8, 16)
HEADS, KV_RANK, WIDTH, SCALE = 3, 12, 16, 0.3


def _shares(size: int, interleave: int) -> list[ContextShare]:
    return [ContextShare(Ranks(rank, size), interleave) for rank in range(size)]


@pytest.mark.parametrize("interleave", [1, 3, 16])
@pytest.mark.parametrize("size", SIZES)
def test_every_position_has_one_place(size: int, interleave: int) -> None:
    shares = _shares(size, interleave)
    stored: list[list[int]] = [[] for _ in shares]
    for position in range(5 * size * interleave + 7):
        for share in shares:
            assert share.length(position) == len(stored[share.ranks.rank])
        owner = shares[0].owner(position)
        assert owner == position // interleave % size
        assert shares[owner].index(position) == len(stored[owner])
        assert shares[owner].position(len(stored[owner])) == position
        stored[owner].append(position)
        lengths = [len(positions) for positions in stored]
        padded = shares[0].padded_length(position + 1)
        assert padded % interleave == 0
        assert max(lengths) <= padded < max(lengths) + interleave


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("size", SIZES)
def test_a_page_has_the_same_place_in_every_request(size: int, interleave: int) -> None:
    """So that a page can be shared by its number, and only whole pages follow each other."""
    share = ContextShare(Ranks(size - 1, size), interleave)
    page_tokens = 3 * size * interleave
    rows = share.page_rows(page_tokens)
    assert rows == 3 * interleave
    for position in range(4 * page_tokens):
        page, offset = divmod(position, page_tokens)
        assert share.owner(position) == share.owner(offset)
        assert share.index(position) == page * rows + share.index(offset)
    assert share.length(4 * page_tokens) == 4 * rows


def test_tensors_of_positions() -> None:
    share = ContextShare(Ranks(2, 4), 16)
    positions = torch.arange(500)
    owners, indices = share.owner(positions), share.index(positions)
    assert owners.tolist() == [share.owner(p) for p in range(500)]
    assert indices.tolist() == [share.index(p) for p in range(500)]
    mine = owners == 2
    assert torch.equal(share.position(indices[mine]), positions[mine])


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"page of 24 positions .* whole rounds of 16"):
        ContextShare(Ranks(0, 2), 8).page_rows(24)
    with pytest.raises(ValueError, match="interleave is 0"):
        ContextShare(ALONE, 0)
    with pytest.raises(ValueError, match="among 2 ranks; it can be 1 or 4"):
        ContextShare.of(2, Ranks(0, 4), 1)
    assert ContextShare.of(1, Ranks(3, 4), 16) == WHOLE
    assert WHOLE.is_whole
    assert WHOLE.page_rows(64) == 64
    assert not ContextShare.of(4, Ranks(3, 4), 16).is_whole


def _unsharded(query: Tensor, rows: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Causal attention of the last T of C positions, in fp64."""
    scores = torch.einsum("thw,cw->thc", query.double(), rows.double()) * SCALE
    hidden = torch.arange(rows.shape[0]) > start + torch.arange(len(query)).view(-1, 1, 1)
    scores = scores.masked_fill(hidden, -math.inf)
    out = torch.einsum("thc,cv->thv", scores.softmax(-1), rows[:, :KV_RANK].double())
    return out, scores.logsumexp(-1)


def _sharded(
    query: Tensor, rows: Tensor, start: int, size: int, interleave: int
) -> tuple[Tensor, Tensor]:
    """What ranks do: each has its own rows, attends for all heads, and the parts are merged."""
    parts = []
    for share in _shares(size, interleave):
        mine = share.owner(torch.arange(rows.shape[0])) == share.ranks.rank
        seen = [share.length(start + place + 1) for place in range(len(query))]
        parts.append(partial_attention(query, rows[mine], seen, KV_RANK, SCALE))
    outs, lses = zip(*parts, strict=True)
    return merge(torch.stack(outs), torch.stack(lses))


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("size", SIZES)
def test_parts_are_the_whole(size: int, interleave: int) -> None:
    """All lengths, and verify rows of which each one sees one more; ranks without rows too."""
    generator = torch.Generator().manual_seed(size)
    for length in range(1, 41):
        for count in range(1, min(8, length) + 1):
            rows = torch.randn(length, WIDTH, generator=generator).bfloat16()
            query = 3 * torch.randn(count, HEADS, WIDTH, generator=generator).bfloat16()
            out, lse = _sharded(query, rows, length - count, size, interleave)
            gold, gold_lse = _unsharded(query, rows, length - count)
            assert out.dtype == lse.dtype == torch.float32
            torch.testing.assert_close(out.double(), gold, rtol=2e-6, atol=4e-6)
            torch.testing.assert_close(lse.double(), gold_lse, rtol=2e-6, atol=4e-6)


def test_more_rows_than_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdecode.kernels.mla_attention.partial._BLOCK_ROWS", 16)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(75, WIDTH, generator=generator)
    query = torch.randn(8, HEADS, WIDTH, generator=generator)
    # The verify rows lie on both sides of a border of two blocks.
    for start in (36, 60, 67):
        out, lse = _sharded(query, rows[: start + 8], start, 2, 1)
        gold, gold_lse = _unsharded(query, rows[: start + 8], start)
        torch.testing.assert_close(out.double(), gold, rtol=2e-6, atol=4e-6)
        torch.testing.assert_close(lse.double(), gold_lse, rtol=2e-6, atol=4e-6)


def test_scores_of_any_size_and_far_apart() -> None:
    """One part takes it all, or nothing; nothing overflows."""
    rows = torch.zeros(4, WIDTH)
    rows[:, 0] = torch.tensor([900.0, -900.0, 899.0, -1e30])
    query = torch.zeros(1, HEADS, WIDTH)
    query[..., 0] = 1 / SCALE
    out, lse = _sharded(query, rows, 3, 4, 1)
    gold, gold_lse = _unsharded(query, rows, 3)
    torch.testing.assert_close(out.double(), gold)
    torch.testing.assert_close(lse.double(), gold_lse)


def test_an_empty_part_adds_nothing() -> None:
    """Not even to the bits."""
    outs, lses = torch.randn(2, 5, HEADS, KV_RANK), torch.randn(2, 5, HEADS)
    empty, no_rows = partial_attention(
        torch.randn(5, HEADS, WIDTH), torch.full((3, WIDTH), math.nan), [0] * 5, KV_RANK, SCALE
    )
    assert not empty.any()
    assert bool((no_rows == -math.inf).all())
    out, lse = merge(outs, lses)
    for at in range(3):
        padded_outs = torch.cat([outs[:at], empty[None], outs[at:]])
        padded_lses = torch.cat([lses[:at], no_rows[None], lses[at:]])
        padded, padded_lse = merge(padded_outs, padded_lses)
        assert torch.equal(padded, out)
        assert torch.equal(padded_lse, lse)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 5, 9])
def test_what_is_not_a_number_stays_so(value: float, place: int) -> None:
    """On every rank that has it, and in no row that does not see it."""
    rows = torch.randn(10, WIDTH)
    rows[place] = value
    query = torch.rand(2, HEADS, WIDTH)
    out, lse = _sharded(query, rows, 8, 4, 1)
    sees = 2 if place < 9 else 1
    assert bool(out[2 - sees :].isnan().all())
    assert bool(lse[2 - sees :].isnan().all())


def test_the_order_of_parts_is_the_order_of_sums() -> None:
    outs, lses = torch.randn(8, 2, HEADS, KV_RANK), torch.zeros(8, 2, HEADS)
    expected = outs[0]
    for part in outs[1:]:
        expected = expected + part
    assert torch.equal(merge(outs, lses)[0], expected / 8)
