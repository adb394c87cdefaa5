"""mla_attention: latent attention without rotation, from the projection to the gated values.

    a = RMSNorm(q_a);  q = a q_b^T           or q = its columns of mla_proj, without q LoRA
    row = [RMSNorm(c) | k_pe]                into the cache: bf16, or E4M3 of row / scale
    q' = [bf16(W_UK^T q_nope) | q_pe]        absorbed query, against cache rows
    latent = bf16(softmax(q' row^T qk_dim^-1/2) c)          causal, fp32 softmax
    y = bf16(W_UV latent sigmoid(gate))

Long chunks expand keys and values instead (k = [W_UK c | k_pe], v = W_UV c, rounded), which is the
same attention with fewer operations; `mla_query` and `mla_latent` do not exist then, so this op
writes neither. Rows behind a request's length are never read.

Of ranks that share the positions of a context (``Problem.context``) each keeps some of the cache
rows and has some of the heads. A few queries go to where the rows are and latents come back in
parts (`other_ranks.py`, `partial.py`); to a long chunk all rows come. The maths is the same.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="mla_attention",
    covers=("mla_query", "mla_insert", "mla_attend", "mla_value"),
    reads=("mla_proj",),
    writes=("attn_out",),
    mutates=("pages",),
    tolerance=Tolerance(rtol=2e-2, atol=8e-3, rms_ratio=1e-2),
)
