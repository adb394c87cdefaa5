"""embed on the native CPU kernels."""

from __future__ import annotations

from typing import Any

import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.fused import refuse_rows, set_exchange, step_rows
from kdecode.kernels.common.native import NativeStep, ptr
from kdecode.kernels.contract import Buffers, Problem


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_rows(problem)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> NativeStep:
    """weights: a `PackedModel`."""
    config, rows = problem.config, step_rows(problem)
    table, prefix, tokens = weights.embed, buffers["prefix"], buffers["row_token"]
    args = _native.EmbedArgs()
    args.rows, args.vocab, args.width = rows, config.vocab_size, config.hidden_size
    args.table = ptr(table, torch.bfloat16, (config.vocab_size, config.hidden_size))
    args.row_token = ptr(tokens, torch.int32, (rows,))
    args.prefix = ptr(prefix, torch.bfloat16, (rows, config.hidden_size))
    set_exchange(args, problem, buffers, 2 * rows * config.hidden_size)
    return NativeStep(buffers.pool, problem.isa, "embed", args, (table, prefix, tokens))
