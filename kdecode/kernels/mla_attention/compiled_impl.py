"""mla_attention for a compiler, of one token a request.

Writing the cache and attending over it are one operator that it does not look into: how long each
context is and on which pages it lies is known when the step runs. What is before and behind it, the
absorbed products included, is torch's operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.mla_attention import torch_impl
from kdecode.kernels.mla_attention.torch_impl import Attention


def refuse(problem: Problem) -> list[str]:
    if problem.ranks.is_alone:
        return []
    return ["A compiled step has no exchanges between ranks."]


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed MLA layer."""
    attention = torch_impl.prepare(problem, weights, buffers)
    heads, width = problem.config.mla.num_heads, problem.config.mla.kv_rank

    def run(query: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        attention.cache.insert(places, rows)
        return attention.latents(query)

    def outline(query: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        return query.new_empty(query.shape[0], heads, width)

    return _Attention(**vars(attention), attend=buffers.operators.define(3, run, outline))


@dataclass(frozen=True)
class _Attention(Attention):
    attend: Callable[..., Tensor]

    def run(self) -> None:
        query, latent, rest, gate = self._parts(self.buffers["mla_proj"])
        absorbed = self._absorbed(self._query(query))
        latents = self.attend(absorbed, self._cache_row(latent, rest), self.buffers.step.cache_rows)
        self.buffers["attn_out"] = self._gated(self.value(latents), gate)
