"""rank_join in Triton: a program has some columns of one row, of every rank's part where it is.

The last of a row's programs to arrive makes the row's mix and norm, so that rows are independent of
one another at any number of them. What the mix goes by, every program has summed up of its columns:
of older snapshots before the launch ahead is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.rank_tile import rank_tile
from kdecode.kernels.common.triton_join import add_residual
from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    refuse_plan_rows,
    tensor_for,
)
from kdecode.kernels.common.triton_mix import mix_arguments
from kdecode.kernels.common.triton_ops import to_bf16, wait_for_previous
from kdecode.kernels.common.triton_peers import peers_of, wait_for_peers
from kdecode.kernels.common.triton_rank_mix import (
    last_mixes,
    leave_sums,
    num_sums,
    scored_early,
)
from kdecode.kernels.common.triton_rank_sum import sum_of_ranks
from kdecode.kernels.contract import Buffers, Problem
from kdecode.kernels.rank_join.op import JoinUse

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
# A program of a norm has a whole row.
_WARPS = 16


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    return refuse_plan_rows(problem)


def prepare(problem: Problem, weights: JoinUse, buffers: Buffers) -> TritonStep:
    made = _Join(problem, weights, buffers)
    makers = {"embed": made.embed, "attn": made.sums, "mlp": made.sums, "routed": made.columns}
    kernel, arguments, constants = makers[weights.place]()
    return TritonStep(made.launch(kernel, arguments, constants))


# A kernel, its own arguments and its own constants.
_Own = tuple[Any, dict[str, Any], dict[str, Any]]


class _Join:
    """The launch of one place. sources: the addresses at which the ranks' blocks are."""

    def __init__(self, problem: Problem, use: JoinUse, buffers: Buffers) -> None:
        self.config, self.rows, self.size = problem.config, plan_rows(problem), problem.ranks.size
        self.problem, self.buffers, self.use = problem, buffers, use
        self.width = self.config.hidden_size
        # Of a model without latents the last exchange is that of the experts.
        block = buffers.blocks.get(use.place) or buffers.blocks["experts"]
        self.sources = tensor_for(block.sources, torch.int64, (self.size,), name="addresses")
        self.peers, num_peers = peers_of(block)
        # It has been waited for where they were summed up.
        self.num_peers = num_peers if use.place in buffers.blocks else 0
        self.prefix = self.value("prefix")

    def value(self, name: str) -> Tensor:
        return tensor_for(self.buffers[name], BF16, (self.rows, self.width), name=name)

    def embed(self) -> _Own:
        token = tensor_for(self.buffers["row_token"], INT32, (self.rows,), name="row_token")
        constants = {"SIZE": self.size, "EACH": self.config.vocab_size}
        return join_rows, {"row_token": token}, constants

    def sums(self) -> _Own:
        """The sum of a block's parts, and the residual."""
        config, layer, is_attn = self.config, self.problem.layer, self.use.place == "attn"
        assert layer is not None
        pushed = self.prefix  # not written
        is_push = is_attn and config.is_snapshot_layer(layer)
        if is_push:
            pushed = self.buffers["snapshots"][config.snapshots_before(layer)]
            tensor_for(pushed, BF16, (self.rows, self.width), name="the pushed snapshot")
        delta = self.value("attn_delta" if is_attn else "mlp_delta")
        arguments = {"delta_out": delta, "pushed": pushed}
        return join_sums, arguments, {"SIZE": self.size, "PUSH": is_push}

    def columns(self) -> _Own:
        """What is put together of the ranks' columns, beside the shared experts."""
        moe = self.config.moe
        has_latents, has_shared = moe.latent_width is not None, bool(moe.num_shared)
        arguments = {
            # Written where it is put together here, else read.
            "routed": self.value("routed" if has_latents else "expert_sum"),
            "shared": self.value("shared") if has_shared else self.prefix,
            "delta_out": self.value("mlp_delta"),
        }
        constants = {
            "EACH": self.width // self.size,
            "HAS_LATENTS": has_latents,
            "HAS_SHARED": has_shared,
        }
        return join_columns, arguments, constants

    def launch(self, kernel: Any, own: Mapping[str, Any], constants: Mapping[str, Any]) -> Launch:
        arguments, sizes = mix_arguments(self.config, self.rows, self.use.then, self.buffers)
        arguments |= {
            "sources": self.sources,
            "peers": self.peers,
            "counters": self.buffers.counters(self.rows),
            "rows": self.rows,
            **own,
        }
        arch = self.problem.arch
        tile = rank_tile("rank_join", arch, self.rows, self.width, self.size, _WARPS)
        programs = divide_up(self.width, tile.block_n)
        numbers = self.rows * num_sums(programs, sizes["BLOCK_S"])
        arguments["sums"] = self.buffers.scratch(f"mix_sums_{numbers}", (numbers,), FP32)
        sizes |= {**constants, "BLOCK_N": tile.block_n, "PEERS": self.num_peers}
        sizes["PROGRAMS"] = programs
        grid = (programs, self.rows)
        return Launch(kernel, grid, arguments, sizes, tile.warps, begins_early=True)


