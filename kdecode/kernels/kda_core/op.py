"""kda_core: a KDA layer between its input projection and its output projection.

    kda_qkv  = bf16(SiLU(sum_j conv[j] sample[j]))        q, k, v; samples: window, then kda_proj
    z        = bf16(f_b f_a) + dt_bias
    g        = lower_bound sigmoid(exp(A_log) z)          or -exp(A_log) softplus(z)
    beta     = sigmoid(b)
    q, k     = L2-normalised per head (eps 1e-6 on the sum), q times K^-1/2
    u        = beta (v - k^T diag(e^g) S)
    S        = diag(e^g) S + k u^T                        fp32, one pass to read and one to write
    kda_out  = bf16(q^T diag(e^g) S_old + (q k) u)        which is q^T S
    attn_out = bf16(RMSNorm(kda_out; o_norm) sigmoid(gate))     gate: columns, or bf16(g_b g_a)

Rows of one slot must follow each other, oldest token first; each sees the state that the one before
it left. The convolution window and the state of the rows' slots move by one token a row; no other
slot is read or written. With more than one row a request (a verify step, whose requests all have
that many rows) windows and states are only read, and ``buffers.effects`` gets what each row would
do to them: k, g, u and its raw sample; `kda_commit` moves the slots then.

The values between kda_proj and attn_out are rounded as written and stay inside the launch.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="kda_core",
    covers=("kda_conv", "kda_gate", "kda_step", "kda_out_norm"),
    reads=("kda_proj", "row_slot"),
    writes=("attn_out",),
    mutates=("caches.conv", "caches.recurrent"),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
