"""rank_whole in Triton: each program reads its columns of every rank's part where they are."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.rank_parts import Place, offsets, parts_of
from kdecode.kernels.common.triton_join import add_residual
from kdecode.kernels.common.triton_launch import (
    Launch,
    TritonStep,
    divide_up,
    plan_rows,
    refuse_plan_rows,
    row_block,
    tensor_for,
)
from kdecode.kernels.common.triton_ops import to_bf16, wait_for_previous
from kdecode.kernels.common.triton_route import refuse_choice, route_constants, select_experts
from kdecode.kernels.contract import Buffers, Problem
from kdecode.kernels.rank_whole.op import WholeUse

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
# Numbers of a program of columns, and logits of one.
_NUMBERS, _LOGITS = 512, 1024
_ROW_WARPS = 8


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    moe = "moe" in problem.config.mlp_kinds
    return refuse_plan_rows(problem) + (refuse_choice(problem.config.moe) if moe else [])


def prepare(problem: Problem, weights: WholeUse, buffers: Buffers) -> TritonStep:
    made = _Whole(problem, buffers, weights.place)
    makers = {
        "embed": made.embed,
        "attn": made.join,
        "mlp": made.join,
        "gate": lambda: made.choose(weights.weights),
        "experts": lambda: made.sums(weights.weights),
        "routed": made.end,
        "head": made.head,
    }
    return TritonStep(makers[weights.place]())


class _Whole:
    """Launches of one place. sources: the addresses at which the ranks' blocks are."""

    def __init__(self, problem: Problem, buffers: Buffers, place: Place) -> None:
        self.config, self.rows, self.size = problem.config, plan_rows(problem), problem.ranks.size
        self.problem, self.buffers, self.place = problem, buffers, place
        parts = parts_of(self.config, self.size).get(place, ())
        self.begins, _ = offsets(parts, self.rows)
        block = buffers.blocks.get(place)
        # Of a model without latents the last exchange is that of the experts.
        sources = buffers.blocks["experts"].sources if block is None else block.sources
        self.sources = tensor_for(sources, torch.int64, (self.size,), name="addresses")

    def value(self, name: str, dtype: torch.dtype, width: int) -> Tensor:
        return tensor_for(self.buffers[name], dtype, (self.rows, width), name=name)

    def embed(self) -> Launch:
        width = self.config.hidden_size
        token = tensor_for(self.buffers["row_token"], INT32, (self.rows,), name="row_token")
        arguments = {
            "sources": self.sources,
            "row_token": token,
            "prefix": self.value("prefix", BF16, width),
        }
        constants = {
            "SIZE": self.size,
            "EACH": self.config.vocab_size,
            "WIDTH": width,
            "BLOCK_WIDTH": triton.next_power_of_2(width),
        }
        return _row_launch(whole_rows, self.rows, arguments, constants)

    def join(self) -> Launch:
        """The sum of a block's parts, and the residual."""
        config, layer, width = self.config, self.problem.layer, self.config.hidden_size
        name = "attn_delta" if self.place == "attn" else "mlp_delta"
        prefix = self.value("prefix", BF16, width)
        pushed = prefix  # not written
        assert layer is not None
        is_push = self.place == "attn" and config.is_snapshot_layer(layer)
        if is_push:
            pushed = self.buffers["snapshots"][config.snapshots_before(layer)]
            tensor_for(pushed, BF16, (self.rows, width), name="the pushed snapshot")
        arguments = {
            "sources": self.sources,
            "delta_out": self.value(name, BF16, width),
            "prefix": prefix,
            "pushed": pushed,
            "rows": self.rows,
        }
        return self._columns(join_parts, arguments, {"SIZE": self.size, "PUSH": is_push})

    def choose(self, mixture: Any) -> Launch:
        moe, rows = self.config.moe, self.rows
        latent = moe.latent_width or 0
        bias = tensor_for(mixture.router_bias, FP32, (moe.num_experts,), name="router bias")
        arguments: dict[str, Any] = {
            "sources": self.sources,
            "bias": bias,
            "logits": self.buffers.scratch("router_logits", (rows, moe.num_experts), FP32),
            "latent": self.value("latent", BF16, latent) if latent else bias,
            "ids": self.value("route_ids", INT32, moe.top_k),
            "weights": self.value("route_weights", FP32, moe.top_k),
            "scaling": moe.routed_scaling,
            "offset": self.begins.get("latent_part", 0),
        }
        constants = {
            **route_constants(moe),
            "EACH": moe.num_experts // self.size,
            "LATENT": latent,
            "LATENT_EACH": max(1, latent // self.size),
            "BLOCK_L": triton.next_power_of_2(max(1, latent)),
        }
        return _row_launch(choose_parts, rows, arguments, constants)

    def sums(self, mixture: Any) -> Launch:
        config, width = self.config, self.config.hidden_size
        side = config.moe.latent_width or width
        expert_sum = self.value("expert_sum", BF16, side)
        arguments: dict[str, Any] = {
            "sources": self.sources,
            "expert_sum": expert_sum,
            "norm": expert_sum,
            "normed": expert_sum,
            "shared": expert_sum,
            "eps": config.rms_eps,
            "offset": self.begins.get("shared_part", 0),
        }
        has_norm, has_shared = mixture.latent_norm is not None, bool(config.moe.num_shared)
        if has_norm:
            arguments["norm"] = tensor_for(mixture.latent_norm, FP32, (side,), name="latent_norm")
            arguments["normed"] = self.value("expert_normed", BF16, side)
        if has_shared:
            arguments["shared"] = self.value("shared", BF16, width)
        constants = {
            "SIZE": self.size,
            "SIDE": side,
            "BLOCK_SIDE": triton.next_power_of_2(side),
            "WIDTH": width,
            "BLOCK_WIDTH": triton.next_power_of_2(width),
            "NORM": has_norm,
            "HAS_SHARED": has_shared,
        }
        return _row_launch(sum_parts, self.rows, arguments, constants)

    def end(self) -> Launch:
        config, width = self.config, self.config.hidden_size
        has_latents, has_shared = config.moe.latent_width is not None, bool(config.moe.num_shared)
        prefix = self.value("prefix", BF16, width)
        source = "routed" if has_latents else "expert_sum"
        arguments = {
            "sources": self.sources,
            # Written where it is put together here, else read.
            "routed": self.value(source, BF16, width),
            "shared": self.value("shared", BF16, width) if has_shared else prefix,
            "delta_out": self.value("mlp_delta", BF16, width),
            "prefix": prefix,
            "rows": self.rows,
        }
        constants = {
            "EACH": width // self.size,
            "HAS_LATENTS": has_latents,
            "HAS_SHARED": has_shared,
        }
        return self._columns(end_parts, arguments, constants)

    def head(self) -> Launch:
        each = self.config.vocab_size
        width = each * self.size
        arguments = {"sources": self.sources, "logits": self.value("logits", FP32, width)}
        constants = {"EACH": each, "WIDTH": width, "BLOCK_N": _LOGITS}
        grid = (divide_up(width, _LOGITS), self.rows)
        return Launch(whole_logits, grid, arguments, constants, begins_early=True)

    def _columns(self, kernel: Any, arguments: Any, constants: dict[str, Any]) -> Launch:
        """Of programs that have some columns of all rows."""
        width, block_r = self.config.hidden_size, row_block(self.rows)
        block_n = max(16, _NUMBERS // block_r)
        constants |= {"WIDTH": width, "BLOCK_R": block_r, "BLOCK_N": block_n}
        grid = (divide_up(width, block_n),)
        return Launch(kernel, grid, arguments, constants, begins_early=True)


def _row_launch(kernel: Any, rows: int, arguments: Any, constants: Any) -> Launch:
    return Launch(kernel, (rows,), arguments, constants, _ROW_WARPS, begins_early=True)


@triton.jit
def _sums(sources, at, inside, offset, SIZE: tl.constexpr):
    """fp32 numbers of every rank's part, added in the order of the ranks."""
    first = (tl.load(sources) + offset).to(tl.pointer_type(tl.float32))
    total = tl.load(first + at, mask=inside, other=0.0)
    for rank in tl.static_range(1, SIZE):
        part = (tl.load(sources + rank) + offset).to(tl.pointer_type(tl.float32))
        total += tl.load(part + at, mask=inside, other=0.0)
    return total


@triton.jit
def whole_rows(
    sources,
    row_token,
    prefix,
    SIZE: tl.constexpr,
    EACH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Each row from the rank that has its token; NaN where none has."""
    wait_for_previous()
    row = tl.program_id(0)
    token = tl.load(row_token + row)
    is_known = (token >= 0) & (token < SIZE * EACH)
    owner = tl.where(is_known, token // EACH, 0)
    part = tl.load(sources + owner).to(tl.pointer_type(tl.bfloat16))
    at = row * WIDTH + tl.arange(0, BLOCK_WIDTH)
    inside = tl.arange(0, BLOCK_WIDTH) < WIDTH
    x = tl.load(part + at, mask=inside & is_known, other=float("nan"))
    tl.store(prefix + at, x, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def join_parts(
    sources,
    delta_out,
    prefix,
    pushed,
    rows,
    SIZE: tl.constexpr,
    PUSH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)[None, :]
    inside = (r < rows) & (n < WIDTH)[:, None]
    wait_for_previous()
    delta = to_bf16(_sums(sources, r * WIDTH + n[:, None], inside, 0, SIZE))
    add_residual(delta, n, rows, delta_out, prefix, pushed, WIDTH, BLOCK_R, PUSH)


@triton.jit(do_not_specialize=["offset"])
def choose_parts(
    sources,
    bias,
    logits,
    latent,
    ids,
    weights,
    scaling,
    offset,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_EACH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    """One row. offset: of the latents in a block."""
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < EXPERTS
    begin = tl.load(sources + expert // EACH, mask=inside, other=0)
    place = begin.to(tl.pointer_type(tl.float32)) + row * EACH + expert % EACH
    score = tl.load(place, mask=inside, other=0.0)
    tl.store(logits + row * EXPERTS + expert, score, mask=inside)
    if LATENT > 0:
        column = tl.arange(0, BLOCK_L)
        has = column < LATENT
        begin = tl.load(sources + column // LATENT_EACH, mask=has, other=0) + offset
        place = begin.to(tl.pointer_type(tl.bfloat16)) + row * LATENT_EACH + column % LATENT_EACH
        tl.store(latent + row * LATENT + column, tl.load(place, mask=has, other=0.0), mask=has)
    tl.debug_barrier()
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


@triton.jit(do_not_specialize=["offset"])
def sum_parts(
    sources,
    expert_sum,
    norm,
    normed,
    shared,
    eps,
    offset,
    SIZE: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK_SIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    """One row. offset: of the shared experts' part in a block."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_SIDE)
    inside = k < SIDE
    at = row * SIDE + k
    wait_for_previous()
    summed = to_bf16(_sums(sources, at, inside, 0, SIZE))
    tl.store(expert_sum + at, summed, mask=inside)
    if NORM:
        x = summed.to(tl.float32)
        share = tl.load(norm + k, mask=inside, other=0.0)
        scale = tl.rsqrt(tl.sum(x * x) / SIDE + eps)
        tl.store(normed + at, to_bf16(x * scale * share), mask=inside)
    if HAS_SHARED:
        n = tl.arange(0, BLOCK_WIDTH)
        total = _sums(sources, row * WIDTH + n, n < WIDTH, offset, SIZE)
        tl.store(shared + row * WIDTH + n, to_bf16(total), mask=n < WIDTH)


@triton.jit(do_not_specialize=["rows"])
def end_parts(
    sources,
    routed,
    shared,
    delta_out,
    prefix,
    rows,
    EACH: tl.constexpr,
    HAS_LATENTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    held = tl.minimum(n, WIDTH - 1)
    r = tl.arange(0, BLOCK_R)[None, :]
    at = r * WIDTH + n[:, None]
    inside = (r < rows) & (n < WIDTH)[:, None]
    wait_for_previous()
    if HAS_LATENTS:
        begin = tl.load(sources + held // EACH).to(tl.pointer_type(tl.bfloat16))
        place = begin[:, None] + r * EACH + (held % EACH)[:, None]
        delta = tl.load(place, mask=inside, other=0.0)
        tl.store(routed + at, delta, mask=inside)
    else:
        delta = tl.load(routed + at, mask=inside, other=0.0)
    total = delta.to(tl.float32)
    if HAS_SHARED:
        total += tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
    add_residual(to_bf16(total), n, rows, delta_out, prefix, prefix, WIDTH, BLOCK_R, False)


@triton.jit
def whole_logits(sources, logits, EACH: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr):
    wait_for_previous()
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < WIDTH
    begin = tl.load(sources + n // EACH, mask=inside, other=0).to(tl.pointer_type(tl.bfloat16))
    x = tl.load(begin + row * EACH + n % EACH, mask=inside, other=0.0)
    tl.store(logits + row * WIDTH + n, x.to(tl.float32), mask=inside)
