"""draft_insert on the native CPU kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.fused import refuse_device, refuse_rows, step_rows, tiles_of
from kdecode.kernels.common.matrix import TILE_ROWS, Matrix
from kdecode.kernels.common.native import NativeStep, ptr
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    reasons = [*refuse_device(problem), *refuse_rows(problem)]
    rank = problem.config.mla.q_rank
    if rank is None or rank % TILE_ROWS:
        reasons.append(
            f"A native draft's query has a rank that is a multiple of {TILE_ROWS}; it is {rank}."
        )
    return reasons


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> NativeStep:
    """weights: a `PackedLayer` whose ``attention`` is a `PackedMla`."""
    rows, mla, layer = step_rows(problem), problem.config.mla, problem.layer
    width, cached = problem.config.hidden_size, mla.cache_width
    assert layer is not None
    assert mla.q_rank is not None
    pages, table = buffers.caches.pages[layer], buffers["row_pages"]
    rotation, position = buffers["row_rotation"], buffers["row_position"]
    # The part of the layer's input projection that makes cache rows, in place.
    proj = _rows_from(weights.attention.in_proj, mla.q_rank)
    projected = buffers.scratch("draft_cache_row", (rows, cached))
    args = _native.DraftInsertArgs()
    args.rows, args.kv_rank, args.rope_dim = rows, mla.kv_rank, mla.rope_dim
    args.latent_eps = mla.latent_norm_eps
    args.page_tokens, args.max_pages = problem.page_tokens, table.shape[1]
    args.proj = tiles_of("The draft's kv_a", proj, cached, width)
    args.kv_norm = ptr(weights.attention.kv_norm, FP32, (mla.kv_rank,))
    args.context = ptr(buffers["context"], BF16, (rows, width))
    args.projected = ptr(projected, BF16, (rows, cached))
    args.row_position = ptr(position, INT32, (rows,))
    args.row_pages = ptr(table, INT32, (rows, table.shape[1]))
    args.row_rotation = ptr(rotation, FP32, (rows, mla.rope_dim))
    args.pages = ptr(pages, BF16, (pages.shape[0], problem.page_tokens, cached))
    alive = [weights, pages, table, rotation, position, projected, buffers["context"]]
    return NativeStep(buffers.pool, problem.isa, "draft_insert", args, alive)


def _rows_from(matrix: Matrix, first: int) -> Matrix:
    """The rows from ``first`` on, a multiple of a tile's."""
    return replace(matrix, rows=matrix.rows - first, data=matrix.data[first // TILE_ROWS :])
