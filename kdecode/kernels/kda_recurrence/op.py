"""kda_recurrence: the delta rule on the fp32 state of each request.

    q = q rsqrt(sum q^2 + 1e-6) K^-1/2,  k = k rsqrt(sum k^2 + 1e-6)        a head, fp32
    S = diag(e^g) S;  u = beta (v - S^T k);  S = S + k u^T;  o = bf16(S^T q)

Requests with one row take this form; the others the chunked form, equal in exact arithmetic: with
G the sum of g inside a chunk, up to and with a token,

    L_ij = beta_i <k_i, k_j e^{G_i - G_j}> (j < i),  M_ij = <q_i, k_j e^{G_i - G_j}> (j <= i)
    U = (I + L)^-1 beta (V - (K e^G) S);  O = (Q e^G) S + M U
    S = diag(e^{G_last}) S + (K e^{G_last - G})^T U

A state is read from the request's slot and left at its last row, whatever the phase. Of rows that
are verified it is only read, and what each would do to it goes to ``buffers.effects``, the raw
samples of kda_proj included.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="kda_recurrence",
    covers=("kda_step",),
    reads=("kda_proj", "kda_qkv", "kda_decay", "kda_beta"),
    writes=("kda_out",),
    mutates=("recurrent",),
    tolerance=Tolerance(rtol=1e-2, atol=1e-4, rms_ratio=4e-3),
)
