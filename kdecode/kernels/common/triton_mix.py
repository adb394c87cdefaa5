"""The residual mix and its norm of one row on a GPU: device function, and what a launch binds.

The maths is that of mix_norm. Snapshots are older than the launch before, but for one that it
pushed: they are scored before it is over. Read again to be mixed, they come from the first cache;
all of them in fp32 would not fit into registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.kernels.common.mix_norm import MixNorm
from kdecode.kernels.common.triton_launch import tensor_for
from kdecode.kernels.common.triton_ops import round_bf16, to_bf16, wait_for_previous
from kdecode.kernels.contract import Buffers


def mix_arguments(
    config: ModelConfig, rows: int, then: MixNorm, buffers: Buffers
) -> tuple[dict[str, Tensor | int | float], dict[str, Any]]:
    """Arguments and constants by which a kernel calls `mix_norm_row`."""
    width = config.hidden_size
    shape = (rows, width)
    norm = tensor_for(then.norm, torch.float32, (width,), name="the norm's weight")
    mix, snapshots = norm, buffers["prefix"]  # not read without snapshots
    if then.num_snapshots:
        assert then.mix is not None
        stack = (config.num_snapshots, rows, width)
        mix = tensor_for(then.mix, torch.float32, (width,), name="the mix's weight")
        snapshots = tensor_for(buffers["snapshots"], torch.bfloat16, stack, name="snapshots")
    arguments: dict[str, Tensor | int | float] = {
        "prefix": tensor_for(buffers["prefix"], torch.bfloat16, shape, name="prefix"),
        "snapshots": snapshots,
        "mix_weight": mix,
        "norm_weight": norm,
        "eps": config.rms_eps,
    }
    for parameter, name in zip(("mix_out", "norm_out"), then.outputs, strict=True):
        arguments[parameter] = tensor_for(buffers[name], torch.bfloat16, shape, name=name)
    constants = {
        "WIDTH": width,
        "BLOCK_WIDTH": triton.next_power_of_2(width),
        "SNAPSHOTS": then.num_snapshots,
        "BLOCK_S": triton.next_power_of_2(max(1, then.num_snapshots)),
    }
    return arguments, constants


@triton.jit
def mixed_by(sources, scores, prefix, score):
    """The mix of bf16 sources [S, N] and the prefix [1, N], fp32 of bf16 values, by their scores,
    [S] and one; rounded as it is stored."""
    top = tl.maximum(tl.max(scores, axis=0), score)
    shares, share = tl.exp(scores - top), tl.exp(score - top)
    # A thread has all sources of its columns.
    summed = tl.sum(sources.to(tl.float32) * shares[:, None], axis=0)[None, :] + prefix * share
    return round_bf16(summed / (tl.sum(shares, axis=0) + share))


@triton.jit
def store_normed(mixed, norm, row, columns, inside, mix_out, norm_out, eps, WIDTH: tl.constexpr):
    """A whole row [1, N] and its norm."""
    out = row * WIDTH + columns
    tl.store(mix_out + out, to_bf16(mixed), mask=inside)
    normed = mixed * tl.rsqrt(tl.sum(mixed * mixed) / WIDTH + eps) * norm
    tl.store(norm_out + out, to_bf16(normed), mask=inside)


@triton.jit
def mix_norm_row(
    row,
    rows,
    prefix,
    snapshots,
    mix_weight,
    norm_weight,
    mix_out,
    norm_out,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    IS_PUSHED: tl.constexpr,
):
    """One row. IS_PUSHED: the last snapshot is of the launch before."""
    columns = tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = columns < WIDTH
    norm = tl.load(norm_weight + columns, mask=inside, other=0.0)
    if IS_PUSHED:
        wait_for_previous()
    if SNAPSHOTS > 0:
        s = tl.arange(0, BLOCK_S)
        # Behind the last snapshot it is read again, with a share of zero.
        number = tl.minimum(s, SNAPSHOTS - 1)[:, None]
        sources = snapshots + (number * rows + row) * WIDTH + columns
        mix = tl.load(mix_weight + columns, mask=inside, other=0.0)
        x = tl.load(sources, mask=inside, other=0.0).to(tl.float32)
        scores = tl.sum(x * mix, axis=1) * tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
        scores = tl.where(s < SNAPSHOTS, scores, float("-inf"))
    # For a second time it costs nothing, and keeps the compiler from holding on to the snapshots.
    wait_for_previous()
    mixed = tl.load(prefix + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if SNAPSHOTS > 0:
        again = tl.load(sources, mask=inside, other=0.0)
        score = tl.sum(mixed * mix) * tl.rsqrt(tl.sum(mixed * mixed) / WIDTH + eps)
        mixed = mixed_by(again, scores, mixed, score)
    store_normed(mixed, norm, row, columns, inside, mix_out, norm_out, eps, WIDTH)
