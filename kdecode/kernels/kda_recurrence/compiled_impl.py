"""kda_recurrence for a compiler, of one token a request: slots are a tensor, never numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.kda_recurrence.torch_impl import delta_rule_step, unit


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: object, buffers: Buffers) -> Prepared:
    assert problem.layer is not None
    kda = problem.config.kda
    states = buffers.caches.recurrent[problem.layer]
    return _Recurrence(kda.num_heads, kda.head_dim, states, buffers)


@dataclass(frozen=True)
class _Recurrence:
    heads: int
    head_dim: int
    states: Tensor  # [slots, H, K, V] fp32
    buffers: Buffers

    def run(self) -> None:
        buffers, slots = self.buffers, self.buffers.step.single_slots
        qkv = unit(buffers["kda_qkv"].view(-1, 3, self.heads, self.head_dim))
        states = self.states.index_select(0, slots)
        out = delta_rule_step(
            qkv.transpose(0, 1).flatten(1, 2),
            buffers["kda_decay"].exp().flatten(0, 1),
            buffers["kda_beta"].flatten(),
            states.flatten(0, 1),
        )
        self.states.index_copy_(0, slots, states)
        out = out.view(-1, self.heads, self.head_dim)
        buffers["kda_out"] = out.to(torch.bfloat16)
