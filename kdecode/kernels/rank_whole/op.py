"""rank_whole: values made whole of the parts that all ranks have given, and what follows at once.

    embed    prefix[r] = embed_part of the rank that has the token            a copy
    attn     attn_delta = bf16(sum of attn_part);  the residual as in attn_join
    mlp      mlp_delta = bf16(sum of mlp_part);  prefix = bf16(prefix + mlp_delta)
    gate     latent = latent_part side by side;  route_ids, route_weights as in moe_gate, of
             router_part side by side
    experts  expert_sum = bf16(sum of expert_part);  shared = bf16(sum of shared_part)
             expert_normed = RMSNorm(expert_sum; latent_norm)                  LatentMoE only
    routed   routed = routed_part side by side, expert_sum without latents
             mlp_delta = bf16(routed + shared);  prefix = bf16(prefix + mlp_delta)
    head     logits = logits_part side by side                                 bf16 values as fp32

Sums are fp32, in the order of the ranks, rounded once: the same bits on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kdecode.kernels.common.rank_parts import Place
from kdecode.kernels.contract import OpContract, Tolerance


@dataclass(frozen=True)
class WholeUse:
    """Which of the plan's exchanges it follows. weights: the `PackedMoe`, where it needs one."""

    place: Place
    weights: Any = None


_COVERS: dict[Place, tuple[str, ...]] = {
    "embed": ("embed",),
    "attn": ("attn_out_proj", "attn_residual"),
    "mlp": ("dense_mlp", "mlp_residual"),
    "gate": ("route", "latent_down"),
    "experts": ("experts",),
    "routed": ("latent_up", "shared_mlp", "mlp_residual"),
    "head": ("head",),
}
_READS: dict[Place, tuple[str, ...]] = {
    "embed": ("row_token", "embed_part"),
    "attn": ("attn_part", "prefix"),
    "mlp": ("mlp_part", "prefix"),
    "gate": ("router_part", "latent_part"),
    "experts": ("expert_part", "shared_part"),
    "routed": ("routed_part", "expert_sum", "shared", "prefix"),
    "head": ("logits_part",),
}
_WRITES: dict[Place, tuple[str, ...]] = {
    "embed": ("prefix",),
    "attn": ("attn_delta", "prefix", "snapshots"),
    "mlp": ("mlp_delta", "prefix"),
    "gate": ("route_ids", "route_weights", "latent"),
    "experts": ("expert_sum", "expert_normed", "shared"),
    "routed": ("routed", "mlp_delta", "prefix"),
    "head": ("logits",),
}


def contract_at(place: Place) -> OpContract:
    writes = _WRITES[place]
    return OpContract(
        name="rank_whole",
        covers=_COVERS[place],
        reads=_READS[place],
        writes=writes,
        mutates=tuple(name for name in ("prefix", "snapshots") if name in writes),
        tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
    )


CONTRACT = contract_at("attn")
