"""moe_join in Triton against the reference stages that it covers.

The product of the shared experts is another step's, and no value of the reference: it is drawn
here, like the other inputs.
"""

from __future__ import annotations

import pytest
import torch
from join_cases import chain, join_use
from torch import Tensor
from triton_cases import DEVICE, Case, k3_config, linear_config, make_case, poison_buffers

from kdecode.kernels.moe_join.op import CONTRACT
from kdecode.model import reference as ref
from kdecode.model.parameters import MoeParameters
from kdecode.testing.compare import assert_close


def expected_values(case: Case, layer: int, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The composition of the references, from `routed` and `shared` on."""
    config, p = case.config, case.parameters.layers[layer].mlp
    assert isinstance(p, MoeParameters)
    eps, values = config.rms_eps, dict[str, Tensor]()
    delta, shared = inputs["expert_sum"], None
    if p.latent_up is not None:
        delta = values["routed"] = ref.latent_up(p, delta, eps, ref.ROUNDED)
    if p.shared is not None:
        shared = ref.linear(inputs["shared_product"], p.shared.down_proj, ref.ROUNDED)
        values["shared"] = shared
    values["prefix"] = ref.mlp_residual(inputs["prefix"], delta, shared, ref.ROUNDED)
    return values


def check(case: Case, layer: int, rows: int, turns: int = 2) -> None:
    made = chain(case, [join_use(case, "moe_join", layer)], rows)
    for turn in range(turns):
        poison_buffers(made.buffers)
        generator = torch.Generator().manual_seed(turn)
        inputs = {}
        for name in ("expert_sum", "shared_product", "prefix"):
            if name in made.buffers:
                drawn = torch.randn(made.buffers[name].shape, generator=generator)
                inputs[name] = drawn.bfloat16()
                made.buffers[name].copy_(inputs[name].to(DEVICE))
        made.prepared[0].run()
        for name, wanted in expected_values(case, layer, inputs).items():
            assert_close(made.buffers[name].cpu(), wanted, CONTRACT.tolerance, name)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_values(rows: int) -> None:
    check(make_case(k3_config()), 2, rows)


@pytest.mark.parametrize("rows", [1, 4])
def test_latents_without_a_norm(rows: int) -> None:
    check(make_case(k3_config(has_latent_norm=False)), 3, rows, turns=1)


@pytest.mark.parametrize("num_shared", [0, 1])
@pytest.mark.parametrize("rows", [1, 4])
def test_experts_at_the_model_width(rows: int, num_shared: int) -> None:
    check(make_case(linear_config(num_shared=num_shared)), 2, rows, turns=1)


def test_sixty_four_rows() -> None:
    check(make_case(k3_config()), 2, 64, turns=1)
