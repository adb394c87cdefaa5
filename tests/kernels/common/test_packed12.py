"""Lossless 12-bit packing: the same bits, the very same sums, and when it is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.matrix import pack_tiles, to_rows
from kdecode.kernels.common.native import MAX_ROWS, tiles
from kdecode.kernels.common.packed12 import pack12
from kdecode.kernels.linear.native import tiles_linear, unpack_tiles
from kdecode.kernels.linear.unpack import unpack_rows


def weights(rows: int, cols: int, num_odd: int = 0) -> torch.Tensor:
    """Normal, but for some that no table of their tile can have."""
    generator = torch.Generator().manual_seed(rows * cols)
    weight = (torch.randn(rows, cols, generator=generator) / 40).to(torch.bfloat16)
    odd = torch.tensor([float("nan"), float("inf"), 1e-39, -2e37, 3e12], dtype=torch.bfloat16)
    places = torch.randperm(rows * cols, generator=generator)[:num_odd]
    weight.view(-1)[places] = odd[torch.arange(num_odd) % len(odd)]
    return weight


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


@pytest.mark.parametrize(
    ("rows", "cols", "num_odd"), [(16, 32, 0), (33, 1024, 9), (48, 1032, 15), (160, 512, 30)]
)
def test_every_way_back_gives_the_same_bits(isa, rows, cols, num_odd):
    weight = weights(rows, cols, num_odd)
    packed = pack12(pack_tiles(weight), isa)
    assert packed is not None
    assert (packed.format, packed.rows, packed.cols) == ("tiles12", rows, cols)
    assert torch.equal(bits(to_rows(packed)), bits(weight))
    assert torch.equal(bits(unpack_rows(packed)), bits(weight))
    out = torch.full((rows, cols), float("nan"), dtype=torch.bfloat16)
    unpack_tiles(packed, out, isa)
    assert torch.equal(bits(out), bits(weight))
    fixes = 0 if packed.corrections is None else packed.corrections.numel()
    assert (fixes > 0) == (num_odd > 0)
    assert packed.num_bytes == -(-rows // 16) * (64 + cols * 24) + 4 * fixes


@pytest.mark.parametrize(("rows", "cols"), [(33, 1024), (48, 1032), (16, 4096)])
def test_sums_are_those_of_plain_tiles(isa, rows, cols):
    weight = weights(rows, cols)
    # Finite, and outside any table: sums with a NaN would be equal whatever was done.
    weight[5, 3], weight[rows - 1, cols - 1], weight[0, 0] = 2.0**60, -(2.0**-90), 2.0**50
    plain = pack_tiles(weight)
    packed = pack12(plain, isa)
    assert packed is not None
    assert packed.corrections is not None
    x = torch.randn(MAX_ROWS, cols, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for num_rows in range(1, MAX_ROWS + 1):
        sums = []
        for matrix in (plain, packed):
            y = torch.full((-(-rows // 16), num_rows, 16), float("nan"))
            _native.tile_dot(isa, tiles(matrix), num_rows, x.data_ptr(), y.data_ptr())
            sums.append(y.view(torch.int32))
        assert torch.equal(*sums)


@pytest.mark.parametrize("num_rows", [1, 8, 9, 40, 65])
def test_products_of_the_standard_forward_are_those_of_plain_tiles(isa, num_rows):
    plain = pack_tiles(weights(200, 256))
    packed = pack12(plain, isa)
    assert packed is not None
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(num_rows, 256, generator=generator).to(torch.bfloat16)
    expected = tiles_linear(x, plain, torch.float32, isa)
    assert torch.equal(tiles_linear(x, packed, torch.float32, isa), expected)


def test_parts_of_a_matrix_find_their_own_corrections():
    weight = weights(96, 512, 20)
    packed = pack12(pack_tiles(weight))
    assert packed is not None
    for first in (0, 1):
        part = replace(packed, rows=48, data=packed.data[first::2])
        expected = weight.view(3, 2, 16, 512)[:, first].reshape(48, 512)
        assert torch.equal(bits(to_rows(part)), bits(expected))


def test_what_packs_badly_is_left_alone():
    generator = torch.Generator().manual_seed(3)
    spread = torch.randint(-(2**15), 2**15, (32, 256), generator=generator, dtype=torch.int16)
    assert pack12(pack_tiles(spread.view(torch.bfloat16))) is None
    assert pack12(pack_tiles(weights(32, 36))) is None  # not a multiple of 8
    assert pack12(pack_tiles(weights(32, 8))) is None  # the headers weigh more than is saved
    with pytest.raises(ValueError, match="Only bf16 tiles"):
        pack12(pack12(pack_tiles(weights(32, 64))))


def test_a_difference_is_found(isa):
    plain = pack_tiles(weights(64, 64, 2))
    packed = pack12(plain, isa)
    assert packed is not None
    assert _native.differing_tiles(isa, tiles(packed), tiles(plain)) == 0
    packed.data[1, 100] ^= 1
    packed.data[3, 64 + 128 + 5] ^= 0x10
    assert _native.differing_tiles(isa, tiles(packed), tiles(plain)) == 2


def test_a_wrong_packing_is_refused(monkeypatch):
    pack = _native.pack12

    def packs_wrong(source, out, max_corrections):
        corrections = pack(source, out, max_corrections)
        return [*corrections[:-1], corrections[-1] ^ 1]

    monkeypatch.setattr(_native, "pack12", packs_wrong)
    with pytest.raises(RuntimeError, match="1 of 4 packed tiles"):
        pack12(pack_tiles(weights(64, 512, 13)))
