"""gqa_query in Triton: a program has some heads of one row, of the query or of the cache row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.triton_gqa import (
    HEAD_BLOCK,
    grouped,
    insert_heads,
    refuse_grouped,
    turned_heads,
)
from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    tensor_for,
)
from kdecode.kernels.common.triton_ops import wait_for_previous
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_grouped(problem)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``attention`` is a `PackedGqa`."""
    gqa, rows, attention = grouped(problem), plan_rows(problem), weights.attention
    heads, dim, table = gqa.num_heads, gqa.head_dim, buffers["row_pages"]
    columns = heads * dim + gqa.cache_width
    pages = buffers.caches.pages[problem.layer]
    shape = (pages.shape[0], problem.page_tokens, gqa.cache_width)
    rotation = buffers["row_rotation"]
    launch = Launch(
        kernel=turn_insert,
        grid=(divide_up(heads, HEAD_BLOCK) + divide_up(gqa.num_kv_heads, HEAD_BLOCK), rows),
        arguments={
            "proj": tensor_for(buffers["gqa_proj"], BF16, (rows, columns), name="gqa_proj"),
            "q_norm": tensor_for(attention.q_norm, FP32, (dim,), name="q_norm"),
            "k_norm": tensor_for(attention.k_norm, FP32, (dim,), name="k_norm"),
            "row_position": tensor_for(
                buffers["row_position"], INT32, (rows,), name="row_position"
            ),
            "row_pages": tensor_for(table, INT32, (rows, table.shape[1]), name="row_pages"),
            "row_rotation": tensor_for(rotation, FP32, (rows, dim), name="row_rotation"),
            "pages": tensor_for(pages, BF16, shape, name="pages"),
            "out": tensor_for(buffers["gqa_query"], BF16, (rows, heads, dim), name="gqa_query"),
            "max_pages": table.shape[1],
        },
        constants={
            "HEADS": heads,
            "KV_HEADS": gqa.num_kv_heads,
            "DIM": dim,
            "PAGE_TOKENS": problem.page_tokens,
            "EPS": problem.config.rms_eps,
            "BLOCK_H": HEAD_BLOCK,
            "HALF_BLOCK": triton.next_power_of_2(dim // 2),
        },
        begins_early=True,
    )
    return TritonStep(launch, (weights,))


@triton.jit(do_not_specialize=["max_pages"])
def turn_insert(
    proj,
    q_norm,
    k_norm,
    row_position,
    row_pages,
    row_rotation,
    pages,
    out,
    max_pages,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """proj [rows, (HEADS + 2 * KV_HEADS) * DIM], q, k and v; row_rotation [rows, DIM] ->
    out [rows, HEADS, DIM], and a row of the pages each."""
    QUERIES: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    block, row = tl.program_id(0), tl.program_id(1)
    own = proj + row * ((HEADS + 2 * KV_HEADS) * DIM)
    rotation = row_rotation + row * DIM
    wait_for_previous()
    if block < QUERIES:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        a, b, at, inside = turned_heads(
            own, q_norm, rotation, head, head < HEADS, DIM, EPS, HALF_BLOCK
        )
        to = out + row * (HEADS * DIM) + at
        tl.store(to, a.to(tl.bfloat16), mask=inside)
        tl.store(to + DIM // 2, b.to(tl.bfloat16), mask=inside)
    else:
        insert_heads(
            own + HEADS * DIM,
            k_norm,
            row_position,
            row_pages,
            rotation,
            pages,
            row,
            (block - QUERIES) * BLOCK_H,
            max_pages,
            KV_HEADS,
            DIM,
            PAGE_TOKENS,
            EPS,
            BLOCK_H,
            HALF_BLOCK,
        )
