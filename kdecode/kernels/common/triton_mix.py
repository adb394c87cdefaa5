"""Device functions of the residual mix and its norm; the maths is that of mix_norm.

A mix weighs its sources, the snapshots and the prefix, by the softmax of their scores. Snapshots
are old, so that programs of their own score them while others still make the prefix; whoever is
last mixes. Host side: what such a launch binds.
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
from kdecode.kernels.common.triton_ops import round_bf16, to_bf16
from kdecode.kernels.contract import Buffers


def mix_arguments(
    config: ModelConfig, rows: int, then: MixNorm, buffers: Buffers
) -> tuple[dict[str, Tensor | int | float], dict[str, Any]]:
    """Arguments and constants by which a kernel calls `score_snapshot` and `mix_norm_row`."""
    width = config.hidden_size
    shape = (rows, width)
    norm = tensor_for(then.norm, torch.float32, (width,), name="the norm's weight")
    mix, snapshots = norm, buffers["prefix"]  # not read without snapshots
    if then.num_snapshots:
        assert then.mix is not None
        mix = tensor_for(then.mix, torch.float32, (width,), name="the mix's weight")
        snapshots = tensor_for(
            buffers["snapshots"],
            torch.bfloat16,
            (config.num_snapshots, rows, width),
            name="snapshots",
        )
    arguments: dict[str, Tensor | int | float] = {
        "prefix": tensor_for(buffers["prefix"], torch.bfloat16, shape, name="prefix"),
        "snapshots": snapshots,
        "mix_weight": mix,
        "norm_weight": norm,
        "scores": buffers.scratch(
            "mix_scores", (rows, max(1, config.num_snapshots)), torch.float32
        ),
        "eps": config.rms_eps,
    }
    for parameter, name in zip(("mix_out", "norm_out"), then.outputs, strict=True):
        arguments[parameter] = tensor_for(buffers[name], torch.bfloat16, shape, name=name)
    constants = {
        "WIDTH": width,
        "BLOCK_WIDTH": triton.next_power_of_2(width),
        "SNAPSHOTS": then.num_snapshots,
        "MAX_SNAPSHOTS": max(1, config.num_snapshots),
    }
    return arguments, constants


@triton.jit
def _score(x, weight, eps, WIDTH: tl.constexpr):
    """<x, w> rsqrt(mean(x^2) + eps)."""
    return tl.sum(x * weight) * tl.rsqrt(tl.sum(x * x) / WIDTH + eps)


@triton.jit
def score_snapshot(
    row,
    number,
    rows,
    snapshots,
    mix_weight,
    scores,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    MAX_SNAPSHOTS: tl.constexpr,
):
    """scores[row, number]."""
    columns = tl.arange(0, BLOCK_WIDTH)
    source = snapshots + (number * rows + row) * WIDTH + columns
    x = tl.load(source, mask=columns < WIDTH, other=0.0).to(tl.float32)
    weight = tl.load(mix_weight + columns, mask=columns < WIDTH, other=0.0)
    tl.store(scores + row * MAX_SNAPSHOTS + number, _score(x, weight, eps, WIDTH))


@triton.jit
def mix_norm_row(
    row,
    rows,
    prefix,
    snapshots,
    mix_weight,
    norm_weight,
    scores,
    mix_out,
    norm_out,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    MAX_SNAPSHOTS: tl.constexpr,
):
    """One row's mix of the prefix and the scored snapshots, and its norm."""
    columns = tl.arange(0, BLOCK_WIDTH)
    inside = columns < WIDTH
    at = row * WIDTH + columns
    mixed = tl.load(prefix + at, mask=inside, other=0.0).to(tl.float32)
    if SNAPSHOTS > 0:
        weight = tl.load(mix_weight + columns, mask=inside, other=0.0)
        own = _score(mixed, weight, eps, WIDTH)
        top = own
        for number in tl.static_range(SNAPSHOTS):
            top = tl.maximum(top, tl.load(scores + row * MAX_SNAPSHOTS + number))
        share = tl.exp(own - top)
        total = share
        mixed = mixed * share
        for number in tl.static_range(SNAPSHOTS):
            share = tl.exp(tl.load(scores + row * MAX_SNAPSHOTS + number) - top)
            source = snapshots + (number * rows + row) * WIDTH + columns
            mixed += tl.load(source, mask=inside, other=0.0).to(tl.float32) * share
            total += share
        mixed = round_bf16(mixed / total)
    tl.store(mix_out + at, to_bf16(mixed), mask=inside)
    scale = tl.rsqrt(tl.sum(mixed * mixed) / WIDTH + eps)
    normed = mixed * scale * tl.load(norm_weight + columns, mask=inside, other=0.0)
    tl.store(norm_out + at, to_bf16(normed), mask=inside)
