"""shared_up and shared_down in Triton: the shared experts of a mixture in launches of their own."""

from __future__ import annotations

import pytest
import torch
from expert_cases import LAYER, Mixture, small_k3, small_linear, wide_tiles
from mlp_cases import assert_rounded_alike
from triton_cases import make_case, poison_buffers

from kdecode.kernels import table
from kdecode.kernels.dense_up.op import UpWeights
from kdecode.kernels.projection.op import ProjectionWeights
from kdecode.model import reference
from kdecode.model.layout import PackedMlp
from kdecode.model.reference import ROUNDED

CASES = {"k3": make_case(small_k3()), "kimi-linear": make_case(small_linear())}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 64])
def test_matches_the_reference(name: str, rows: int) -> None:
    """Two runs of what was prepared once, each from what the one before it has left."""
    case = CASES[name]
    found, mixture = Mixture(case, (), rows), case.packed.layers[LAYER].mlp
    assert not isinstance(mixture, PackedMlp)
    shared, wanted = mixture.shared, found.parameters.shared
    assert shared is not None
    assert wanted is not None
    weights = {
        "shared_up": UpWeights(shared.gate_up, "shared_product"),
        "shared_down": ProjectionWeights(shared.down, "shared_product", "shared"),
    }
    problem, buffers = case.problem(LAYER, rows), found.buffers
    steps = wide_tiles(
        lambda: [
            table.implementation(op, "triton").prepare(problem, each, buffers)
            for op, each in weights.items()
        ]
    )
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        mlp_in = torch.randn(rows, case.config.hidden_size, generator=generator).bfloat16()
        poison_buffers(buffers)
        buffers["mlp_in"].copy_(mlp_in)
        for step in steps:
            step.run()
        product, value = buffers["shared_product"].cpu(), buffers["shared"].cpu()
        assert_rounded_alike(product, found.shared_product(mlp_in), "shared_product")
        assert_rounded_alike(value, reference.linear(product, wanted.down_proj, ROUNDED), "shared")
