"""The residual mix on the native CPU kernels, in torch's OpenMP threads."""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.kernels.common import _native
from kdecode.kernels.common.native import ptr

MAX_SNAPSHOTS: int = _native.MAX_SNAPSHOTS


def mix(sources: Tensor, weight: Tensor, eps: float, isa: str | None = None) -> Tensor:
    """sources [S + 1, R, M] bf16, the prefix last; weight [M] fp32 -> [R, M] bf16.

    isa: instruction set; None is the best. A row is one thread's, so nothing depends on the others.
    """
    count, rows, width = sources.shape
    out = torch.empty(rows, width, dtype=torch.bfloat16)
    _native.mix_rows(
        isa or _native.detect_isa(),
        ptr(sources, torch.bfloat16, (count, rows, width)),
        ptr(weight, torch.float32, (width,)),
        out.data_ptr(),
        count - 1,
        rows,
        width,
        eps,
    )
    return out
