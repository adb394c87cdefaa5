"""draft_insert in Triton: the product, and a program a row that norms, turns and writes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    plan_rows,
    row_major,
    tensor_for,
)
from kdecode.kernels.common.triton_mla import insert_row, refuse_plan
from kdecode.kernels.common.triton_projection import projection_launch
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    reasons = refuse_plan(problem)
    if problem.config.mla.q_rank is None:
        reasons.append("A draft's query has a low rank; this one's has none.")
    return reasons


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``attention`` is a `PackedMla`, its matrices in "rows"."""
    rows, mla, attention = plan_rows(problem), problem.config.mla, weights.attention
    width, cached = problem.config.hidden_size, mla.cache_width
    assert mla.q_rank is not None
    projected = buffers.scratch("draft_cache_row", (rows, cached))
    # The part of the layer's input projection that makes cache rows, in place.
    matrix = attention.in_proj
    matrix = replace(matrix, rows=matrix.rows - mla.q_rank, data=matrix.data[mla.q_rank :])
    product = projection_launch(
        problem,
        tensor_for(buffers["context"], BF16, (rows, width), name="context"),
        row_major(matrix, (cached, width), "the draft's kv_a"),
        projected,
        buffers,
    )
    return TritonStep(product, (weights,), (_insert(problem, attention, projected, buffers),))


def _insert(problem: Problem, attention: Any, projected: torch.Tensor, buffers: Buffers) -> Launch:
    rows, mla, table = plan_rows(problem), problem.config.mla, buffers["row_pages"]
    pages = buffers.caches.pages[problem.layer]
    shape = (pages.shape[0], problem.page_tokens, mla.cache_width)
    rotation = buffers["row_rotation"]
    arguments = {
        "projected": projected,
        "kv_norm": tensor_for(attention.kv_norm, FP32, (mla.kv_rank,), name="kv_norm"),
        "row_position": tensor_for(buffers["row_position"], INT32, (rows,), name="row_position"),
        "row_pages": tensor_for(table, INT32, (rows, table.shape[1]), name="row_pages"),
        "row_rotation": tensor_for(rotation, FP32, (rows, mla.rope_dim), name="row_rotation"),
        "pages": tensor_for(pages, BF16, shape, name="pages"),
        "max_pages": table.shape[1],
    }
    constants = {
        "LATENT": mla.kv_rank,
        "ROPE": mla.rope_dim,
        "PAGE_TOKENS": problem.page_tokens,
        "EPS": mla.latent_norm_eps,
        "LATENT_BLOCK": triton.next_power_of_2(mla.kv_rank),
        "ROPE_BLOCK": triton.next_power_of_2(mla.rope_dim),
    }
    return Launch(insert_rows, (rows,), arguments, constants, begins_early=True)


@triton.jit(do_not_specialize=["max_pages"])
def insert_rows(
    projected,
    kv_norm,
    row_position,
    row_pages,
    row_rotation,
    pages,
    max_pages,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    EPS: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    """projected [rows, LATENT + ROPE] -> a row of the pages each."""
    insert_row(
        projected,
        kv_norm,
        row_position,
        row_pages,
        row_rotation,
        pages,
        tl.program_id(0),
        max_pages,
        1.0,
        LATENT + ROPE,
        0,
        LATENT,
        ROPE,
        PAGE_TOKENS,
        False,
        True,
        EPS,
        LATENT_BLOCK,
        ROPE_BLOCK,
    )
