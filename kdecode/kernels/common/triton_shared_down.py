"""The way back of a mixture's shared experts as programs of a launch that is there anyway.

On one of several ranks the product is a part of a sum, which the ranks exchange with the part of
the other experts: so expert_down makes both. Host side: what the programs need; device side: one
program's work. Knows no op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.tile_table import choose
from kdecode.kernels.common.triton_launch import divide_up, tensor_for
from kdecode.kernels.common.triton_product import FEW_ROWS, product, product_rows

# Weights that a program of few rows has at once, and columns of its block.
_FEW_WEIGHTS, _FEW_COLUMNS = 4096, 8


@dataclass(frozen=True)
class SharedDown:
    """x [R, inner] bf16, weight [M, inner] bf16 and this rank's part of x W^T, out [R, M] fp32."""

    x: Tensor
    weight: Tensor
    out: Tensor


@dataclass(frozen=True)
class SharedTile:
    """block_n output columns a program, block_k input columns at a time; warps are the launch's."""

    block_n: int
    block_k: int


def shared_lines(
    shared: SharedDown | None, arch: str, rows: int, line: int, unused: Tensor
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Lines of ``line`` programs that a grid needs in front of its own, and the arguments and
    constants of a kernel that calls `shared_down` in them. unused: any tensor, without ``shared``.
    """
    if shared is None:
        arguments = dict.fromkeys(("shared_x", "shared_weight", "shared_out"), unused)
        sizes = dict.fromkeys(("SHARED", "SHARED_OUT", "SHARED_R", "SHARED_N", "SHARED_K"), 0)
        return 0, arguments, {"SHARED_LINES": 0, **sizes}
    columns, inner = shared.weight.shape
    tile = _tile(arch, rows, columns, inner)
    lines = divide_up(divide_up(columns, tile.block_n), line)
    arguments = {
        "shared_x": tensor_for(shared.x, torch.bfloat16, (rows, inner), name="shared_product"),
        "shared_weight": shared.weight,
        "shared_out": tensor_for(shared.out, torch.float32, (rows, columns), name="shared_part"),
    }
    constants = {
        "SHARED_LINES": lines,
        "SHARED": inner,
        "SHARED_OUT": columns,
        "SHARED_R": product_rows(rows),
        "SHARED_N": tile.block_n,
        "SHARED_K": tile.block_k,
    }
    return lines, arguments, constants


def _tile(arch: str, rows: int, columns: int, inner: int) -> SharedTile:
    """Small enough to leave registers and shared memory as they are without these programs."""
    whole = max(16, triton.next_power_of_2(inner))
    if rows <= FEW_ROWS:
        block_k = min(1024, whole)
        default = SharedTile(min(_FEW_COLUMNS, _FEW_WEIGHTS // block_k), block_k)
    else:
        default = SharedTile(block_n=32, block_k=min(64, whole))
    shape = f"rows {product_rows(rows)}, {columns} x {inner}"
    return choose("shared_down", arch, shape, default)


@triton.jit
def shared_down(
    block,
    x,
    weight,
    out,
    rows,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Columns ``block`` * BLOCK_N and on of x [rows, INNER] W^T, not rounded; behind the last there
    is nothing to do. Calls `wait_for_previous`."""
    if block * BLOCK_N < COLUMNS:
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        held = tl.minimum(n, COLUMNS - 1)
        acc = product(
            x, weight, x, 0.0, held, rows, 0, INNER, INNER, BLOCK_R, BLOCK_N, BLOCK_K, False
        )
        r = tl.arange(0, BLOCK_R)[None, :]
        inside = (r < rows) & (n < COLUMNS)[:, None]
        tl.store(out + r * COLUMNS + n[:, None], acc, mask=inside)
