"""kda_gate in Triton: torch's product with f_b, then one launch for all that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.triton_delta import log_decay
from kdecode.kernels.common.triton_launch import Launch, tensor_for
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
    return _Gate(
        product=make_linear(weights.f_b, buffers.products),
        rank=weights.f_b.cols,
        dt_bias=tensor_for(weights.dt_bias, torch.float32, (kda.width,), name="dt_bias"),
        decay_scale=tensor_for(weights.decay_scale, torch.float32, (kda.num_heads,), name="A"),
        heads=kda.num_heads,
        lower_bound=kda.gate_lower_bound,
        buffers=buffers,
    )


@dataclass(frozen=True)
class _Gate:
    product: Linear
    rank: int
    dt_bias: Tensor  # [D] fp32
    decay_scale: Tensor  # [H] fp32
    heads: int
    lower_bound: float | None
    buffers: Buffers

    def run(self) -> None:
        proj = self.buffers["kda_proj"]
        rows, columns = proj.shape
        f = self.product(proj[:, columns - self.heads - self.rank : columns - self.heads])
        dim = self.dt_bias.shape[0] // self.heads
        decay = torch.empty(rows, self.heads, dim, dtype=torch.float32, device=proj.device)
        beta = torch.empty(rows, self.heads, dtype=torch.float32, device=proj.device)
        arguments = {"f": f, "proj": proj, "dt_bias": self.dt_bias, "scale": self.decay_scale}
        Launch(
            _gates,
            (self.heads, triton.cdiv(rows, _BLOCK_T)),
            arguments | {"decay": decay, "beta": beta, "rows": rows},
            {"HEADS": self.heads, "DIM": dim, "COLUMNS": columns, "BLOCK_T": _BLOCK_T}
            | {"BLOCK_D": triton.next_power_of_2(dim), "LOWER_BOUND": self.lower_bound},
        ).run()
        self.buffers["kda_decay"], self.buffers["kda_beta"] = decay, beta


@triton.jit(do_not_specialize=["rows"])
def _gates(
    f,
    proj,
    dt_bias,
    scale,
    decay,
    beta,
    rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
):
    """Grid: (heads, blocks of rows)."""
    head = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    in_t, in_d = t < rows, d < DIM
    at = t.to(tl.int64)[:, None] * (HEADS * DIM) + (head * DIM + d)[None, :]
    inside = in_t[:, None] & in_d[None, :]
    z = tl.load(f + at, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(dt_bias + head * DIM + d, mask=in_d, other=0.0)[None, :]
    tl.store(decay + at, log_decay(z, tl.load(scale + head), LOWER_BOUND), mask=inside)
    column = COLUMNS - HEADS + head
    b = tl.load(proj + t.to(tl.int64) * COLUMNS + column, mask=in_t, other=0.0)
    tl.store(beta + t * HEADS + head, sigmoid(b.to(tl.float32)), mask=in_t)
