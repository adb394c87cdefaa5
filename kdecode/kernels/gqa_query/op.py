"""gqa_query: the query of every head, and the cache row of every row of a draft's block.

    gqa_query = rotate(RMSNorm(q; q_norm))                       a head at a time
    cache row = [rotate(RMSNorm(k; k_norm)) of all heads, v]     bf16

q, k and v are the columns of gqa_proj, in this order. A head is rounded to bf16 behind its norm and
behind its rotation by row_rotation, whose pairs are the halves of a head. A row goes to the page
that row_pages has for its position, and is not written where there is none (-1). No other cache row
changes.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="gqa_query",
    covers=("gqa_query", "gqa_insert"),
    reads=("gqa_proj", "row_position", "row_pages", "row_rotation"),
    writes=("gqa_query",),
    mutates=("caches.pages",),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
