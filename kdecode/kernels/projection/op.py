"""projection: y = bf16(x W^T), fp32 accumulation.

The head's logits are made for the rows that need them only; they are bf16 values, kept as fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import OpContract, Tolerance


@dataclass(frozen=True)
class ProjectionWeights:
    """The matrix, and the buffers to read and to write. is_head: logits.

    exchange: of several ranks, what makes the product of each one's part whole: "reduce" of some
    columns, "gather" of some rows; None where a rank needs its own columns of the product only.
    """

    matrix: Matrix
    input: str
    output: str
    is_head: bool = False
    exchange: Literal["reduce", "gather"] | None = None


CONTRACT = OpContract(
    name="projection",
    covers=("attn_out_proj",),
    reads=("attn_out",),
    writes=("attn_delta",),
    mutates=(),
    tolerance=Tolerance(rtol=8e-3, atol=1e-2, rms_ratio=4e-3),
)
