"""Gated MLPs as matrices: gate beside up in tiles, and the experts of a layer in one block.

Owns how gate and up share a matrix and where the experts of a layer lie; how a bf16 matrix becomes
one of the trunk's format is the caller's. Packing is exact, but in integer formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kdecode.config import MXFP4_GROUP
from kdecode.kernels.common.expert_stack import ExpertStack
from kdecode.kernels.common.matrix import (
    GROUP_BYTES,
    TILE_ROWS,
    Matrix,
    empty_huge,
    num_tiles,
    pack12_shape,
    pack_mxfp4_rows,
    pack_mxfp4_tiles,
    pack_rows,
    pack_tiles,
)
from kdecode.model.parameters import ExpertWeight, MoeParameters, Mxfp4

# How MXFP4 experts are stored, whatever the trunk's format is.
Mxfp4Format = Literal["mxfp4_tiles", "mxfp4_rows"]
# Gate_up and down.
ExpertMatrices = tuple[Matrix, Matrix]


@dataclass(frozen=True)
class ExpertPacker:
    """is_coded: experts are MXFP4, else bf16. pack: a matrix in "tiles" in the trunk's format, in
    memory that may be given."""

    is_coded: bool
    trunk_format: str
    mxfp4: Mxfp4Format
    pack: Callable[[Matrix, Tensor | None], Matrix]

    def experts(self, p: MoeParameters) -> tuple[ExpertMatrices, ...]:
        """The experts of a layer, which share one block of memory for each kind of matrix."""
        count = len(p.w1)
        width, side = p.w1[0].shape
        if self.mxfp4 == "mxfp4_rows" if self.is_coded else self.trunk_format == "rows":
            stack = ExpertStack.empty("mxfp4_rows" if self.is_coded else "rows", count, width, side)
            for pair, w1, w3, w2 in zip(stack.matrices(), p.w1, p.w3, p.w2, strict=True):
                _into_rows([w1, w3], pair[0])
                _into_rows([w2], pair[1])
            return tuple(stack.matrices())
        if not self.is_coded and self.trunk_format != "tiles":
            return self._packed(p)
        gate_up = self._block(count, pair_tiles(width), side)
        down = self._block(count, num_tiles(side), width)
        experts = []
        for expert, (w1, w3, w2) in enumerate(zip(p.w1, p.w3, p.w2, strict=True)):
            data, scales = (None if part is None else part[expert] for part in gate_up)
            assert data is not None
            below = _into(w2, *(None if part is None else part[expert] for part in down))
            experts.append((interleaved(w1, w3, data, scales), below))
        return tuple(experts)

    def _packed(self, p: MoeParameters) -> tuple[ExpertMatrices, ...]:
        """bf16 experts in 12 bits a weight or in integers; what does not pack well in "tiles"."""
        count = len(p.w1)
        width, side = p.w1[0].shape
        gate_up: Sequence[Tensor | None] = [None] * count
        down: Sequence[Tensor | None] = [None] * count
        if self.trunk_format == "tiles12":
            shapes = pack12_shape(2 * width, side), pack12_shape(side, width)
            gate_up, down = (list(empty_huge((count, *shape), torch.uint8)) for shape in shapes)
        experts = []
        for expert, (w1, w3, w2) in enumerate(zip(p.w1, p.w3, p.w2, strict=True)):
            data = torch.empty(pair_tiles(width), side // 2, TILE_ROWS, 2, dtype=torch.bfloat16)
            plain = interleaved(w1, w3, data, None), pack_tiles(_dense(w2))
            experts.append(
                (self.pack(plain[0], gate_up[expert]), self.pack(plain[1], down[expert]))
            )
        return tuple(experts)

    def _block(self, count: int, tiles: int, cols: int) -> tuple[Tensor, Tensor | None]:
        """Memory of ``count`` matrices in the experts' tile format: data and scales."""
        if not self.is_coded:
            return empty_huge((count, tiles, cols // 2, TILE_ROWS, 2), torch.bfloat16), None
        shape = (count, tiles, cols // MXFP4_GROUP)
        data = empty_huge((*shape, GROUP_BYTES), torch.uint8)
        return data, empty_huge((*shape, TILE_ROWS), torch.uint8)


def pair_tiles(width: int) -> int:
    """Tiles of gate and up together."""
    if width % TILE_ROWS:
        raise ValueError(
            f"Interleaved gate and up rows need a width that is a multiple of {TILE_ROWS}; it is "
            f"{width}."
        )
    return 2 * width // TILE_ROWS


def interleaved(
    gate: ExpertWeight, up: ExpertWeight, data: Tensor, scales: Tensor | None
) -> Matrix:
    """Gate in the even tiles, up in the odd ones."""
    for first, weight in enumerate((gate, up)):
        _into(weight, data[first::2], None if scales is None else scales[first::2])
    rows, cols = gate.shape
    if scales is None:
        return Matrix("tiles", 2 * rows, cols, data)
    return Matrix("mxfp4_tiles", 2 * rows, cols, data, scales)


def _into_rows(weights: Sequence[ExpertWeight], out: Matrix) -> None:
    """Fills a matrix of a stack with these, one below the other."""
    if out.scales is None:
        pack_rows([_dense(weight) for weight in weights], out.data)
    else:
        pack_mxfp4_rows([_coded(weight) for weight in weights], (out.data, out.scales))


def _into(weight: ExpertWeight, data: Tensor | None, scales: Tensor | None) -> Matrix:
    if isinstance(weight, Mxfp4):
        out = None if data is None or scales is None else (data, scales)
        return pack_mxfp4_tiles(weight.packed, weight.scale, out)
    return pack_tiles(weight, data)


def _dense(weight: ExpertWeight) -> Tensor:
    if isinstance(weight, Mxfp4):
        raise TypeError("The configuration states bf16 experts; this one is MXFP4.")
    return weight


def _coded(weight: ExpertWeight) -> tuple[Tensor, Tensor]:
    if not isinstance(weight, Mxfp4):
        raise TypeError("The configuration states MXFP4 experts; this one is bf16.")
    return weight.packed, weight.scale
