"""The named pieces of the model's maths: what a decode plan has to cover, once each and in order.

Owns the names and the order of the stages of a layer. Knows nothing of how a stage is computed:
`model/reference.py` has one function for each of them, those of a draft apart
(`model/draft_reference.py`).
"""

from __future__ import annotations

from kdecode.config import ModelConfig

EMBED = ("embed",)

KDA = (
    "attn_mix",  # attention residual mix (identity for plain residual models)
    "attn_norm",  # input_layernorm
    "kda_in_proj",  # one packed projection: q | k | v | output gate | f_a | beta
    "kda_conv",  # short causal convolution + SiLU over q, k, v; moves the window
    "kda_gate",  # f_b, dt bias, decay g (log domain), beta
    "kda_step",  # L2 norms, delta rule on the fp32 state, read-out
    "kda_out_norm",  # per-head RMSNorm and sigmoid output gate
    "attn_out_proj",
    "attn_residual",  # snapshot push and residual add
)

MLA = (
    "attn_mix",
    "attn_norm",
    "mla_in_proj",  # one packed projection: q_a (or q) | kv_a | output gate
    "mla_query",  # query norm, q_b, absorption of W_UK
    "mla_insert",  # latent norm, cache row write
    "mla_attend",  # softmax over the cached latents
    "mla_value",  # W_UV and the output gate
    "attn_out_proj",
    "attn_residual",
)

# Of the stack of a draft only.
GQA = (
    "attn_mix",
    "attn_norm",
    "gqa_in_proj",  # one packed projection: q | k | v
    "gqa_query",  # norm of every head, rotation
    "gqa_insert",  # the same of the keys, cache row write
    "gqa_attend",  # softmax over the cached keys, of the values
    "attn_out_proj",
    "attn_residual",
)

DENSE = ("mlp_mix", "mlp_norm", "dense_mlp", "mlp_residual")

MOE = ("mlp_mix", "mlp_norm", "route", "experts", "shared_mlp", "mlp_residual")

LATENT_MOE = (
    "mlp_mix",
    "mlp_norm",
    "route",
    "latent_down",
    "experts",
    "latent_up",  # norm of the summed experts, up projection
    "shared_mlp",
    "mlp_residual",
)

HEAD = ("final_mix", "head_norm", "head")


def layer_stages(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Stages of one layer, in order."""
    attention = {"kda": KDA, "mla": MLA, "gqa": GQA}[config.layer_kinds[layer]]
    if config.mlp_kinds[layer] == "dense":
        return attention + DENSE
    mixture: tuple[str, ...] = MOE if config.moe.latent_width is None else LATENT_MOE
    if not config.moe.num_shared:
        mixture = tuple(stage for stage in mixture if stage != "shared_mlp")
    return attention + mixture


def model_stages(config: ModelConfig) -> tuple[tuple[int | None, str], ...]:
    """Every (layer, stage) of a forward pass, in order; layer None is before or after the stack."""
    stages: list[tuple[int | None, str]] = [(None, stage) for stage in EMBED]
    for layer in range(config.num_layers):
        stages += [(layer, stage) for stage in layer_stages(config, layer)]
    stages += [(None, stage) for stage in HEAD]
    return tuple(stages)
