"""attn_res for a compiler: sums, which it makes one loop of, where torch has products."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kdecode.kernels.attn_res.op import MixWeights
from kdecode.kernels.contract import Buffers, Prepared, Problem


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: MixWeights, buffers: Buffers) -> Prepared:
    return _Mix(weights, problem.config.rms_eps, buffers)


@dataclass(frozen=True)
class _Mix:
    weights: MixWeights
    eps: float
    buffers: Buffers

    def run(self) -> None:
        buffers, weights = self.buffers, self.weights
        if weights.weight is None or weights.num_snapshots == 0:
            buffers[weights.output] = buffers["prefix"]
            return
        sources = buffers["residual_stack"][: weights.num_snapshots + 1].float()  # [S + 1, R, M]
        scale = (sources.square().mean(-1) + self.eps).rsqrt()
        share = torch.softmax((sources * weights.weight).sum(-1) * scale, dim=0)
        mixed = (sources * share.unsqueeze(-1)).sum(0)
        buffers[weights.output] = mixed.to(torch.bfloat16)
