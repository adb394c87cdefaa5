"""mla_attend: attention of every head over the cached rows, by splits of the context.

    s_j = qk_dim^-1/2 log2(e) mla_query row_j              fp32; an fp8 row is bf16(code * scale)
    stats[row, split, head] = [m, l]                       m = max s_j, l = sum 2^(s_j - m)
    sums[row, split, head]  = sum 2^(s_j - m) c_j          fp32, of weights rounded to bf16

The stage mla_attend ends in `mla_value`, which adds the splits up: there many programs share the
work that the last program of a split would do alone. What lies behind a row's context is neither
read nor counted, and of a split behind it nothing has to be written.

The length of a split is the smallest power of two, from `mla_splits.ROUND_TOKENS` up, of which
`mla_splits.max_splits` cover the context: it depends on the plan and on the row's own request. The
rows of one request (`Problem.rows_per_request`) follow each other and share the reads of a split;
theirs is the last row's. Of a target a row sees its own position and those before it; of a draft
(`Problem.rotation_scale`) all rows of a request see all of them unless its block is causal
(`Problem.is_causal_block`), and scores carry that scale.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="mla_attend",
    covers=(),
    reads=("mla_query", "row_position", "row_pages"),
    writes=("mla_split_sums", "mla_split_stats"),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
