"""experts and route of the standard path in Triton on one of two ranks: what it gives the other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from expert_cases import LAYER, random_input, random_routes, small_k3, small_linear
from torch import Tensor
from triton_cases import DEVICE, Case, make_case

from kdecode.kernels import table
from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import Buffers
from kdecode.kernels.linear.product import ProductSettings, make_linear
from kdecode.parallel.ranks import Ranks
from kdecode.testing.compare import bit_equal

CASES = {"k3": make_case(small_k3()), "kimi-linear": make_case(small_linear())}
RANKS = Ranks(0, 2)


@dataclass
class Other:
    """The exchange of rank 0 of two. words: what rank 1 has of what is gathered, else the same."""

    words: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)

    def reduce(self, part: Tensor) -> Tensor:
        self.parts.append(part.clone())
        return part.to(torch.bfloat16)

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat([part, part if self.words is None else self.words.to(part)], dim=1)

    def swap(self, parts: Tensor) -> Tensor:
        raise AssertionError("Nothing of these is swapped.")


def run(case: Case, op: str, impl: str, other: Other | None, **inputs: Tensor) -> Buffers:
    """On rank 0 of two, whose share the case is; other: None for a rank that is alone."""
    buffers = Buffers({name: value.to(DEVICE) for name, value in inputs.items()})
    buffers.products = ProductSettings(DEVICE)
    buffers.exchange = other
    problem = replace(case.problem(LAYER, 1), rows=None)
    weights: Any = case.packed.layers[LAYER].mlp
    if other is not None:
        problem = replace(problem, ranks=RANKS)
        if op == "route":
            halves = {name: _half(getattr(weights, name)) for name in ("router", "latent_down")}
            weights = replace(weights, **halves)
    module = table.implementation(op, impl)
    assert module.refuse(problem) == []
    module.prepare(problem, weights, buffers).run()
    return buffers


def _half(matrix: Matrix) -> Matrix:
    rows = matrix.rows // 2
    return replace(matrix, rows=rows, data=matrix.data[:rows])


def inputs_of(case: Case, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    """What the experts read; for the shared ones there is always a normed input."""
    source, x = random_input(case, rows)
    ids, weights = random_routes(case, rows)
    generator = torch.Generator().manual_seed(6)
    normed = torch.randn(rows, case.config.hidden_size, generator=generator).to(torch.bfloat16)
    return x, {"mlp_in": normed, source: x, "route_ids": ids, "route_weights": weights}


@pytest.mark.parametrize(("name", "rows"), [("k3", 1), ("k3", 9), ("k3", 70), ("kimi-linear", 5)])
def test_a_part_of_the_experts_sums_is_not_rounded(name: str, rows: int) -> None:
    """Nor one of the shared experts, which travels behind it."""
    case = CASES[name]
    x, inputs = inputs_of(case, rows)
    ours, theirs = Other(), Other()
    found = run(case, "experts", "triton", ours, **inputs)
    run(case, "experts", "torch", theirs, **inputs)
    (line,), (gold,) = ours.parts, theirs.parts
    assert line.shape == (1, x.numel() + rows * case.config.hidden_size)
    part, shared = line[:, : x.numel()].view(x.shape), line[:, x.numel() :].view(rows, -1)
    for values, buffer in ((part, "expert_sum"), (shared, "shared")):
        assert values.dtype == torch.float32
        assert not torch.equal(values, values.to(torch.bfloat16).float())
        bit_equal(found[buffer], values.to(torch.bfloat16), buffer)
    # Products between the matrices are bf16, and some are rounded to a neighbour.
    error = torch.linalg.norm((line - gold).cpu()) / torch.linalg.norm(gold.cpu())
    assert error < 2e-3


def test_all_ranks_choose_among_the_experts_of_all() -> None:
    """And have the latents of all, which come with the logits."""
    case = CASES["k3"]
    generator = torch.Generator().manual_seed(5)
    mlp_in = torch.randn(5, case.config.hidden_size, generator=generator).to(torch.bfloat16)
    mixture: Any = case.packed.layers[LAYER].mlp
    rest = mixture.router.data[mixture.router.rows // 2 :]
    logits = mlp_in.to(DEVICE).float() @ rest.float().T
    each = mixture.latent_down.rows // 2
    latents = torch.randn(5, each, generator=generator).to(DEVICE, torch.bfloat16)
    words = torch.cat([logits.view(torch.int16), latents.view(torch.int16)], dim=1)
    found = run(case, "route", "triton", Other(words), mlp_in=mlp_in)
    alone = run(case, "route", "triton", None, mlp_in=mlp_in)
    bit_equal(found["route_ids"], alone["route_ids"], "route_ids")
    torch.testing.assert_close(found["route_weights"], alone["route_weights"], rtol=1e-5, atol=0.0)
    own = make_linear(_half(mixture.latent_down), ProductSettings(DEVICE))(mlp_in.to(DEVICE))
    bit_equal(found["latent"], torch.cat([own, latents], dim=1), "latent")


def test_a_step_of_no_rows_has_a_part_of_none() -> None:
    case = CASES["k3"]
    x, inputs = inputs_of(case, 0)
    other = Other()
    found = run(case, "experts", "triton", other, **inputs)
    assert [part.shape for part in other.parts] == [(1, 0)]
    assert found["expert_sum"].shape == x.shape
