"""Reference stages of an MLA layer without rotation, in the absorbed form that decode uses.

`mla_plain` is the same attention with expanded keys and values, for checking the absorbed form.
A cache row is [latent after its norm | unrotated key part]; formulas in docs/model.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdecode.config import CacheDtype, MlaConfig
from kdecode.model.parameters import MlaParameters
from kdecode.model.reference_common import Rounding, linear, rms_norm

FP8_MAX = 448.0  # largest E4M3 number


class MlaColumns(NamedTuple):
    """`mla_proj` by column group."""

    query: Tensor  # [R, q_rank], or [R, H*qk_dim] without q LoRA
    latent: Tensor  # [R, kv_rank], before its norm
    key_rest: Tensor  # [R, rope_dim], shared by all heads
    gate: Tensor  # [R, H*v_dim], or [R, 0]


def mla_columns(p: MlaParameters, config: MlaConfig, mla_proj: Tensor) -> MlaColumns:
    """Splits `mla_proj` [R, q + kv_rank + rope_dim + gate]."""
    gate = 0 if p.g_proj is None else p.g_proj.shape[0]
    query = mla_proj.shape[-1] - config.cache_width - gate
    sizes = [query, config.kv_rank, config.rope_dim, gate]
    return MlaColumns(*torch.split(mla_proj, sizes, dim=-1))


def mla_in_proj(p: MlaParameters, attn_in: Tensor, rounding: Rounding) -> Tensor:
    """attn_in [R, M] -> mla_proj [R, q + kv_rank + rope_dim + gate]."""
    query = p.q_proj if p.q_proj is not None else p.q_a_proj
    if query is None:
        raise ValueError("An MLA layer needs q_proj or q_a_proj; both are absent.")
    weights = (query, p.kv_a_proj) if p.g_proj is None else (query, p.kv_a_proj, p.g_proj)
    return torch.cat([linear(attn_in, weight, rounding) for weight in weights], dim=-1)


def mla_heads(p: MlaParameters, config: MlaConfig, mla_proj: Tensor, rounding: Rounding) -> Tensor:
    """The query of every head, before absorption. mla_proj -> [R, H, qk_dim]."""
    query = mla_columns(p, config, mla_proj).query
    if p.q_b_proj is not None:
        if p.q_a_norm is None:
            raise ValueError("An MLA layer with q_b_proj needs q_a_norm, which is absent.")
        normed = rms_norm(query, p.q_a_norm, config.latent_norm_eps, rounding)
        query = linear(normed, p.q_b_proj, rounding)
    return query.reshape(-1, config.num_heads, config.qk_dim)


def mla_up(p: MlaParameters, config: MlaConfig, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """W_UK [H, nope_dim, kv_rank] and W_UV [H, v_dim, kv_rank], wide."""
    heads = rounding.wide(p.kv_b_proj).view(config.num_heads, -1, config.kv_rank)
    w_uk, w_uv = torch.split(heads, [config.nope_dim, config.v_dim], dim=1)
    return w_uk, w_uv


def mla_query(p: MlaParameters, config: MlaConfig, mla_proj: Tensor, rounding: Rounding) -> Tensor:
    """Query against cache rows. mla_proj -> [R, H, kv_rank + rope_dim]."""
    query = mla_heads(p, config, mla_proj, rounding)
    nope, rest = torch.split(query, [config.nope_dim, config.rope_dim], dim=-1)
    w_uk, _ = mla_up(p, config, rounding)
    latent = torch.einsum("rhn,hnl->rhl", rounding.wide(nope), w_uk)
    return torch.cat([rounding.narrow(latent), rest], dim=-1)


def mla_insert(p: MlaParameters, config: MlaConfig, mla_proj: Tensor, rounding: Rounding) -> Tensor:
    """The cache row of each token, before `store_rows`. mla_proj -> [R, kv_rank + rope_dim]."""
    columns = mla_columns(p, config, mla_proj)
    latent = rms_norm(columns.latent, p.kv_a_norm, config.latent_norm_eps, rounding)
    return torch.cat([latent, columns.key_rest], dim=-1)


def store_rows(rows: Tensor, cache_dtype: CacheDtype, scale: float = 1.0) -> Tensor:
    """Cache rows as the cache keeps them: unchanged, or E4M3 of ``rows / scale`` clamped to 448."""
    if cache_dtype == "bf16":
        return rows
    scaled = rows.float() / scale
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def load_rows(stored: Tensor, rounding: Rounding, scale: float = 1.0) -> Tensor:
    """Cache rows as attention reads them: ``bf16(fp8 * scale)``, or unchanged."""
    if stored.dtype != torch.float8_e4m3fn:
        return stored
    return rounding.narrow(stored.float() * scale)


def mla_attend(
    config: MlaConfig, mla_query: Tensor, rows: Tensor, start: int, rounding: Rounding
) -> Tensor:
    """Causal attention of the T tokens of one request over its cache rows.

    mla_query [T, H, width], rows [>= start + T, width] as `load_rows` gives them, start: position
    of the first token -> mla_latent [T, H, kv_rank]. Rows behind a token are not read.
    """
    outs = []
    for t in range(mla_query.shape[0]):
        seen = rounding.wide(rows[: start + t + 1])
        scores = rounding.wide(mla_query[t]) @ seen.T * config.qk_dim**-0.5  # [H, C]
        outs.append(torch.softmax(scores, dim=-1) @ seen[:, : config.kv_rank])
    return rounding.narrow(torch.stack(outs))


def mla_value(
    p: MlaParameters, config: MlaConfig, mla_latent: Tensor, mla_proj: Tensor, rounding: Rounding
) -> Tensor:
    """W_UV and the sigmoid output gate, rounded once. mla_latent -> attn_out [R, H*v_dim]."""
    _, w_uv = mla_up(p, config, rounding)
    value = torch.einsum("rhl,hvl->rhv", rounding.wide(mla_latent), w_uv).flatten(-2)
    return rounding.narrow(_gated(p, config, value, mla_proj, rounding))


def mla_plain(
    p: MlaParameters,
    config: MlaConfig,
    mla_proj: Tensor,
    rows: Tensor,
    start: int,
    rounding: Rounding,
) -> Tensor:
    """`mla_query` to `mla_value` with expanded keys and values. -> attn_out [T, H*v_dim]."""
    query = rounding.wide(mla_heads(p, config, mla_proj, rounding))
    w_uk, w_uv = mla_up(p, config, rounding)
    wide = rounding.wide(rows)
    latent, rest = wide[:, : config.kv_rank], wide[:, config.kv_rank : config.cache_width]
    keys = torch.einsum("cl,hnl->hcn", latent, w_uk)
    keys = torch.cat([keys, rest.expand(config.num_heads, *rest.shape)], dim=-1)  # [H, C, qk_dim]
    values = torch.einsum("cl,hvl->hcv", latent, w_uv)
    outs = []
    for t in range(query.shape[0]):
        end = start + t + 1
        scores = torch.einsum("hd,hcd->hc", query[t], keys[:, :end]) * config.qk_dim**-0.5
        outs.append(torch.einsum("hc,hcv->hv", torch.softmax(scores, dim=-1), values[:, :end]))
    value = torch.stack(outs).flatten(-2)
    return rounding.narrow(_gated(p, config, value, mla_proj, rounding))


def _gated(
    p: MlaParameters, config: MlaConfig, value: Tensor, mla_proj: Tensor, rounding: Rounding
) -> Tensor:
    if p.g_proj is None:
        return value
    return value * torch.sigmoid(rounding.wide(mla_columns(p, config, mla_proj).gate))
