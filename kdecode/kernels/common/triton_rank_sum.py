"""The sum of what several ranks have given, in their order: a device function, and a launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.triton_launch import Launch, divide_up, tensor_for
from kdecode.kernels.common.triton_ops import to_bf16

_BLOCK = 1024


def sum_launch(parts: Tensor, out: Tensor) -> Launch:
    """parts [ranks, numbers] fp32 -> out [numbers] bf16. ValueError where there are no numbers."""
    size, numbers = parts.shape
    arguments = {
        "parts": tensor_for(parts, torch.float32, (size, numbers), name="the ranks' parts"),
        "out": tensor_for(out, torch.bfloat16, (numbers,), name="their sum"),
        "numbers": numbers,
    }
    grid = (divide_up(numbers, _BLOCK),)
    return Launch(sum_ranks, grid, arguments, {"SIZE": size, "BLOCK": _BLOCK})


@triton.jit
def sum_of_ranks(sources, at, inside, offset, SIZE: tl.constexpr):
    """fp32 numbers of every rank's part, which begins ``offset`` bytes behind the rank's address in
    ``sources``, added in the order of the ranks."""
    first = (tl.load(sources) + offset).to(tl.pointer_type(tl.float32))
    total = tl.load(first + at, mask=inside, other=0.0)
    for rank in tl.static_range(1, SIZE):
        part = (tl.load(sources + rank) + offset).to(tl.pointer_type(tl.float32))
        total += tl.load(part + at, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["numbers"])
def sum_ranks(parts, out, numbers, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    total = tl.load(parts + at, mask=inside, other=0.0)
    part = parts
    for _ in range(1, SIZE):
        part += numbers
        total += tl.load(part + at, mask=inside, other=0.0)
    tl.store(out + at, to_bf16(total), mask=inside)
