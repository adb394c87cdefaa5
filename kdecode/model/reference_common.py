"""What the reference stages share: how numbers are rounded, products, RMSNorm, gated MLPs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.config import Activation
from kdecode.model.parameters import MlpParameters


@dataclass(frozen=True)
class Rounding:
    """How numbers are kept: the dtype of the arithmetic, and whether bf16 buffers are bf16."""

    name: str
    compute: torch.dtype
    is_rounded: bool

    def wide(self, x: Tensor) -> Tensor:
        """A stored tensor, in the dtype of the arithmetic."""
        return x.to(self.compute)

    def narrow(self, x: Tensor) -> Tensor:
        """A result at a rounding point."""
        return x.to(torch.bfloat16 if self.is_rounded else self.compute)


GOLD = Rounding("gold", torch.float64, is_rounded=False)
GOLD32 = Rounding("gold32", torch.float32, is_rounded=False)
ROUNDED = Rounding("rounded", torch.float32, is_rounded=True)


def linear(x: Tensor, weight: Tensor, rounding: Rounding) -> Tensor:
    """``x W^T``, rounded once. x [R, in], weight [out, in] -> [R, out]."""
    return rounding.narrow(rounding.wide(x) @ rounding.wide(weight).T)


def normalise(x: Tensor, weight: Tensor, eps: float, rounding: Rounding) -> Tensor:
    """RMSNorm over the last axis, wide: what is rounded later is left to the caller."""
    x = rounding.wide(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * rounding.wide(weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: Rounding) -> Tensor:
    """RMSNorm over the last axis; statistics and weight wide, rounded once. x [R, M] -> [R, M]."""
    return rounding.narrow(normalise(x, weight, eps, rounding))


def activate(gate: Tensor, up: Tensor, activation: Activation, rounding: Rounding) -> Tensor:
    """``silu(gate) * up``, or SiTU; rounded once. gate, up [R, F] -> [R, F]."""
    gate, up = rounding.wide(gate), rounding.wide(up)
    if activation.kind == "silu":
        return rounding.narrow(torch.nn.functional.silu(gate) * up)
    beta, bound = activation.beta, activation.linear_beta
    if beta is None or bound is None:
        raise ValueError(f"SiTU needs both of its bounds; beta={beta}, linear_beta={bound}.")
    bounded_gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return rounding.narrow(bounded_gate * (bound * torch.tanh(up / bound)))


def gated_mlp(x: Tensor, mlp: MlpParameters, activation: Activation, rounding: Rounding) -> Tensor:
    """``down(act(gate(x), up(x)))``. x [R, M] -> [R, M]."""
    gate = linear(x, mlp.gate_proj, rounding)
    up = linear(x, mlp.up_proj, rounding)
    return linear(activate(gate, up, activation, rounding), mlp.down_proj, rounding)
