"""A kernel that only reads: how fast a device's memory is to kernels like those of a plan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.triton_launch import Launch

_BLOCK = 4096
# Programs a multiprocessor: fewer leave its loads waiting, more only take turns.
_PROGRAMS = 8


@triton.jit
def read_words(words, results, count, BLOCK: tl.constexpr):
    """Each program takes the exclusive or of every n-th block of int32 words, for n programs."""
    total = tl.zeros([BLOCK], dtype=tl.int32)
    stride = tl.num_programs(0) * BLOCK
    for begin in range(tl.program_id(0) * BLOCK, count, stride):
        at = begin + tl.arange(0, BLOCK)
        total ^= tl.load(words + at, mask=at < count, other=0)
    tl.store(results + tl.program_id(0), tl.xor_sum(total))


def read_launch(words: Tensor, multiprocessors: int) -> Launch:
    """Reads int32 words once; the result is ``arguments["results"]``, one number a program."""
    if words.dtype != torch.int32 or not words.is_contiguous() or words.numel() >= 1 << 30:
        raise ValueError(
            f"The probe reads fewer than 2^30 contiguous int32 words; this is {words.dtype}, "
            f"{words.numel():,} of them."
        )
    programs = _PROGRAMS * multiprocessors
    results = torch.empty(programs, dtype=torch.int32, device=words.device)
    arguments = {"words": words, "results": results, "count": words.numel()}
    return Launch(read_words, (programs,), arguments, {"BLOCK": _BLOCK}, num_warps=8)
