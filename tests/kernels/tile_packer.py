"""The packer of the tests: tiles from the byte orders that native.h documents.

Written apart from `model/layout.py` and `common/matrix.py`, so that a mistake there cannot hide one
in a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.kernels.common.matrix import TILE_ROWS, Matrix
from kdecode.model.parameters import ExpertWeight, Mxfp4


def pack(weight: ExpertWeight) -> Matrix:
    """Canonical weight -> tiles."""
    if isinstance(weight, Mxfp4):
        return _pack_mxfp4(weight)
    rows, cols = weight.shape
    padded = _pad_rows(weight.to(torch.bfloat16), 0)
    data = padded.view(-1, TILE_ROWS, cols // 2, 2).permute(0, 2, 1, 3).contiguous()
    return Matrix("tiles", rows, cols, data)


def _pack_mxfp4(weight: Mxfp4) -> Matrix:
    rows, cols = weight.shape
    codes = torch.stack([weight.packed & 15, weight.packed >> 4], dim=-1).view(rows, cols)
    # columns: group, block of 8, nibble, parity; the nibbles of a 16-bit word from the low end up
    split = _pad_rows(codes, 0).view(-1, TILE_ROWS, cols // 32, 4, 4, 2).int()
    low = split[..., 0, :] | split[..., 1, :] << 4
    high = split[..., 2, :] | split[..., 3, :] << 4
    words = torch.stack([low, high], dim=-1).to(torch.uint8)
    data = words.permute(0, 2, 3, 1, 4, 5).reshape(-1, cols // 32, 256).contiguous()
    scales = _pad_rows(weight.scale, 127).view(-1, TILE_ROWS, cols // 32).permute(0, 2, 1)
    return Matrix("mxfp4_tiles", rows, cols, data, scales.contiguous())


def _pad_rows(values: Tensor, fill: int) -> Tensor:
    missing = -values.shape[0] % TILE_ROWS
    return torch.cat([values, values.new_full((missing, values.shape[1]), fill)])


def by_turns(gate: Tensor, up: Tensor) -> Tensor:
    """16 gate rows, 16 up rows, by turns."""
    cols = gate.shape[1]
    blocks = [part.reshape(-1, TILE_ROWS, cols) for part in (gate, up)]
    return torch.stack(blocks, dim=1).reshape(-1, cols)
