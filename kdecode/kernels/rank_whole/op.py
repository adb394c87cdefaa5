"""rank_whole: values made whole of the parts that all ranks have given, inside of a block.

    gate     latent = latent_part side by side;  route_ids, route_weights as in moe_gate, of
             router_part side by side
    experts  expert_sum = bf16(sum of expert_part);  shared = bf16(sum of shared_part)
             expert_normed = RMSNorm(expert_sum; latent_norm)                  LatentMoE only
    head     logits = logits_part side by side                                 bf16 values as fp32

Sums are fp32, in the order of the ranks, rounded once: the same bits on every rank. Where a block
ends, `rank_join` does that.
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
    "gate": ("route", "latent_down"),
    "experts": ("experts",),
    "head": ("head",),
}
_READS: dict[Place, tuple[str, ...]] = {
    "gate": ("router_part", "latent_part"),
    "experts": ("expert_part", "shared_part"),
    "head": ("logits_part",),
}
_WRITES: dict[Place, tuple[str, ...]] = {
    "gate": ("route_ids", "route_weights", "latent"),
    "experts": ("expert_sum", "expert_normed", "shared"),
    "head": ("logits",),
}


def contract_at(place: Place) -> OpContract:
    """place: one of the three above."""
    return OpContract(
        name="rank_whole",
        covers=_COVERS[place],
        reads=_READS[place],
        writes=_WRITES[place],
        mutates=(),
        tolerance=Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=1e-2),
    )


CONTRACT = contract_at("experts")
