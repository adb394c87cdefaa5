"""rank_whole in Triton: each program reads its columns of every rank's part where they are."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.rank_parts import Place, offsets, parts_of
from kdecode.kernels.common.rank_tile import rank_tile
from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    refuse_plan_rows,
    tensor_for,
)
from kdecode.kernels.common.triton_ops import is_last_arrival, to_bf16, wait_for_previous
from kdecode.kernels.common.triton_peers import peers_of, wait_for_peers
from kdecode.kernels.common.triton_rank_route import choice_of_ranks, choose_row
from kdecode.kernels.common.triton_rank_sum import sum_of_ranks
from kdecode.kernels.common.triton_route import refuse_choice
from kdecode.kernels.contract import Buffers, Problem
from kdecode.kernels.rank_whole.op import WholeUse

BF16, FP32 = torch.bfloat16, torch.float32
# Of a program of logits.
_LOGITS = 1024
_ROW_WARPS = 8


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    moe = "moe" in problem.config.mlp_kinds
    return refuse_plan_rows(problem) + (refuse_choice(problem.config.moe) if moe else [])


def prepare(problem: Problem, weights: WholeUse, buffers: Buffers) -> TritonStep:
    made = _Whole(problem, buffers, weights.place)
    makers = {
        "gate": lambda: made.choose(weights.weights),
        "experts": lambda: made.sums(weights.weights),
        "head": made.head,
    }
    return TritonStep(makers[weights.place]())


class _Whole:
    """Launches of one place. sources: the addresses at which the ranks' blocks are."""

    def __init__(self, problem: Problem, buffers: Buffers, place: Place) -> None:
        self.config, self.rows, self.size = problem.config, plan_rows(problem), problem.ranks.size
        self.problem, self.buffers = problem, buffers
        self.begins, _ = offsets(parts_of(self.config, self.size)[place], self.rows)
        block = buffers.blocks[place]
        self.sources = tensor_for(block.sources, torch.int64, (self.size,), name="addresses")
        self.peers, self.num_peers = peers_of(block)

    def value(self, name: str, dtype: torch.dtype, width: int) -> Tensor:
        return tensor_for(self.buffers[name], dtype, (self.rows, width), name=name)

    def choose(self, mixture: Any) -> Launch:
        arguments, constants = choice_of_ranks(self.problem, mixture, self.buffers)
        grid = (self.rows,)
        return Launch(choose_parts, grid, arguments, constants, _ROW_WARPS, begins_early=True)

    def sums(self, mixture: Any) -> Launch:
        config, width, rows = self.config, self.config.hidden_size, self.rows
        side = config.moe.latent_width or width
        expert_sum = self.value("expert_sum", BF16, side)
        tile = rank_tile("sum_parts", self.problem.arch, rows, width, self.size, _ROW_WARPS)
        side_blocks = divide_up(side, tile.block_n)
        arguments: dict[str, Any] = {
            "sources": self.sources,
            "peers": self.peers,
            "expert_sum": expert_sum,
            "norm": expert_sum,
            "normed": expert_sum,
            "shared": expert_sum,
            "counters": self.buffers.counters(rows),
            "eps": config.rms_eps,
            "offset": self.begins.get("shared_part", 0),
        }
        has_norm = mixture.latent_norm is not None
        if has_norm:
            arguments["norm"] = tensor_for(mixture.latent_norm, FP32, (side,), name="latent_norm")
            arguments["normed"] = self.value("expert_normed", BF16, side)
        blocks = side_blocks
        if config.moe.num_shared:
            arguments["shared"] = self.value("shared", BF16, width)
            blocks += divide_up(width, tile.block_n)
        constants = {
            "SIZE": self.size,
            "SIDE": side,
            "SIDE_BLOCKS": side_blocks,
            "BLOCK_SIDE": triton.next_power_of_2(side),
            "WIDTH": width,
            "BLOCK_N": tile.block_n,
            "NORM": has_norm,
            "PEERS": self.num_peers,
        }
        grid = (blocks, rows)
        return Launch(sum_parts, grid, arguments, constants, tile.warps, begins_early=True)

    def head(self) -> Launch:
        each = self.config.vocab_size
        width = each * self.size
        arguments = {
            "sources": self.sources,
            "peers": self.peers,
            "logits": self.value("logits", FP32, width),
        }
        constants = {"EACH": each, "WIDTH": width, "BLOCK_N": _LOGITS, "PEERS": self.num_peers}
        grid = (divide_up(width, _LOGITS), self.rows)
        return Launch(whole_logits, grid, arguments, constants, begins_early=True)


@triton.jit(do_not_specialize=["offset"])
def choose_parts(
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
    """A program a row."""
    wait_for_previous()
    choose_row(
        tl.program_id(0).to(tl.int64),
        sources,
        bias,
        scores,
        latents,
        ids,
        weights,
        scaling,
        offset,
        EXPERTS,
        EACH,
        LATENTS,
        LATENTS_EACH,
        TOP_K,
        BLOCK_E,
        BLOCK_L,
        BLOCK_SLOTS,
        RENORMALISE,
    )


@triton.jit(do_not_specialize=["offset"])
def sum_parts(
    sources,
    peers,
    expert_sum,
    norm,
    normed,
    shared,
    counters,
    eps,
    offset,
    SIZE: tl.constexpr,
    SIDE: tl.constexpr,
    SIDE_BLOCKS: tl.constexpr,
    BLOCK_SIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NORM: tl.constexpr,
    PEERS: tl.constexpr,
):
    """Some columns of one row: of the experts, whose last program normalises their sum, then of the
    shared experts. offset: of the shared experts' part in a block."""
    block, row = tl.program_id(0), tl.program_id(1)
    wait_for_previous()
    wait_for_peers(peers, PEERS)
    if block < SIDE_BLOCKS:
        k = block * BLOCK_N + tl.arange(0, BLOCK_N)
        at, inside = row * SIDE + k, k < SIDE
        tl.store(expert_sum + at, to_bf16(sum_of_ranks(sources, at, inside, 0, SIZE)), mask=inside)
        # Two conditions, of which the compiler knows one.
        if NORM:  # noqa: SIM102
            if is_last_arrival(counters + row, SIDE_BLOCKS):
                every = tl.arange(0, BLOCK_SIDE)
                has, line = every < SIDE, row * SIDE + every
                x = tl.load(expert_sum + line, mask=has, other=0.0).to(tl.float32)
                share = tl.load(norm + every, mask=has, other=0.0)
                scale = tl.rsqrt(tl.sum(x * x) / SIDE + eps)
                tl.store(normed + line, to_bf16(x * scale * share), mask=has)
    else:
        n = (block - SIDE_BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)
        at, inside = row * WIDTH + n, n < WIDTH
        tl.store(shared + at, to_bf16(sum_of_ranks(sources, at, inside, offset, SIZE)), mask=inside)


@triton.jit
def whole_logits(
    sources,
    peers,
    logits,
    EACH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PEERS: tl.constexpr,
):
    wait_for_previous()
    wait_for_peers(peers, PEERS)
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < WIDTH
    begin = tl.load(sources + n // EACH, mask=inside, other=0).to(tl.pointer_type(tl.bfloat16))
    x = tl.load(begin + row * EACH + n % EACH, mask=inside, other=0.0)
    tl.store(logits + row * WIDTH + n, x.to(tl.float32), mask=inside)
