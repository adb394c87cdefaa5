"""experts in torch: (row, expert) pairs sorted by expert, one product an expert or one for all.

Tiles on a CPU multiply through the native grouped product, one call for all experts. Elsewhere, and
in "rows", every used expert is a product of torch. Of several ranks each has some columns of every
expert: its weighted sum is one part of theirs, and no expert's output is rounded on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kdecode.kernels.common.activation import GatedActivation, make_gated
from kdecode.kernels.common.matrix import ROW_FORMATS, Matrix
from kdecode.kernels.contract import Buffers, Problem
from kdecode.kernels.linear.rank_mixture import MixtureEnd, make_mixture_end
from kdecode.kernels.linear.unpack import unpack_rows


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Experts:
    """weights: the packed mixture of experts."""
    first = weights.experts[0].gate_up
    return Experts(
        gate_up=tuple(expert.gate_up for expert in weights.experts),
        down=tuple(expert.down for expert in weights.experts),
        activation=make_gated(problem.config.activation, first, buffers.products.isa),
        input="mlp_in" if problem.config.moe.latent_width is None else "latent",
        is_native=first.format not in ROW_FORMATS and first.data.device.type == "cpu",
        end=make_mixture_end(weights, problem, buffers),
        buffers=buffers,
    )


@dataclass(frozen=True)
class Experts:
    gate_up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    activation: GatedActivation
    input: str
    is_native: bool
    end: MixtureEnd | None  # of several ranks, where sums are parts
    buffers: Buffers

    def run(self) -> None:
        buffers = self.buffers
        inputs = buffers[self.input], buffers["route_ids"], buffers["route_weights"]
        summed = self.summed(*inputs)
        if self.end is None:
            buffers["expert_sum"] = summed
        else:
            self.end.run(summed)

    def summed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [R, L], the experts of each row [R, N] and what each counts there -> [R, L] bf16, or
        fp32 of a part."""
        rows, top_k = ids.shape
        # Pairs (row, place) by expert; the rows of an expert stay in order.
        by_expert, pairs = ids.flatten().sort(stable=True)
        used, counts = torch.unique_consecutive(by_expert, return_counts=True)
        outputs = x.new_empty(rows * top_k, self.down[0].rows, dtype=self._out_dtype)
        experts, numbers = used.tolist(), counts.tolist()
        if self.is_native:
            outputs[pairs] = self._grouped(x, pairs // top_k, experts, numbers)
        else:
            for expert, own in zip(experts, pairs.split(numbers), strict=True):
                outputs[own] = self._unpacked(x[own // top_k], expert)
        outputs = outputs.float().view(rows, top_k, -1)
        summed = torch.bmm(weights.unsqueeze(1), outputs).squeeze(1)
        return summed.bfloat16() if self.end is None else summed

    @property
    def _out_dtype(self) -> torch.dtype:
        """Of one expert's output."""
        return torch.bfloat16 if self.end is None else torch.float32

    def _grouped(
        self, x: Tensor, pair_rows: Tensor, experts: Sequence[int], counts: Sequence[int]
    ) -> Tensor:
        """Native: x [R, L], the row of each pair [P] -> [P, L]."""
        from kdecode.kernels.linear.native import tiles_linear_grouped

        isa = self.buffers.products.isa
        gate_up = [self.gate_up[expert] for expert in experts]
        down = [self.down[expert] for expert in experts]
        product = self.activation(tiles_linear_grouped(x, gate_up, counts, pair_rows, isa=isa))
        return tiles_linear_grouped(product, down, counts, out_dtype=self._out_dtype, isa=isa)

    def _unpacked(self, x: Tensor, expert: int) -> Tensor:
        """x [P, L] -> [P, L] through one expert, row-major."""
        product = self.activation(F.linear(x, unpack_rows(self.gate_up[expert])))
        # In fp32 where it is a part: torch has no product of bf16 on a CPU that is not rounded.
        down = unpack_rows(self.down[expert]).to(self._out_dtype)
        return F.linear(product.to(self._out_dtype), down)
