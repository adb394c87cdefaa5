"""attn_join: the output projection of an attention layer, and the residual.

    attn_delta = bf16(o_proj attn_out)
    prefix     = bf16(prefix + attn_delta)

On a snapshot layer the prefix as it came in is pushed, and a new one starts from the delta:

    snapshots[n] = prefix;  prefix = attn_delta   n: snapshots of the layers below
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
