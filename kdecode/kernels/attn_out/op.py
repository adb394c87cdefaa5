"""attn_out: the output projection of an attention layer, and the residual.

    attn_delta = bf16(o_proj attn_out)
    prefix     = bf16(prefix + attn_delta)

On a snapshot layer the prefix as it came in is pushed, and a new one starts from the delta:

    snapshots[n] = prefix;  prefix = attn_delta   n: snapshots of the layers below

One phase: tiles of o_proj, each with its columns of the residual. Of several ranks, each of which
has the columns of its heads: tiles of o_proj, unrounded | exchange | sums in the order of the
ranks, rounded once, with their columns of the residual.
"""

from __future__ import annotations

from kdecode.kernels.contract import OpContract, Tolerance

CONTRACT = OpContract(
    name="attn_out",
    covers=("attn_out_proj", "attn_residual"),
    reads=("attn_out", "prefix"),
    writes=("attn_delta", "prefix", "snapshots"),
    mutates=("prefix", "snapshots"),
    tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
)
