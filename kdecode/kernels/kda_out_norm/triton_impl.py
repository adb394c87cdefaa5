"""kda_out_norm in Triton: one launch, behind torch's product with g_b where the gate has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.triton_launch import Launch, divide_up, tensor_for
from kdecode.kernels.common.triton_ops import sigmoid
from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.linear.product import Linear, make_linear

# Rows that one program goes through.
_BLOCK_T = 8


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run: none is known."""
    return []


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed KDA layer."""
    kda = problem.config.kda
    product = None
    if weights.g_b is not None:
        product = make_linear(weights.g_b, buffers.products)
    return _OutNorm(
        weight=tensor_for(weights.o_norm, torch.float32, (kda.head_dim,), name="The KDA o_norm"),
        eps=problem.config.rms_eps,
        heads=kda.num_heads,
        rank=kda.width if weights.g_b is None else weights.g_b.cols,
        product=product,
        buffers=buffers,
    )


@dataclass(frozen=True)
class _OutNorm:
    weight: Tensor  # [V] fp32
    eps: float
    heads: int
    rank: int  # columns of kda_proj that the gate has
    product: Linear | None
    buffers: Buffers

    def run(self) -> None:
        dim = self.weight.shape[0]
        width = self.heads * dim
        proj, source = self.buffers["kda_proj"], self.buffers["kda_out"]
        gate = proj[:, 3 * width : 3 * width + self.rank]
        if self.product is not None:
            gate = self.product(gate)
        rows = proj.shape[0]
        out = proj.new_empty(rows, width)
        Launch(
            _gated_norm,
            (self.heads, divide_up(rows, _BLOCK_T)),
            {"source": source, "gate": gate, "weight": self.weight, "out": out, "rows": rows},
            {"HEADS": self.heads, "DIM": dim, "GATE_STRIDE": gate.stride(0), "EPS": self.eps}
            | {"BLOCK_T": _BLOCK_T, "BLOCK_D": triton.next_power_of_2(dim)},
        ).run()
        self.buffers["attn_out"] = out


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(
    source,
    gate,
    weight,
    out,
    rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (heads, blocks of rows)."""
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)
    channel = (tl.program_id(0) * DIM + d)[None, :]
    inside = (t < rows) & (d < DIM)[None, :]
    x = tl.load(source + t * (HEADS * DIM) + channel, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + t * GATE_STRIDE + channel, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + EPS)
    y = x * factor[:, None] * tl.load(weight + d, mask=d < DIM, other=0.0)[None, :] * sigmoid(z)
    tl.store(out + t * (HEADS * DIM) + channel, y.to(tl.bfloat16), mask=inside)
