"""kda_commit in Triton: one launch for every KDA layer of a plan.

The layers' tensors lie anywhere in memory, so a kernel gets those of the first layer and a table of
how far from them the others are, in elements. Rows go through the state as in `kda_core`: it has
the bits of so many plain steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.tile_table import choose
from kdecode.kernels.common.triton_delta import moved
from kdecode.kernels.common.triton_launch import Launch, TritonStep, row_block, tensor_for
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32 = torch.bfloat16, torch.float32

CONV_WIDTH = 4
# Addresses of tensors are multiples of so many bytes (torch gives 512 on a GPU, 64 on a CPU).
_ALIGNMENT = 64


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    reasons = []
    if problem.rows is None:
        reasons.append(
            "kda_commit is built for a fixed number of rows; this plan takes any number."
        )
    if problem.layer is not None:
        reasons.append(
            f"kda_commit in Triton moves all layers at once; this problem is layer {problem.layer}."
        )
    if problem.config.kda.conv_width != CONV_WIDTH:
        reasons.append(
            f"The KDA convolution has {CONV_WIDTH} taps in Triton; the model's has "
            f"{problem.config.kda.conv_width}."
        )
    return reasons


@dataclass(frozen=True)
class CommitTile:
    """block_v: value columns of a program, a power of two."""

    block_v: int
    num_warps: int


def tile(problem: Problem) -> CommitTile:
    """A quarter of a head a program: enough of them at one request, none too small at many."""
    assert problem.rows is not None
    kda = problem.config.kda
    width = triton.next_power_of_2(kda.head_dim)
    shape = (
        f"rows {row_block(problem.rows)} by {problem.rows_per_request}, "
        f"{kda.num_heads} heads of {kda.head_dim}"
    )
    default = CommitTile(max(16, width // 4), 4)
    return choose("kda_commit", problem.arch, shape, default)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: none are used. ``buffers.effects`` has the `RowEffects` of every KDA layer."""
    reasons = refuse(problem)
    if reasons or problem.rows is None:
        raise ValueError(" ".join(reasons))
    kda, rows, layers = problem.config.kda, problem.rows, list(buffers.effects)
    requests = rows // problem.rows_per_request
    kept = tensor_for(buffers["kept_rows"], torch.int32, (requests, 3), name="kept_rows")
    tensors = [_layer_tensors(problem, buffers, layer) for layer in layers]
    names = tuple(tensors[0])
    distances = [_distances([layer[name] for layer in tensors]) for name in names]
    chosen = tile(problem)
    width = triton.next_power_of_2(kda.head_dim)
    blocks = -(-kda.head_dim // min(width, chosen.block_v))
    constants = {
        "HEADS": kda.num_heads,
        "DIM": kda.head_dim,
        "BLOCK_D": width,
        "BLOCK_V": min(width, chosen.block_v),
        "BLOCKS": blocks,
        "LAYERS": len(layers),
    }
    table = torch.tensor(distances, dtype=torch.int64, device=kept.device)
    arguments: dict[str, Tensor | int | float] = {**tensors[0], "kept": kept, "distance": table}
    grid = (kda.num_heads * blocks, len(layers), requests)
    launch = Launch(_commit, grid, arguments, constants, num_warps=chosen.num_warps)
    return TritonStep(launch, alive=tuple(tensors))


def _layer_tensors(problem: Problem, buffers: Buffers, layer: int) -> dict[str, Tensor]:
    kda, rows = problem.config.kda, problem.rows
    assert rows is not None
    window, state = buffers.caches.conv[layer], buffers.caches.recurrent[layer]
    effects, slots = buffers.effects[layer], window.shape[0]
    heads = (rows, kda.num_heads, kda.head_dim)
    shapes: dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]] = {
        "window": (window, BF16, (slots, CONV_WIDTH - 1, 3 * kda.width)),
        "state": (state, FP32, (slots, kda.num_heads, kda.head_dim, kda.head_dim)),
        "keys": (effects.keys, FP32, heads),
        "decays": (effects.decays, FP32, heads),
        "corrections": (effects.corrections, FP32, heads),
        "samples": (effects.samples, BF16, (rows, 3 * kda.width)),
    }
    return {name: tensor_for(*spec, name=name) for name, spec in shapes.items()}


