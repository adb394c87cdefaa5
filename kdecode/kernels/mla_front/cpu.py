"""mla_front on the native CPU kernels."""

from __future__ import annotations

from typing import Any

import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.fused import (
    refuse_device,
    refuse_mix_norm,
    refuse_rows,
    set_attn_mix_norm,
    set_exchange,
    step_rows,
    tiles_of,
)
from kdecode.kernels.common.matrix import TILE_ROWS
from kdecode.kernels.common.native import NativeStep, ptr
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32

MAX_CACHE_WIDTH: int = _native.MAX_MLA_WIDTH
MAX_HEAD_DIM: int = _native.MAX_MLA_HEAD_DIM
CACHE_DTYPES = {"bf16": BF16, "fp8": torch.float8_e4m3fn}

# A split of the context has a multiple of so many tokens (one round of the online softmax), and the
# longest context at most so many splits: their sums are the largest scratch memory of a plan.
ROUND_TOKENS = 64
MAX_SPLITS = 32


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    mla = problem.config.mla
    reasons = [
        *refuse_device(problem),
        *refuse_rows(problem),
        *refuse_mix_norm(problem.config),
    ]
    dims = {
        "kv_rank": mla.kv_rank,
        "nope_dim": mla.nope_dim,
        "rope_dim": mla.rope_dim,
        "v_dim": mla.v_dim,
    }
    reasons += [
        f"Native MLA sizes are positive multiples of {TILE_ROWS}; {name} is {size}."
        for name, size in dims.items()
        if size % TILE_ROWS or size <= 0
    ]
    if mla.q_rank is not None and mla.q_rank % 2:
        reasons.append(f"Native tiles hold pairs of columns; the query rank {mla.q_rank} is odd.")
    if mla.cache_width > MAX_CACHE_WIDTH:
        reasons.append(
            f"Native MLA cache rows have at most {MAX_CACHE_WIDTH} numbers; "
            f"the model's have {mla.cache_width}."
        )
    if mla.qk_dim > MAX_HEAD_DIM:
        reasons.append(
            f"Native MLA heads have at most {MAX_HEAD_DIM} query channels; "
            f"the model's have {mla.qk_dim}."
        )
    if problem.cache_dtype not in CACHE_DTYPES:
        reasons.append(
            f"Native MLA caches are {' or '.join(CACHE_DTYPES)}; "
            f"{problem.cache_dtype} was asked for."
        )
    return reasons


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> NativeStep:
    """weights: a `PackedLayer` whose ``attention`` is a `PackedMla`."""
    config = problem.config
    args = _native.MlaFrontArgs()
    used = set_attn_mix_norm(args, problem, weights, buffers)
    mla = config.mla
    args.heads, args.kv_rank, args.v_dim = mla.num_heads, mla.kv_rank, mla.v_dim
    args.nope_dim, args.rope_dim = mla.nope_dim, mla.rope_dim
    args.has_gate = mla.has_output_gate
    args.latent_eps = mla.latent_norm_eps
    args.softmax_scale = mla.qk_dim**-0.5 * (problem.rotation_scale or 1.0)
    _set_weights(args, problem, weights.attention)
    used += _set_cache(args, problem, buffers)
    used += _set_values(args, problem, buffers)
    used += _set_splits(args, problem, buffers)
    if not problem.context.is_whole:
        args.interleave = problem.context.interleave
        set_exchange(args, problem, buffers, *exchanged_arrays(problem))
    alive = (*used, weights.attention)
    return NativeStep(buffers.pool, problem.isa, "mla_front", args, alive)


def exchanged_arrays(problem: Problem) -> tuple[int, ...]:
    """Bytes of the arrays of the largest part that ranks which share a context give each other.

    They are sums and, behind them, statistics of every row and head; queries are fewer bytes.
    """
    mla = problem.config.mla
    lanes = step_rows(problem) * mla.num_heads * problem.context.ranks.size
    return 4 * lanes * mla.kv_rank, 4 * lanes * 2


