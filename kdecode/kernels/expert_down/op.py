"""expert_down: the weighted sum of the outputs of each row's experts.

    e_k        = bf16(down_e expert_product[r, k])                  e: route_ids[r, k]
    expert_sum = bf16(sum_k route_weights[r, k] e_k)                fp32, in an order of its own
    expert_squares[b, r] = sum of expert_sum[r, c]^2 over the columns c of block b           fp32

The squares are for the norm in moe_join, where it has one, of more than two rows; how wide a block
is, `common/expert_squares.py` says.

In a step of many rows each distinct expert is read once, for all rows that chose it. An id outside
[0, E) reads nothing and makes its row NaN.

On one of several ranks it leaves parts of two sums, in fp32 and not rounded on the way:
`expert_part` of expert_sum, and shared_part = shared_down shared_product, which is moe_gate's.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="expert_down",
    covers=("experts",),
    reads=("expert_product", "route_ids", "route_weights"),
    writes=("expert_sum", "expert_squares"),
    mutates=(),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
