"""draft_insert in Triton against the draft's reference; what it must not write keeps its bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draft_cases import NUM_PAGES, PAGE_TOKENS, make_draft_case, randn

from kdecode.decode.plan import Buffer
from kdecode.kernels.draft_insert import triton_impl
from kdecode.kernels.draft_insert.op import CONTRACT
from kdecode.model.draft_reference import cache_rows
from kdecode.model.reference import ROUNDED
from kdecode.testing.compare import assert_close

LAYER = 1
INT32, FP32, BF16 = torch.int32, torch.float32, torch.bfloat16


@pytest.mark.parametrize("rows", [*range(1, 9), 64])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_rows_over_the_ends_of_pages(rows: int, is_grouped: bool) -> None:
    case = make_draft_case(is_grouped=is_grouped)
    turned, width = case.deployment.config.rotated_dim, case.config.hidden_size
    max_pages = case.deployment.max_pages
    buffers = case.buffers(
        Buffer("row_position", (rows,), INT32, "input"),
        Buffer("row_pages", (rows, max_pages), INT32, "input"),
        Buffer("row_rotation", (rows, turned), FP32, "input"),
        Buffer("context", (rows, width), BF16),
    )
    context, positions = randn(rows, width, seed=rows), torch.arange(rows) + 3
    table = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1))[:max_pages]
    pages = table.int().repeat(rows, 1)
    # One row has no page: it is written nowhere.
    skipped = rows // 2 if rows > 2 else None
    if skipped is not None:
        pages[skipped] = -1
    inputs = {
        "row_position": positions.int(),
        "row_pages": pages,
        "row_rotation": case.rotation(positions),
        "context": context,
    }
    for name, tensor in inputs.items():
        buffers[name].copy_(tensor)
    case.run("draft_insert", case.weights.layers[LAYER], buffers, rows, layer=LAYER)
    gold = cache_rows(case.p.layers[LAYER], case.config, context, positions, ROUNDED)
    cached = buffers.caches.pages[LAYER].cpu()
    written = torch.zeros(cached.shape[:2], dtype=torch.bool)
    for row, position in enumerate(positions.tolist()):
        if row == skipped:
            continue
        page, place = int(table[position // PAGE_TOKENS]), position % PAGE_TOKENS
        written[page, place] = True
        assert_close(cached[page, place], gold[row].float(), CONTRACT.tolerance, f"row {row}")
    assert bool(torch.isnan(cached[~written]).all())
    assert bool(torch.isnan(buffers.caches.pages[0]).all())


def test_a_draft_without_a_query_of_low_rank_is_refused() -> None:
    case = make_draft_case()
    mla = case.config.attention
    config = case.deployment.config
    problem = case.deployment.problem(0, 3)
    plain = replace(problem, config=replace(config, mla=replace(mla, q_rank=None, rope_dim=7)))
    reasons = triton_impl.refuse(plain)
    assert len(reasons) == 2
    assert "a head has 7 that are" in reasons[0]
    assert "has a low rank" in reasons[1]


def test_grouped_queries_are_refused_what_their_kernels_do_not_have() -> None:
    case = make_draft_case(is_grouped=True)
    problem = case.deployment.problem(0, 3)
    assert triton_impl.refuse(problem) == []
    (reason,) = triton_impl.refuse(replace(problem, cache_dtype="fp8"))
    assert "cached in bf16; fp8 was asked for" in reason
