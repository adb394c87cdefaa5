"""The maths of the model in plain torch: one function for each stage of `model/stages.py`.

Every function takes a `Rounding`, so the same text is two oracles: `GOLD` (fp64, nothing is
rounded; `GOLD32` in fp32) and `ROUNDED` (fp32 arithmetic, bf16 at the rounding points of
ARCHITECTURE.md). Functions read canonical parameters, never change their arguments, and return new
tensors; buffers have the names and shapes of ARCHITECTURE.md, in bf16 or fp32 under ROUNDED and in
the dtype of the arithmetic otherwise.

Stateless stages work on rows [R, ...] of any requests. Stateful stages (`kda_conv`, `kda_step`,
`kda_chunk`, `mla_attend`) take the tokens [T, ...] of one request, in order. The formulas are in
docs/model.md. Knows no caches, packed weights or kernels, and is not meant to be fast.

The mixers have a file each (`reference_kda`, `reference_mla`, `reference_moe`); this one has the
stages around them, `forward`, and gives every stage its name: callers import from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from kdecode.config import CacheDtype, ModelConfig
from kdecode.model.parameters import (
    KdaParameters,
    LayerParameters,
    MixParameters,
    MlaParameters,
    MlpParameters,
    ModelParameters,
)
from kdecode.model.reference_common import (
    GOLD,
    GOLD32,
    ROUNDED,
    Rounding,
    activate,
    gated_mlp,
    linear,
    rms_norm,
)
from kdecode.model.reference_kda import (
    decay,
    delta_rule_chunk,
    kda_chunk,
    kda_columns,
    kda_conv,
    kda_gate,
    kda_heads,
    kda_in_proj,
    kda_out_norm,
    kda_step,
)
from kdecode.model.reference_mla import (
    load_rows,
    mla_attend,
    mla_columns,
    mla_heads,
    mla_in_proj,
    mla_insert,
    mla_plain,
    mla_query,
    mla_up,
    mla_value,
    store_rows,
)
from kdecode.model.reference_moe import experts, latent_down, latent_up, route, shared_mlp

__all__ = [
    "GOLD",
    "GOLD32",
    "ROUNDED",
    "KdaForm",
    "Options",
    "RequestState",
    "Rounding",
    "activate",
    "attn_mix",
    "attn_norm",
    "attn_out_proj",
    "attn_residual",
    "decay",
    "delta_rule_chunk",
    "dense_mlp",
    "embed",
    "experts",
    "final_mix",
    "forward",
    "gated_mlp",
    "head",
    "head_norm",
    "kda_chunk",
    "kda_columns",
    "kda_conv",
    "kda_gate",
    "kda_heads",
    "kda_in_proj",
    "kda_out_norm",
    "kda_step",
    "latent_down",
    "latent_up",
    "linear",
    "load_rows",
    "mix",
    "mla_attend",
    "mla_columns",
    "mla_heads",
    "mla_in_proj",
    "mla_insert",
    "mla_plain",
    "mla_query",
    "mla_up",
    "mla_value",
    "mlp_mix",
    "mlp_norm",
    "mlp_residual",
    "rms_norm",
    "route",
    "shared_mlp",
    "store_rows",
]

KdaForm = Literal["recurrent", "chunked"]


def embed(parameters: ModelParameters, token_ids: Tensor, rounding: Rounding) -> Tensor:
    """token_ids [R] -> prefix [R, M]."""
    return rounding.narrow(parameters.embed[token_ids.long()])


def mix(
    weights: MixParameters | None,
    prefix: Tensor,
    snapshots: Tensor,
    eps: float,
    rounding: Rounding,
) -> Tensor:
    """Attention residual mix. prefix [R, M], snapshots [S, R, M] -> [R, M].

    Softmax over the snapshots and the prefix of a score of each source's norm; what is averaged
    are the sources themselves. Identity without weights (plain residual) or without snapshots.
    """
    if weights is None or snapshots.shape[0] == 0:
        return prefix
    sources = rounding.wide(torch.cat([snapshots, prefix.unsqueeze(0)]))  # [S + 1, R, M]
    folded = rounding.wide(weights.norm) * rounding.wide(weights.proj)  # [M]
    scale = torch.rsqrt(sources.square().mean(-1) + eps)  # [S + 1, R]
    weight = torch.softmax((sources @ folded) * scale, dim=0)
    return rounding.narrow((weight.unsqueeze(-1) * sources).sum(0))


attn_mix = mlp_mix = final_mix = mix
attn_norm = mlp_norm = head_norm = rms_norm
dense_mlp = gated_mlp


def attn_out_proj(p: KdaParameters | MlaParameters, attn_out: Tensor, rounding: Rounding) -> Tensor:
    """attn_out [R, H*V] -> attn_delta [R, M]."""
    return linear(attn_out, p.o_proj, rounding)


def attn_residual(
    prefix: Tensor,
    snapshots: Tensor,
    attn_delta: Tensor,
    is_snapshot_layer: bool,
    rounding: Rounding,
) -> tuple[Tensor, Tensor]:
    """prefix, attn_delta [R, M], snapshots [S, R, M] -> the new prefix and snapshots.

    A snapshot layer pushes the prefix as it came in, unmixed (snapshots [S + 1, R, M]), and starts
    a new one from its own attention output.
    """
    if is_snapshot_layer:
        return attn_delta, torch.cat([snapshots, prefix.unsqueeze(0)])
    return rounding.narrow(rounding.wide(prefix) + rounding.wide(attn_delta)), snapshots


def mlp_residual(
    prefix: Tensor, mlp_delta: Tensor, shared: Tensor | None, rounding: Rounding
) -> Tensor:
    """prefix + mlp_delta, or with shared experts prefix + bf16(routed + shared). All [R, M]."""
    delta = rounding.wide(mlp_delta)
    if shared is not None:
        delta = rounding.wide(rounding.narrow(delta + rounding.wide(shared)))
    return rounding.narrow(rounding.wide(prefix) + delta)


def head(parameters: ModelParameters, head_in: Tensor, rounding: Rounding) -> Tensor:
    """head_in [R, M] -> logits [R, vocab]: wide tensors, of bf16 values under ROUNDED."""
    return rounding.wide(linear(head_in, parameters.lm_head, rounding))


@dataclass
class RequestState:
    """What one request has cached, by layer number. `forward` replaces the tensors of it.

    windows: KDA layers, [W - 1, 3D] raw samples. recurrent: KDA layers, [H, K, V] wide.
    rows: MLA layers, [num_tokens, kv_rank + rope_dim] as the cache keeps them (`store_rows`).
    cache_scale: of an fp8 cache, for layers whose checkpoint has no k_scale.
    """

    cache_dtype: CacheDtype = "bf16"
    cache_scale: float = 1.0
    num_tokens: int = 0
    windows: dict[int, Tensor] = field(default_factory=dict)
    recurrent: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def new(
        config: ModelConfig,
        rounding: Rounding,
        cache_dtype: CacheDtype = "bf16",
        cache_scale: float = 1.0,
    ) -> RequestState:
        """The state before the first token."""
        state = RequestState(cache_dtype, cache_scale)
        empty = rounding.narrow(torch.zeros(0))
        kda, mla = config.kda, config.mla
        for layer, kind in enumerate(config.layer_kinds):
            if kind == "kda":
                state.windows[layer] = empty.new_zeros(kda.conv_width - 1, 3 * kda.width)
                shape = (kda.num_heads, kda.head_dim, kda.head_dim)
                state.recurrent[layer] = torch.zeros(shape, dtype=rounding.compute)
            else:
                rows = empty.new_zeros(0, mla.cache_width)
                state.rows[layer] = store_rows(rows, cache_dtype)
        return state

    def clone(self) -> RequestState:
        """An independent copy; tensors are shared, because nothing writes into them."""
        return replace(
            self,
            windows=dict(self.windows),
            recurrent=dict(self.recurrent),
            rows=dict(self.rows),
        )


@dataclass(frozen=True)
class Options:
    """How `forward` computes, where two ways are equal in exact arithmetic.

    on_layer is called with (layer, prefix [T, M]) after each layer; on_kda with (layer, kda_proj,
    kda_qkv, kda_decay, kda_beta) before the recurrence of each KDA layer.
    """

    kda_form: KdaForm = "recurrent"
    chunk_tokens: int = 64
    on_layer: Callable[[int, Tensor], None] | None = None
    on_kda: Callable[[int, Tensor, Tensor, Tensor, Tensor], None] | None = None


def forward(
    parameters: ModelParameters,
    config: ModelConfig,
    token_ids: Tensor,
    state: RequestState,
    rounding: Rounding,
    options: Options = Options(),
) -> Tensor:
    """Logits [T, vocab] of T new tokens of one request; `state` is moved past them."""
    prefix = embed(parameters, token_ids, rounding)
    snapshots = prefix.new_zeros(0, *prefix.shape)
    eps = config.rms_eps
    for layer, p in enumerate(parameters.layers):
        mixed = attn_mix(p.attn_mix, prefix, snapshots, eps, rounding)
        attn_in = attn_norm(mixed, p.input_norm, eps, rounding)
        if isinstance(p.attention, KdaParameters):
            attn_out = _kda(p.attention, config, attn_in, layer, state, rounding, options=options)
        else:
            attn_out = _mla(p.attention, config, attn_in, layer, state, rounding)
        attn_delta = attn_out_proj(p.attention, attn_out, rounding)
        is_snapshot = config.is_snapshot_layer(layer)
        prefix, snapshots = attn_residual(prefix, snapshots, attn_delta, is_snapshot, rounding)
        prefix = _mlp(p, config, prefix, snapshots, rounding)
        if options.on_layer is not None:
            options.on_layer(layer, prefix)
    state.num_tokens += token_ids.shape[0]
    mixed = final_mix(parameters.final_mix, prefix, snapshots, eps, rounding)
    return head(parameters, head_norm(mixed, parameters.norm, eps, rounding), rounding)


def _kda(
    p: KdaParameters,
    config: ModelConfig,
    attn_in: Tensor,
    layer: int,
    state: RequestState,
    rounding: Rounding,
    *,
    options: Options,
) -> Tensor:
    """attn_in [T, M] -> attn_out [T, H*V]; moves the layer's window and recurrent state."""
    kda = config.kda
    proj = kda_in_proj(p, attn_in, rounding)
    qkv, state.windows[layer] = kda_conv(p, proj, state.windows[layer], rounding)
    g, beta = kda_gate(p, kda, proj, rounding)
    if options.on_kda is not None:
        options.on_kda(layer, proj, qkv, g, beta)
    recurrent = state.recurrent[layer]
    if options.kda_form == "recurrent":
        out, recurrent = kda_step(kda, qkv, g, beta, recurrent, rounding)
    else:
        chunk = options.chunk_tokens
        out, recurrent = kda_chunk(kda, qkv, g, beta, recurrent, rounding, chunk_tokens=chunk)
    state.recurrent[layer] = recurrent
    return kda_out_norm(p, out, proj, config.rms_eps, rounding)


