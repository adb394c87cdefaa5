"""mla_attention with the kernels of a CUDA plan for the rows of requests with few new tokens.

Those run in blocks of as many rows as a plan has at most, on launches that are made for the step:
nothing waits for the device, so that a step of such rows only can be recorded in a CUDA graph.
Requests with more new tokens stay in torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kdecode.kernels import table
from kdecode.kernels.common.mla_splits import max_splits
from kdecode.kernels.common.step import MAX_DECODE_ROWS, DecodeRows
from kdecode.kernels.common.triton_launch import ROW_BLOCKS
from kdecode.kernels.contract import Buffers, Implementation, PlanMemory, Prepared, Problem
from kdecode.kernels.mla_attention import torch_impl

_ROWS = ROW_BLOCKS[-1]


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    if not problem.context.is_whole:
        return ["Ranks that share the positions of a context attend in torch."]
    one_row = replace(problem, rows=1, rows_per_request=1)
    reasons = [r for kernel in _kernels(problem) for r in kernel.refuse(one_row)]
    return list(dict.fromkeys(reasons))


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed MLA layer."""
    heads = problem.config.mla.num_heads
    return _Attention(
        problem=problem,
        weights=SimpleNamespace(attention=weights),
        kernels=tuple(_kernels(problem)),
        prompts=torch_impl.prepare(problem, weights, buffers),
        counters=torch.zeros(_ROWS * heads, dtype=torch.int32, device=weights.kv_norm.device),
        buffers=buffers,
    )


def _kernels(problem: Problem) -> list[Implementation]:
    ops = ["mla_query", "mla_attend", "mla_value"]
    if problem.config.mla.q_rank is not None:
        ops.insert(0, "mla_query_up")
    return [table.implementation(op, "triton") for op in ops]


class _RowBuffers(Buffers):
    """Buffers of some rows of a step, whose arrivals are counted where all steps count them."""

    kept: Tensor  # zero between runs

    def counters(self, count: int) -> Tensor:
        return self.kept[:count]


@dataclass(frozen=True)
class _Attention:
    problem: Problem
    weights: Any  # as a plan's steps have them
    kernels: tuple[Implementation, ...]
    prompts: torch_impl.Attention
    counters: Tensor
    buffers: Buffers

    def run(self) -> None:
        step, proj, mla = self.buffers.step, self.buffers["mla_proj"], self.problem.config.mla
        rows: DecodeRows | None = step.decode_rows
        out = proj.new_empty(step.num_rows, mla.num_heads * mla.v_dim)
        if rows is not None and rows.index is None:
            self._decode(rows, proj, out)
        elif rows is not None:
            own = out[rows.index]
            self._decode(rows, proj[rows.index], own)
            out.index_copy_(0, rows.index, own)
        for span in step.multi:
            if span.num_rows > MAX_DECODE_ROWS:
                self.prompts.run_span(span, out)
        self.buffers["attn_out"] = out

    def _decode(self, rows: DecodeRows, proj: Tensor, out: Tensor) -> None:
        """proj [n, columns] -> out [n, H*v_dim], a block of whole requests after the other."""
        block = _ROWS // rows.each * rows.each
        for first in range(0, rows.count, block):
            own = slice(first, first + block)
            buffers = self._block_buffers(rows, own, proj[own], out[own])
            problem = replace(
                self.problem, rows=len(buffers["mla_proj"]), rows_per_request=rows.each
            )
            for kernel in self.kernels:
                kernel.prepare(problem, self.weights, buffers).run()

    def _block_buffers(self, rows: DecodeRows, own: slice, proj: Tensor, out: Tensor) -> Buffers:
        mla, count = self.problem.config.mla, len(proj)
        splits = (count, max_splits(count), mla.num_heads)
        buffers = _RowBuffers(
            memory=PlanMemory(str(proj.device)),
            mla_proj=proj,
            row_position=rows.position[own],
            row_pages=rows.pages[own],
            mla_query=proj.new_empty(count, mla.num_heads, mla.cache_width),
            mla_split_sums=proj.new_empty(*splits, mla.kv_rank, dtype=torch.float32),
            mla_split_stats=proj.new_empty(*splits, 2, dtype=torch.float32),
            mla_latent=proj.new_empty(count, mla.num_heads, mla.kv_rank),
            attn_out=out,
        )
        if mla.q_rank is not None:
            buffers["mla_q"] = proj.new_empty(count, mla.num_heads * mla.qk_dim)
        buffers.caches, buffers.kept = self.buffers.caches, self.counters
        return buffers
