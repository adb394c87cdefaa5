"""mla_attend in Triton: a program has one split of one request's context, for a block of lanes.

A lane is a head of a row, the rows of a request outermost: lanes are the rows of both products, so
a cache row that was read serves all heads, and all rows that a request verifies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.mla_splits import ROUND_TOKENS, max_splits
from kdecode.kernels.common.tile_table import choose
from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    tensor_for,
)
from kdecode.kernels.common.triton_mla import refuse_cache, refuse_plan, split_length
from kdecode.kernels.common.triton_ops import dot_bf16, prefetch, wait_for_previous
from kdecode.kernels.common.triton_pages import page_numbers
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32

_LINE_BYTES = 128


@dataclass(frozen=True)
class Tile:
    """block_m: lanes a program; block_t: tokens of a round, which divide ROUND_TOKENS."""

    block_m: int
    block_t: int
    warps: int
    stages: int


def tile(lanes: int, kv_rank: int, cache_dtype: str, arch: str) -> Tile:
    """The tile of requests of so many lanes."""
    # Wherever 64 lanes would spill registers: with rows that are widened in them, and on Blackwell.
    most = 16 if cache_dtype == "fp8" else 64 if arch in ("", "sm_90") else 32
    block_m = min(most, max(16, triton.next_power_of_2(lanes)))
    # Three stages are two rounds in memory: one is read while the other is multiplied.
    default = Tile(block_m, block_t=32 if block_m > 16 else 64, warps=8, stages=3)
    return choose("mla_attend", arch, f"{lanes} x {kv_rank}, {cache_dtype}", default)


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    reasons = [*refuse_plan(problem), *refuse_cache(problem)]
    rows, each = problem.rows, problem.rows_per_request
    if rows is not None and rows % each:
        reasons.append(f"{rows} rows are not a number of requests of {each} each.")
    return reasons


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: not used; the caches are those of ``buffers``."""
    mla, rows, each = problem.config.mla, plan_rows(problem), problem.rows_per_request
    heads, table = mla.num_heads, buffers["row_pages"]
    pages, is_fp8 = buffers.caches.pages[problem.layer], problem.cache_dtype == "fp8"
    shape = (pages.shape[0], problem.page_tokens, mla.cache_width)
    splits, turns = max_splits(rows), problem.rotation_scale
    split_shape = (rows, splits, heads)
    used = tile(each * heads, mla.kv_rank, problem.cache_dtype, problem.arch)
    blocks = divide_up(each * heads, used.block_m)
    # A context of the longest allowed length may need fewer splits than there is room for.
    needed = min(splits, divide_up(problem.max_context_tokens, ROUND_TOKENS))
    line = _LINE_BYTES // pages.element_size()
    # Triton 3.6 copies 16 bytes at a time ahead of a round, whatever the rows are aligned to.
    can_copy_ahead = mla.cache_width * pages.element_size() % 16 == 0
    launch = Launch(
        kernel=attend_splits,
        grid=(rows // each * blocks, needed),
        arguments={
            "query": tensor_for(
                buffers["mla_query"], BF16, (rows, heads, mla.cache_width), name="mla_query"
            ),
            "pages": tensor_for(
                pages, torch.float8_e4m3fn if is_fp8 else BF16, shape, name="pages"
            ),
            "row_position": tensor_for(
                buffers["row_position"], INT32, (rows,), name="row_position"
            ),
            "row_pages": tensor_for(table, INT32, (rows, table.shape[1]), name="row_pages"),
            "sums": tensor_for(
                buffers["mla_split_sums"], FP32, (*split_shape, mla.kv_rank), name="mla_split_sums"
            ),
            "stats": tensor_for(
                buffers["mla_split_stats"], FP32, (*split_shape, 2), name="mla_split_stats"
            ),
            "max_pages": table.shape[1],
            "cache_scale": float(buffers.caches.scales[problem.layer]),
        },
        constants={
            "SCORE_SCALE": mla.qk_dim**-0.5 * (1.0 if turns is None else turns) * math.log2(math.e),
            "HEADS": heads,
            "EACH": each,
            "LATENT": mla.kv_rank,
            "ROPE": mla.rope_dim,
            "PAGE_TOKENS": problem.page_tokens,
            "SPLITS": splits,
            "IS_FP8": is_fp8,
            "IS_BLOCK": turns is not None and not problem.is_causal_block,
            "BLOCK_M": used.block_m,
            "BLOCK_T": used.block_t,
            "BLOCKS": blocks,
            "LATENT_BLOCK": max(16, triton.next_power_of_2(mla.kv_rank)),
            "ROPE_BLOCK": max(16, triton.next_power_of_2(mla.rope_dim)),
            "LINE": line,
            "LINES": triton.next_power_of_2(divide_up(mla.cache_width, line)),
        },
        num_warps=used.warps,
        num_stages=used.stages if can_copy_ahead else 1,
        begins_early=True,
    )
    return TritonStep(launch)


@triton.jit
def _widened(stored, cache_scale, IS_FP8: tl.constexpr):
    """What attention reads of cache rows: bf16."""
    if IS_FP8:
        return (stored.to(tl.float32) * cache_scale).to(tl.bfloat16)
    else:
        return stored


@triton.jit
def _prefetch_round(
    pages,
    entry,
    start,
    end,
    PAGE_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
):
    """The first round of a split into the second-level cache, as far as earlier steps wrote it."""
    if start < end:
        token = tl.minimum(start + tl.arange(0, BLOCK_T), end - 1)
        page = tl.load(entry + token // PAGE_TOKENS)
        at = (page.to(tl.int64) * PAGE_TOKENS + token % PAGE_TOKENS) * WIDTH
        line = tl.minimum(tl.arange(0, LINES) * LINE, WIDTH - 1)
        prefetch(pages + at[:, None] + line[None, :])


@triton.jit(do_not_specialize=["max_pages"])
def attend_splits(
    query,
    pages,
    row_position,
    row_pages,
    sums,
    stats,
    max_pages,
    cache_scale,
    SCORE_SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCKS: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
):
    """query [rows, HEADS, LATENT + ROPE]; pages [pages, PAGE_TOKENS, LATENT + ROPE] ->
    sums [rows, SPLITS, HEADS, LATENT], stats [rows, SPLITS, HEADS, 2]. With IS_BLOCK the rows of a
    request see all that its last row sees."""
    WIDTH: tl.constexpr = LATENT + ROPE
    request, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    split = tl.program_id(1)
    last = request * EACH + EACH - 1
    context = tl.load(row_position + last) + 1
    length = split_length(context, SPLITS)
    start = split * length
    entry = row_pages + last * max_pages
    # Positions and pages are the step's inputs, which no launch writes.
    _prefetch_round(pages, entry, start, context - EACH, PAGE_TOKENS, WIDTH, BLOCK_T, LINE, LINES)
    wait_for_previous()
    if start < context:
        end = tl.minimum(start + length, context)
        lane = block * BLOCK_M + tl.arange(0, BLOCK_M)
        has_lane = lane < EACH * HEADS
        row, head = request * EACH + lane // HEADS, lane % HEADS
        if IS_BLOCK:
            position = tl.where(has_lane, context - 1, -1)
        else:
            position = tl.load(row_position + row, mask=has_lane, other=-1)
        channel, rest = tl.arange(0, LATENT_BLOCK), tl.arange(0, ROPE_BLOCK)
        has_channel, has_rest = channel < LATENT, rest < ROPE
        own = query + (row * HEADS + head) * WIDTH
        mask = has_lane[:, None] & has_channel[None, :]
        q = tl.load(own[:, None] + channel[None, :], mask=mask, other=0.0)
        mask = has_lane[:, None] & has_rest[None, :]
        q_rest = tl.load(own[:, None] + LATENT + rest[None, :], mask=mask, other=0.0)

        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, LATENT_BLOCK], tl.float32)
        # A page's number is read a round before its rows, which do not wait for it then.
        place = tl.arange(0, BLOCK_T)
        page = page_numbers(entry, start, end, place, PAGE_TOKENS, BLOCK_T)
        for first in range(start, end, BLOCK_T):
            token = first + place
            is_cached = token < end
            at = (page.to(tl.int64) * PAGE_TOKENS + token % PAGE_TOKENS) * WIDTH
            page = page_numbers(entry, first + BLOCK_T, end, place, PAGE_TOKENS, BLOCK_T)
            cached = pages + at[:, None]
            is_latent = is_cached[:, None] & has_channel[None, :]
            stored = tl.load(cached + channel[None, :], mask=is_latent, other=0.0)
            is_rest = is_cached[:, None] & has_rest[None, :]
            stored_rest = tl.load(cached + LATENT + rest[None, :], mask=is_rest, other=0.0)
            latent = _widened(stored, cache_scale, IS_FP8)
            score = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
            score = dot_bf16(q, tl.trans(latent), score)
            key_rest = _widened(stored_rest, cache_scale, IS_FP8)
            score = dot_bf16(q_rest, tl.trans(key_rest), score)
            score = tl.where(
                token[None, :] <= position[:, None], score * SCORE_SCALE, float("-inf")
            )

            top = tl.maximum(highest, tl.max(score, axis=1))
            # A lane that has seen no token keeps a maximum of -inf: not to be subtracted.
            base = tl.where(top == float("-inf"), 0.0, top)
            kept = tl.exp2(highest - base)
            weight = tl.exp2(score - base[:, None]).to(tl.bfloat16)
            total = total * kept + tl.sum(weight.to(tl.float32), axis=1)
            acc = dot_bf16(weight, latent, acc * kept[:, None])
            highest = top

        at = (row * SPLITS + split) * HEADS + head
        tl.store(stats + at * 2, highest, mask=has_lane)
        tl.store(stats + at * 2 + 1, total, mask=has_lane)
        mask = has_lane[:, None] & has_channel[None, :]
        tl.store(sums + at[:, None] * LATENT + channel[None, :], acc, mask=mask)
