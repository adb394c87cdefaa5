"""The gated activation in torch: fp32 arithmetic, one rounding to bf16 at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kdecode.config import Activation
from kdecode.kernels.common.matrix import TILE_ROWS, Matrix

GatedActivation = Callable[[Tensor], Tensor]


def make_gated(activation: Activation, gate_up: Matrix) -> GatedActivation:
    """A function of the product of ``gate_up`` [R, 2F] bf16, in its row order, -> [R, F]."""
    if activation.kind == "silu":
        return lambda product: _silu(*_halves(product, gate_up.format))
    beta, bound = activation.beta, activation.linear_beta
    if beta is None or bound is None:
        raise ValueError(f"SiTU needs both of its bounds; the configuration has {activation}.")
    return lambda product: _situ(*_halves(product, gate_up.format), beta=beta, bound=bound)


def _halves(product: Tensor, matrix_format: str) -> tuple[Tensor, Tensor]:
    """Gate and up [R, ...]: one after the other in "rows", 16 and 16 alternating in tiles."""
    if matrix_format == "rows":
        gate, up = product.chunk(2, dim=-1)
        return gate, up
    width = product.shape[-1] // (2 * TILE_ROWS)
    pairs = product.view(product.shape[0], width, 2, TILE_ROWS)
    return pairs[:, :, 0], pairs[:, :, 1]


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    product = torch.nn.functional.silu(gate.float()).mul_(up)
    return product.to(torch.bfloat16).flatten(1)


def _situ(gate: Tensor, up: Tensor, *, beta: float, bound: float) -> Tensor:
    gate, up = gate.float(), up.float()
    bounded = (gate / beta).tanh_().mul_(gate.sigmoid())
    linear = (up / bound).tanh_()
    return bounded.mul_(linear).mul_(beta * bound).to(torch.bfloat16).flatten(1)
