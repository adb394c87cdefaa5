"""experts in torch: (row, expert) pairs sorted by expert, one product an expert or one for all.

Tiles on a CPU multiply through the native grouped product, one call for all experts with few rows;
an expert with many rows is unpacked into scratch and multiplied by torch. Elsewhere every used
expert is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kdecode.kernels.common.activation import GatedActivation, make_gated
from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import Buffers, Prepared, Problem
from kdecode.kernels.linear.product import Scratch, unpack
from kdecode.kernels.linear.unpack import unpack_rows

# Rows of one expert up to which native passes over it cost less than unpacking it for torch.
GROUPED_ROWS = 128


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed mixture of experts."""
    first = weights.experts[0].gate_up
    is_native = first.format != "rows" and first.data.device.type == "cpu"
    return _Experts(
        gate_up=tuple(expert.gate_up for expert in weights.experts),
        down=tuple(expert.down for expert in weights.experts),
        activation=make_gated(problem.config.activation, first, buffers.products.isa),
        input="mlp_in" if problem.config.moe.latent_width is None else "latent",
        grouped_rows=GROUPED_ROWS if is_native else 0,
        scratch=buffers.products,
        buffers=buffers,
    )


@dataclass(frozen=True)
class _Experts:
    gate_up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    activation: GatedActivation
    input: str
    grouped_rows: int
    scratch: Scratch
    buffers: Buffers

    def run(self) -> None:
        x, ids = self.buffers[self.input], self.buffers["route_ids"]
        rows, top_k = ids.shape
        # Pairs (row, place) by expert; the rows of an expert stay in order.
        by_expert, pairs = ids.flatten().sort(stable=True)
        used, counts = torch.unique_consecutive(by_expert, return_counts=True)
        outputs = x.new_empty(rows * top_k, self.down[0].rows)
        is_few = counts <= self.grouped_rows
        if bool(is_few.any()):
            few = pairs if bool(is_few.all()) else pairs[is_few.repeat_interleave(counts)]
            experts, numbers = used[is_few].tolist(), counts[is_few].tolist()
            outputs[few] = self._grouped(x, few // top_k, experts, numbers)
        begin = 0
        for expert, count in zip(used.tolist(), counts.tolist(), strict=True):
            if count > self.grouped_rows:
                own = pairs[begin : begin + count]
                outputs[own] = self._unpacked(x[own // top_k], expert)
            begin += count
        weights = self.buffers["route_weights"].unsqueeze(1)  # [R, 1, N]
        summed = torch.bmm(weights, outputs.float().view(rows, top_k, -1)).squeeze(1)
        self.buffers["expert_sum"] = summed.to(torch.bfloat16)

    def _grouped(
        self, x: Tensor, pair_rows: Tensor, experts: Sequence[int], counts: Sequence[int]
    ) -> Tensor:
        """Native: x [R, L], the row of each pair [P] -> [P, L]."""
        from kdecode.kernels.linear.native import tiles_linear_grouped

        isa = self.scratch.isa
        gate_up = [self.gate_up[expert] for expert in experts]
        down = [self.down[expert] for expert in experts]
        product = self.activation(tiles_linear_grouped(x, gate_up, counts, pair_rows, isa=isa))
        return tiles_linear_grouped(product, down, counts, isa=isa)

    def _unpacked(self, x: Tensor, expert: int) -> Tensor:
        """x [P, L] -> [P, L] through one expert, row-major."""
        product = self.activation(F.linear(x, self._rows(self.gate_up[expert])))
        return F.linear(product, self._rows(self.down[expert]))

    def _rows(self, matrix: Matrix) -> Tensor:
        if matrix.format == "rows":
            return unpack_rows(matrix)
        return unpack(matrix, self.scratch)