def _mla(
    p: MlaParameters,
    config: ModelConfig,
    attn_in: Tensor,
    layer: int,
    state: RequestState,
    rounding: Rounding,
) -> Tensor:
    """attn_in [T, M] -> attn_out [T, H*v_dim]; appends to the layer's cache rows."""
    mla = config.mla
    proj = mla_in_proj(p, attn_in, rounding)
    scale = state.cache_scale if p.k_scale is None else float(p.k_scale)
    inserted = store_rows(mla_insert(p, mla, proj, rounding), state.cache_dtype, scale)
    state.rows[layer] = stored = torch.cat([state.rows[layer], inserted])
    query = mla_query(p, mla, proj, rounding)
    rows = load_rows(stored, rounding, scale)
    latent = mla_attend(mla, query, rows, state.num_tokens, rounding)
    return mla_value(p, mla, latent, proj, rounding)


def _mlp(
    layer: LayerParameters,
    config: ModelConfig,
    prefix: Tensor,
    snapshots: Tensor,
    rounding: Rounding,
) -> Tensor:
    """The second half of a layer. prefix [T, M] -> prefix."""
    eps, activation = config.rms_eps, config.activation
    mixed = mlp_mix(layer.mlp_mix, prefix, snapshots, eps, rounding)
    mlp_in = mlp_norm(mixed, layer.post_norm, eps, rounding)
    p = layer.mlp
    if isinstance(p, MlpParameters):
        delta = dense_mlp(mlp_in, p, activation, rounding)
        return mlp_residual(prefix, delta, None, rounding)
    ids, weights = route(p, config.moe, mlp_in, rounding)
    is_latent = p.latent_down is not None
    expert_in = latent_down(p, mlp_in, rounding) if is_latent else mlp_in
    routed = experts(p, activation, expert_in, ids, weights, rounding)
    if is_latent:
        routed = latent_up(p, routed, eps, rounding)
    shared = None if p.shared is None else shared_mlp(p, activation, mlp_in, rounding)
    return mlp_residual(prefix, routed, shared, rounding)
