"""moe_gate in Triton: one program a block of router rows, of latent rows or of shared gate and up.

The router's programs come first. All ask for their weights before the launch ahead is over. Of one
or two rows the last of the router's to arrive makes the choice, while others still multiply; of
more rows a second launch does, one program a row.

Of several ranks each has some rows of the router and of the way to the latents. Where they signal
each other, the last of both kinds of programs to arrive does so, and of one or two rows it then
waits for the others and makes the choice; of more rows the last programs of the grid do, each for
one row. Otherwise the choice is left to `rank_whole`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    refuse_plan_rows,
    row_major,
    tensor_for,
)
from kdecode.kernels.common.triton_ops import (
    gated,
    is_last_arrival,
    round_bf16,
    to_bf16,
    wait_for_previous,
    wait_for_word,
)
from kdecode.kernels.common.triton_peers import peers_of, signal_peers, wait_for_peers
from kdecode.kernels.common.triton_product import product, product_rows, product_tile
from kdecode.kernels.common.triton_rank_route import choice_of_ranks, choose_row
from kdecode.kernels.common.triton_route import (
    refuse_choice,
    route_constants,
    route_launch,
    select_experts,
)
from kdecode.kernels.contract import Buffers, Problem

# Rows that one program chooses experts for, one after the other.
SELECT_ROWS = 2
BF16, FP32 = torch.bfloat16, torch.float32


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem) + refuse_choice(problem.config.moe)


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``mlp`` is a `PackedMoe`, its trunk in "rows"."""
    config, rows, mixture = problem.config, plan_rows(problem), weights.mlp
    moe, inner = config.moe, config.hidden_size
    experts, latent = _own_rows(problem)
    shared, is_alone = moe.shared_width, problem.ranks.is_alone
    columns = experts + latent + 2 * shared
    tile = product_tile("moe_gate", problem.arch, rows, columns, inner)
    # Gate and up are neighbours in a block.
    block_n = max(2, tile.block_n)
    blocks = _Blocks(
        divide_up(experts, block_n),
        divide_up(latent, block_n),
        divide_up(2 * shared, block_n),
    )
    choice, sizes, then = _choice(problem, mixture, buffers)
    can_wait = sizes["PEERS"] > 0
    selects = rows <= SELECT_ROWS and (is_alone or can_wait)
    arguments = {
        **choice,
        "x": tensor_for(buffers["mlp_in"], BF16, (rows, inner), name="mlp_in"),
        "router": row_major(mixture.router, (experts, inner), "the router"),
        **_outputs(problem, mixture, buffers),
        # Of programs that multiply, and of those that choose; whether the first are done.
        "counters": buffers.counters(3),
        "beta": config.activation.beta or 0.0,
        "bound": config.activation.linear_beta or 0.0,
        "rows": rows,
    }
    constants = {
        **sizes,
        "EXPERTS": experts,
        "LATENT": latent,
        "SHARED": shared,
        "INNER": inner,
        "ROUTER_BLOCKS": blocks.router,
        "LATENT_BLOCKS": blocks.latent,
        "PRODUCTS": blocks.total,
        "IS_SITU": config.activation.kind == "situ",
        "SELECT": selects,
        "BLOCK_R": product_rows(rows),
        "BLOCK_N": block_n,
        "BLOCK_K": tile.block_k,
    }
    grid = (blocks.total + (rows if can_wait and not selects else 0),)
    launch = Launch(
        moe_gate, grid, arguments, constants, tile.warps, tile.stages, begins_early=True
    )
    return TritonStep(launch, then=then if is_alone and not selects else ())


