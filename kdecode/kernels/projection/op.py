"""projection: y = bf16(x W^T), fp32 accumulation. Head logits are the bf16 values, kept as fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import OpContract, Tolerance


@dataclass(frozen=True)
class ProjectionWeights:
    """The matrix, the buffers to read and to write, and the dtype that the result is kept in."""

    matrix: Matrix
    input: str
    output: str
    kept_as: torch.dtype = torch.bfloat16


CONTRACT = OpContract(
    name="projection",
    covers=("attn_out_proj",),
    reads=("attn_out",),
    writes=("attn_delta",),
    mutates=(),
    tolerance=Tolerance(rtol=8e-3, atol=1e-2, rms_ratio=4e-3),
)
