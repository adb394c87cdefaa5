"""attn_res in torch; on a CPU the mix is native.

Snapshots and prefix lie behind one another in ``residual_stack`` [S + 1, R, M], so the sources of a
mix are one slice of it and nothing is concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.kernels.attn_res.op import MixWeights
from kdecode.kernels.contract import Buffers, Prepared, Problem

# Rows of a mix that are widened to fp32 at a time.
_BLOCK_ROWS = 128


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: MixWeights, buffers: Buffers) -> Prepared:
    return _Mix(weights, problem.config.rms_eps, _is_native(problem, weights), buffers)


def _is_native(problem: Problem, weights: MixWeights) -> bool:
    """Whether there is a native mix of so many snapshots."""
    if problem.device != "cpu":
        return False
    from kdecode.kernels.attn_res import native

    return weights.num_snapshots <= native.MAX_SNAPSHOTS


@dataclass(frozen=True)
class _Mix:
    weights: MixWeights
    eps: float
    is_native: bool
    buffers: Buffers

    def run(self) -> None:
        buffers, weights = self.buffers, self.weights
        if weights.weight is None or weights.num_snapshots == 0:
            buffers[weights.output] = buffers["prefix"]
            return
        sources = buffers["residual_stack"][: weights.num_snapshots + 1]
        if self.is_native:
            from kdecode.kernels.attn_res import native

            isa = buffers.products.isa
            buffers[weights.output] = native.mix(sources, weights.weight, self.eps, isa)
            return
        if sources.shape[1] <= _BLOCK_ROWS:
            buffers[weights.output] = mix(sources, weights.weight, self.eps)
            return
        blocks = torch.split(sources, _BLOCK_ROWS, dim=1)
        buffers[weights.output] = torch.cat([mix(x, weights.weight, self.eps) for x in blocks])


def mix(sources: Tensor, weight: Tensor, eps: float) -> Tensor:
    """sources [S + 1, R, M] bf16, weight [M] fp32 -> [R, M] bf16."""
    wide = sources.float()
    scale = wide.square().mean(-1).add_(eps).rsqrt_()  # [S + 1, R]
    share = torch.softmax((wide @ weight).mul_(scale), dim=0)
    mixed = torch.bmm(share.T.unsqueeze(1), wide.transpose(0, 1))  # [R, 1, M]
    return mixed.squeeze(1).to(torch.bfloat16)
