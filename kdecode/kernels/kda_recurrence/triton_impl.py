"""kda_recurrence in Triton: a launch for the requests with one token, three for each other one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.kernels.common.step import RequestSpan, RowEffects
from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.kda_recurrence.triton_chunk import Span, delta_rule_chunks
from kdecode.kernels.kda_recurrence.triton_single import launch

MAX_HEAD_DIM = 256


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    dim = problem.config.kda.head_dim
    if 16 <= dim <= MAX_HEAD_DIM:
        return []
    return [f"KDA heads have 16 to {MAX_HEAD_DIM} channels in Triton; the model's have {dim}."]


def prepare(problem: Problem, weights: object, buffers: Buffers) -> Prepared:
    """weights: none are used."""
    reasons = refuse(problem)
    if reasons:
        raise ValueError(" ".join(reasons))
    assert problem.layer is not None
    kda, states = problem.config.kda, buffers.caches.recurrent[problem.layer]
    return _Recurrence(
        layer=problem.layer,
        heads=kda.num_heads,
        head_dim=kda.head_dim,
        lower_bound=kda.gate_lower_bound,
        arch=problem.arch,
        states=states,
        buffers=buffers,
    )


@dataclass(frozen=True)
class _Recurrence:
    layer: int
    heads: int
    head_dim: int
    lower_bound: float | None
    arch: str
    states: Tensor  # [slots, H, K, V] fp32
    buffers: Buffers

    def run(self) -> None:
        buffers, step = self.buffers, self.buffers.step
        qkv = buffers["kda_qkv"].view(-1, 3, self.heads, self.head_dim)
        decay, beta = buffers["kda_decay"], buffers["kda_beta"]
        out = torch.empty_like(qkv[:, 2], memory_format=torch.contiguous_format)
        if step.single:
            tensors = {
                "qkv": qkv,
                "decay": decay,
                "beta": beta,
                "states": self.states,
                "out": out,
                "rows": step.single_rows,
                "slots": step.single_slots,
            }
            launch(tensors, self.heads, self.head_dim, self.arch).run()
        for span in step.multi:
            rows = slice(span.first, span.last)
            state = self.states[span.slot]
            self._chunks(span, Span(qkv[rows], decay[rows], beta[rows], state, out[rows]))
        buffers["kda_out"] = out

    def _chunks(self, span: RequestSpan, rows: Span) -> None:
        recorded = delta_rule_chunks(rows, self.lower_bound, self.arch, is_verify=span.is_verify)
        if recorded is None:
            return
        samples = self.buffers["kda_proj"][span.first : span.last, : 3 * self.heads * self.head_dim]
        self.buffers.effects[span.slot, self.layer] = RowEffects(
            keys=recorded.keys,
            # Copies: the buffers are the next step's before the verdict is known.
            decays=rows.decay.clone(),
            corrections=recorded.corrections,
            samples=samples.clone(),
        )
