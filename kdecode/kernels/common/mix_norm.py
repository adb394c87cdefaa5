"""The residual mix and RMSNorm that every block begins with: where it stands and what it reads.

Owns the pieces of its contracts; does not know the ops or their kernels. Weights are duck-typed
(`model/layout.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from kdecode.config import ModelConfig

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


@dataclass(frozen=True)
class MixNorm:
    """mix [M] fp32: norm weight times score projection, None for a model without attention
    residuals. norm [M] fp32. num_snapshots: those that exist at this point; is_pushed: the last of
    them is of the step just before. outputs: the buffers of the mix and of its norm.
    """

    mix: Tensor | None
    norm: Tensor
    num_snapshots: int
    is_pushed: bool
    outputs: tuple[str, str]


def mix_norm_of(config: ModelConfig, place: Place, layer: int | None, weights: Any) -> MixNorm:
    """The mix and norm at a place of a layer. weights: its `PackedLayer`, or the `PackedModel`."""
    is_pushed = False
    if place == "final":
        mix, norm, count = weights.final_mix, weights.norm, config.num_snapshots
    else:
        assert layer is not None
        is_mlp = place == "mlp"
        mix = weights.mlp_mix if is_mlp else weights.attn_mix
        norm = weights.post_norm if is_mlp else weights.input_norm
        count = config.snapshots_before(layer + 1 if is_mlp else layer)
        is_pushed = is_mlp and config.is_snapshot_layer(layer)
    if mix is None:
        count, is_pushed = 0, False
    return MixNorm(mix, norm, count, is_pushed, OUTPUTS[place])
