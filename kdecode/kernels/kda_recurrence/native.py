"""The chunked delta rule on the native CPU kernels, in torch's OpenMP threads.

`chunk.py` is the same in torch operators, for other devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.kernels.common import _native
from kdecode.kernels.common.matrix import TILE_ROWS
from kdecode.kernels.common.native import ptr


def takes(head_dim: int) -> bool:
    """Whether heads of this width are whole vectors of every instruction set."""
    return head_dim % TILE_ROWS == 0


def delta_rule_chunks(
    qkv: Tensor, decay: Tensor, beta: Tensor, *, state: Tensor, out: Tensor, isa: str | None = None
) -> None:
    """The rows of one request; ``state`` [H, K, V] fp32 is moved past them, ``out`` [T, H, V] bf16.

    qkv [T, 3, H, K] bf16, as the convolution leaves it; decay [T, H, K] and beta [T, H] fp32. isa:
    instruction set; None is the best. A head is one thread's, so nothing depends on their number.
    """
    tokens, _, heads, width = qkv.shape
    _native.delta_rule_chunks(
        isa or _native.detect_isa(),
        ptr(qkv, torch.bfloat16, (tokens, 3, heads, width)),
        ptr(decay, torch.float32, (tokens, heads, width)),
        ptr(beta, torch.float32, (tokens, heads)),
        ptr(state, torch.float32, (heads, width, width)),
        ptr(out, torch.bfloat16, (tokens, heads, width)),
        tokens,
        heads,
        width,
    )
