"""moe_front on the native CPU kernels."""

from __future__ import annotations

from typing import Any

import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.fused import (
    MAX_EXPERTS,
    MAX_TOP_K,
    refuse_gated_width,
    refuse_mix_norm,
    refuse_parts,
    refuse_rows,
    set_activation,
    set_exchange,
    set_mlp_mix_norm,
    step_rows,
    tiles_of,
)
from kdecode.kernels.common.native import NativeStep, ptr
from kdecode.kernels.contract import Buffers, Problem


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    moe = problem.config.moe
    reasons = refuse_rows(problem) + refuse_mix_norm(problem.config)
    if moe.num_experts > MAX_EXPERTS:
        reasons.append(
            f"The native router takes up to {MAX_EXPERTS} experts; the model has {moe.num_experts}."
        )
    if not 1 <= moe.top_k <= min(MAX_TOP_K, moe.num_experts):
        reasons.append(
            f"The native router selects 1 to {min(MAX_TOP_K, moe.num_experts)} of "
            f"{moe.num_experts} experts a row; the model selects {moe.top_k}."
        )
    reasons += refuse_parts(problem, experts=moe.num_experts, latents=moe.latent_width or 0)
    return reasons + refuse_gated_width("The width of the shared experts", moe.shared_width)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> NativeStep:
    """weights: a `PackedLayer` whose ``mlp`` is a `PackedMoe`."""
    config, rows, moe, ranks = problem.config, step_rows(problem), weights.mlp, problem.ranks
    args = _native.MoeFrontArgs()
    used = set_mlp_mix_norm(args, problem, weights, buffers)
    used += _set_routing(args, problem, moe, buffers)
    width, latent_width, shared_width = (
        config.hidden_size,
        config.moe.latent_width,
        config.moe.shared_width,
    )
    if latent_width is not None:
        own = ranks.part(latent_width)
        args.latent_down = tiles_of("latent_down", moe.latent_down, own, width)
        args.latent = ptr(buffers["latent"], torch.bfloat16, (rows, latent_width))
        used.append(buffers["latent"])
    if shared_width:
        set_activation(args, config.activation)
        args.shared_gate_up = tiles_of(
            "The shared gate_up matrix", moe.shared.gate_up, 2 * shared_width, width
        )
        args.shared_product = ptr(buffers["shared_product"], torch.bfloat16, (rows, shared_width))
        used.append(buffers["shared_product"])
    parts = 4 * rows * args.router.rows, 2 * rows * args.latent_down.rows
    set_exchange(args, problem, buffers, *parts)
    return NativeStep(buffers.pool, problem.isa, "moe_front", args, (*used, moe))


def _set_routing(args: Any, problem: Problem, moe: Any, buffers: Buffers) -> list[torch.Tensor]:
    """Fills the router's fields; returns the tensors that must stay alive."""
    settings, rows = problem.config.moe, step_rows(problem)
    num_experts, top_k = settings.num_experts, settings.top_k
    logits = buffers.scratch("router_logits", (rows, num_experts), torch.float32)
    own = problem.ranks.part(num_experts)
    args.router = tiles_of("The router", moe.router, own, problem.config.hidden_size)
    args.router_bias = ptr(moe.router_bias, torch.float32, (num_experts,))
    args.router_logits = ptr(logits, torch.float32, (rows, num_experts))
    args.route_ids = ptr(buffers["route_ids"], torch.int32, (rows, top_k))
    args.route_weights = ptr(buffers["route_weights"], torch.float32, (rows, top_k))
    args.top_k = top_k
    args.is_renormalized = settings.is_renormalized
    args.routed_scaling = settings.routed_scaling
    return [logits, buffers["route_ids"], buffers["route_weights"]]
