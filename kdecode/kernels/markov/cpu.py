"""markov on the native CPU kernels."""

from __future__ import annotations

from typing import Any

import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.fused import refuse_device, refuse_rows, step_rows, tiles_of
from kdecode.kernels.common.native import NativeStep, ptr
from kdecode.kernels.contract import Buffers, Problem


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return [*refuse_device(problem), *refuse_rows(problem)]


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> NativeStep:
    """weights: a `DraftPlanWeights`. The caller checks that the tokens are of the vocabulary."""
    rows, vocab = step_rows(problem), problem.config.vocab_size
    table, previous, bias = weights.markov_in, buffers["row_previous"], buffers["markov_bias"]
    args = _native.MarkovArgs()
    args.rows = rows
    args.out = tiles_of("The Markov head's output", weights.markov_out, vocab, table.shape[1])
    args.table = ptr(table, torch.bfloat16, (vocab, table.shape[1]))
    args.row_previous = ptr(previous, torch.int32, (rows,))
    args.bias = ptr(bias, torch.float32, (rows, vocab))
    return NativeStep(buffers.pool, problem.isa, "markov", args, (weights, table, previous, bias))
