"""embed_part in Triton, a program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    plan_rows,
    refuse_plan_rows,
    tensor_for,
)
from kdecode.kernels.common.triton_peers import signal_if_last, signal_of
from kdecode.kernels.contract import Buffers, Problem

_WARPS = 8


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: Tensor, buffers: Buffers) -> TritonStep:
    """weights: this rank's rows of the table."""
    config, rows = problem.config, plan_rows(problem)
    width, vocab = config.hidden_size, config.vocab_size
    out = buffers["embed_part"]
    signal = signal_of(buffers.blocks["embed"], buffers, out)
    arguments = {
        "table": tensor_for(weights, torch.bfloat16, (vocab, width), name="the embedding"),
        "row_token": tensor_for(buffers["row_token"], torch.int32, (rows,), name="row_token"),
        "out": tensor_for(out, torch.bfloat16, (rows, width), name="embed_part"),
        **signal.arguments,
        "first": problem.ranks.rank * vocab,
    }
    constants = {
        "VOCAB": vocab,
        "WIDTH": width,
        "BLOCK_WIDTH": triton.next_power_of_2(width),
        **signal.constants,
    }
    return TritonStep(Launch(embed_part, (rows,), arguments, constants, num_warps=_WARPS))


@triton.jit(do_not_specialize=["first"])
def embed_part(
    table,
    row_token,
    out,
    arrivals,
    peers,
    first,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PEERS: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(row_token + row) - first
    is_own = (token >= 0) & (token < VOCAB)
    columns = tl.arange(0, BLOCK_WIDTH)
    inside = columns < WIDTH
    line = table + token.to(tl.int64) * WIDTH + columns
    tl.store(out + row * WIDTH + columns, tl.load(line, mask=inside & is_own, other=0.0), inside)
    signal_if_last(arrivals, tl.num_programs(0), peers, PEERS)
