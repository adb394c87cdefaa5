"""draft_insert in Triton: the product, and programs that norm, turn and write its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.common.triton_gqa import HEAD_BLOCK, grouped, insert_heads, refuse_grouped
from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    row_major,
    tensor_for,
)
from kdecode.kernels.common.triton_mla import insert_row, refuse_plan
from kdecode.kernels.common.triton_ops import wait_for_previous
from kdecode.kernels.common.triton_projection import projection_launch
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    if problem.config.gqa is not None:
        return refuse_grouped(problem)
    reasons = refuse_plan(problem)
    if problem.config.mla.q_rank is None:
        reasons.append("A draft's query has a low rank; this one's has none.")
    return reasons


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``attention`` is a `PackedMla` or a `PackedGqa`, its matrices
    in "rows"."""
    gqa, mla, attention = problem.config.gqa, problem.config.mla, weights.attention
    if gqa is None:
        assert mla.q_rank is not None
        product, projected = _product(problem, attention.in_proj, mla.q_rank, buffers)
        return TritonStep(product, (weights,), (_insert(problem, attention, projected, buffers),))
    queries = gqa.num_heads * gqa.head_dim
    product, projected = _product(problem, attention.in_proj, queries, buffers)
    then = _insert_heads(problem, attention, projected, buffers)
    return TritonStep(product, (weights,), (then,))


def _product(
    problem: Problem, matrix: Matrix, first: int, buffers: Buffers
) -> tuple[Launch, Tensor]:
    """By the part of the layer's input projection that makes cache rows, in place, and what it
    gives. first: the queries' rows before it."""
    rows, width = plan_rows(problem), problem.config.hidden_size
    cached = matrix.rows - first
    projected = buffers.scratch("draft_cache_row", (rows, cached))
    part = replace(matrix, rows=cached, data=matrix.data[first:])
    launch = projection_launch(
        problem,
        tensor_for(buffers["context"], BF16, (rows, width), name="context"),
        row_major(part, (cached, width), "what makes the draft's cache rows"),
        projected,
        buffers,
    )
    return launch, projected


def _places(problem: Problem, width: int, buffers: Buffers) -> dict[str, Tensor | int | float]:
    """Where rows go, and how they turn: arguments of both kernels. width: of a cache row."""
    rows, table = plan_rows(problem), buffers["row_pages"]
    pages, rotation = buffers.caches.pages[problem.layer], buffers["row_rotation"]
    shape = (pages.shape[0], problem.page_tokens, width)
    turned = (rows, problem.config.rotated_dim)
    return {
        "row_position": tensor_for(buffers["row_position"], INT32, (rows,), name="row_position"),
        "row_pages": tensor_for(table, INT32, (rows, table.shape[1]), name="row_pages"),
        "row_rotation": tensor_for(rotation, FP32, turned, name="row_rotation"),
        "pages": tensor_for(pages, BF16, shape, name="pages"),
        "max_pages": table.shape[1],
    }


def _insert(problem: Problem, attention: Any, projected: Tensor, buffers: Buffers) -> Launch:
    rows, mla = plan_rows(problem), problem.config.mla
    arguments = {
        "projected": tensor_for(projected, BF16, (rows, mla.cache_width), name="a cache row"),
        "kv_norm": tensor_for(attention.kv_norm, FP32, (mla.kv_rank,), name="kv_norm"),
        **_places(problem, mla.cache_width, buffers),
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


def _insert_heads(problem: Problem, attention: Any, projected: Tensor, buffers: Buffers) -> Launch:
    rows, gqa = plan_rows(problem), grouped(problem)
    arguments = {
        "projected": tensor_for(projected, BF16, (rows, gqa.cache_width), name="a cache row"),
        "k_norm": tensor_for(attention.k_norm, FP32, (gqa.head_dim,), name="k_norm"),
        **_places(problem, gqa.cache_width, buffers),
    }
    constants = {
        "HEADS": gqa.num_kv_heads,
        "DIM": gqa.head_dim,
        "PAGE_TOKENS": problem.page_tokens,
        "EPS": problem.config.rms_eps,
        "BLOCK_H": HEAD_BLOCK,
        "HALF_BLOCK": triton.next_power_of_2(gqa.head_dim // 2),
    }
    grid = (divide_up(gqa.num_kv_heads, HEAD_BLOCK), rows)
    return Launch(insert_grouped_rows, grid, arguments, constants, begins_early=True)


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


@triton.jit(do_not_specialize=["max_pages"])
def insert_grouped_rows(
    projected,
    k_norm,
    row_position,
    row_pages,
    row_rotation,
    pages,
    max_pages,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """projected [rows, 2 * HEADS * DIM], keys and values -> a row of the pages each, some heads a
    program."""
    row = tl.program_id(1)
    wait_for_previous()
    insert_heads(
        projected + row * (2 * HEADS * DIM),
        k_norm,
        row_position,
        row_pages,
        row_rotation + row * DIM,
        pages,
        row,
        tl.program_id(0) * BLOCK_H,
        max_pages,
        HEADS,
        DIM,
        PAGE_TOKENS,
        EPS,
        BLOCK_H,
        HALF_BLOCK,
    )
