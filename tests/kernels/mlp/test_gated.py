"""The native gated activation against torch in fp64."""

from __future__ import annotations

import pytest
import torch

from kdecode.config import Activation
from kdecode.kernels.common.activation import make_gated, torch_gated
from kdecode.kernels.common.matrix import Matrix

SITU = Activation("situ", 4.0, 25.0)


@pytest.mark.parametrize("matrix_format", ["rows", "tiles"])
@pytest.mark.parametrize("activation", [Activation("silu"), SITU], ids=["silu", "situ"])
@pytest.mark.parametrize(("rows", "width"), [(0, 16), (1, 48), (40, 528)])
def test_native_equals_torch(
    isa: str, matrix_format: str, activation: Activation, rows: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    # Both ends of the functions: gates that saturate, products that are tiny.
    product = (torch.randn(rows, 2 * width, generator=generator) * 12).bfloat16()
    weights = Matrix(matrix_format, 2 * width, 16, torch.empty(0))
    got = make_gated(activation, weights, isa)(product)
    assert got.shape == (rows, width)
    if matrix_format == "rows":
        gate, up = product.double().chunk(2, dim=-1)
    else:
        gate, up = product.double().view(rows, width // 16, 2, 16).unbind(2)
    if activation.kind == "silu":
        gold = gate * gate.sigmoid() * up
    else:
        gold = 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()
    gold = gold.reshape(rows, width)
    bound = gold.abs() * 2.0**-8 + 1e-30
    assert bool(((got.double() - gold).abs() <= bound).all())
    reference = torch_gated(activation, matrix_format)(product)
    assert bool(((reference.double() - gold).abs() <= bound).all())


def test_situ_without_its_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="both of its bounds"):
        make_gated(Activation("situ", 4.0), Matrix("rows", 32, 16, torch.empty(0)))
