"""MXFP4: the code table, exact dequantising, rounding of `pack`."""

from __future__ import annotations

import pytest
import torch

from kdecode.model.mxfp4 import (
    code_values,
    dequantise,
    pack,
    pack_codes,
    unpack_codes,
)
from kdecode.model.parameters import Mxfp4

VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.mark.parametrize(("scale", "factor"), [(127, 1.0), (128, 2.0), (126, 0.5), (120, 2**-7)])
def test_every_code(scale: int, factor: float) -> None:
    codes = torch.arange(32, dtype=torch.uint8).view(1, 32) % 16
    weight = Mxfp4(pack_codes(codes), torch.full((1, 1), scale, dtype=torch.uint8))
    expected = torch.tensor([VALUES * 2]) * factor
    out = dequantise(weight)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out.float(), expected)
    assert torch.equal(torch.signbit(out), torch.signbit(expected))


def test_the_low_nibble_is_the_even_column() -> None:
    packed = torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)
    assert unpack_codes(packed).tolist() == [[1, 2, 0, 15]]
    assert torch.equal(pack_codes(unpack_codes(packed)), packed)


@pytest.mark.parametrize("scale", [1, 252])
def test_the_ends_of_the_scales_are_exact_in_bf16(scale: int) -> None:
    codes = torch.arange(32, dtype=torch.uint8).view(1, 32) % 16
    weight = Mxfp4(pack_codes(codes), torch.full((1, 1), scale, dtype=torch.uint8))
    exact = code_values()[codes.int()].double() * 2.0 ** (scale - 127)
    assert torch.equal(dequantise(weight).double(), exact)


def test_pack_gives_back_what_it_can_hold() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (7, 96), generator=generator, dtype=torch.uint8)
    codes[:, ::32] = 7  # each group has its largest code, so that the scale is unique
    scale = torch.randint(90, 140, (7, 3), generator=generator, dtype=torch.uint8)
    weight = Mxfp4(pack_codes(codes), scale)
    again = pack(dequantise(weight))
    assert torch.equal(again.packed, weight.packed)
    assert torch.equal(again.scale, weight.scale)


def test_pack_rounds_to_the_nearest_value() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    packed = pack(weight)
    scales = 2.0 ** (packed.scale.double() - 127).repeat_interleave(32, dim=1)
    options = code_values().double() * scales.unsqueeze(-1)  # [16, 64, 16]
    best = (options - weight.unsqueeze(-1)).abs().amin(-1)
    assert torch.equal((dequantise(packed).double() - weight).abs(), best)
    # The scale is the smallest one that clips nothing.
    largest = weight.view(16, 2, 32).abs().amax(-1)
    limit = 6 * 2.0 ** (packed.scale.double() - 127)
    assert (largest <= limit).all()
    assert (largest > limit / 2).all()


def test_pack_rounds_ties_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    weight = torch.zeros(1, 32)
    weight[0, : len(ties)] = torch.tensor(ties)
    weight[0, 8 : 8 + len(ties)] = -torch.tensor(ties)
    weight[0, 31] = 6.0
    out = dequantise(pack(weight)).float()[0]
    assert out[: len(ties)].tolist() == expected
    assert out[8 : 8 + len(ties)].tolist() == [-value for value in expected]


def test_pack_of_zeros_and_of_what_it_cannot_hold() -> None:
    zeros = pack(torch.zeros(2, 32))
    assert not dequantise(zeros).any()
    assert (zeros.scale == 127).all()
    with pytest.raises(ValueError, match="multiple of 32 columns; there are 48"):
        pack(torch.zeros(2, 48))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or infinity"):
            pack(torch.full((1, 32), bad))
    with pytest.raises(ValueError, match="scale bytes from"):
        pack(torch.full((1, 32), 1e-45, dtype=torch.float64))
