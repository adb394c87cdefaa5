"""gqa_query in Triton against the draft's reference; what it must not write keeps its bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from draft_cases import PAGE_TOKENS
from gqa_cases import LAYER, GroupedBlock

from kdecode.config import GqaConfig
from kdecode.kernels.gqa_query import triton_impl
from kdecode.kernels.gqa_query.op import CONTRACT
from kdecode.testing.compare import assert_close, bit_equal

# Fewer heads than a program has, and more by a few.
MANY_HEADS = {"attention": GqaConfig(num_heads=20, num_kv_heads=10, head_dim=12)}


@pytest.mark.parametrize(
    ("contexts", "each", "many"),
    [
        *(([5 + 3 * rows], rows, False) for rows in range(1, 9)),
        ([0, 17], 3, True),
        ([2 * place for place in range(16)], 4, False),
    ],
)
def test_queries_and_cache_rows(contexts: list[int], each: int, many: bool) -> None:
    """Of 1 to 8 and 64 rows, over the ends of pages."""
    block = GroupedBlock(contexts, each, MANY_HEADS if many else {})
    block.run("gqa_query")
    queries, rows = block.heads()
    found = block.buffers["gqa_query"].cpu()
    assert_close(found, queries.float(), CONTRACT.tolerance, "gqa_query")
    keys = rows.shape[1] // 2
    inserted = block.inserted()
    assert_close(inserted[:, :keys], rows[:, :keys].float(), CONTRACT.tolerance, "keys")
    bit_equal(inserted[:, keys:].contiguous(), rows[:, keys:].contiguous(), "values")


def test_nothing_but_the_rows_of_the_block_is_written() -> None:
    """And nothing of a row without a page."""
    block = GroupedBlock([62, 1], 4, {})
    block.buffers["row_pages"][6] = -1
    before = block.pages.clone()
    block.run("gqa_query")
    after = block.buffers.caches.pages[LAYER].cpu()
    for row, position in enumerate(block.positions.tolist()):
        if row != 6:
            place = block.table[row // 4, position // PAGE_TOKENS], position % PAGE_TOKENS
            before[place] = after[place]
    bit_equal(after, before, "pages")


def test_every_reason_why_it_cannot_run() -> None:
    problem = GroupedBlock([1], 1, {}).case.deployment.problem(LAYER, 65)
    assert problem.config.gqa is not None
    odd = replace(problem.config, gqa=replace(problem.config.gqa, head_dim=7))
    reasons = triton_impl.refuse(
        replace(problem, config=odd, cache_dtype="fp8", rotation_scale=None)
    )
    assert len(reasons) == 4
    assert "1 to 64 rows; this has 65" in reasons[0]
    assert "this model's rows do not turn" in reasons[1]
    assert "cached in bf16; fp8 was asked for" in reasons[2]
    assert "a head has 7 that are" in reasons[3]