def _distances(tensors: Sequence[Tensor]) -> list[int]:
    """How far each tensor is from the first, in elements; ValueError for odd addresses.

    Addresses only: this reads no data, and on the meta device, where all are 0, it means nothing.
    """
    first, size = tensors[0].data_ptr(), tensors[0].element_size()
    distances = [tensor.data_ptr() - first for tensor in tensors]
    if any(distance % _ALIGNMENT for distance in distances):
        raise ValueError(
            f"Tensors of different layers are {distances} bytes apart; these have to be multiples "
            f"of {_ALIGNMENT}."
        )
    return [distance // size for distance in distances]


@triton.jit
def _commit(
    window,
    state,
    keys,
    decays,
    corrections,
    samples,
    kept,
    distance,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCKS: tl.constexpr,
    LAYERS: tl.constexpr,
):
    """Grid: (heads x blocks of value columns, layers, requests)."""
    WIDTH: tl.constexpr = HEADS * DIM
    head = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    line = kept + tl.program_id(2) * 3
    slot = tl.load(line).to(tl.int64)
    first = tl.load(line + 1)
    count = tl.load(line + 2)
    if count == 0:
        return
    # In the order of the arguments; rows of the table are multiples of 64 bytes.
    by_layer = distance + tl.program_id(1)
    window += tl.multiple_of(tl.load(by_layer), 32) + slot * (9 * WIDTH)
    state += tl.multiple_of(tl.load(by_layer + LAYERS), 16) + (slot * HEADS + head) * (DIM * DIM)
    keys += tl.multiple_of(tl.load(by_layer + 2 * LAYERS), 16) + first * WIDTH
    decays += tl.multiple_of(tl.load(by_layer + 3 * LAYERS), 16) + first * WIDTH
    corrections += tl.multiple_of(tl.load(by_layer + 4 * LAYERS), 16) + first * WIDTH
    samples += tl.multiple_of(tl.load(by_layer + 5 * LAYERS), 32) + first * (3 * WIDTH)

    d = tl.arange(0, BLOCK_D)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_d, in_v = d < DIM, v < DIM
    cell = d[:, None] * DIM + v[None, :]
    in_cell = in_d[:, None] & in_v[None, :]
    s = tl.load(state + cell, mask=in_cell, other=0.0)
    for row in range(0, count):
        at = row * WIDTH + head * DIM
        k = tl.load(keys + at + d, mask=in_d, other=0.0)
        decay = tl.exp(tl.load(decays + at + d, mask=in_d, other=0.0))
        s = moved(s, decay, k, tl.load(corrections + at + v, mask=in_v, other=0.0))
    tl.store(state + cell, s, mask=in_cell)

    # This block's channels of the head in each group: all samples are read before one is written.
    for group in tl.static_range(3):
        channel = group * WIDTH + head * DIM + v
        oldest = _sample(window, samples, channel, count - 3, 3 * WIDTH, in_v)
        second = _sample(window, samples, channel, count - 2, 3 * WIDTH, in_v)
        newest = _sample(window, samples, channel, count - 1, 3 * WIDTH, in_v)
        tl.debug_barrier()
        tl.store(window + channel, oldest, mask=in_v)
        tl.store(window + 3 * WIDTH + channel, second, mask=in_v)
        tl.store(window + 6 * WIDTH + channel, newest, mask=in_v)


@triton.jit
def _sample(window, samples, channel, place, STRIDE: tl.constexpr, mask):
    """Sample number ``place`` after the window; negative ones are in it."""
    old = tl.load(window + (3 + place) * STRIDE + channel, mask=mask & (place < 0), other=0.0)
    new = tl.load(samples + place * STRIDE + channel, mask=mask & (place >= 0), other=0.0)
    return tl.where(place < 0, old, new)
