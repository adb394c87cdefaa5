"""The sum of every rank's values through shared memory, as a native step of its own.

What the fused ops do after a product. For measurements and tests; no plan has this step.
"""

from __future__ import annotations

import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.native import NativeStep, Pool, SharedExchange, ptr


def reduce_step(
    pool: Pool, isa: str, shared: SharedExchange, part: torch.Tensor, out: torch.Tensor
) -> NativeStep:
    """out [rows, width] bf16 = the sum of all ranks' part [rows, width] fp32, rounded once.

    Raises ValueError for a part that has no room in the exchange.
    """
    rows, width = part.shape
    size = part.numel() * part.element_size()
    if size > shared.part_bytes:
        raise ValueError(
            f"A part of {size} bytes was given; those of this exchange have up to "
            f"{shared.part_bytes}."
        )
    args = _native.ReducePartsArgs()
    args.exchange, args.rows, args.width = shared, rows, width
    args.part = ptr(part, torch.float32, (rows, width))
    args.out = ptr(out, torch.bfloat16, (rows, width))
    return NativeStep(pool, isa, "reduce_parts", args, (part, out))
