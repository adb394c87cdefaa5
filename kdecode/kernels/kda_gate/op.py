"""kda_gate: decay and beta of the delta rule, fp32.

z    = bf16(f_a f_b^T) + dt_bias              f_a, b: columns of kda_proj
g    = bound sigmoid(exp(A_log) z)            with a lower bound
g    = -exp(A_log) softplus(z)                without; linear above 20
beta = sigmoid(b)
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="kda_gate",
    covers=("kda_gate",),
    reads=("kda_proj",),
    writes=("kda_decay", "kda_beta"),
    mutates=(),
    tolerance=Tolerance(rtol=1e-2, atol=4e-3, rms_ratio=4e-3),
)
