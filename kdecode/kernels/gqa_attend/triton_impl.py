"""gqa_attend in Triton: a program has one split of what a block sees, for the heads of a group.

A lane is a head of the group of a row, the rows of a block outermost: lanes are the rows of both
products, so that keys and values that were read serve all of them. The program of a group that
comes last adds its splits up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.gqa_splits import num_splits
from kdecode.kernels.common.tile_table import choose
from kdecode.kernels.common.triton_gqa import grouped, refuse_grouped
from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    tensor_for,
)
from kdecode.kernels.common.triton_mla import split_length
from kdecode.kernels.common.triton_ops import (
    dot_bf16,
    is_last_arrival,
    prefetch,
    wait_for_previous,
)
from kdecode.kernels.common.triton_pages import page_numbers
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32

_LINE_COLUMNS = 64
# Of wider heads a program has fewer lanes and tokens and more warps: else its sums are spilled.
_NARROW_DIM = 128
# Splits whose sums are on their way at a time.
_TOGETHER = tl.constexpr(4)


@dataclass(frozen=True)
class Tile:
    """block_m: lanes a program; block_t: tokens of a round, which divide `ROUND_TOKENS`."""

    block_m: int
    block_t: int
    warps: int
    stages: int


def tile(lanes: int, head_dim: int, arch: str) -> Tile:
    """The tile of blocks of so many lanes a group."""
    block_m = max(16, triton.next_power_of_2(lanes))
    # Three stages are two rounds in memory: one is read while the other is multiplied.
    if head_dim <= _NARROW_DIM:
        first = Tile(min(64, block_m), 64, 4, 3)
    else:
        first = Tile(min(32, block_m), 32, 8, 3)
    return choose("gqa_attend", arch, f"{lanes} x {head_dim}", first)


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    reasons, rows, each = refuse_grouped(problem), problem.rows, problem.rows_per_request
    if rows is not None and rows % each:
        reasons.append(f"{rows} rows are not a number of blocks of {each} each.")
    return reasons


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: not used; the caches are those of ``buffers``."""
    gqa, rows, each = grouped(problem), plan_rows(problem), problem.rows_per_request
    heads, dim, groups = gqa.num_heads, gqa.head_dim, gqa.num_kv_heads
    table, lanes = buffers["row_pages"], each * (heads // groups)
    pages = buffers.caches.pages[problem.layer]
    shape = (pages.shape[0], problem.page_tokens, gqa.cache_width)
    used = tile(lanes, dim, problem.arch)
    blocks = divide_up(lanes, used.block_m)
    programs = rows // each * groups * blocks
    splits = num_splits(programs, _most_tokens(problem, used))
    # Triton 3.6 copies 16 bytes at a time ahead of a round, whatever the rows are aligned to.
    can_copy_ahead = dim * BF16.itemsize % 16 == 0
    launch = Launch(
        kernel=attend_groups,
        grid=(programs, splits),
        arguments={
            "query": tensor_for(buffers["gqa_query"], BF16, (rows, heads, dim), name="gqa_query"),
            "pages": tensor_for(pages, BF16, shape, name="pages"),
            "row_position": tensor_for(
                buffers["row_position"], INT32, (rows,), name="row_position"
            ),
            "row_pages": tensor_for(table, INT32, (rows, table.shape[1]), name="row_pages"),
            "sums": buffers.scratch("gqa_split_sums", (rows, splits, heads, dim), FP32),
            "stats": buffers.scratch("gqa_split_stats", (rows, splits, heads, 2), FP32),
            "counters": buffers.counters(programs),
            "out": tensor_for(buffers["attn_out"], BF16, (rows, heads * dim), name="attn_out"),
            "max_pages": table.shape[1],
        },
        constants={
            "SCORE_SCALE": dim**-0.5 * (problem.rotation_scale or 1.0) * math.log2(math.e),
            "GROUPS": groups,
            "GROUP": heads // groups,
            "EACH": each,
            "DIM": dim,
            "PAGE_TOKENS": problem.page_tokens,
            "SPLITS": splits,
            "IS_CAUSAL": problem.is_causal_block,
            "WINDOW": 0 if problem.window is None else problem.window,
            "BLOCK_M": used.block_m,
            "BLOCK_T": used.block_t,
            "BLOCKS": blocks,
            "DIM_BLOCK": max(16, triton.next_power_of_2(dim)),
            "LINE": _LINE_COLUMNS,
            "LINES": triton.next_power_of_2(divide_up(dim, _LINE_COLUMNS)),
        },
        num_warps=used.warps,
        num_stages=used.stages if can_copy_ahead else 1,
        begins_early=True,
    )
    return TritonStep(launch)


def _most_tokens(problem: Problem, used: Tile) -> int:
    """That a block sees, and those of its first round that it does not."""
    if problem.window is None:
        return problem.max_context_tokens
    seen = problem.window + problem.rows_per_request + used.block_t
    return min(seen, problem.max_context_tokens)


@triton.jit
def _prefetch_round(
    cached,
    entry,
    start,
    end,
    PAGE_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
):
    """Keys and values of the first round of a split into the second-level cache, as far as earlier
    steps wrote them. cached: the keys of the group on the first page."""
    if start < end:
        token = tl.minimum(start + tl.arange(0, BLOCK_T), end - 1)
        page = tl.load(entry + token // PAGE_TOKENS)
        at = cached + (page.to(tl.int64) * PAGE_TOKENS + token % PAGE_TOKENS) * (2 * WIDTH)
        line = tl.minimum(tl.arange(0, LINES) * LINE, DIM - 1)
        prefetch(at[:, None] + line[None, :])
        prefetch(at[:, None] + WIDTH + line[None, :])


@triton.jit
def _merged(
    sums,
    stats,
    at,
    count,
    has_lane,
    has_both,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """What lanes read of ``count`` splits, [BLOCK_M, DIM_BLOCK] fp32; zeros of none.

    at: [BLOCK_M], the place of each lane's first split; the next is STRIDE behind it.
    """
    every = tl.arange(0, SPLITS)
    each = at[:, None] + every[None, :] * STRIDE
    has_each = has_lane[:, None] & (every < count)[None, :]
    tops = tl.load(stats + each * 2, mask=has_each, other=float("-inf"))
    totals = tl.load(stats + each * 2 + 1, mask=has_each, other=0.0)
    highest = tl.max(tops, axis=1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp2(tops - highest[:, None]) * totals, axis=1)
    channel = tl.arange(0, DIM_BLOCK)
    acc = tl.zeros([BLOCK_M, DIM_BLOCK], tl.float32)
    for first in range(0, count, _TOGETHER):
        for more in tl.static_range(_TOGETHER):
            is_there = first + more < count
            own = at + (first + more) * STRIDE
            top = tl.load(stats + own * 2, mask=has_lane & is_there, other=float("-inf"))
            part = sums + own[:, None] * DIM + channel[None, :]
            weight = tl.exp2(top - highest)[:, None]
            acc += weight * tl.load(part, mask=has_both & is_there, other=0.0)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["max_pages"])
def attend_groups(
    query,
    pages,
    row_position,
    row_pages,
    sums,
    stats,
    counters,
    out,
    max_pages,
    SCORE_SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    EACH: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
):
    """query [rows, GROUPS * GROUP, DIM]; pages [pages, PAGE_TOKENS, 2, GROUPS, DIM], keys and
    values; sums [rows, SPLITS, heads, DIM] and stats [rows, SPLITS, heads, 2] fp32 ->
    out [rows, heads * DIM]. WINDOW 0: there is none."""
    WIDTH: tl.constexpr = GROUPS * DIM
    HEADS: tl.constexpr = GROUPS * GROUP
    program, split = tl.program_id(0), tl.program_id(1)
    request = program // (GROUPS * BLOCKS)
    group, block = program // BLOCKS % GROUPS, program % BLOCKS
    last = request * EACH + EACH - 1
    context = tl.load(row_position + last) + 1
    earliest = tl.maximum(context - EACH - WINDOW, 0) if WINDOW > 0 else 0
    # Rounds begin on their multiples, so that one has one page wherever pages are as long.
    begin = earliest // BLOCK_T * BLOCK_T
    length = split_length(context - begin, SPLITS)
    start = begin + split * length
    entry = row_pages + last * max_pages
    cached = pages + group * DIM
    # Positions and pages are the step's inputs, which no launch writes.
    _prefetch_round(
        cached, entry, start, context - EACH, PAGE_TOKENS, WIDTH, DIM, BLOCK_T, LINE, LINES
    )
    wait_for_previous()
    lane = block * BLOCK_M + tl.arange(0, BLOCK_M)
    has_lane = lane < EACH * GROUP
    row, head = request * EACH + lane // GROUP, group * GROUP + lane % GROUP
    channel = tl.arange(0, DIM_BLOCK)
    has_channel = channel < DIM
    has_both = has_lane[:, None] & has_channel[None, :]
    if start < context:
        end = tl.minimum(start + length, context)
        if IS_CAUSAL:
            position = tl.load(row_position + row, mask=has_lane, other=-1)
        else:
            position = tl.where(has_lane, context - 1, -1)
        asked = query + (row * HEADS + head) * DIM
        q = tl.load(asked[:, None] + channel[None, :], mask=has_both, other=0.0)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM_BLOCK], tl.float32)
        # A page's number is read a round before its rows, which do not wait for it then.
        place = tl.arange(0, BLOCK_T)
        page = page_numbers(entry, start, end, place, PAGE_TOKENS, BLOCK_T)
        for first in range(start, end, BLOCK_T):
            token = first + place
            is_seen = (token >= earliest) & (token < end)
            line = (page.to(tl.int64) * PAGE_TOKENS + token % PAGE_TOKENS) * (2 * WIDTH)
            page = page_numbers(entry, first + BLOCK_T, end, place, PAGE_TOKENS, BLOCK_T)
            own = cached + line[:, None] + channel[None, :]
            is_read = is_seen[:, None] & has_channel[None, :]
            key = tl.load(own, mask=is_read, other=0.0)
            value = tl.load(own + WIDTH, mask=is_read, other=0.0)
            score = dot_bf16(q, tl.trans(key), tl.zeros([BLOCK_M, BLOCK_T], tl.float32))
            is_counted = is_seen[None, :] & (token[None, :] <= position[:, None])
            score = tl.where(is_counted, score * SCORE_SCALE, float("-inf"))
            top = tl.maximum(highest, tl.max(score, axis=1))
            # A lane that has seen no token keeps a maximum of -inf: not to be subtracted.
            base = tl.where(top == float("-inf"), 0.0, top)
            kept = tl.exp2(highest - base)
            weight = tl.exp2(score - base[:, None]).to(tl.bfloat16)
            total = total * kept + tl.sum(weight.to(tl.float32), axis=1)
            acc = dot_bf16(weight, value, acc * kept[:, None])
            highest = top
        left = (row * SPLITS + split) * HEADS + head
        tl.store(stats + left * 2, highest, mask=has_lane)
        tl.store(stats + left * 2 + 1, total, mask=has_lane)
        tl.store(sums + left[:, None] * DIM + channel[None, :], acc, mask=has_both)
    if is_last_arrival(counters + program, SPLITS):
        count = (context - begin + length - 1) // length
        at = row * SPLITS * HEADS + head
        read = _merged(
            sums, stats, at, count, has_lane, has_both, HEADS, DIM, SPLITS, BLOCK_M, DIM_BLOCK
        )
        to = out + row[:, None] * (HEADS * DIM) + (head * DIM)[:, None] + channel[None, :]
        tl.store(to, read.to(tl.bfloat16), mask=has_both)
