"""mla_query in Triton: programs for channels of a head, and one a row that inserts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.tile_table import choose
from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    row_block,
    row_major,
    tensor_for,
)
from kdecode.kernels.common.triton_mla import (
    insert_row,
    refuse_cache,
    refuse_plan,
    turned_pairs,
)
from kdecode.kernels.common.triton_ops import dot_bf16, wait_for_previous
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32

_PROGRAMS = 128


@dataclass(frozen=True)
class Tile:
    """block_l: absorbed channels a program."""

    block_l: int
    warps: int


def tile(rows: int, heads: int, kv_rank: int, nope_dim: int, arch: str) -> Tile:
    """The tile of a step of so many rows; a head's W_UK is [kv_rank, nope_dim]."""
    block_r = row_block(rows)
    block_l = 16
    while block_l < 64 and heads * divide_up(kv_rank, 2 * block_l) >= _PROGRAMS:
        block_l *= 2
    shape = f"rows {block_r}, {heads} x {kv_rank} x {nope_dim}"
    return choose("mla_query", arch, shape, Tile(block_l, warps=4))


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return [*refuse_plan(problem), *refuse_cache(problem)]


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``attention`` is a `PackedMla`."""
    mla, rows, attention = problem.config.mla, plan_rows(problem), weights.attention
    heads, proj, table = mla.num_heads, buffers["mla_proj"], buffers["row_pages"]
    columns = proj.shape[1]
    query, query_width = proj, heads * mla.qk_dim
    if mla.q_rank is not None:
        query, query_width = buffers["mla_q"], mla.q_rank
    pages, is_fp8 = buffers.caches.pages[problem.layer], problem.cache_dtype == "fp8"
    dtype = torch.float8_e4m3fn if is_fp8 else BF16
    shape = (pages.shape[0], problem.page_tokens, mla.cache_width)
    pages = tensor_for(pages, dtype, shape, name="pages")
    out_shape = (rows, heads, mla.cache_width)
    up_shape = (heads * mla.kv_rank, mla.nope_dim)
    used = tile(rows, heads, mla.kv_rank, mla.nope_dim, problem.arch)
    blocks = divide_up(mla.kv_rank, used.block_l)
    launch = Launch(
        kernel=absorb_insert,
        grid=(heads * blocks + rows,),
        arguments={
            "query": tensor_for(query, BF16, (rows, query.shape[1]), name="the query"),
            "proj": tensor_for(proj, BF16, (rows, columns), name="mla_proj"),
            "w_uk": row_major(attention.w_uk, up_shape, "W_UK"),
            "kv_norm": tensor_for(attention.kv_norm, FP32, (mla.kv_rank,), name="kv_norm"),
            "row_position": tensor_for(
                buffers["row_position"], INT32, (rows,), name="row_position"
            ),
            "row_pages": tensor_for(table, INT32, (rows, table.shape[1]), name="row_pages"),
            "row_rotation": _rotation(problem, buffers),
            "pages": pages.view(torch.uint8) if is_fp8 else pages,
            "out": tensor_for(buffers["mla_query"], BF16, out_shape, name="mla_query"),
            "rows": rows,
            "max_pages": table.shape[1],
            "cache_scale": float(buffers.caches.scales[problem.layer]),
        },
        constants={
            "QUERY": query.shape[1],
            "PROJ": columns,
            "LATENT_AT": query_width,
            "HEADS": heads,
            "LATENT": mla.kv_rank,
            "NOPE": mla.nope_dim,
            "ROPE": mla.rope_dim,
            "PAGE_TOKENS": problem.page_tokens,
            "IS_FP8": is_fp8,
            "IS_ROTATED": problem.rotation_scale is not None,
            "EPS": mla.latent_norm_eps,
            "BLOCK_R": row_block(rows),
            "BLOCK_L": used.block_l,
            "LATENT_BLOCK": triton.next_power_of_2(mla.kv_rank),
            "NOPE_BLOCK": max(16, triton.next_power_of_2(mla.nope_dim)),
            "ROPE_BLOCK": triton.next_power_of_2(mla.rope_dim),
        },
        num_warps=used.warps,
        num_stages=1,
        begins_early=True,
    )
    return TritonStep(launch, (weights,))


def _rotation(problem: Problem, buffers: Buffers) -> Tensor:
    """How the rows of a draft turn; of a target something that is not read."""
    if problem.rotation_scale is None:
        return buffers["row_position"]
    shape = (plan_rows(problem), problem.config.mla.rope_dim)
    return tensor_for(buffers["row_rotation"], FP32, shape, name="row_rotation")


@triton.jit
def _absorb(
    query,
    w_uk,
    row_rotation,
    out,
    rows,
    program,
    QUERY: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    IS_ROTATED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    """BLOCK_L channels of one head for all rows; with the first of them goes its rope part."""
    BLOCKS: tl.constexpr = (LATENT + BLOCK_L - 1) // BLOCK_L
    IS_DOT: tl.constexpr = BLOCK_R > 2
    LANES: tl.constexpr = max(BLOCK_R, 16) if IS_DOT else BLOCK_R
    head, block = program // BLOCKS, program % BLOCKS
    channel = block * BLOCK_L + tl.arange(0, BLOCK_L)
    has_channel = channel < LATENT
    k = tl.arange(0, NOPE_BLOCK)
    has_k = k < NOPE
    row = tl.arange(0, LANES)
    has_row = row < rows
    mask = has_channel[:, None] & has_k[None, :]
    w = tl.load(w_uk + (head * LATENT + channel)[:, None] * NOPE + k[None, :], mask=mask, other=0.0)
    wait_for_previous()
    own = query + head * (NOPE + ROPE)
    to = out + (row * HEADS + head) * (LATENT + ROPE)
    if IS_DOT:
        mask = has_k[:, None] & has_row[None, :]
        q = tl.load(own + row[None, :] * QUERY + k[:, None], mask=mask, other=0.0)
        acc = dot_bf16(w, q, tl.zeros([BLOCK_L, LANES], tl.float32))
        mask = has_channel[:, None] & has_row[None, :]
        tl.store(to[None, :] + channel[:, None], acc.to(tl.bfloat16), mask=mask)
    else:
        mask = has_row[:, None] & has_k[None, :]
        q = tl.load(own + row[:, None] * QUERY + k[None, :], mask=mask, other=0.0)
        acc = tl.sum(w.to(tl.float32)[None, :, :] * q.to(tl.float32)[:, None, :], axis=2)
        mask = has_row[:, None] & has_channel[None, :]
        tl.store(to[:, None] + channel[None, :], acc.to(tl.bfloat16), mask=mask)
    if block == 0:
        if IS_ROTATED:
            pair = tl.arange(0, ROPE_BLOCK // 2)[None, :]
            has_pair = has_row[:, None] & (2 * pair < ROPE)
            x, rotation = own + row[:, None] * QUERY + NOPE, row_rotation + row[:, None] * ROPE
            first, second = turned_pairs(x, rotation, pair, has_pair, ROPE)
            at = to[:, None] + LATENT + 2 * pair
            tl.store(at, first.to(tl.bfloat16), mask=has_pair)
            tl.store(at + 1, second.to(tl.bfloat16), mask=has_pair)
        else:
            rest = tl.arange(0, ROPE_BLOCK)
            has_rest = has_row[:, None] & (rest < ROPE)[None, :]
            q_rest = tl.load(own + row[:, None] * QUERY + NOPE + rest[None, :], mask=has_rest)
            tl.store(to[:, None] + LATENT + rest[None, :], q_rest, mask=has_rest)


@triton.jit(do_not_specialize=["rows", "max_pages"])
def absorb_insert(
    query,
    proj,
    w_uk,
    kv_norm,
    row_position,
    row_pages,
    row_rotation,
    pages,
    out,
    rows,
    max_pages,
    cache_scale,
    QUERY: tl.constexpr,
    PROJ: tl.constexpr,
    LATENT_AT: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_ROTATED: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    """query [rows, QUERY], heads first; proj [rows, PROJ], the latent from LATENT_AT on; w_uk
    [HEADS * LATENT, NOPE]; row_rotation [rows, ROPE], with IS_ROTATED only; pages, of fp8 their
    bytes -> out [rows, HEADS, LATENT + ROPE]."""
    program = tl.program_id(0)
    ABSORBING: tl.constexpr = HEADS * ((LATENT + BLOCK_L - 1) // BLOCK_L)
    if program < ABSORBING:
        _absorb(
            query,
            w_uk,
            row_rotation,
            out,
            rows,
            program,
            QUERY,
            HEADS,
            LATENT,
            NOPE,
            ROPE,
            IS_ROTATED,
            BLOCK_R,
            BLOCK_L,
            NOPE_BLOCK,
            ROPE_BLOCK,
        )
    else:
        insert_row(
            proj,
            kv_norm,
            row_position,
            row_pages,
            row_rotation,
            pages,
            program - ABSORBING,
            max_pages,
            cache_scale,
            PROJ,
            LATENT_AT,
            LATENT,
            ROPE,
            PAGE_TOKENS,
            IS_FP8,
            IS_ROTATED,
            EPS,
            LATENT_BLOCK,
            ROPE_BLOCK,
        )
