"""Reference stages of a KDA layer: projection, convolution, gate, delta rule, gated norm.

Formulas: docs/model.md. `kda_step` and `kda_chunk` are two forms of the same recurrence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdecode.config import KdaConfig
from kdecode.model.parameters import KdaParameters
from kdecode.model.reference_common import Rounding, linear, normalise

L2_EPS = 1e-6


class KdaColumns(NamedTuple):
    """`kda_proj` by column group: q, k, v [R, D] together, output gate, f_a, beta."""

    qkv: Tensor  # [R, 3D]
    gate: Tensor  # [R, G]
    decay: Tensor  # [R, A]
    beta: Tensor  # [R, H]


def kda_columns(p: KdaParameters, kda_proj: Tensor) -> KdaColumns:
    """Splits `kda_proj` [R, 3D + G + A + H]."""
    width = p.q_proj.shape[0]
    gate = p.g_proj if p.g_proj is not None else p.g_a_proj
    if gate is None:
        raise ValueError("A KDA layer needs g_proj or g_a_proj; both are absent.")
    sizes = [3 * width, gate.shape[0], p.f_a_proj.shape[0], p.b_proj.shape[0]]
    return KdaColumns(*torch.split(kda_proj, sizes, dim=-1))


def kda_in_proj(p: KdaParameters, attn_in: Tensor, rounding: Rounding) -> Tensor:
    """attn_in [R, M] -> kda_proj [R, 3D + G + A + H]."""
    gate = p.g_proj if p.g_proj is not None else p.g_a_proj
    if gate is None:
        raise ValueError("A KDA layer needs g_proj or g_a_proj; both are absent.")
    weights = (p.q_proj, p.k_proj, p.v_proj, gate, p.f_a_proj, p.b_proj)
    return torch.cat([linear(attn_in, weight, rounding) for weight in weights], dim=-1)


def kda_conv(
    p: KdaParameters, kda_proj: Tensor, window: Tensor, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution and SiLU over the T tokens of one request.

    kda_proj [T, >= 3D], window [W - 1, 3D] (the samples before them, oldest first)
    -> kda_qkv [T, 3D], window after the last token.
    """
    taps = rounding.wide(torch.cat([p.q_conv, p.k_conv, p.v_conv]))  # [3D, W]
    num_taps = taps.shape[1]
    raw = kda_proj[:, : taps.shape[0]]
    samples = torch.cat([window.to(raw.dtype), raw])  # [W - 1 + T, 3D]
    wide = rounding.wide(samples)
    tokens = raw.shape[0]
    convolved = sum(
        (wide[j : j + tokens] * taps[:, j] for j in range(num_taps)),
        start=torch.zeros_like(wide[:tokens]),
    )
    return rounding.narrow(torch.nn.functional.silu(convolved)), samples[tokens:]


