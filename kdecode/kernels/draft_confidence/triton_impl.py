"""draft_confidence in Triton, a program a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    plan_rows,
    refuse_plan_rows,
    tensor_for,
)
from kdecode.kernels.common.triton_ops import sigmoid, wait_for_previous
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32

_WARPS = 8


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    reasons, rows, each = refuse_plan_rows(problem), problem.rows, problem.rows_per_request
    if rows is not None and rows % each:
        reasons.append(f"{rows} rows are not a number of requests of {each} each.")
    return reasons


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `DraftPlanWeights` that has a confidence head."""
    rows, each, config = plan_rows(problem), problem.rows_per_request, problem.config
    width, vocab, rank = config.hidden_size, config.vocab_size, weights.markov_in.shape[1]
    weight, bias = weights.confidence
    tokens, out = buffers["draft_tokens"], buffers["draft_confidence"]
    arguments = {
        "hidden": tensor_for(buffers["head_in"], BF16, (rows, width), name="head_in"),
        "table": tensor_for(weights.markov_in, BF16, (vocab, rank), name="markov_in"),
        "weight": tensor_for(weight, FP32, (width + rank,), name="the confidence head's weight"),
        "bias": tensor_for(bias, FP32, (1,), name="the confidence head's bias"),
        "tokens": tensor_for(tokens, INT32, (each + 1, rows // each), name="draft_tokens"),
        "out": tensor_for(out, FP32, (rows,), name="draft_confidence"),
        "requests": rows // each,
    }
    constants = {
        "EACH": each,
        "VOCAB": vocab,
        "WIDTH": width,
        "RANK": rank,
        "BLOCK_WIDTH": triton.next_power_of_2(width),
        "BLOCK_RANK": triton.next_power_of_2(rank),
    }
    launch = Launch(confidence, (rows,), arguments, constants, _WARPS, begins_early=True)
    return TritonStep(launch, (weights,))


@triton.jit(do_not_specialize=["requests"])
def confidence(
    hidden,
    table,
    weight,
    bias,
    tokens,
    out,
    requests,
    EACH: tl.constexpr,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """hidden [requests * EACH, WIDTH]; table [VOCAB, RANK]; weight [WIDTH + RANK]; tokens
    [EACH + 1, requests] -> out [requests * EACH]."""
    row = tl.program_id(0)
    column, k = tl.arange(0, BLOCK_WIDTH), tl.arange(0, BLOCK_RANK)
    inside, has_k = column < WIDTH, k < RANK
    own = tl.load(weight + column, mask=inside, other=0.0)
    other = tl.load(weight + WIDTH + k, mask=has_k, other=0.0)
    wait_for_previous()
    previous = tl.load(tokens + row % EACH * requests + row // EACH)
    # The host has checked the tokens that it wrote; a wrong one must not become an address.
    is_known = (previous >= 0) & (previous < VOCAB)
    x = tl.load(hidden + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    line = table + previous.to(tl.int64) * RANK
    markov = tl.load(line + k, mask=has_k & is_known, other=0.0).to(tl.float32)
    score = tl.sum(x * own) + tl.sum(markov * other) + tl.load(bias)
    tl.store(out + row, sigmoid(score))
