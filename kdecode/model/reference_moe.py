"""Reference stages of a mixture of experts: router, latent projections, experts, shared MLP."""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.config import Activation, MoeConfig
from kdecode.model.mxfp4 import dequantise
from kdecode.model.parameters import ExpertWeight, MlpParameters, MoeParameters, Mxfp4
from kdecode.model.reference_common import Rounding, gated_mlp, linear, rms_norm

ROUTER_EPS = 1e-20


def route(
    p: MoeParameters, config: MoeConfig, mlp_in: Tensor, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    """mlp_in [R, M] -> route_ids [R, N] int32, best first, and route_weights [R, N] (wide).

    The bias only selects; the weights come from the unbiased scores. Of equal biased scores the
    lowest expert is first.
    """
    scores = torch.sigmoid(rounding.wide(mlp_in) @ rounding.wide(p.router).T)  # [R, E]
    biased = scores + rounding.wide(p.router_bias)
    ids = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, : config.top_k]
    weights = scores.gather(-1, ids)
    if config.is_renormalized:
        weights = weights / (weights.sum(-1, keepdim=True) + ROUTER_EPS)
    return ids.to(torch.int32), weights * config.routed_scaling


def latent_down(p: MoeParameters, mlp_in: Tensor, rounding: Rounding) -> Tensor:
    """mlp_in [R, M] -> latent [R, L]."""
    if p.latent_down is None:
        raise ValueError("latent_down was asked of a model whose experts work at the model width.")
    return linear(mlp_in, p.latent_down, rounding)


def experts(
    p: MoeParameters,
    activation: Activation,
    expert_in: Tensor,
    route_ids: Tensor,
    route_weights: Tensor,
    rounding: Rounding,
) -> Tensor:
    """Weighted sum of the chosen experts. expert_in [R, L or M] -> expert_sum [R, L or M].

    Each expert's output is rounded, then the sum; weights and sum are wide.
    """
    rows, top_k = route_ids.shape
    outputs = rounding.wide(expert_in.new_zeros(rows, top_k, expert_in.shape[-1]))
    for expert in sorted(set(route_ids.flatten().tolist())):
        row, place = (route_ids == expert).nonzero(as_tuple=True)
        mlp = MlpParameters(_dense(p.w1[expert]), _dense(p.w3[expert]), _dense(p.w2[expert]))
        outputs[row, place] = rounding.wide(gated_mlp(expert_in[row], mlp, activation, rounding))
    weights = rounding.wide(route_weights).unsqueeze(-1)
    return rounding.narrow((weights * outputs).sum(1))


def latent_up(p: MoeParameters, expert_sum: Tensor, eps: float, rounding: Rounding) -> Tensor:
    """Norm of the summed experts, up projection. expert_sum [R, L] -> routed [R, M]."""
    if p.latent_up is None:
        raise ValueError("latent_up was asked of a model whose experts work at the model width.")
    if p.latent_norm is not None:
        expert_sum = rms_norm(expert_sum, p.latent_norm, eps, rounding)
    return linear(expert_sum, p.latent_up, rounding)


def shared_mlp(
    p: MoeParameters, activation: Activation, mlp_in: Tensor, rounding: Rounding
) -> Tensor:
    """The shared experts, one fused MLP on the model width. mlp_in [R, M] -> shared [R, M]."""
    if p.shared is None:
        raise ValueError("shared_mlp was asked of a model without shared experts.")
    return gated_mlp(mlp_in, p.shared, activation, rounding)


def _dense(weight: ExpertWeight) -> Tensor:
    return dequantise(weight) if isinstance(weight, Mxfp4) else weight
