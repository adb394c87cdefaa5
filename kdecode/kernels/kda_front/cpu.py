"""kda_front on the native CPU kernels."""

from __future__ import annotations

from typing import Any

import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.fused import (
    refuse_device,
    refuse_mix_norm,
    refuse_rows,
    set_attn_mix_norm,
    step_rows,
    tiles_of,
)
from kdecode.kernels.common.matrix import TILE_ROWS
from kdecode.kernels.common.native import NativeStep, ptr
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32 = torch.bfloat16, torch.float32

CONV_WIDTH = 4
MAX_HEAD_DIM: int = _native.MAX_KDA_HEAD_DIM
MAX_VERIFY_ROWS: int = _native.MAX_VERIFY_ROWS


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    kda = problem.config.kda
    reasons = [
        *refuse_device(problem),
        *refuse_rows(problem),
        *refuse_mix_norm(problem.config),
    ]
    if kda.conv_width != CONV_WIDTH:
        reasons.append(
            f"The native KDA convolution has {CONV_WIDTH} taps; the model's has {kda.conv_width}."
        )
    if kda.head_dim % TILE_ROWS or not 0 < kda.head_dim <= MAX_HEAD_DIM:
        reasons.append(
            f"Native KDA heads have a multiple of {TILE_ROWS} channels, at most {MAX_HEAD_DIM}; "
            f"the model's have {kda.head_dim}."
        )
    if problem.rows_per_request > MAX_VERIFY_ROWS:
        reasons.append(
            f"The native KDA step records at most {MAX_VERIFY_ROWS} rows of a request, its anchor "
            f"and its drafts; this plan has {problem.rows_per_request}."
        )
    return reasons


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> NativeStep:
    """weights: a `PackedLayer` whose ``attention`` is a `PackedKda`."""
    config = problem.config
    args = _native.KdaFrontArgs()
    used = set_attn_mix_norm(args, problem, weights, buffers)
    args.heads, args.head_dim = config.kda.num_heads, config.kda.head_dim
    args.is_softplus_gate = config.kda.gate_lower_bound is None
    args.gate_lower_bound = config.kda.gate_lower_bound or 0.0
    _set_weights(args, problem, weights.attention)
    used += _set_caches(args, problem, buffers)
    used += _set_values(args, problem, buffers)
    if problem.rows_per_request > 1:
        used += _set_effects(args, problem, buffers)
    alive = (*used, weights.attention)
    return NativeStep(buffers.pool, problem.isa, "kda_front", args, alive)


def _set_weights(args: Any, problem: Problem, kda: Any) -> None:
    config = problem.config.kda
    width, heads = config.width, config.num_heads
    args.decay_rank = kda.f_b.cols
    args.gate_rank = width if kda.g_b is None else kda.g_b.cols
    columns = 3 * width + args.gate_rank + args.decay_rank + heads
    args.in_proj = tiles_of("The KDA in_proj", kda.in_proj, columns, problem.config.hidden_size)
    args.f_b = tiles_of("The KDA f_b", kda.f_b, width, args.decay_rank)
    if kda.g_b is not None:
        args.g_b = tiles_of("The KDA g_b", kda.g_b, width, args.gate_rank)
    args.conv = ptr(kda.conv, FP32, (CONV_WIDTH, 3 * width))
    args.decay_scale = ptr(kda.decay_scale, FP32, (heads,))
    args.dt_bias = ptr(kda.dt_bias, FP32, (width,))
    args.out_norm = ptr(kda.o_norm, FP32, (config.head_dim,))


def _set_caches(args: Any, problem: Problem, buffers: Buffers) -> list[torch.Tensor]:
    """The slots of this layer; returns the tensors that must stay alive."""
    config, rows, layer = problem.config.kda, step_rows(problem), problem.layer
    window, state = buffers.caches.conv[layer], buffers.caches.recurrent[layer]
    slots, dim = window.shape[0], config.head_dim
    args.row_slot = ptr(buffers["row_slot"], torch.int32, (rows,))
    args.window = ptr(window, BF16, (slots, CONV_WIDTH - 1, 3 * config.width))
    args.state = ptr(state, FP32, (slots, config.num_heads, dim, dim))
    return [buffers["row_slot"], window, state]


def _set_values(args: Any, problem: Problem, buffers: Buffers) -> list[torch.Tensor]:
    """The buffers after attn_in; returns the tensors that must stay alive."""
    config, rows = problem.config.kda, step_rows(problem)
    width, heads, dim = config.width, config.num_heads, config.head_dim
    shapes = {
        "kda_proj": (BF16, (rows, args.in_proj.rows)),
        "kda_qkv": (BF16, (rows, 3 * width)),
        "kda_decay": (FP32, (rows, heads, dim)),
        "kda_beta": (FP32, (rows, heads)),
        "kda_out": (BF16, (rows, heads, dim)),
        "attn_out": (BF16, (rows, width)),
    }
    for name, (dtype, shape) in shapes.items():
        setattr(args, name, ptr(buffers[name], dtype, shape))
    return [buffers[name] for name in shapes]


def _set_effects(args: Any, problem: Problem, buffers: Buffers) -> list[torch.Tensor]:
    """Where the rows are recorded; returns the tensors that must stay alive."""
    config, rows = problem.config.kda, step_rows(problem)
    effects = buffers.effects[problem.layer]
    heads = (rows, config.num_heads, config.head_dim)
    args.keys = ptr(effects.keys, FP32, heads)
    args.decays = ptr(effects.decays, FP32, heads)
    args.corrections = ptr(effects.corrections, FP32, heads)
    args.samples = ptr(effects.samples, BF16, (rows, 3 * config.width))
    return [effects.keys, effects.decays, effects.corrections, effects.samples]
