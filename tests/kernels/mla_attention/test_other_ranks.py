"""Attention over a context of which every rank has some positions, against one that has them all.

Ranks are threads. Whatever nobody has written is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kdecode.config import MlaConfig
from kdecode.kernels.common.step import RequestSpan
from kdecode.kernels.contract import Buffers, Tolerance
from kdecode.kernels.mla_attention.other_ranks import OtherRanks
from kdecode.kernels.mla_attention.rows import CacheRows
from kdecode.parallel.context import WHOLE, ContextShare
from kdecode.parallel.ranks import Ranks
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.poison import poisoned
from kdecode.testing.ranks import ThreadExchange, run_ranks

HEADS = 16
MLA = MlaConfig(HEADS, 64, 32, 24, 16, 24, True, 1e-5)
SCALES = {"bf16": 1.0, "fp8": 0.05}
TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
# One rounding of the result to bf16, and sums in another order.
TOLERANCE = Tolerance(rtol=2**-8, atol=1e-5, rms_ratio=3e-3)

# (tokens before, new tokens) of requests: first tokens, page borders of any size below, verify rows
# across them.
REQUESTS = [(0, 1), (0, 5), (31, 1), (32, 1), (63, 8), (60, 8), (127, 1), (128, 3), (200, 7)]


def _spans(page_tokens: int) -> list[RequestSpan]:
    """Pages in no order, none of them twice."""
    spans, first, page = [], 0, 200
    for number, (start, count) in enumerate(REQUESTS):
        needed = -(-(start + count) // page_tokens)
        pages = torch.arange(page, page - needed, -1)
        page -= needed
        spans.append(RequestSpan(first, first + count, start, number, pages, None))
        first += count
    return spans


def _cache(dtype: str, context: ContextShare, page_tokens: int) -> CacheRows:
    """All rows of all requests that are stored there, the same ones on any rank."""
    pages = poisoned((201, context.page_rows(page_tokens), MLA.cache_width), TYPES[dtype])
    cache = CacheRows(pages, SCALES[dtype])
    for span in _spans(page_tokens):
        generator = torch.Generator().manual_seed(span.slot)
        rows = torch.randn(span.context_tokens, MLA.cache_width, generator=generator).bfloat16()
        positions = torch.arange(span.context_tokens)
        mine = positions[context.owner(positions) == context.ranks.rank]
        place = context.index(mine) % context.page_rows(page_tokens)
        page = span.pages[mine // page_tokens]
        cache.insert(page * context.page_rows(page_tokens) + place, rows[mine])
    return cache


def _query() -> Tensor:
    count = sum(count for _, count in REQUESTS)
    generator = torch.Generator().manual_seed(99)
    return torch.randn(count, HEADS, MLA.cache_width, generator=generator).bfloat16()


def _gold(dtype: str, page_tokens: int) -> Tensor:
    cache, query = _cache(dtype, WHOLE, page_tokens), _query()
    outs = []
    for span in _spans(page_tokens):
        rows = cache.gather(span).double()
        own = query[span.first : span.last].double()
        scores = torch.einsum("thw,cw->thc", own, rows) * MLA.qk_dim**-0.5
        limits = span.start + torch.arange(span.num_rows).view(-1, 1, 1)
        scores.masked_fill_(torch.arange(len(rows)) > limits, float("-inf"))
        outs.append(torch.einsum("thc,cv->thv", scores.softmax(-1), rows[:, : MLA.kv_rank]))
    return torch.cat(outs)


def _rank(
    ranks: Ranks, exchange: ThreadExchange, dtype: str, interleave: int, page_tokens: int
) -> OtherRanks:
    context = ContextShare(ranks, interleave)
    buffers = Buffers()
    buffers.exchange = exchange
    mla = replace(MLA, num_heads=ranks.part(HEADS))
    return OtherRanks(mla, context, _cache(dtype, context, page_tokens), buffers)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (2, 16), (4, 4), (8, 1), (16, 2)])
def test_latents_of_decode_and_verify_rows(dtype: str, size: int, interleave: int) -> None:
    page_tokens = 2 * size * interleave

    def body(ranks: Ranks, exchange: ThreadExchange) -> Tensor:
        begin, end = ranks.span(HEADS)
        others = _rank(ranks, exchange, dtype, interleave, page_tokens)
        return others.attend(_query()[:, begin:end], _spans(page_tokens))

    found = torch.cat(run_ranks(size, body), dim=1)
    assert found.dtype == torch.bfloat16
    assert_close(found, _gold(dtype, page_tokens), TOLERANCE, "latents")


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (2, 16), (4, 4), (8, 1), (16, 2)])
def test_rows_come_in_their_order(dtype: str, size: int, interleave: int) -> None:
    """Bit by bit what one rank would have, on every rank."""
    page_tokens = 2 * size * interleave
    whole = _cache(dtype, WHOLE, page_tokens)

    def body(ranks: Ranks, exchange: ThreadExchange) -> list[Tensor]:
        others = _rank(ranks, exchange, dtype, interleave, page_tokens)
        return [others.rows(span) for span in _spans(page_tokens)]

    for found in run_ranks(size, body):
        for span, rows in zip(_spans(page_tokens), found, strict=True):
            bit_equal(rows, whole.gather(span), f"rows of request {span.slot}")


def test_the_company_of_a_row_changes_no_bit_of_it() -> None:
    """Its request alone, and in a step with others."""

    def body(ranks: Ranks, exchange: ThreadExchange) -> tuple[Tensor, list[Tensor]]:
        begin, end = ranks.span(HEADS)
        others = _rank(ranks, exchange, "bf16", 1, 16)
        query, spans = _query()[:, begin:end], _spans(16)
        alone = [others.attend(query[span.first : span.last], [span]) for span in spans]
        return others.attend(query, spans), alone

    for together, alone in run_ranks(4, body):
        bit_equal(together, torch.cat(alone), "latents")


def test_a_plan_without_an_exchange_says_so() -> None:
    context = ContextShare(Ranks(0, 2), 1)
    others = OtherRanks(MLA, context, _cache("bf16", context, 16), Buffers())
    with pytest.raises(ValueError, match="no exchange with the other ranks"):
        others.attend(_query(), _spans(16))
