"""Inputs of the mixture's Triton steps that a test writes itself, and the reference of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton_cases import (
    DEVICE,
    Case,
    k3_config,
    linear_config,
    make_buffers,
    poison_buffers,
)

from kdecode.cache.caches import Caches
from kdecode.config import ExpertProducts, ModelConfig
from kdecode.kernels import table
from kdecode.kernels.common.expert_squares import square_columns
from kdecode.kernels.common.tile_table import forced, recording
from kdecode.kernels.contract import Buffers
from kdecode.model import reference
from kdecode.model.parameters import MoeParameters
from kdecode.model.reference import ROUNDED

LAYER = 1
# The interpreter's time is by the program: blocks of the default size would be ten times as many.
_COLUMNS = 64


def wide_tiles(prepare: Callable[[], Any]) -> Any:
    """What ``prepare`` returns with blocks of `_COLUMNS` columns, but for scaled products."""
    with recording() as asked:
        prepare()
    tiles = {
        key: tile if "scaled" in key.shape else replace(tile, block_n=_COLUMNS)
        for key, tile in asked.items()
    }
    with forced(tiles):
        return prepare()


def small_k3(**moe: Any) -> ModelConfig:
    """Few experts; blocks of `_COLUMNS` are several of each matrix, the last one not full."""
    return k3_config(**{"num_experts": 12, "top_k": 2, "expert_width": 64, **moe})


def small_linear(**moe: Any) -> ModelConfig:
    return linear_config(**{"num_experts": 12, "top_k": 2, "expert_width": 40, **moe})


class Mixture:
    """Ops of one layer's mixture, prepared once for ``rows`` rows on poisoned buffers."""

    def __init__(
        self, case: Case, ops: Sequence[str], rows: int, products: ExpertProducts = "exact"
    ) -> None:
        self.case, self.rows = case, rows
        caches = Caches.allocate(case.config, DEVICE, 1, 1, 8)
        self.buffers: Buffers = make_buffers(case.config, rows, 1, caches)
        problem = replace(case.problem(LAYER, rows), expert_products=products)
        layer = case.packed.layers[LAYER]
        modules = [table.implementation(op, "triton") for op in ops]
        assert [module.refuse(problem) for module in modules] == [[]] * len(ops)
        self._steps = wide_tiles(
            lambda: [module.prepare(problem, layer, self.buffers) for module in modules]
        )

    @property
    def launches(self) -> list[Any]:
        return [launch for step in self._steps for launch in step.launches]

    def run(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Copies of all buffers, on the host."""
        poison_buffers(self.buffers)
        for name, value in inputs.items():
            self.buffers[name].copy_(value)
        for step in self._steps:
            step.run()
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.buffers.items()}

    @property
    def parameters(self) -> MoeParameters:
        mlp = self.case.parameters.layers[LAYER].mlp
        assert isinstance(mlp, MoeParameters)
        return mlp

    def expert_sum(self, source: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Of ids that are all experts."""
        activation = self.case.config.activation
        return reference.experts(self.parameters, activation, source, ids, weights, ROUNDED)

    def shared_product(self, mlp_in: Tensor) -> Tensor:
        shared = self.parameters.shared
        assert shared is not None
        gate = reference.linear(mlp_in, shared.gate_proj, ROUNDED)
        up = reference.linear(mlp_in, shared.up_proj, ROUNDED)
        return reference.activate(gate, up, self.case.config.activation, ROUNDED)


def random_input(case: Case, rows: int, seed: int = 0) -> tuple[str, Tensor]:
    """What the experts read, and its name."""
    latent = case.config.moe.latent_width
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, latent or case.config.hidden_size)
    values = torch.randn(shape, generator=generator).to(torch.bfloat16)
    return ("mlp_in" if latent is None else "latent"), values


def random_routes(case: Case, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Distinct experts of each row, and their weights."""
    generator = torch.Generator().manual_seed(seed + 100)
    moe = case.config.moe
    order = torch.rand(rows, moe.num_experts, generator=generator).argsort(1)
    weights = torch.rand(rows, moe.top_k, generator=generator)
    return order[:, : moe.top_k].to(torch.int32).contiguous(), weights


def block_squares(config: ModelConfig, expert_sum: Tensor) -> Tensor:
    """`expert_squares` of these sums."""
    columns = square_columns(config, expert_sum.shape[0])
    padded = pad(expert_sum.float(), (0, -expert_sum.shape[1] % columns))
    return padded.square().unflatten(1, (-1, columns)).sum(2).T.contiguous()
