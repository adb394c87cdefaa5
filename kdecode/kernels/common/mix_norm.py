"""The residual mix and RMSNorm that every block begins with: what it reads, and whose launch it is.

Of few rows the last program of the step before does them (a join, or the embedding); of more a
launch of their own, with a program a row. Owns that limit and the pieces of the contracts; does not
know the ops or their kernels. Weights are duck-typed (`model/layout.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.kernels.contract import OpContract

# Before attention, before an MLP, before the head.
Place = Literal["attn", "mlp", "final"]

STAGES: dict[Place, tuple[str, str]] = {
    "attn": ("attn_mix", "attn_norm"),
    "mlp": ("mlp_mix", "mlp_norm"),
    "final": ("final_mix", "head_norm"),
}
OUTPUTS: dict[Place, tuple[str, str]] = {
    "attn": ("attn_mix", "attn_in"),
    "mlp": ("mlp_mix", "mlp_in"),
    "final": ("final_mix", "head_in"),
}

# Above so many rows one program takes longer for all of them than a launch of their own.
MAX_FUSED_ROWS = 2


@dataclass(frozen=True)
class MixNorm:
    """mix [M] fp32: norm weight times score projection, None for a model without attention
    residuals. norm [M] fp32. num_snapshots: those that exist at this point. outputs: the buffers of
    the mix and of its norm.
    """

    mix: Tensor | None
    norm: Tensor
    num_snapshots: int
    outputs: tuple[str, str]


@dataclass(frozen=True)
class JoinWeights:
    """Of a step that ends a block. layer: its `PackedLayer`. then: the mix and norm that the step
    does for the next block; None where they are a launch of their own.
    """

    layer: Any
    then: MixNorm | None = None


def is_fused(rows: int) -> bool:
    """Whether the step before a mix and norm of so many rows does them."""
    return rows <= MAX_FUSED_ROWS


def mix_norm_of(config: ModelConfig, place: Place, layer: int | None, weights: Any) -> MixNorm:
    """The mix and norm at a place of a layer. weights: its `PackedLayer`, or the `PackedModel`."""
    if place == "final":
        mix, norm, count = weights.final_mix, weights.norm, config.num_snapshots
    else:
        assert layer is not None
        is_mlp = place == "mlp"
        mix = weights.mlp_mix if is_mlp else weights.attn_mix
        norm = weights.post_norm if is_mlp else weights.input_norm
        count = config.snapshots_before(layer + 1 if is_mlp else layer)
    return MixNorm(mix, norm, 0 if mix is None else count, OUTPUTS[place])


def with_mix_norm(contract: OpContract, place: Place) -> OpContract:
    """The contract of a step that also does the mix and norm which follow it."""
    reads = contract.reads + tuple({"snapshots"} - set(contract.reads))
    return replace(
        contract,
        covers=contract.covers + STAGES[place],
        reads=reads,
        writes=contract.writes + OUTPUTS[place],
    )
