"""The delta rule of requests with one new token each, in one Triton launch.

A program has a block of value columns of one head of one row; states are moved in their slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.tile_table import choose
from kdecode.kernels.common.triton_delta import delta_row, unit
from kdecode.kernels.common.triton_launch import Launch, divide_up, row_block


@dataclass(frozen=True)
class SingleTile:
    """block_v: value columns of a program, a power of two."""

    block_v: int
    num_warps: int


def tile(rows: int, heads: int, head_dim: int, arch: str) -> SingleTile:
    block = row_block(min(rows, 64))
    default = SingleTile(max(16, triton.next_power_of_2(head_dim) // 4), 4)
    return choose("kda_single", arch, f"rows {block}, {heads} heads of {head_dim}", default)


def launch(tensors: Mapping[str, Tensor], heads: int, head_dim: int, arch: str) -> Launch:
    """tensors: the kernel's, by name; ``rows`` and ``slots`` int64 [N], a line a request.

    qkv [R, 3, H, K] bf16, not normalised, decay g [R, H, K] and beta [R, H] fp32, states [slots, H,
    K, V] fp32, out [R, H, V] bf16.
    """
    count = tensors["rows"].shape[0]
    chosen = tile(count, heads, head_dim, arch)
    width = triton.next_power_of_2(head_dim)
    block_v = min(width, chosen.block_v)
    constants = {"HEADS": heads, "DIM": head_dim, "BLOCK_D": width, "BLOCK_V": block_v}
    grid = (divide_up(head_dim, block_v), heads, count)
    return Launch(_single, grid, tensors, constants, num_warps=chosen.num_warps)


@triton.jit
def _single(
    qkv,
    decay,
    beta,
    states,
    out,
    rows,
    slots,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid: (blocks of value columns, heads, requests)."""
    WIDTH: tl.constexpr = HEADS * DIM
    head = tl.program_id(1)
    row = tl.load(rows + tl.program_id(2))
    slot = tl.load(slots + tl.program_id(2))
    d = tl.arange(0, BLOCK_D)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_d, in_v = d < DIM, v < DIM
    state = states + (slot * HEADS + head) * (DIM * DIM)
    cell = d[:, None] * DIM + v[None, :]
    in_cell = in_d[:, None] & in_v[None, :]
    s = tl.load(state + cell, mask=in_cell, other=0.0)
    line = qkv + row * (3 * WIDTH) + head * DIM
    q = tl.load(line + d, mask=in_d, other=0.0).to(tl.float32)
    k = tl.load(line + WIDTH + d, mask=in_d, other=0.0).to(tl.float32)
    value = tl.load(line + 2 * WIDTH + v, mask=in_v, other=0.0).to(tl.float32)
    g = tl.load(decay + row * WIDTH + head * DIM + d, mask=in_d, other=0.0)
    b = tl.load(beta + row * HEADS + head)
    s, o, _ = delta_row(s, unit(q, DIM**-0.5), unit(k, 1.0), value, tl.exp(g), b)
    tl.store(state + cell, s, mask=in_cell)
    tl.store(out + row * WIDTH + head * DIM + v, o.to(tl.bfloat16), mask=in_v)
