"""moe_tail on the native CPU kernels."""

from __future__ import annotations

from typing import Any

import torch

from kdecode.config import MoeConfig
from kdecode.kernels.common import _native
from kdecode.kernels.common.fused import (
    MAX_EXPERTS,
    MAX_TOP_K,
    refuse_gated_width,
    refuse_parts,
    refuse_rows,
    set_activation,
    set_exchange,
    step_rows,
    tiles_of,
)
from kdecode.kernels.common.native import NativeStep, ptr
from kdecode.kernels.contract import Buffers, Problem

BF16 = torch.bfloat16

# Columns of a matrix come in groups of so many.
_COLUMN_GROUP = {"bf16": 2, "mxfp4": 32}


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    moe = problem.config.moe
    reasons = refuse_rows(problem)
    if not 1 <= moe.num_experts <= MAX_EXPERTS:
        reasons.append(
            f"The native experts are 1 to {MAX_EXPERTS}; the model has {moe.num_experts}."
        )
    if not 1 <= moe.top_k <= MAX_TOP_K:
        reasons.append(
            f"The native experts step takes 1 to {MAX_TOP_K} experts a row; "
            f"the model selects {moe.top_k}."
        )
    if moe.latent_width is not None:
        reasons += refuse_parts(problem, columns_of_the_model=problem.config.hidden_size)
    reasons += refuse_gated_width("The width of an expert", moe.expert_width)
    group = _COLUMN_GROUP[moe.expert_format]
    in_width = _in_width(problem)
    for what, columns in (("width of an expert", moe.expert_width), ("experts' input", in_width)):
        if columns % group:
            reasons.append(
                f"Columns of {moe.expert_format} tiles come in groups of {group}; "
                f"the {what} is {columns}."
            )
    return reasons


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> NativeStep:
    """weights: a `PackedLayer` whose ``mlp`` is a `PackedMoe`."""
    config, rows, moe = problem.config, step_rows(problem), weights.mlp
    width = config.hidden_size
    args = _native.MoeTailArgs()
    args.rows, args.width, args.eps = rows, width, config.rms_eps
    set_activation(args, config.activation)
    used = _set_experts(args, problem, moe, buffers)
    if config.moe.latent_width is not None:
        used += _set_latent_up(args, problem, moe, buffers)
    if config.moe.num_shared:
        used += _set_shared(args, problem, moe, buffers)
    parts = 4 * rows * _in_width(problem), 4 * rows * args.shared_down.rows
    set_exchange(args, problem, buffers, *parts)
    args.mlp_delta = ptr(buffers["mlp_delta"], BF16, (rows, width))
    args.prefix = ptr(buffers["prefix"], BF16, (rows, width))
    alive = (*used, moe, buffers["mlp_delta"], buffers["prefix"])
    return NativeStep(buffers.pool, problem.isa, "moe_tail", args, alive)


def _in_width(problem: Problem) -> int:
    return problem.config.moe.latent_width or problem.config.hidden_size


def _set_experts(args: Any, problem: Problem, moe: Any, buffers: Buffers) -> list[torch.Tensor]:
    """Experts, routes and their scratch; returns the tensors that must stay alive."""
    settings: MoeConfig = problem.config.moe
    rows, in_width, top_k = step_rows(problem), _in_width(problem), settings.top_k
    if len(moe.experts) != settings.num_experts:
        raise ValueError(f"{len(moe.experts)} experts are packed of {settings.num_experts}.")
    gate_rows = 2 * settings.expert_width
    args.expert_gate_up = buffers.memory.once(
        "expert_gate_up",
        moe,
        lambda: _native.TileList(
            [
                tiles_of("An expert's gate_up matrix", expert.gate_up, gate_rows, in_width)
                for expert in moe.experts
            ]
        ),
    )
    args.expert_down = buffers.memory.once(
        "expert_down",
        moe,
        lambda: _native.TileList(
            [
                tiles_of("An expert's down matrix", expert.down, in_width, settings.expert_width)
                for expert in moe.experts
            ]
        ),
    )
    source = buffers["mlp_in" if settings.latent_width is None else "latent"]
    product = buffers.scratch("expert_product", (rows * top_k, settings.expert_width))
    outputs = _set_outputs(args, problem, buffers)
    ids, route_weights = buffers["route_ids"], buffers["route_weights"]
    args.top_k = top_k
    args.expert_in = ptr(source, BF16, (rows, in_width))
    args.route_ids = ptr(ids, torch.int32, (rows, top_k))
    args.route_weights = ptr(route_weights, torch.float32, (rows, top_k))
    args.expert_product = ptr(product, BF16, tuple(product.shape))
    args.expert_sum = ptr(buffers["expert_sum"], BF16, (rows, in_width))
    return [source, product, outputs, ids, route_weights, buffers["expert_sum"]]


def _set_outputs(args: Any, problem: Problem, buffers: Buffers) -> torch.Tensor:
    """Scratch of every expert's output: of several ranks it is a part, and is not rounded."""
    shape = (step_rows(problem) * problem.config.moe.top_k, _in_width(problem))
    if problem.ranks.is_alone:
        outputs = buffers.scratch("expert_out", shape)
        args.expert_out = ptr(outputs, BF16, shape)
    else:
        outputs = buffers.scratch("expert_part", shape, torch.float32)
        args.expert_part = ptr(outputs, torch.float32, shape)
    return outputs


def _set_latent_up(args: Any, problem: Problem, moe: Any, buffers: Buffers) -> list[torch.Tensor]:
    """Norm of the summed experts and the way back to the model width."""
    rows, in_width, width = step_rows(problem), _in_width(problem), problem.config.hidden_size
    own = problem.ranks.part(width)
    args.latent_up = tiles_of("latent_up", moe.latent_up, own, in_width)
    args.routed = ptr(buffers["routed"], BF16, (rows, width))
    used = [buffers["routed"]]
    if moe.latent_norm is not None:
        normed = buffers.scratch("expert_sum_normed", (rows, in_width))
        args.latent_norm = ptr(moe.latent_norm, torch.float32, (in_width,))
        args.normed = ptr(normed, BF16, (rows, in_width))
        used.append(normed)
    return used


def _set_shared(args: Any, problem: Problem, moe: Any, buffers: Buffers) -> list[torch.Tensor]:
    """The down projection of the shared experts."""
    rows, width = step_rows(problem), problem.config.hidden_size
    shared_width = problem.config.moe.shared_width
    args.shared_down = tiles_of("The shared down matrix", moe.shared.down, width, shared_width)
    args.shared_product = ptr(buffers["shared_product"], BF16, (rows, shared_width))
    args.shared = ptr(buffers["shared"], BF16, (rows, width))
    return [buffers["shared_product"], buffers["shared"]]
