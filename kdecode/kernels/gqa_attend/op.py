"""gqa_attend: attention of every head over the cached keys and values of its group.

    s_j      = head_dim^-1/2 scale gqa_query k_j         fp32; scale: `Problem.rotation_scale`
    attn_out = bf16(sum_j w_j v_j / sum_j w_j)           w_j = bf16(e^(s_j - max s))

The rows of one block (`Problem.rows_per_request`) follow each other. A row sees the tokens before
its block, of these at most the last ``Problem.window``; and of the block all rows, or where it is
causal (`Problem.is_causal_block`) those up to itself. What it does not see is neither read nor
counted. A row without a context (row_position -1) has zeros.

What a block sees is cut into splits, as `common/gqa_splits.py` has it, whose fp32 sums are added
up in order.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="gqa_attend",
    covers=("gqa_attend",),
    reads=("gqa_query", "row_position", "row_pages"),
    writes=("attn_out",),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
