"""Rounding to integers: the values, what a block scheme guarantees, and the way back from tiles."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kdecode.kernels.common.integers import dequantise_integers, quantise_tiles, round_rows
from kdecode.kernels.common.matrix import INTEGER_BITS, MatrixFormat, pack_tiles, to_rows

GGUF_TYPES = {8: gguf.GGMLQuantizationType.Q8_0, 4: gguf.GGMLQuantizationType.Q4_0}


def _weights(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_those_of_llama_cpps_formats_but_at_ties_and_scales(bits: int) -> None:
    weights = _weights(64, 256)
    codes, scales = round_rows(weights, bits)
    ours = codes.float().view(64, -1, 32) * scales.float().unsqueeze(-1)
    blocks = gguf.quantize(weights.float().numpy(), GGUF_TYPES[bits])
    theirs = torch.from_numpy(gguf.dequantize(blocks, GGUF_TYPES[bits])).view(64, -1, 32)
    # Scales differ by the rounding of bf16, 2^-9, so that few codes do, and those by one.
    step = scales.float().abs().unsqueeze(-1)
    assert ((ours - theirs).abs() <= step * (1 + 2.0**-7 * 2 ** (bits - 1))).all()
    assert ((ours - theirs).abs() > 0.5 * step).float().mean() < 0.2
    exact = weights.float().view(64, -1, 32)
    error, theirs_error = ((x - exact).norm() / exact.norm() for x in (ours, theirs))
    assert error < 1.03 * theirs_error


def test_a_group_of_zeros_and_the_ends_of_the_range() -> None:
    weights = torch.zeros(2, 64, dtype=torch.bfloat16)
    weights[0, 3], weights[0, 4], weights[1, 40] = 1.0, -1.0, 2.0
    codes, scales = round_rows(weights, 4)
    assert (codes[0, 3], codes[0, 4], codes[1, 40]) == (-8, 7, -8)
    assert torch.equal(scales, torch.tensor([[-0.125, 0], [0, -0.25]]).bfloat16())
    codes, scales = round_rows(weights, 8)
    assert (codes[0, 3], codes[0, 4], codes[1, 40]) == (127, -127, 127)
    assert codes[:, 41:].abs().sum() == 0


@pytest.mark.parametrize("target", INTEGER_BITS)
def test_tiles_hold_the_rounded_rows(target: MatrixFormat) -> None:
    weights = _weights(37, 96)
    matrix = quantise_tiles(pack_tiles(weights), target)
    assert matrix is not None
    codes, scales = round_rows(weights, INTEGER_BITS[target])
    wanted = codes.float().view(37, -1, 32) * scales.float().unsqueeze(-1)
    assert torch.equal(dequantise_integers(matrix), wanted.view(37, 96).bfloat16())
    assert torch.equal(to_rows(matrix), dequantise_integers(matrix))
    # Bits a weight, of 48 rows: 8.5 and 4.5, as q8_0 and q4_0.
    assert matrix.num_bytes * 8 / (48 * 96) == INTEGER_BITS[target] + 0.5
    assert np.isfinite(matrix.data.numpy()).all()


def test_what_cannot_be_rounded() -> None:
    assert quantise_tiles(pack_tiles(_weights(16, 48)), "int8_tiles") is None
    with pytest.raises(ValueError, match="tiles12 is not one of int8_tiles, int4_tiles"):
        quantise_tiles(pack_tiles(_weights(16, 64)), "tiles12")
    matrix = quantise_tiles(pack_tiles(_weights(16, 64)), "int8_tiles")
    assert matrix is not None
    with pytest.raises(ValueError, match="this matrix is in int8_tiles"):
        quantise_tiles(matrix, "int8_tiles")
