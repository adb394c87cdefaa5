"""draft_choice in Triton: a program has some tokens of the vocabulary, for all requests.

It leaves the largest of its logits of each request; the last program chooses among these. So the
drafts of a block follow each other on the device, and the host waits for none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.tile_table import choose
from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    refuse_plan_rows,
    row_block,
    row_major,
    tensor_for,
)
from kdecode.kernels.common.triton_ops import (
    dot_bf16,
    is_last_arrival,
    prefetch,
    wait_for_previous,
)
from kdecode.kernels.contract import Buffers, Problem
from kdecode.kernels.draft_choice.op import ChoiceWeights

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32

# Weights that a program of few requests has in registers at once.
_WEIGHTS = 8192
# Of bf16 in a line of memory.
_LINE_COLUMNS = tl.constexpr(64)
# Numbers of other programs that the last one has under way at a time.
_NUMBERS = 4096


@dataclass(frozen=True)
class Tile:
    """block_n: tokens a program; block_k: columns of markov_out at a time."""

    block_n: int
    block_k: int
    warps: int
    stages: int


def tile(requests: int, vocab: int, rank: int, arch: str) -> Tile:
    """The tile of blocks of so many requests."""
    block_r, whole = row_block(requests), triton.next_power_of_2(rank)
    if block_r <= 2:
        block_k = min(512, max(16, whole))
        default = Tile(max(8, min(64, _WEIGHTS // block_k)), block_k, warps=4, stages=1)
    else:
        default = Tile(64, min(128, max(16, whole)), warps=4, stages=3)
    return choose("draft_choice", arch, f"requests {block_r}, {vocab} x {rank}", default)


def _lanes(requests: int) -> int:
    """Of a program: its requests, filled up to what a tensor core takes of more than two."""
    block_r = row_block(requests)
    return max(block_r, 16) if block_r > 2 else block_r


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    reasons, rows, each = refuse_plan_rows(problem), problem.rows, problem.rows_per_request
    if rows is not None and rows % each:
        reasons.append(f"{rows} rows are not a number of requests of {each} each.")
    return reasons


def prepare(problem: Problem, weights: ChoiceWeights, buffers: Buffers) -> TritonStep:
    rows, each, vocab = plan_rows(problem), problem.rows_per_request, problem.config.vocab_size
    requests, rank = rows // each, weights.markov_in.shape[1]
    if not 0 <= weights.place < each:
        raise ValueError(f"Draft {weights.place} of a block that has {each}.")
    used = tile(requests, vocab, rank, problem.arch)
    blocks = divide_up(vocab, used.block_n)
    tokens, logits = buffers["draft_tokens"], buffers["draft_logits"]
    launch = Launch(
        kernel=choose_drafts,
        grid=(blocks,),
        arguments={
            "logits": tensor_for(buffers["logits"], FP32, (rows, vocab), name="logits"),
            "table": tensor_for(weights.markov_in, BF16, (vocab, rank), name="markov_in"),
            "weight": row_major(weights.markov_out, (vocab, rank), "markov_out"),
            "tokens": tensor_for(tokens, INT32, (each + 1, requests), name="draft_tokens"),
            "out": tensor_for(logits, FP32, (requests, vocab), name="draft_logits"),
            "tops": buffers.scratch("draft_tops", (blocks, requests), FP32),
            "firsts": buffers.scratch("draft_firsts", (blocks, requests), INT32),
            "counter": buffers.counters(1),
            "requests": requests,
            "place": weights.place,
        },
        constants={
            "EACH": each,
            "VOCAB": vocab,
            "RANK": rank,
            "BLOCKS": blocks,
            "ROUND": min(triton.next_power_of_2(blocks), _NUMBERS // _lanes(requests)),
            "BLOCK_R": row_block(requests),
            "BLOCK_N": used.block_n,
            "BLOCK_K": used.block_k,
            "LINES": triton.next_power_of_2(divide_up(rank, _LINE_COLUMNS)),
        },
        num_warps=used.warps,
        num_stages=used.stages,
        begins_early=True,
    )
    return TritonStep(launch, (weights,))


@triton.jit
def _first_of_largest(values, numbers, highest, NONE: tl.constexpr):
    """Along axis 0 the smallest number of those whose value is the largest."""
    return tl.min(tl.where(values == highest[None, :], numbers, NONE), axis=0)


@triton.jit
def _choose(
    tops,
    firsts,
    requests,
    request,
    has_request,
    BLOCKS: tl.constexpr,
    VOCAB: tl.constexpr,
    ROUND: tl.constexpr,
):
    """The first of the largest logits of every program; token 0 where all are -inf."""
    best = request * 0.0 + float("-inf")
    token = request * 0
    for begin in range(0, BLOCKS, ROUND):
        block = begin + tl.arange(0, ROUND)
        own = block[:, None] * requests + request[None, :]
        mask = (block < BLOCKS)[:, None] & has_request[None, :]
        values = tl.load(tops + own, mask=mask, other=float("-inf"))
        numbers = tl.load(firsts + own, mask=mask, other=VOCAB)
        highest = tl.max(values, axis=0)
        found = _first_of_largest(values, numbers, highest, VOCAB)
        # Equal ones behind those that are known are no better.
        token = tl.where(highest > best, found, token)
        best = tl.maximum(best, highest)
    return token


@triton.jit(do_not_specialize=["requests", "place"])
def choose_drafts(
    logits,
    table,
    weight,
    tokens,
    out,
    tops,
    firsts,
    counter,
    requests,
    place,
    EACH: tl.constexpr,
    VOCAB: tl.constexpr,
    RANK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
):
    """logits [requests * EACH, VOCAB]; table, weight [VOCAB, RANK]; tokens [EACH + 1, requests], of
    which line ``place`` is read and the next one written; tops, firsts [BLOCKS, requests] ->
    out [requests, VOCAB]. One or two requests are multiplied in fp32, more by tensor cores."""
    IS_DOT: tl.constexpr = BLOCK_R > 2
    LANES: tl.constexpr = max(BLOCK_R, 16) if IS_DOT else BLOCK_R
    block = tl.program_id(0)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    has_n = n < VOCAB
    request = tl.arange(0, LANES)
    has_request = request < requests
    lines = weight + tl.minimum(n, VOCAB - 1).to(tl.int64)[:, None] * RANK
    early = tl.arange(0, LINES) * _LINE_COLUMNS
    prefetch(lines + tl.minimum(early, RANK - 1)[None, :])
    wait_for_previous()
    previous = tl.load(tokens + place * requests + request, mask=has_request, other=0)
    # The host has checked the tokens that it wrote; a wrong one must not become an address.
    is_known = has_request & (previous >= 0) & (previous < VOCAB)
    own = table + previous.to(tl.int64) * RANK
    acc = tl.zeros([BLOCK_N, LANES], tl.float32)
    for start in range(0, RANK, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        has_k = k < RANK
        w = tl.load(lines + k[None, :], mask=has_k[None, :], other=0.0)
        if IS_DOT:
            mask = has_k[:, None] & is_known[None, :]
            acc = dot_bf16(w, tl.load(own[None, :] + k[:, None], mask=mask, other=0.0), acc)
        else:
            mask = is_known[:, None] & has_k[None, :]
            x = tl.load(own[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
            acc += tl.sum(w.to(tl.float32)[:, None, :] * x[None, :, :], axis=2)

    mask = has_n[:, None] & has_request[None, :]
    row = request * EACH + place
    base = tl.load(logits + row.to(tl.int64)[None, :] * VOCAB + n[:, None], mask=mask, other=0.0)
    values = base + acc
    tl.store(out + request.to(tl.int64)[None, :] * VOCAB + n[:, None], values, mask=mask)
    is_choice = has_n[:, None] & (values == values)
    scores = tl.where(is_choice, values, float("-inf"))
    highest = tl.max(scores, axis=0)
    first = _first_of_largest(scores, n[:, None], highest, VOCAB)
    tl.store(tops + block * requests + request, highest, mask=has_request)
    tl.store(firsts + block * requests + request, first, mask=has_request)
    if is_last_arrival(counter, BLOCKS):
        chosen = _choose(tops, firsts, requests, request, has_request, BLOCKS, VOCAB, ROUND)
        tl.store(tokens + (place + 1) * requests + request, chosen, mask=has_request)
