"""kda_recurrence in torch: one token a request in few operators, more in the chunked form.

That is the native one for a prompt on a CPU, else `chunk.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.kernels.common.matrix import TILE_ROWS
from kdecode.kernels.common.step import RequestSpan, RowEffects
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
        layer=problem.layer,
        heads=kda.num_heads,
        head_dim=kda.head_dim,
        lower_bound=kda.gate_lower_bound,
        states=states,
        is_native=_is_native(states),
        buffers=buffers,
    )


def _is_native(states: Tensor) -> bool:
    """Whether there is a native chunked form for these states [slots, H, K, V]."""
    return states.device.type == "cpu" and states.shape[-1] % TILE_ROWS == 0


@dataclass(frozen=True)
class _Recurrence:
    layer: int
    heads: int
    head_dim: int
    lower_bound: float | None
    states: Tensor  # [slots, H, K, V] fp32
    is_native: bool  # prompts
    buffers: Buffers

    def run(self) -> None:
        buffers, step = self.buffers, self.buffers.step
        qkv = buffers["kda_qkv"].view(-1, 3, self.heads, self.head_dim)
        g, beta = buffers["kda_decay"], buffers["kda_beta"]
        if not step.multi:
            buffers["kda_out"] = self._single(unit(qkv), g, beta).to(torch.bfloat16)
            return
        out = torch.empty_like(qkv[:, 2])
        if step.single:
            rows = step.single_rows
            single = self._single(unit(qkv[rows]), g[rows], beta[rows])
            out.index_copy_(0, rows, single.to(out.dtype))
        for span in step.multi:
            rows = slice(span.first, span.last)
            run = self._verify if span.is_verify else self._prompt
            run(span, qkv[rows], g[rows], beta[rows], out[rows])
        buffers["kda_out"] = out

    def _prompt(self, span: RequestSpan, qkv: Tensor, g: Tensor, beta: Tensor, out: Tensor) -> None:
        """Rows of one request, which move its state. Like `_verify`, fills ``out`` [T, H, V]."""
        state = self.states[span.slot]
        if self.is_native:
            from kdecode.kernels.kda_recurrence import native

            isa = self.buffers.products.isa
            native.delta_rule_chunks(qkv, g, beta, state=state, out=out, isa=isa)
            return
        bound = self.lower_bound
        read, _ = delta_rule_chunks(unit(qkv), g, beta, state=state, lower_bound=bound)
        out.copy_(read)

    def _verify(self, span: RequestSpan, qkv: Tensor, g: Tensor, beta: Tensor, out: Tensor) -> None:
        """Rows of one request that only read its state; what each would do to it is noted."""
        qkv, state, bound = unit(qkv), self.states[span.slot].clone(), self.lower_bound
        read, corrections = delta_rule_chunks(qkv, g, beta, state=state, lower_bound=bound)
        out.copy_(read)
        samples = self.buffers["kda_proj"][span.first : span.last, : 3 * self.heads * self.head_dim]
        self.buffers.effects[span.slot, self.layer] = RowEffects(
            keys=qkv[:, 1],
            decays=g,
            corrections=token_rows(corrections, self.heads, span.num_rows),
            # A copy: rows of prompts in the same step need not wait for the verdict.
            samples=samples.clone(),
        )

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


def unit(qkv: Tensor) -> Tensor:
    """qkv [R, 3, H, K] bf16 -> fp32, q and k normalised."""
    qkv = qkv.float()
    scale = qkv[:, :2].square().sum(-1, keepdim=True).add_(L2_EPS).rsqrt_()
    scale[:, 0].mul_(qkv.shape[-1] ** -0.5)
    qkv[:, :2].mul_(scale)
    return qkv
