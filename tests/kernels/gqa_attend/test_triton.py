"""gqa_attend in Triton against softmax over what each row sees: windows, causal blocks, splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from draft_cases import MAX_CONTEXT, make_draft_case
from gqa_cases import LAYER, GroupedBlock

from kdecode.config import GqaConfig
from kdecode.config_draft import RopeConfig
from kdecode.kernels.common.gqa_splits import num_splits
from kdecode.kernels.gqa_attend import triton_impl
from kdecode.kernels.gqa_attend.op import CONTRACT
from kdecode.testing.compare import assert_close

OPS = ("gqa_query", "gqa_attend")
CAUSAL = {"is_causal": True}


def _heads(heads: int, groups: int, dim: int) -> dict[str, Any]:
    rope = RopeConfig(dim, 10_000.0, is_interleaved=False)
    return {"attention": GqaConfig(heads, groups, dim), "rope": rope}


def _check(block: GroupedBlock) -> None:
    block.run(*OPS)
    found = block.buffers["attn_out"].cpu()
    assert_close(found, block.read().float(), CONTRACT.tolerance, "attn_out")


@pytest.mark.parametrize(
    ("contexts", "each", "changes"),
    [
        ([9], 1, {}),
        ([130], 2, {}),
        ([0], 7, {}),
        ([62, 1], 4, {}),
        ([61, 130, 7], 5, CAUSAL),
        ([3, 64], 3, CAUSAL),
        ([0], 6, CAUSAL),
        # The window begins within a page, on the first token and behind rounds and splits.
        ([130, 20, 5], 7, {"window": 20}),
        ([150], 8, {"window": 66, **CAUSAL}),
        ([100], 3, {"window": 1, **CAUSAL}),
        ([2 * place for place in range(16)], 4, {"window": 13, **CAUSAL}),
        # More lanes of a group than a program has.
        ([70, 9], 7, {"attention": GqaConfig(20, 1, 12), **CAUSAL}),
        # Of wide heads a program has fewer of them, and shorter rounds.
        ([70, 9], 7, {**_heads(6, 1, 144), **CAUSAL}),
        ([62, 1], 2, _heads(2, 2, 256)),
    ],
)
def test_blocks_against_the_reference(
    contexts: list[int], each: int, changes: dict[str, Any]
) -> None:
    """Of 1 to 8 rows and more, over the ends of pages, rounds and splits."""
    assert max(contexts) + each <= MAX_CONTEXT
    _check(GroupedBlock(contexts, each, changes))


@pytest.mark.parametrize(
    ("contexts", "each", "changes"),
    [([61, 130, 7], 5, {}), ([150, 64], 4, {"window": 66, **CAUSAL})],
)
def test_pages_as_long_as_a_round(contexts: list[int], each: int, changes: dict[str, Any]) -> None:
    """As an engine has them: a round reads one page's number."""
    _check(GroupedBlock(contexts, each, changes, page_tokens=64))


def test_another_run_finds_nothing_of_the_last_one() -> None:
    """Arrivals are counted from none again, and splits behind a shorter context do not count."""
    own, long, short = (GroupedBlock([context], 2, {}) for context in (90, 150, 10))
    step = triton_impl.prepare(own.case.deployment.problem(LAYER, 2, 2), None, own.buffers)
    for block in (long, short, long):
        for name in ("row_position", "row_pages", "row_rotation", "gqa_proj"):
            own.buffers[name].copy_(block.buffers[name])
        own.buffers.caches.pages[LAYER].copy_(block.pages)
        own.run("gqa_query")
        step.run()
        found = own.buffers["attn_out"].cpu()
        assert_close(found, block.read().float(), CONTRACT.tolerance, "attn_out")


def test_a_row_without_a_context_has_zeros() -> None:
    block = GroupedBlock([9, 4], 1, {})
    block.buffers["row_position"][0] = -1
    block.run("gqa_query", "gqa_attend")
    found = block.buffers["attn_out"].cpu()
    assert not bool(found[0].any())
    assert_close(found[1], block.read()[1].float(), CONTRACT.tolerance, "the other row")


def test_splits_keep_a_gpu_busy_and_none_is_empty_in_every_context() -> None:
    """Of Kimi K3's drafts, by programs a split and tokens that are seen at most."""
    assert num_splits(16, 131_072) == 16
    assert num_splits(9 * 16, 131_072) == 2
    assert num_splits(1, 131_072) == 32
    assert num_splits(16, 64) == 1
    assert num_splits(16, 65) == 2
    assert num_splits(1024, 131_072) == 1


def test_rows_that_are_no_blocks_are_refused() -> None:
    problem = GroupedBlock([1], 1, {}).case.deployment.problem(LAYER, 7, 3)
    (reason,) = triton_impl.refuse(problem)
    assert "7 rows are not a number of blocks of 3 each" in reason
    with pytest.raises(ValueError, match="no grouped-query attention"):
        triton_impl.prepare(
            replace(problem, rows=6, config=replace(problem.config, gqa=None)),
            None,
            GroupedBlock([1], 1, {}).buffers,
        )


def test_heads_wider_than_tiles_were_compiled_for_are_refused() -> None:
    found = {}
    for dim in (256, 258):
        case = make_draft_case(is_grouped=True, **_heads(2, 1, dim))
        found[dim] = triton_impl.refuse(case.deployment.problem(LAYER, 2, 2))
    reason = "Heads of grouped queries have at most 256 channels in Triton; this model's have 258."
    assert found == {256: [], 258: [reason]}


def test_what_it_reads_is_checked() -> None:
    block = GroupedBlock([5], 2, {})
    block.buffers["gqa_query"] = torch.zeros(2, 6, 11).bfloat16()
    with pytest.raises(ValueError, match=r"gqa_query is torch.bfloat16 \[2, 6, 11\]"):
        block.run("gqa_attend")
