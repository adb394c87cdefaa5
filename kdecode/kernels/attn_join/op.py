"""attn_join: the output projection of an attention layer, the residual, and what the MLP reads.

    attn_delta = bf16(o_proj attn_out)
    prefix     = bf16(prefix + attn_delta)

On a snapshot layer the prefix as it came in is pushed, and a new one starts from the delta:

    snapshots[n] = prefix;  prefix = attn_delta   n: snapshots of the layers below

With few rows (`common/mix_norm.py: is_fused`) the program that ends last goes on with

    mlp_mix = MIX(prefix, snapshots);  mlp_in = RMSNorm(mlp_mix; post_norm)

and the contract is ``with_mix_norm(CONTRACT, "mlp")``. Weights: `common/mix_norm.py: JoinWeights`.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="attn_join",
    covers=("attn_out_proj", "attn_residual"),
    reads=("attn_out", "prefix"),
    writes=("attn_delta", "prefix", "snapshots"),
    mutates=("prefix", "snapshots"),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
