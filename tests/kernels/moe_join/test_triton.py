"""moe_join in Triton against the reference stages that it covers.

The product of the shared experts and the squares of the experts' sums are other steps', and no
values of the reference: they are made here, like the other inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expert_cases import block_squares
from join_cases import chain, join_use
from torch import Tensor
from triton_cases import (
    DEVICE,
    Case,
    Chain,
    k3_config,
    linear_config,
    make_case,
    poison_buffers,
)

from kdecode.config import ModelConfig
from kdecode.kernels.moe_join.op import CONTRACT, MADE_CONTRACT, SharedMade
from kdecode.model import reference as ref
from kdecode.model.parameters import MoeParameters
from kdecode.testing.compare import assert_close, bit_equal


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


def random_inputs(case: Case, made: Chain, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        name: torch.randn(made.buffers[name].shape, generator=generator).bfloat16()
        for name in ("expert_sum", "shared_product", "prefix")
        if name in made.buffers
    }
    if "expert_squares" in made.buffers:
        inputs["expert_squares"] = block_squares(case.config, inputs["expert_sum"])
    return inputs


def run(made: Chain, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of all buffers, on the host."""
    poison_buffers(made.buffers)
    for name, value in inputs.items():
        made.buffers[name].copy_(value.to(DEVICE))
    made.prepared[0].run()
    return {name: tensor.to("cpu", copy=True) for name, tensor in made.buffers.items()}


def check(case: Case, layer: int, rows: int, turns: int = 2) -> None:
    made = chain(case, [join_use(case, "moe_join", layer)], rows)
    for turn in range(turns):
        inputs = random_inputs(case, made, turn)
        found = run(made, inputs)
        for name, wanted in expected_values(case, layer, inputs).items():
            assert_close(found[name], wanted, CONTRACT.tolerance, name)


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


@pytest.mark.parametrize("rows", [4, 9])
def test_what_is_wrong_with_a_row_stays_in_it(rows: int) -> None:
    """Of the norm that a program makes of all rows at once; and other rows change no bit."""
    case = make_case(k3_config())
    made = chain(case, [join_use(case, "moe_join", 2)], rows)
    inputs = random_inputs(case, made, 0)
    clean = run(made, inputs)
    hurt = {name: value.clone() for name, value in inputs.items()}
    hurt["expert_sum"][1, 7] = float("nan")
    hurt["expert_sum"][2] *= 100
    hurt["expert_squares"] = block_squares(case.config, hurt["expert_sum"])
    found = run(made, hurt)
    rest = [row for row in range(rows) if row not in (1, 2)]
    for name in ("routed", "mlp_delta", "prefix"):
        bit_equal(found[name][rest], clean[name][rest], name)
        assert found[name][1].isnan().all()
    # A hundred times the sums are the same norm, but for the roundings and eps.
    assert_close(found["routed"][2], clean["routed"][2], CONTRACT.tolerance, "routed")


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("form", [k3_config, linear_config])
def test_shared_experts_that_other_steps_have_run(
    form: Callable[[], ModelConfig], rows: int
) -> None:
    """The bits of the launch that runs them itself; their product is not read."""
    case = make_case(form())
    use = join_use(case, "moe_join", 2)
    whole = chain(case, [use], rows)
    inputs = random_inputs(case, whole, 0)
    wanted = run(whole, inputs)
    names = {"reads": MADE_CONTRACT.reads, "writes": MADE_CONTRACT.writes}
    other = chain(case, [replace(use, weights=SharedMade(case.packed.layers[2]), **names)], rows)
    inputs["shared"] = wanted["shared"]
    del inputs["shared_product"]
    found = run(other, inputs)
    for name in ("mlp_delta", "prefix"):
        bit_equal(found[name], wanted[name], name)
    assert found["prefix"].isfinite().all()
