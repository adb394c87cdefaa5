"""head on the native CPU kernels."""

from __future__ import annotations

from typing import Any

import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.fused import (
    refuse_mix_norm,
    refuse_rows,
    set_exchange,
    set_mix_norm,
    step_rows,
    tiles_of,
)
from kdecode.kernels.common.native import NativeStep, ptr
from kdecode.kernels.contract import Buffers, Problem


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_rows(problem) + refuse_mix_norm(problem.config)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> NativeStep:
    """weights: a `PackedModel`."""
    config, rows = problem.config, step_rows(problem)
    args = _native.HeadArgs()
    used = set_mix_norm(
        args,
        problem,
        buffers,
        mix_weight=weights.final_mix,
        norm_weight=weights.norm,
        outputs=("final_mix", "head_in"),
        num_snapshots=config.num_snapshots,
    )
    args.weight = tiles_of("The head", weights.head, config.vocab_size, config.hidden_size)
    vocab_size = config.vocab_size * problem.ranks.size
    args.logits = ptr(buffers["logits"], torch.float32, (rows, vocab_size))
    set_exchange(args, problem, buffers, 2 * rows * config.vocab_size)
    alive = (*used, weights.head, buffers["logits"])
    return NativeStep(buffers.pool, problem.isa, "head", args, alive)