def _choice(
    problem: Problem, mixture: Any, buffers: Buffers
) -> tuple[dict[str, Any], dict[str, Any], tuple[Launch, ...]]:
    """Arguments and constants of the choice, and the launch that a rank which is alone may leave it
    to. logits: of this rank's experts."""
    moe, rows = problem.config.moe, plan_rows(problem)
    if problem.ranks.is_alone:
        logits = buffers.scratch("router_logits", (rows, moe.num_experts), FP32)
        ids, chosen = buffers["route_ids"], buffers["route_weights"]
        launch = route_launch(moe, logits, mixture.router_bias, ids, chosen)
        unused = dict.fromkeys(("sources", "peers", "scores", "latents"), logits)
        arguments = {**launch.arguments, **unused, "offset": 0}
        return arguments, {**launch.constants, "LATENTS_BLOCK": 1, "PEERS": 0}, (launch,)
    experts, _ = _own_rows(problem)
    peers, size = peers_of(buffers.blocks["gate"])
    arguments, constants = choice_of_ranks(problem, mixture, buffers)
    arguments |= {
        "logits": tensor_for(buffers["router_part"], FP32, (rows, experts), name="router_part"),
        "peers": peers,
    }
    sizes = {name: constants[name] for name in route_constants(moe)}
    return arguments, {**sizes, "LATENTS_BLOCK": constants["BLOCK_L"], "PEERS": size}, ()


def _own_rows(problem: Problem) -> tuple[int, int]:
    """Of the router and of the way to the latents, on this rank."""
    moe, ranks = problem.config.moe, problem.ranks
    return ranks.part(moe.num_experts), ranks.part(moe.latent_width or 0)


@dataclass(frozen=True)
class _Blocks:
    router: int
    latent: int
    shared: int

    @property
    def total(self) -> int:
        return self.router + self.latent + self.shared


def _outputs(problem: Problem, mixture: Any, buffers: Buffers) -> dict[str, Tensor]:
    """Weights and buffers that a model may not have; what stands for them is never read."""
    config, rows = problem.config, plan_rows(problem)
    shared, inner = config.moe.shared_width, config.hidden_size
    absent = buffers["mlp_in"]
    found = dict.fromkeys(("latent_down", "latent", "gate_up", "product_out"), absent)
    if config.moe.latent_width is not None:
        _, latent = _own_rows(problem)
        name = "latent" if problem.ranks.is_alone else "latent_part"
        found["latent_down"] = row_major(mixture.latent_down, (latent, inner), "latent_down")
        found["latent"] = tensor_for(buffers[name], BF16, (rows, latent), name=name)
    if shared:
        out = buffers["shared_product"]
        name = "the shared gate and up"
        found["gate_up"] = row_major(mixture.shared.gate_up, (2 * shared, inner), name)
        found["product_out"] = tensor_for(out, BF16, (rows, shared), name="shared_product")
    return found


@triton.jit
def _choose_behind(
    block,
    counters,
    peers,
    sources,
    bias,
    scores,
    latents,
    ids,
    weights,
    scaling,
    offset,
    rows,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    LATENT: tl.constexpr,
    PARTS: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SELECT: tl.constexpr,
    PEERS: tl.constexpr,
):
    """Of ranks that signal each other: what follows when the first PARTS programs have stored
    this rank's parts. With SELECT the last of them chooses for all rows, else each of the programs
    behind PRODUCTS for one.

    Those wait for other programs of their own launch. They are as many as rows, and ranks signal
    each other on GPUs with room for more (`peer_table.MOST_WAITING`), so that the others run.
    """
    if block < PARTS:
        if is_last_arrival(counters, PARTS):
            signal_peers(peers, PEERS)
            if SELECT:
                wait_for_peers(peers, PEERS)
                for row in range(rows):
                    choose_row(
                        row,
                        sources,
                        bias,
                        scores,
                        latents,
                        ids,
                        weights,
                        scaling,
                        offset,
                        EXPERTS * PEERS,
                        EXPERTS,
                        LATENT * PEERS,
                        LATENT,
                        TOP_K,
                        BLOCK_E,
                        BLOCK_L,
                        BLOCK_SLOTS,
                        RENORMALISE,
                    )
            else:
                tl.atomic_xchg(counters + 2, 1, sem="release")
    elif block >= PRODUCTS:  # noqa: SIM102
        # The compiler knows this one.
        if not SELECT:
            wait_for_previous()
            wait_for_word(counters + 2)
            wait_for_peers(peers, PEERS)
            choose_row(
                block - PRODUCTS,
                sources,
                bias,
                scores,
                latents,
                ids,
                weights,
                scaling,
                offset,
                EXPERTS * PEERS,
                EXPERTS,
                LATENT * PEERS,
                LATENT,
                TOP_K,
                BLOCK_E,
                BLOCK_L,
                BLOCK_SLOTS,
                RENORMALISE,
            )
            if is_last_arrival(counters + 1, rows):
                tl.store(counters + 2, 0)


