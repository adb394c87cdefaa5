"""kda_recurrence in torch: one token a request in few operators, more through `chunk.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.kernels.common.step import RowEffects
from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.kda_recurrence.chunk import delta_rule_chunks, token_rows

L2_EPS = 1e-6
# States of this size are updated in their slots, one request after the other; smaller ones are
# gathered and updated together, which takes fewer operators but moves each state twice more.
_IN_PLACE_BYTES = 512 * 1024


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: object, buffers: Buffers) -> Prepared:
    assert problem.layer is not None
    kda = problem.config.kda
    states = buffers.caches.recurrent[problem.layer]
    return _Recurrence(
        problem.layer, kda.num_heads, kda.head_dim, kda.gate_lower_bound, states, buffers
    )


@dataclass(frozen=True)
class _Recurrence:
    layer: int
    heads: int
    head_dim: int
    lower_bound: float | None
    states: Tensor  # [slots, H, K, V] fp32
    buffers: Buffers

    def run(self) -> None:
        buffers, step = self.buffers, self.buffers.step
        qkv = buffers["kda_qkv"].float().view(-1, 3, self.heads, self.head_dim)
        g, beta = buffers["kda_decay"], buffers["kda_beta"]
        scale = qkv[:, :2].square().sum(-1, keepdim=True).add_(L2_EPS).rsqrt_()
        scale[:, 0].mul_(self.head_dim**-0.5)
        qkv[:, :2].mul_(scale)
        if not step.multi:
            buffers["kda_out"] = self._single(qkv, g, beta).to(torch.bfloat16)
            return
        out = torch.empty_like(qkv[:, 2], dtype=torch.bfloat16)
        if step.single:
            rows = step.single_rows
            out.index_copy_(0, rows, self._single(qkv[rows], g[rows], beta[rows]).to(out.dtype))
        for span in step.multi:
            rows = slice(span.first, span.last)
            state = self.states[span.slot]
            out[rows], corrections = delta_rule_chunks(
                qkv[rows],
                g[rows],
                beta[rows],
                state=state.clone() if span.is_verify else state,
                lower_bound=self.lower_bound,
            )
            if span.is_verify:
                self.buffers.effects[span.slot, self.layer] = RowEffects(
                    keys=qkv[rows, 1],
                    decays=g[rows],
                    corrections=token_rows(corrections, self.heads, span.num_rows),
                    # A copy: rows of prompts in the same step need not wait for the verdict.
                    samples=buffers["kda_proj"][rows, : 3 * self.heads * self.head_dim].clone(),
                )
        buffers["kda_out"] = out

    def _single(self, qkv: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """One token of each request: qkv [R, 3, H, K], g [R, H, K], beta [R, H] -> [R, H, V]."""
        step = self.buffers.step
        kept = g.exp()
        state_bytes = self.states[0].numel() * self.states.element_size()
        if state_bytes >= _IN_PLACE_BYTES or len(step.single) == 1:
            outs = [
                delta_rule_step(qkv[row], kept[row], beta[row], self.states[span.slot])
                for row, span in enumerate(step.single)
            ]
            return torch.stack(outs)
        states = self.states.index_select(0, step.single_slots)
        out = delta_rule_step(
            qkv.transpose(0, 1).flatten(1, 2),
            kept.flatten(0, 1),
            beta.flatten(),
            states.flatten(0, 1),
        )
        self.states.index_copy_(0, step.single_slots, states)
        return out.view(-1, self.heads, self.head_dim)


def delta_rule_step(qkv: Tensor, kept: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token. qkv [3, H, K], kept (e^g) [H, K], beta [H] -> [H, V]; state [H, K, V] in place.

    Both read-outs use the state before the update: o = q^T S' = (q e^g)^T S + <q, k> u.
    """
    q, k, v = qkv.unbind(0)
    reads = torch.bmm((qkv[:2] * kept).transpose(0, 1), state)  # [H, 2, V]: q, k
    correction = (v - reads[:, 1]).mul_(beta.unsqueeze(-1))
    state.mul_(kept.unsqueeze(-1)).addcmul_(k.unsqueeze(-1), correction.unsqueeze(1))
    overlap = (q * k).sum(-1, keepdim=True)
    return torch.addcmul(reads[:, 0], overlap, correction)