def split_tokens(max_context_tokens: int) -> int:
    """Tokens of one split: the shortest that needs no more than MAX_SPLITS."""
    return ROUND_TOKENS * -(-max_context_tokens // (ROUND_TOKENS * MAX_SPLITS))


def _set_weights(args: Any, problem: Problem, weights: Any) -> None:
    mla, width = problem.config.mla, problem.config.hidden_size
    heads = mla.num_heads
    gate = heads * mla.v_dim if mla.has_output_gate else 0
    query = heads * mla.qk_dim if mla.q_rank is None else mla.q_rank
    columns = query + mla.cache_width + gate
    args.in_proj = tiles_of("The MLA in_proj", weights.in_proj, columns, width)
    if mla.q_rank is not None:
        args.q_b = tiles_of("The MLA q_b", weights.q_b, heads * mla.qk_dim, mla.q_rank)
        args.q_norm = ptr(weights.q_norm, FP32, (mla.q_rank,))
    args.w_uk = tiles_of("W_UK", weights.w_uk, heads * mla.kv_rank, mla.nope_dim)
    args.w_uv = tiles_of("W_UV", weights.w_uv, heads * mla.v_dim, mla.kv_rank)
    args.kv_norm = ptr(weights.kv_norm, FP32, (mla.kv_rank,))


def _set_cache(args: Any, problem: Problem, buffers: Buffers) -> list[torch.Tensor]:
    """Pages of this layer and where the rows' are; returns the tensors that must stay alive."""
    rows, layer = step_rows(problem), problem.layer
    pages, table = buffers.caches.pages[layer], buffers["row_pages"]
    page_rows = problem.context.page_rows(problem.page_tokens)
    shape = (pages.shape[0], page_rows, problem.config.mla.cache_width)
    args.page_rows, args.max_pages = page_rows, table.shape[1]
    args.pages = ptr(pages, CACHE_DTYPES[problem.cache_dtype], shape)
    args.row_position = ptr(buffers["row_position"], INT32, (rows,))
    args.row_pages = ptr(table, INT32, (rows, table.shape[1]))
    used = [pages, table, buffers["row_position"]]
    if problem.rotation_scale is not None:
        context, rotation = buffers["row_context"], buffers["row_rotation"]
        args.row_context = ptr(context, INT32, (rows,))
        args.row_rotation = ptr(rotation, FP32, (rows, problem.config.mla.rope_dim))
        used += [context, rotation]
    if problem.cache_dtype == "fp8":
        scale = float(buffers.caches.scales[layer])
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        values = (codes.float() * scale).to(BF16)
        args.fp8_scale, args.fp8_values = scale, ptr(values, BF16, (256,))
        used.append(values)
    return used


def _set_values(args: Any, problem: Problem, buffers: Buffers) -> list[torch.Tensor]:
    """The buffers after attn_in; returns the tensors that must stay alive."""
    mla, rows = problem.config.mla, step_rows(problem)
    shapes = {
        "mla_proj": (rows, args.in_proj.rows),
        "mla_query": (rows, mla.num_heads, mla.cache_width),
        "mla_latent": (rows, mla.num_heads, mla.kv_rank),
        "attn_out": (rows, mla.num_heads * mla.v_dim),
    }
    for name, shape in shapes.items():
        setattr(args, name, ptr(buffers[name], BF16, shape))
    used = [buffers[name] for name in shapes]
    if mla.q_rank is not None:
        normed = buffers.scratch("mla_query_norm", (rows, mla.q_rank))
        args.query_norm = ptr(normed, BF16, (rows, mla.q_rank))
        used.append(normed)
    return used


def _set_splits(args: Any, problem: Problem, buffers: Buffers) -> list[torch.Tensor]:
    """Scratch of the context's splits; returns the tensors that must stay alive."""
    mla, rows, context = problem.config.mla, step_rows(problem), problem.context
    # Of the rows that are here, for the heads of everyone who has them here.
    longest = context.padded_length(problem.max_context_tokens)
    args.split_tokens = split_tokens(longest)
    args.max_splits = -(-longest // args.split_tokens)
    lead = (rows, args.max_splits, mla.num_heads * context.ranks.size)
    stats = buffers.scratch("mla_split_stats", (*lead, 2), FP32)
    sums = buffers.scratch("mla_split_sums", (*lead, mla.kv_rank), FP32)
    args.split_stats = ptr(stats, FP32, (*lead, 2))
    args.split_sums = ptr(sums, FP32, (*lead, mla.kv_rank))
    return [stats, sums]
