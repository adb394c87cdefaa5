"""The native residual mix against its definition in fp64, and torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdecode.kernels.attn_res import native
from kdecode.kernels.attn_res.torch_impl import mix
from kdecode.testing.compare import bit_equal

EPS = 1e-5


def _inputs(count: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count + rows + width)
    scales = torch.rand(count, rows, 1, generator=generator) * 8
    sources = (torch.randn(count, rows, width, generator=generator) * scales).bfloat16()
    return sources, torch.randn(width, generator=generator) / width**0.5


@pytest.mark.parametrize(
    ("count", "rows", "width"), [(1, 3, 16), (2, 1, 48), (5, 70, 528), (64, 2, 32)]
)
def test_mix(isa: str, count: int, rows: int, width: int) -> None:
    sources, weight = _inputs(count, rows, width)
    got = native.mix(sources, weight, EPS, isa)
    wide = sources.double()
    scores = (wide @ weight.double()) * (wide.square().mean(-1) + EPS).rsqrt()
    gold = (scores.softmax(0).unsqueeze(-1) * wide).sum(0)
    size = (scores.softmax(0).unsqueeze(-1) * wide.abs()).sum(0)
    bound = gold.abs() * 2.0**-8 + size * 1e-5
    assert bool(((got.double() - gold).abs() <= bound).all())
    assert bool(((mix(sources, weight, EPS).double() - gold).abs() <= bound).all())
    for row in range(rows):  # no row depends on the others
        bit_equal(
            native.mix(sources[:, row : row + 1].contiguous(), weight, EPS, isa)[0], got[row], "row"
        )


def test_what_does_not_fit_is_refused() -> None:
    sources, weight = _inputs(native.MAX_SNAPSHOTS + 2, 1, 16)
    with pytest.raises(ValueError, match="at most 63 snapshots"):
        native.mix(sources, weight, EPS)
    with pytest.raises(ValueError, match="its shape is"):
        native.mix(sources, weight[:8], EPS)
