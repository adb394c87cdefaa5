"""The choice of a row's experts where each of several ranks has some of the router's products.

Device function: one program's work for one row, of every rank's part where it is. Host side: what a
launch binds for it. Knows no op.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kdecode.kernels.common.rank_parts import offsets, parts_of
from kdecode.kernels.common.triton_launch import plan_rows, tensor_for
from kdecode.kernels.common.triton_route import route_constants, select_experts
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32


def choice_of_ranks(
    problem: Problem, mixture: Any, buffers: Buffers
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and constants by which a kernel calls `choose_row`. mixture: a `PackedMoe`."""
    moe, rows, size = problem.config.moe, plan_rows(problem), problem.ranks.size
    latent = moe.latent_width or 0
    begins, _ = offsets(parts_of(problem.config, size)["gate"], rows)
    bias = tensor_for(mixture.router_bias, FP32, (moe.num_experts,), name="router bias")
    arguments: dict[str, Any] = {
        "sources": tensor_for(
            buffers.blocks["gate"].sources, torch.int64, (size,), name="addresses"
        ),
        "bias": bias,
        "scores": buffers.scratch("router_logits", (rows, moe.num_experts), FP32),
        "latents": bias,  # not written without a width
        "ids": tensor_for(buffers["route_ids"], INT32, (rows, moe.top_k), name="route_ids"),
        "weights": tensor_for(
            buffers["route_weights"], FP32, (rows, moe.top_k), name="route_weights"
        ),
        "scaling": moe.routed_scaling,
        "offset": begins.get("latent_part", 0),
    }
    if latent:
        arguments["latents"] = tensor_for(buffers["latent"], BF16, (rows, latent), name="latent")
    constants = {
        **route_constants(moe),
        "EACH": moe.num_experts // size,
        "LATENTS": latent,
        "LATENTS_EACH": max(1, latent // size),
        "BLOCK_L": triton.next_power_of_2(max(1, latent)),
    }
    return arguments, constants


@triton.jit
def choose_row(
    row,
    sources,
    bias,
    scores,
    latents,
    ids,
    weights,
    scaling,
    offset,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,
    LATENTS: tl.constexpr,
    LATENTS_EACH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    """Row ``row``, int64, of the blocks at ``sources``: its latents side by side, its experts and
    their weights. offset: of the latents in a block, in bytes. EXPERTS, LATENTS: of all ranks."""
    expert = tl.arange(0, BLOCK_E)
    inside = expert < EXPERTS
    begin = tl.load(sources + expert // EACH, mask=inside, other=0)
    place = begin.to(tl.pointer_type(tl.float32)) + row * EACH + expert % EACH
    score = tl.load(place, mask=inside, other=0.0)
    tl.store(scores + row * EXPERTS + expert, score, mask=inside)
    if LATENTS > 0:
        column = tl.arange(0, BLOCK_L)
        has = column < LATENTS
        begin = tl.load(sources + column // LATENTS_EACH, mask=has, other=0) + offset
        place = begin.to(tl.pointer_type(tl.bfloat16)) + row * LATENTS_EACH + column % LATENTS_EACH
        tl.store(latents + row * LATENTS + column, tl.load(place, mask=has, other=0.0), mask=has)
    tl.debug_barrier()
    select_experts(
        scores + row * EXPERTS,
        bias,
        ids + row * TOP_K,
        weights + row * TOP_K,
        scaling,
        EXPERTS,
        TOP_K,
        BLOCK_E,
        BLOCK_SLOTS,
        RENORMALISE,
    )
