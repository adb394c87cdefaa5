"""mla_query_up: the query of every head out of its low-rank space.

    q = bf16(q_b RMSNorm(query columns of mla_proj; q_norm))     norm: fp32, rounded once

The first half of the stage mla_query, which ends in `mla_query`. A model without q LoRA has no such
step: its columns of mla_proj are the query.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="mla_query_up",
    covers=(),
    reads=("mla_proj",),
    writes=("mla_q",),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