@triton.jit(do_not_specialize=["rows", "offset"])
def moe_gate(
    x,
    router,
    latent_down,
    gate_up,
    bias,
    logits,
    ids,
    weights,
    latent,
    product_out,
    counters,
    peers,
    sources,
    scores,
    latents,
    scaling,
    beta,
    bound,
    offset,
    rows,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    LATENT: tl.constexpr,
    SHARED: tl.constexpr,
    INNER: tl.constexpr,
    ROUTER_BLOCKS: tl.constexpr,
    LATENT_BLOCKS: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    LATENTS_BLOCK: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    IS_SITU: tl.constexpr,
    SELECT: tl.constexpr,
    PEERS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0)
    r = tl.arange(0, BLOCK_R)[None, :]
    at = tl.arange(0, BLOCK_N)
    if block < ROUTER_BLOCKS:
        expert = block * BLOCK_N + at
        held = tl.minimum(expert, EXPERTS - 1)
        sums = product(
            x, router, x, 0.0, held, rows, 0, INNER, INNER, BLOCK_R, BLOCK_N, BLOCK_K, False
        )
        is_expert = (r < rows) & (expert < EXPERTS)[:, None]
        tl.store(logits + r * EXPERTS + expert[:, None], sums, mask=is_expert)
        # Conditions of which the compiler knows one.
        if SELECT and PEERS == 0:  # noqa: SIM102
            if is_last_arrival(counters, ROUTER_BLOCKS):
                for row in range(rows):
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
    elif block < ROUTER_BLOCKS + LATENT_BLOCKS:
        if LATENT > 0:
            column = (block - ROUTER_BLOCKS) * BLOCK_N + at
            held = tl.minimum(column, LATENT - 1)
            sums = product(
                x,
                latent_down,
                x,
                0.0,
                held,
                rows,
                0,
                INNER,
                INNER,
                BLOCK_R,
                BLOCK_N,
                BLOCK_K,
                False,
            )
            is_latent = (r < rows) & (column < LATENT)[:, None]
            tl.store(latent + r * LATENT + column[:, None], to_bf16(sums), mask=is_latent)
    elif block < PRODUCTS:  # noqa: SIM102
        if SHARED > 0:
            first = (block - ROUTER_BLOCKS - LATENT_BLOCKS) * (BLOCK_N // 2)
            held = tl.minimum(first + at // 2, SHARED - 1) + (at % 2) * SHARED
            sums = product(
                x, gate_up, x, 0.0, held, rows, 0, INNER, INNER, BLOCK_R, BLOCK_N, BLOCK_K, False
            )
            pairs = tl.permute(tl.reshape(sums, [BLOCK_N // 2, 2, BLOCK_R]), (0, 2, 1))
            gate, up = tl.split(pairs)
            values = gated(round_bf16(gate), round_bf16(up), beta, bound, IS_SITU)
            n = first + tl.arange(0, BLOCK_N // 2)
            is_shared = (r < rows) & (n < SHARED)[:, None]
            tl.store(product_out + r * SHARED + n[:, None], to_bf16(values), mask=is_shared)
    if PEERS > 0:
        _choose_behind(
            block,
            counters,
            peers,
            sources,
            bias,
            scores,
            latents,
            ids,
            weights,
            scaling,
            offset,
            rows,
            EXPERTS,
            TOP_K,
            LATENT,
            ROUTER_BLOCKS + LATENT_BLOCKS,
            PRODUCTS,
            BLOCK_E,
            LATENTS_BLOCK,
            BLOCK_SLOTS,
            RENORMALISE,
            SELECT,
            PEERS,
        )