@triton.jit(do_not_specialize=["rows"])
def join_rows(
    sources,
    peers,
    row_token,
    counters,
    sums,
    prefix,
    snapshots,
    mix_weight,
    norm_weight,
    mix_out,
    norm_out,
    eps,
    rows,
    SIZE: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PEERS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Each row from the rank that has its token; NaN where none has."""
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at, inside = row * WIDTH + n, n < WIDTH
    wait_for_previous()
    wait_for_peers(peers, PEERS)
    token = tl.load(row_token + row)
    is_known = (token >= 0) & (token < SIZE * EACH)
    owner = tl.where(is_known, token // EACH, 0)
    part = tl.load(sources + owner).to(tl.pointer_type(tl.bfloat16))
    x = tl.load(part + at, mask=inside & is_known, other=float("nan"))
    tl.store(prefix + at, x, mask=inside)
    last_mixes(
        row,
        counters,
        sums,
        prefix,
        snapshots,
        norm_weight,
        mix_out,
        norm_out,
        eps,
        rows,
        PROGRAMS,
        WIDTH,
        BLOCK_WIDTH,
        SNAPSHOTS,
        BLOCK_S,
    )


@triton.jit(do_not_specialize=["rows"])
def join_sums(
    sources,
    peers,
    delta_out,
    pushed,
    counters,
    sums,
    prefix,
    snapshots,
    mix_weight,
    norm_weight,
    mix_out,
    norm_out,
    eps,
    rows,
    SIZE: tl.constexpr,
    PUSH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PEERS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at, inside = row * WIDTH + n, n < WIDTH
    mix, products, squares = scored_early(
        snapshots,
        mix_weight,
        norm_weight,
        row,
        rows,
        n,
        inside,
        BLOCK_N,
        WIDTH,
        SNAPSHOTS - PUSH,
        BLOCK_S,
    )
    wait_for_previous()
    wait_for_peers(peers, PEERS)
    delta = to_bf16(sum_of_ranks(sources, at, inside, 0, SIZE))
    old, new = add_residual(delta, at, inside, delta_out, prefix, pushed, PUSH)
    if SNAPSHOTS > 0:
        leave_sums(sums, row, mix, products, squares, old, new, PROGRAMS, SNAPSHOTS, BLOCK_S, PUSH)
    last_mixes(
        row,
        counters,
        sums,
        prefix,
        snapshots,
        norm_weight,
        mix_out,
        norm_out,
        eps,
        rows,
        PROGRAMS,
        WIDTH,
        BLOCK_WIDTH,
        SNAPSHOTS,
        BLOCK_S,
    )


@triton.jit(do_not_specialize=["rows"])
def join_columns(
    sources,
    peers,
    routed,
    shared,
    delta_out,
    counters,
    sums,
    prefix,
    snapshots,
    mix_weight,
    norm_weight,
    mix_out,
    norm_out,
    eps,
    rows,
    EACH: tl.constexpr,
    HAS_LATENTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PEERS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at, inside = row * WIDTH + n, n < WIDTH
    mix, products, squares = scored_early(
        snapshots,
        mix_weight,
        norm_weight,
        row,
        rows,
        n,
        inside,
        BLOCK_N,
        WIDTH,
        SNAPSHOTS,
        BLOCK_S,
    )
    wait_for_previous()
    wait_for_peers(peers, PEERS)
    if HAS_LATENTS:
        begin = tl.load(sources + n // EACH, mask=inside, other=0).to(tl.pointer_type(tl.bfloat16))
        delta = tl.load(begin + row * EACH + n % EACH, mask=inside, other=0.0)
        tl.store(routed + at, delta, mask=inside)
    else:
        delta = tl.load(routed + at, mask=inside, other=0.0)
    total = delta.to(tl.float32)
    if HAS_SHARED:
        total += tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
    total = to_bf16(total)
    old, new = add_residual(total, at, inside, delta_out, prefix, prefix, False)
    if SNAPSHOTS > 0:
        leave_sums(sums, row, mix, products, squares, old, new, PROGRAMS, SNAPSHOTS, BLOCK_S, False)
    last_mixes(
        row,
        counters,
        sums,
        prefix,
        snapshots,
        norm_weight,
        mix_out,
        norm_out,
        eps,
        rows,
        PROGRAMS,
        WIDTH,
        BLOCK_WIDTH,
        SNAPSHOTS,
        BLOCK_S,
    )
