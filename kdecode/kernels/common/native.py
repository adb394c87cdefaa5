"""The native library as Python sees it: pool, programs, steps and addresses of tensors.

Owns the one import of the compiled module and the checks that stand between a tensor and a raw
pointer. Knows no op. torch is imported first on purpose: the native module then finds torch's
OpenMP runtime already loaded and shares it, instead of bringing a second set of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kdecode.kernels.common import _native
from kdecode.kernels.common.matrix import INTEGER_BITS, PACKED12_HEADER_BYTES, Matrix

Pool = _native.Pool
Program = _native.Program
SharedExchange = _native.SharedExchange
Tiles = _native.Tiles
available_cores = _native.available_cores
detect_isa = _native.detect_isa
supported_isas = _native.supported_isas
time_stream = _native.time_stream

__all__ = [
    "NativeStep",
    "Pool",
    "Program",
    "SharedExchange",
    "Tiles",
    "available_cores",
    "detect_isa",
    "ptr",
    "supported_isas",
    "tiles",
    "time_stream",
]

# Rows of one native decode step, and of one pass of the native products over a tile.
MAX_ROWS = 64


def ptr(tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The address of a contiguous CPU tensor of exactly this dtype and shape.

    The caller keeps the tensor alive for as long as native code may use the address.
    """
    problems = []
    if tensor.device.type != "cpu":
        problems.append(f"it is on {tensor.device}, not on the cpu")
    if tensor.dtype != dtype:
        problems.append(f"its dtype is {tensor.dtype}, not {dtype}")
    if tuple(tensor.shape) != tuple(shape):
        problems.append(f"its shape is {list(tensor.shape)}, not {list(shape)}")
    if not tensor.is_contiguous():
        problems.append(f"it is not contiguous (strides {list(tensor.stride())})")
    if problems:
        raise ValueError(f"Native code cannot take this tensor: {'; '.join(problems)}.")
    return tensor.data_ptr()


def tiles(matrix: Matrix) -> Tiles:
    """A packed matrix for native code; the caller keeps ``matrix`` alive."""
    num_tiles = -(-matrix.rows // 16)
    if matrix.format == "tiles":
        data = ptr(matrix.data, torch.bfloat16, (num_tiles, matrix.cols // 2, 16, 2))
        return Tiles(data, 0, matrix.rows, matrix.cols, _native.TileFormat.bf16)
    if matrix.format == "mxfp4_tiles":
        assert matrix.scales is not None
        data = ptr(matrix.data, torch.uint8, (num_tiles, matrix.cols // 32, 256))
        scales = ptr(matrix.scales, torch.uint8, (num_tiles, matrix.cols // 32, 16))
        return Tiles(data, scales, matrix.rows, matrix.cols, _native.TileFormat.mxfp4)
    if matrix.format in INTEGER_BITS:
        assert matrix.scales is not None
        bits, groups = INTEGER_BITS[matrix.format], matrix.cols // 32
        data = ptr(matrix.data, torch.uint8, (num_tiles, groups, bits * 64))
        scales = ptr(matrix.scales, torch.bfloat16, (num_tiles, groups, 16))
        kind = _native.TileFormat.int4 if bits == 4 else _native.TileFormat.int8
        return Tiles(data, scales, matrix.rows, matrix.cols, kind)
    if matrix.format == "tiles12":
        data = ptr(matrix.data, torch.uint8, (num_tiles, PACKED12_HEADER_BYTES + matrix.cols * 24))
        fixes = matrix.corrections
        address = 0 if fixes is None else ptr(fixes, torch.int32, fixes.shape)
        return Tiles(data, 0, matrix.rows, matrix.cols, _native.TileFormat.packed12, address)
    raise ValueError(
        f"Native code reads matrices in tiles, tiles12, mxfp4_tiles, int8_tiles or "
        f"int4_tiles; this one is in {matrix.format}."
    )


class NativeStep:
    """One native step, bound to its arguments: the `Prepared` of every native op.

    name, args: what a plan adds to its own program. ``keep_alive``: everything whose address is in
    ``args`` (tensors, or objects that hold them).
    """

    def __init__(
        self, pool: Pool, isa: str, name: str, args: Any, keep_alive: Sequence[Any]
    ) -> None:
        self.name = name
        self.args = args
        self._keep_alive = tuple(keep_alive)
        self._program = Program(pool, isa)
        self._program.add(name, args)

    def run(self) -> None:
        """One launch."""
        self._program.run(0, 1)
