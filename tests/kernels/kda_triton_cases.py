"""A KDA layer's slots and rows for the tests of `kda_core` and `kda_commit` in Triton.

What `triton_cases.Chain` compares with the reference, this runs in other ways: rows of one slot
together or alone, plainly or verified and then committed. These must give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton_cases as cases
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.kernels import table
from kdecode.kernels.contract import Buffers
from kdecode.testing.poison import poison_

LAYER = 1  # of a step that runs one layer


def config_of(form: str, head_dim: int = 16, heads: int = 3) -> ModelConfig:
    """form "k3" or "linear"; MLPs are dense, which nobody runs here."""
    config = cases.k3_config() if form == "k3" else cases.linear_config()
    kda = replace(config.kda, head_dim=head_dim, num_heads=heads)
    return replace(config, kda=kda, mlp_kinds=("dense",) * config.num_layers)


class Slots:
    """The KDA caches of a model, NaN but for the slots in use, and steps of random rows on them."""

    def __init__(self, case: cases.Case, used: Sequence[int], num_slots: int = 6) -> None:
        self.case = case
        self.caches = cases._allocate_caches(case, (num_slots, 1), cases.DEVICE, "bf16")
        for pool in (self.caches.conv, self.caches.recurrent):
            for layer, tensor in pool.items():
                poison_(tensor)
                for slot in used:
                    tensor[slot] = _normal(tensor.shape[1:], 31 * layer + slot).to(tensor)

    def run(
        self,
        proj: Tensor,
        slots: Sequence[int],
        each: int = 1,
        layers: Sequence[int] = (LAYER,),
    ) -> Buffers:
        """The layers' core on rows [R, columns] of kda_proj, in the slots of the rows."""
        buffers = cases.make_buffers(self.case.config, len(slots), each, self.caches)
        cases.poison_buffers(buffers)
        for layer in layers:
            problem = self.case.problem(layer, len(slots), each)
            module = table.implementation("kda_core", "triton")
            assert module.refuse(problem) == []
            step = module.prepare(problem, self.case.packed.layers[layer], buffers)
            buffers["kda_proj"].copy_(proj)
            buffers["row_slot"].copy_(torch.tensor(slots))
            step.run()
        return buffers

    def state(self, slot: int) -> list[Tensor]:
        """Copies of everything that the slot has."""
        pools = (self.caches.conv, self.caches.recurrent)
        return [tensor[slot].clone() for pool in pools for tensor in pool.values()]


def projections(config: ModelConfig, rows: int, seed: int = 0) -> Tensor:
    kda = config.kda
    gate = kda.width if kda.is_gate_full_rank else kda.head_dim
    columns = 3 * kda.width + gate + kda.head_dim + kda.num_heads
    return _normal((rows, columns), seed).to(torch.bfloat16)


def _normal(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
