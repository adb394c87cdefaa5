"""Model and engine configuration: frozen dataclasses, no torch.

Owns the translation of a released ``config.json`` (nested under ``text_config`` or flat) into the
settings that the maths needs, and refuses every setting it does not know that could change the
maths. It is the only module that reads environment variables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["kda", "mla"]
MlpKind = Literal["dense", "moe"]


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the setting, its value and the limit."""


@dataclass(frozen=True)
class Activation:
    """Gated activation: ``silu(g) * u``, or SiTU with its two bounds."""

    kind: Literal["silu", "situ"]
    beta: float | None = None
    linear_beta: float | None = None


@dataclass(frozen=True)
class KdaConfig:
    """Kimi Delta Attention: H heads of K = V = head_dim channels."""

    num_heads: int
    head_dim: int
    conv_width: int
    # None selects the softplus gate; a value (K3: -5.0) the sigmoid gate with that lower bound.
    gate_lower_bound: float | None
    is_gate_full_rank: bool

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention without rotation; cache row = kv_rank + rope_dim numbers."""

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    has_output_gate: bool
    latent_norm_eps: float

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def cache_width(self) -> int:
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts; ``latent_width`` None means the experts work at the model width."""

    num_experts: int
    top_k: int
    expert_width: int
    num_shared: int
    latent_width: int | None
    has_latent_norm: bool
    is_renormalized: bool
    routed_scaling: float
    expert_format: Literal["mxfp4", "bf16"]

    @property
    def shared_width(self) -> int:
        return self.num_shared * self.expert_width


@dataclass(frozen=True)
class ModelConfig:
    """Everything the maths of one model needs. Layer numbers are 0-based."""

    model_type: Literal["kimi_k3", "kimi_linear"]
    hidden_size: int
    vocab_size: int
    layer_kinds: tuple[LayerKind, ...]
    mlp_kinds: tuple[MlpKind, ...]
    dense_width: int
    activation: Activation
    rms_eps: float
    # A residual snapshot is pushed before layers 0, n, 2n, ...; None: plain pre-norm residual.
    attn_res_block: int | None
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    max_positions: int
    bos_id: int
    eos_id: int
    pad_id: int

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def num_snapshots(self) -> int:
        """Snapshots of the attention residuals after the last layer (K3: 8)."""
        if self.attn_res_block is None:
            return 0
        return -(-self.num_layers // self.attn_res_block)

    def is_snapshot_layer(self, layer: int) -> bool:
        return self.attn_res_block is not None and layer % self.attn_res_block == 0
