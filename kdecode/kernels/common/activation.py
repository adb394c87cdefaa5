"""The gated activation: fp32 arithmetic, one rounding to bf16 at the end.

Native on a CPU, in torch's OpenMP threads; torch operators elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kdecode.config import Activation
from kdecode.kernels.common.matrix import ROW_FORMATS, TILE_ROWS, Matrix

GatedActivation = Callable[[Tensor], Tensor]


def make_gated(activation: Activation, gate_up: Matrix, isa: str | None = None) -> GatedActivation:
    """A function of the product of ``gate_up`` [R, 2F] bf16, in its row order, -> [R, F].

    isa: instruction set of the native one; None is the best.
    """
    beta, bound = activation.beta, activation.linear_beta
    if activation.kind == "situ" and (beta is None or bound is None):
        raise ValueError(f"SiTU needs both of its bounds; the configuration has {activation}.")
    if gate_up.data.device.type == "cpu":
        return _native_gated(activation, gate_up.format, isa)
    return torch_gated(activation, gate_up.format)


def torch_gated(activation: Activation, matrix_format: str) -> GatedActivation:
    """In torch operators."""
    beta, bound = activation.beta, activation.linear_beta
    if activation.kind == "silu" or beta is None or bound is None:
        return lambda product: _silu(*_halves(product, matrix_format))
    return lambda product: _situ(*_halves(product, matrix_format), beta=beta, bound=bound)


def sigmoid_(x: Tensor) -> Tensor:
    """In place, fp32; an element's bits do not depend on where in the tensor it stands.

    torch's own sigmoid has another exponential for the elements behind the last whole vector, so
    that a row of few columns would depend on the rows beside it. Rows of multiples of 32 columns
    have none behind it.
    """
    return x.neg_().exp_().add_(1.0).reciprocal_()


def _native_gated(activation: Activation, matrix_format: str, isa: str | None) -> GatedActivation:
    from kdecode.kernels.common import _native
    from kdecode.kernels.common.native import ptr

    isa = isa or _native.detect_isa()
    is_situ, is_interleaved = activation.kind == "situ", matrix_format not in ROW_FORMATS
    bounds = (activation.beta or 0.0, activation.linear_beta or 0.0)

    def run(product: Tensor) -> Tensor:
        rows, width = product.shape[0], product.shape[1] // 2
        out = torch.empty(rows, width, dtype=torch.bfloat16)
        address = ptr(product, torch.bfloat16, (rows, 2 * width))
        _native.gated(isa, address, out.data_ptr(), rows, width, is_interleaved, is_situ, *bounds)
        return out

    return run


def _halves(product: Tensor, matrix_format: str) -> tuple[Tensor, Tensor]:
    """Gate and up [R, ...]: one after the other in rows, 16 and 16 alternating in tiles."""
    if matrix_format in ROW_FORMATS:
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
