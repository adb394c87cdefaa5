"""The choice of a row's experts from the router's products: moe_gate's and the standard path's.

`select_experts` is one program's work for one row; `route_rows` is a launch of one program a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.config import MoeConfig
from kdecode.kernels.common.triton_launch import Launch, tensor_for
from kdecode.kernels.common.triton_ops import sigmoid, wait_for_previous

MAX_EXPERTS = 4096
MAX_TOP_K = 64
# The number of an expert takes the bits of this below the rank of its score.
_LAST_EXPERT = tl.constexpr(MAX_EXPERTS - 1)
_RANK_UNIT = tl.constexpr(MAX_EXPERTS)
_EPS = tl.constexpr(1e-20)


def refuse_choice(moe: MoeConfig) -> list[str]:
    """Reasons that concern the numbers of experts."""
    reasons = []
    if moe.num_experts > MAX_EXPERTS:
        reasons.append(
            f"The Triton router takes up to {MAX_EXPERTS} experts; the model has {moe.num_experts}."
        )
    if not 1 <= moe.top_k <= min(MAX_TOP_K, moe.num_experts):
        reasons.append(
            f"The Triton router selects 1 to {min(MAX_TOP_K, moe.num_experts)} of "
            f"{moe.num_experts} experts a row; the model selects {moe.top_k}."
        )
    return reasons


def route_constants(moe: MoeConfig) -> dict[str, int | bool]:
    """The ``constexpr`` parameters of `select_experts`."""
    return {
        "EXPERTS": moe.num_experts,
        "TOP_K": moe.top_k,
        "BLOCK_E": triton.next_power_of_2(moe.num_experts),
        "BLOCK_SLOTS": triton.next_power_of_2(moe.top_k),
        "RENORMALISE": moe.is_renormalized,
    }


def route_launch(
    moe: MoeConfig, logits: Tensor, bias: Tensor, ids: Tensor, weights: Tensor
) -> Launch:
    """`route_rows` for all rows of ``logits`` [R, E] fp32."""
    rows = logits.shape[0]
    arguments = {
        "logits": tensor_for(logits, torch.float32, (rows, moe.num_experts), name="router logits"),
        "bias": tensor_for(bias, torch.float32, (moe.num_experts,), name="router bias"),
        "ids": tensor_for(ids, torch.int32, (rows, moe.top_k), name="route_ids"),
        "weights": tensor_for(weights, torch.float32, (rows, moe.top_k), name="route_weights"),
        "scaling": moe.routed_scaling,
    }
    return Launch(route_rows, (rows,), arguments, route_constants(moe), begins_early=True)


@triton.jit
def select_experts(
    logits,
    bias,
    ids,
    weights,
    scaling,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    """One row: the experts of the largest sigmoid(logits) + bias, and their weights.

    A key is the fp32 order of the biased score (NaN below everything), then the lower expert first.
    """
    expert = tl.arange(0, BLOCK_E)
    inside = expert < EXPERTS
    score = sigmoid(tl.load(logits + expert, mask=inside, other=0.0))
    biased = score + tl.load(bias + expert, mask=inside, other=0.0)
    # -0 and 0 tie.
    bits = tl.where(biased == 0.0, 0.0, biased).to(tl.int32, bitcast=True)
    # Of negative numbers all bits turn around, of others the sign: an order from 0 to 2^32 - 1.
    rank = tl.where(bits < 0, ~bits, bits ^ -0x80000000).to(tl.uint32, bitcast=True).to(tl.int64)
    rank = tl.where(biased == biased, rank, 0)
    keys = tl.where(inside, rank * _RANK_UNIT + (expert ^ _LAST_EXPERT), -1)
    slots = tl.arange(0, BLOCK_SLOTS)
    chosen = tl.zeros([BLOCK_SLOTS], tl.int32)
    for slot in range(TOP_K):
        best = tl.max(keys, axis=0)
        keys = tl.where(keys == best, -1, keys)
        number = (best & _LAST_EXPERT) ^ _LAST_EXPERT
        chosen = tl.where(slots == slot, number.to(tl.int32), chosen)
    is_slot = slots < TOP_K
    weight = sigmoid(tl.load(logits + chosen, mask=is_slot, other=0.0))
    if RENORMALISE:
        weight = weight / (tl.sum(tl.where(is_slot, weight, 0.0), axis=0) + _EPS)
    tl.store(ids + slots, chosen, mask=is_slot)
    tl.store(weights + slots, weight * scaling, mask=is_slot)


@triton.jit
def route_rows(
    logits,
    bias,
    ids,
    weights,
    scaling,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    select_experts(
        logits + row * EXPERTS,
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
