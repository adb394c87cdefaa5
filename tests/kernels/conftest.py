"""Packed matrices made straight from the byte orders that ``native.h`` documents.

Written apart from `model/layout.py` on purpose: a mistake there cannot hide one in a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cute_twin
import pytest
import torch
from torch import Tensor

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.common.native import Pool, supported_isas

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class RandomMatrix:
    """A packed matrix and the numbers in it, exactly."""

    matrix: Matrix
    dense: Tensor  # [rows, cols] fp64


def _pad_rows(values: Tensor, fill: int) -> Tensor:
    missing = -values.shape[0] % 16
    return torch.cat([values, values.new_full((missing, values.shape[1]), fill)])


def _bf16(rows: int, cols: int, generator: torch.Generator) -> RandomMatrix:
    dense = torch.randn(rows, cols, generator=generator).to(torch.bfloat16)
    padded = _pad_rows(dense, 0)
    data = padded.view(-1, 16, cols // 2, 2).permute(0, 2, 1, 3).contiguous()
    return RandomMatrix(Matrix("tiles", rows, cols, data), dense.double())


def _bf16_in_12_bits(rows: int, cols: int, generator: torch.Generator) -> RandomMatrix:
    """About one weight in 250 is outside its tile's table: zeros, a subnormal, large numbers."""
    made = _bf16(rows, cols, generator)
    dense = made.dense.to(torch.bfloat16)
    odd = torch.rand(rows, cols, generator=generator) < 0.004
    odd_values = torch.tensor([0.0, -0.0, 1e-40, -3e6, 1e9, 5.0], dtype=torch.bfloat16)
    dense[odd] = odd_values[torch.arange(int(odd.sum())) % len(odd_values)]
    bits = _pad_rows(dense, 0).view(torch.int16).int() & 0xFFFF
    tiles, corrections = [], []
    for tile in bits.view(-1, 16, cols):
        high = tile >> 8
        table = high.flatten().bincount(minlength=256).argsort(descending=True, stable=True)[:16]
        blocks = torch.zeros(cols // 8, 192, dtype=torch.int32)
        first = len(corrections)
        for block in range(cols // 8):
            for line in range(4):
                for number in range(32):
                    weight = int(tile[number // 2, block * 8 + line * 2 + number % 2])
                    place = number // 8 * 16 + line % 2 * 8 + number % 8
                    found = (table == weight >> 8).nonzero().flatten().tolist()
                    if not found:
                        fix = block << 15 | line << 13 | number << 8 | weight >> 8
                        corrections.append(fix)
                    blocks[block, line // 2 * 64 + place] = weight & 0xFF
                    blocks[block, 128 + place] += (found or [7])[0] << 4 * (line // 2)
        numbers = torch.tensor([first, len(corrections) - first]).view(torch.uint8)
        padding = torch.zeros(32, dtype=torch.uint8)
        header = torch.cat([table.to(torch.uint8), numbers, padding])
        tiles.append(torch.cat([header, blocks.to(torch.uint8).flatten()]))
    fixes = torch.tensor(corrections, dtype=torch.int32) if corrections else None
    matrix = Matrix("tiles12", rows, cols, torch.stack(tiles), corrections=fixes)
    return RandomMatrix(matrix, dense.double())


def _mxfp4(
    rows: int, cols: int, generator: torch.Generator, scale_bytes: tuple[int, int]
) -> RandomMatrix:
    codes = torch.randint(0, 16, (rows, cols), dtype=torch.uint8, generator=generator)
    scales = torch.randint(
        scale_bytes[0], scale_bytes[1] + 1, (rows, cols // 32), generator=generator
    ).to(torch.uint8)
    values = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=torch.float64)[codes.long()]
    dense = values * torch.exp2(scales.double() - 127).repeat_interleave(32, dim=1)

    data = _nibbles(codes).view(-1, cols // 32, 256)
    packed_scales = _pad_rows(scales, 127).view(-1, 16, cols // 32).permute(0, 2, 1).contiguous()
    return RandomMatrix(Matrix("mxfp4_tiles", rows, cols, data, packed_scales), dense)


def _nibbles(codes: Tensor) -> Tensor:
    """Codes 0 to 15 [rows, cols] -> [tile, group, block, 64] bytes."""
    # columns: group, block of 8, nibble, parity; the nibbles of a 16-bit word from the low end up
    split = _pad_rows(codes, 0).view(-1, 16, codes.shape[1] // 32, 4, 4, 2).int()
    low, high = split[..., 0, :] | split[..., 1, :] << 4, split[..., 2, :] | split[..., 3, :] << 4
    pairs = torch.stack([low, high], dim=-1).to(torch.uint8)  # [tile, row, group, block, parity, 2]
    return pairs.permute(0, 2, 3, 1, 4, 5).flatten(3).contiguous()


def _integers(rows: int, cols: int, generator: torch.Generator, bits: int) -> RandomMatrix:
    """All codes that there are, -128 among them, and scales of both signs."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.randint(low, high, (rows, cols), generator=generator)
    scales = torch.randn(rows, cols // 32, generator=generator).to(torch.bfloat16)
    return _pack_integers(codes, scales, bits)


def _pack_integers(codes: Tensor, scales: Tensor, bits: int) -> RandomMatrix:
    """Whole numbers [rows, cols] and bf16 scales [rows, cols / 32]."""
    rows, cols = codes.shape
    dense = codes.double() * scales.double().repeat_interleave(32, dim=1)
    if bits == 8:
        pairs = _pad_rows(codes, 0).to(torch.int8).view(-1, 16, cols // 32, 16, 2)
        data = pairs.permute(0, 2, 3, 1, 4).contiguous().view(torch.uint8)
    else:
        data = _nibbles(codes & 15)
    packed_scales = _pad_rows(scales, 0).view(-1, 16, cols // 32).permute(0, 2, 1).contiguous()
    data = data.reshape(-1, cols // 32, bits * 64)
    kind = "int8_tiles" if bits == 8 else "int4_tiles"
    return RandomMatrix(Matrix(kind, rows, cols, data, packed_scales), dense)


@pytest.fixture
def random_matrix() -> Callable[..., RandomMatrix]:
    """random_matrix(format, rows, cols, seed=0, scale_bytes=(120, 130)) -> RandomMatrix."""

    def make(
        matrix_format: str,
        rows: int,
        cols: int,
        seed: int = 0,
        scale_bytes: tuple[int, int] = (120, 130),
    ) -> RandomMatrix:
        generator = torch.Generator().manual_seed(seed)
        if matrix_format == "tiles":
            return _bf16(rows, cols, generator)
        if matrix_format == "tiles12":
            return _bf16_in_12_bits(rows, cols, generator)
        if matrix_format in ("int8_tiles", "int4_tiles"):
            return _integers(rows, cols, generator, 8 if matrix_format == "int8_tiles" else 4)
        return _mxfp4(rows, cols, generator, scale_bytes)

    return make


@pytest.fixture
def integer_matrix() -> Callable[[Tensor, Tensor], RandomMatrix]:
    """integer_matrix(codes, scales) -> a matrix in "int8_tiles" with these numbers."""
    return lambda codes, scales: _pack_integers(codes, scales, 8)


@pytest.fixture(scope="session")
def pool() -> Pool:
    """One thread: on a busy machine a second one costs a time slice at every barrier."""
    return Pool(1)


@pytest.fixture(scope="session")
def two_threads() -> Pool:
    """For the tests whose point it is, whatever the machine has."""
    return Pool(2, can_oversubscribe=True)


@pytest.fixture(params=supported_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cute_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches in CuTe DSL run on the GPU, and where there is none as `cute_twin` imitates them."""
    cute_twin.install(monkeypatch)
