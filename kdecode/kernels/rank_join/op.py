"""rank_join: where a block ends on one of several ranks, up to what the next block reads.

    embed    prefix[r] = embed_part of the rank that has the token            a copy
    attn     attn_delta = bf16(sum of attn_part);  the residual as in attn_join
    mlp      mlp_delta = bf16(sum of mlp_part);  prefix = bf16(prefix + mlp_delta)
    routed   routed = routed_part side by side, expert_sum without latents
             mlp_delta = bf16(routed + shared);  prefix = bf16(prefix + mlp_delta)

and then, as in mix_norm, the mix and norm that the next block begins with:

    mix  = MIX(prefix, snapshots)            as in attn_res; a copy of prefix without one
    norm = RMSNorm(mix; weight)              fp32 statistics and weight, rounded once

Sums are fp32, in the order of the ranks, rounded once: the same bits on every rank. A row whose
token no rank has becomes NaN in every column, as in embed.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.kernels.common import mix_norm
from kdecode.kernels.common.mix_norm import MixNorm
from kdecode.kernels.common.rank_parts import Place
from kdecode.kernels.contract import OpContract, Tolerance


@dataclass(frozen=True)
class JoinUse:
    """Which of the plan's exchanges it follows, and the mix and norm that follow at once."""

    place: Place
    then: MixNorm


_COVERS: dict[Place, tuple[str, ...]] = {
    "embed": ("embed",),
    "attn": ("attn_out_proj", "attn_residual"),
    "mlp": ("dense_mlp", "mlp_residual"),
    "routed": ("latent_up", "shared_mlp", "mlp_residual"),
}
_READS: dict[Place, tuple[str, ...]] = {
    "embed": ("row_token", "embed_part"),
    "attn": ("attn_part", "prefix", "snapshots"),
    "mlp": ("mlp_part", "prefix", "snapshots"),
    "routed": ("routed_part", "expert_sum", "shared", "prefix", "snapshots"),
}
_WRITES: dict[Place, tuple[str, ...]] = {
    "embed": ("prefix",),
    "attn": ("attn_delta", "prefix", "snapshots"),
    "mlp": ("mlp_delta", "prefix"),
    "routed": ("routed", "mlp_delta", "prefix"),
}


def contract_at(place: Place, then: mix_norm.Place) -> OpContract:
    """place: one of the four above. then: what the next block is."""
    reads, writes = _READS[place], _WRITES[place]
    return OpContract(
        name="rank_join",
        covers=(*_COVERS[place], *mix_norm.STAGES[then]),
        reads=reads,
        writes=(*writes, *mix_norm.OUTPUTS[then]),
        mutates=tuple(name for name in writes if name in reads),
        tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
    )


CONTRACT = contract_at("attn", "mlp")