def kda_gate(
    p: KdaParameters, config: KdaConfig, kda_proj: Tensor, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    """kda_proj -> kda_decay g [R, H, K] (log domain, never above 0), kda_beta [R, H]; wide."""
    columns = kda_columns(p, kda_proj)
    f = linear(columns.decay, p.f_b_proj, rounding)
    z = (rounding.wide(f) + rounding.wide(p.dt_bias)).view(-1, config.num_heads, config.head_dim)
    g = decay(z, rounding.wide(p.a_log).unsqueeze(-1), config.gate_lower_bound)
    return g, torch.sigmoid(rounding.wide(columns.beta))


def decay(z: Tensor, a_log: Tensor, lower_bound: float | None) -> Tensor:
    """The gate's function: sigmoid form with a lower bound, softplus form without one."""
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(a_log.exp() * z)
    return -a_log.exp() * torch.nn.functional.softplus(z, threshold=20.0)


class KdaHeads(NamedTuple):
    """Inputs of the delta rule, wide: L2-normalised q (scaled) and k [T, H, K], v [T, H, V]."""

    q: Tensor
    k: Tensor
    v: Tensor


def kda_heads(config: KdaConfig, kda_qkv: Tensor, rounding: Rounding) -> KdaHeads:
    """kda_qkv [T, 3D] -> per-head q, k (L2-normalised, in fp32 under ROUNDED) and v."""
    shape = (-1, 3, config.num_heads, config.head_dim)
    q, k, v = rounding.wide(kda_qkv).reshape(shape).unbind(1)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * config.head_dim**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
    return KdaHeads(q, k, v)


def kda_step(
    config: KdaConfig,
    kda_qkv: Tensor,
    kda_decay: Tensor,
    kda_beta: Tensor,
    state: Tensor,
    rounding: Rounding,
) -> tuple[Tensor, Tensor]:
    """The delta rule, one token after the other, over the T tokens of one request.

    kda_qkv [T, 3D], kda_decay [T, H, K], kda_beta [T, H], state [H, K, V] (wide)
    -> kda_out [T, H, V], state.
    """
    heads = kda_heads(config, kda_qkv, rounding)
    kept = rounding.wide(kda_decay).exp()
    beta = rounding.wide(kda_beta)
    state = rounding.wide(state)
    outs = []
    for t in range(kda_qkv.shape[0]):
        state = kept[t].unsqueeze(-1) * state
        read = torch.einsum("hk,hkv->hv", heads.k[t], state)
        correction = beta[t].unsqueeze(-1) * (heads.v[t] - read)
        state = state + heads.k[t].unsqueeze(-1) * correction.unsqueeze(-2)
        outs.append(torch.einsum("hk,hkv->hv", heads.q[t], state))
    return rounding.narrow(torch.stack(outs)), state


def kda_chunk(
    config: KdaConfig,
    kda_qkv: Tensor,
    kda_decay: Tensor,
    kda_beta: Tensor,
    state: Tensor,
    rounding: Rounding,
    *,
    chunk_tokens: int = 64,
) -> tuple[Tensor, Tensor]:
    """The chunked form of `kda_step`: equal in exact arithmetic, same arguments and results."""
    heads = kda_heads(config, kda_qkv, rounding)
    inputs = (*heads, rounding.wide(kda_decay), rounding.wide(kda_beta))
    state = rounding.wide(state)
    outs = []
    for chunk in zip(*(torch.split(x, chunk_tokens) for x in inputs), strict=True):
        out, _, state = delta_rule_chunk(*chunk, state=state)
        outs.append(out)
    return rounding.narrow(torch.cat(outs)), state


def delta_rule_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk of C tokens in closed form; any C.

    q, k, g [C, H, K], v [C, H, V], beta [C, H], state [H, K, V]
    -> outputs [C, H, V], corrections u [C, H, V] (those of `kda_step`), state.
    """
    q, k, v, g, beta = (x.transpose(0, 1) for x in (q, k, v, g, beta))  # heads first
    tokens = q.shape[1]
    total = g.cumsum(1)  # [H, C, K], inclusive
    # Differences are formed before exp: each is <= 0 where it is used, so strong decays underflow
    # to 0 instead of overflowing.
    upper = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    difference = total.unsqueeze(2) - total.unsqueeze(1)  # [H, i, j, K]
    ratio = difference.masked_fill(upper[..., None], float("-inf")).exp()
    pairs = torch.einsum("hik,hjk,hijk->hij", k, k, ratio)
    lower = (beta.unsqueeze(-1) * pairs).tril(-1)
    reads = torch.einsum("hik,hjk,hijk->hij", q, k, ratio)
    rhs = beta.unsqueeze(-1) * (v - (k * total.exp()) @ state)
    identity = torch.eye(tokens, dtype=q.dtype, device=q.device)
    u = torch.linalg.solve_triangular(identity + lower, rhs, upper=False, unitriangular=True)
    out = (q * total.exp()) @ state + reads @ u
    last = total[:, -1]  # [H, K]
    carried = (k * (last.unsqueeze(1) - total).exp()).transpose(1, 2) @ u
    state = last.exp().unsqueeze(-1) * state + carried
    return out.transpose(0, 1), u.transpose(0, 1), state


def kda_out_norm(
    p: KdaParameters, kda_out: Tensor, kda_proj: Tensor, eps: float, rounding: Rounding
) -> Tensor:
    """Per-head RMSNorm times the sigmoid gate, rounded once. -> attn_out [R, H*V]."""
    gate = kda_columns(p, kda_proj).gate
    if p.g_b_proj is not None:
        gate = linear(gate, p.g_b_proj, rounding)
    normed = normalise(kda_out, p.o_norm, eps, rounding)  # [R, H, V]
    return rounding.narrow(normed.flatten(-2) * torch.sigmoid(rounding.wide(gate)))
