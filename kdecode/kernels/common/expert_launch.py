"""What the launches of expert_up, expert_down and the standard path's experts have in common.

Owns tile sizes and the tensors of an `ExpertStack` as kernels take them: MXFP4 in 32-bit words of 8
codes. Its kernels' device functions are in `triton_experts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdecode.config import MXFP4_GROUP, ModelConfig
from kdecode.kernels.common.expert_squares import GROUPED_COLUMNS, PAIR_COLUMNS
from kdecode.kernels.common.expert_stack import ExpertStack
from kdecode.kernels.common.tile_table import choose
from kdecode.kernels.common.triton_launch import tensor_for
from kdecode.kernels.contract import Buffers

BF16 = torch.bfloat16
# Pairs of one expert that a program multiplies at a time in a plan's steps of more rows.
TILE_ROWS = 16
# Rows of a matrix that the instruction of scaled products takes at a time, and no fewer.
SCALED_COLUMNS = 128
# Numbers of a pair's tile that a warp holds: 128 bytes of them a thread.
_CODED_WARP, _BF16_WARP = 1 << 13, 1 << 11
_MOST_WARPS = 8


@dataclass(frozen=True)
class ExpertTile:
    """block_n rows of an expert's matrix a program, block_k of its columns at a time."""

    block_n: int
    block_k: int
    warps: int
    stages: int


def stack_of(mixture: Any, buffers: Buffers) -> ExpertStack:
    """The experts of a `PackedMoe`; the proof that they are one block is done once."""
    made: ExpertStack = buffers.memory.once(
        "experts", mixture, lambda: ExpertStack.of(mixture.experts)
    )
    return made


def up_arguments(
    config: ModelConfig, stack: ExpertStack, *, as_bytes: bool = False
) -> dict[str, Any]:
    """``data`` and ``scales`` of gate and up. as_bytes: codes two in a byte, not 8 in a word."""
    side, width = expert_side(config), config.moe.expert_width
    shape = (config.moe.num_experts, 2 * width, side)
    name = "the experts' gate and up"
    return _matrices(stack.gate_up, stack.gate_up_scales, shape, name, as_bytes)


def down_arguments(
    config: ModelConfig, stack: ExpertStack, *, as_bytes: bool = False
) -> dict[str, Any]:
    """The same of down."""
    shape = (config.moe.num_experts, expert_side(config), config.moe.expert_width)
    return _matrices(stack.down, stack.down_scales, shape, "the experts' down", as_bytes)


def expert_side(config: ModelConfig) -> int:
    """Inputs and outputs of an expert."""
    return config.moe.latent_width or config.hidden_size


def expert_input(config: ModelConfig) -> str:
    return "mlp_in" if config.moe.latent_width is None else "latent"


def paired(tensor: Tensor, is_coded: bool) -> Tensor:
    """bf16 inputs as kernels of pairs read them: beside codes two of them in a word."""
    return tensor.view(torch.int32) if is_coded else tensor


def pair_tile(
    kernel: str,
    arch: str,
    inner: int,
    columns: int,
    is_coded: bool,
    slots: int = 1,
    *,
    has_squares: bool = False,
) -> ExpertTile:
    """Of kernels of pairs. slots: experts that one program has at a time. has_squares: more rounds
    rather than fewer columns than a block of `expert_squares` has."""
    warp, widest = (_CODED_WARP, 4096) if is_coded else (_BF16_WARP, 1024)
    block_k = _power_above(inner, 32, widest if slots == 1 else 1024)
    block_n = PAIR_COLUMNS
    while block_n * block_k * slots > _MOST_WARPS * warp:
        if has_squares and block_k > 32:
            block_k //= 2
        elif not has_squares and block_n > 2:
            block_n //= 2
        else:
            break
    warps = max(4, min(_MOST_WARPS, block_n * block_k * slots // warp))
    default = ExpertTile(block_n, block_k, warps, stages=2)
    kind = "pairs and squares" if has_squares else "pairs"
    return choose(kernel, arch, f"{kind}, {_shape(inner, columns, is_coded)}", default)


def grouped_tile(
    kernel: str,
    arch: str,
    inner: int,
    columns: int,
    is_coded: bool,
    rows: int,
    *,
    is_scaled: bool = False,
) -> ExpertTile:
    """Of kernels of tiles of pairs. rows: of a tile. is_scaled: its products. ValueError for a
    tile, of the table or of the tuner, that has no such products."""
    shape = f"rows {rows}, {_shape(inner, columns, is_coded)}"
    if is_scaled:
        return _scaled_tile(kernel, arch, inner, f"scaled, {shape}")
    block_k = 128
    while block_k > MXFP4_GROUP and inner % block_k:
        block_k //= 2
    # Larger tiles have fewer programs a processor, and less room for copies that run ahead.
    stages = 4 if rows <= 2 * TILE_ROWS else 3
    default = ExpertTile(GROUPED_COLUMNS, block_k, warps=4, stages=stages)
    return choose(kernel, arch, shape, default)


def _scaled_tile(kernel: str, arch: str, inner: int, shape: str) -> ExpertTile:
    block_k = 128
    while block_k > MXFP4_GROUP and inner <= block_k:
        block_k //= 2
    # A loop of few rounds has no use for more copies ahead.
    stages = 4 if inner > 3 * block_k else 3
    tile = choose(kernel, arch, shape, ExpertTile(SCALED_COLUMNS, block_k, warps=4, stages=stages))
    # Of fewer columns Triton decodes the weights after all, and of a single round Triton 3.7.1
    # fails to compile the product.
    if tile.block_n < SCALED_COLUMNS or tile.block_k >= inner:
        raise ValueError(
            f"Scaled products of {kernel} take programs of {SCALED_COLUMNS} columns at least, and "
            f"two rounds; with {tile.block_n} columns and rounds of {tile.block_k} of {inner} "
            "inputs there are none."
        )
    return tile


def grouped_places(config: ModelConfig, rows: int) -> tuple[int, bool]:
    """Places of a grid in which each chosen expert has one, and whether they are pairs.

    Without them they are the experts, and one more for ids that are none.
    """
    pairs, experts = rows * config.moe.top_k, config.moe.num_experts + 1
    return min(pairs, experts), pairs <= experts


def _matrices(
    data: Tensor, scales: Tensor | None, shape: Sequence[int], name: str, as_bytes: bool
) -> dict[str, Any]:
    experts, rows, cols = shape
    if scales is None:
        checked = tensor_for(data, BF16, (experts, rows, cols), name=name)
        return {"data": checked, "scales": checked}
    codes = tensor_for(data, torch.uint8, (experts, rows, cols // 2), name=name)
    groups = (experts, rows, cols // MXFP4_GROUP)
    return {
        "data": codes if as_bytes else codes.view(torch.int32),
        "scales": tensor_for(scales, torch.uint8, groups, name=f"the scales of {name}"),
    }


def _shape(inner: int, columns: int, is_coded: bool) -> str:
    return f"{columns} x {inner} in {'mxfp4' if is_coded else 'bf16'}"


def _power_above(size: int, least: int, most: int) -> int:
    """The power of two that holds ``size``, within bounds."""
    power = least
    while power < min(size, most):
        power *= 2
    return power
