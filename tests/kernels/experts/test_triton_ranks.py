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
from kdecode.kernels.contract import Buffers
from kdecode.kernels.linear.product import ProductSettings
from kdecode.parallel.ranks import Ranks
from kdecode.testing.compare import bit_equal

CASES = {"k3": make_case(small_k3()), "kimi-linear": make_case(small_linear())}
RANKS = Ranks(0, 2)


@dataclass
class Other:
    """The exchange of rank 0 of two. columns: what rank 1 has of what is gathered."""

    columns: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)

    def reduce(self, part: Tensor) -> Tensor:
        self.parts.append(part.clone())
        return part.to(torch.bfloat16)

    def gather(self, part: Tensor) -> Tensor:
        assert self.columns is not None
        return torch.cat([part, self.columns.to(part)], dim=1)

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
            router, rows = weights.router, weights.router.rows // 2
            weights = replace(weights, router=replace(router, rows=rows, data=router.data[:rows]))
    module = table.implementation(op, impl)
    assert module.refuse(problem) == []
    module.prepare(problem, weights, buffers).run()
    return buffers


@pytest.mark.parametrize(("name", "rows"), [("k3", 1), ("k3", 9), ("k3", 70), ("kimi-linear", 5)])
def test_a_part_of_the_experts_sums_is_not_rounded(name: str, rows: int) -> None:
    case = CASES[name]
    source, x = random_input(case, rows)
    ids, weights = random_routes(case, rows)
    inputs = {source: x, "route_ids": ids, "route_weights": weights}
    ours, theirs = Other(), Other()
    out = run(case, "experts", "triton", ours, **inputs)["expert_sum"]
    run(case, "experts", "torch", theirs, **inputs)
    (part,), (gold,) = ours.parts, theirs.parts
    assert part.dtype == torch.float32
    assert not torch.equal(part, part.to(torch.bfloat16).float())
    bit_equal(out, part.to(torch.bfloat16), "expert_sum")
    # Products between the matrices are bf16, and some are rounded to a neighbour.
    error = torch.linalg.norm((part - gold).cpu()) / torch.linalg.norm(gold.cpu())
    assert error < 2e-3


def test_all_ranks_choose_among_the_experts_of_all() -> None:
    case = CASES["k3"]
    generator = torch.Generator().manual_seed(5)
    mlp_in = torch.randn(5, case.config.hidden_size, generator=generator).to(torch.bfloat16)
    router = case.packed.layers[LAYER].mlp.router  # type: ignore[union-attr]
    rest = router.data[router.rows // 2 :]
    columns = mlp_in.to(DEVICE).float() @ rest.float().T
    found = run(case, "route", "triton", Other(columns), mlp_in=mlp_in)
    alone = run(case, "route", "triton", None, mlp_in=mlp_in)
    bit_equal(found["route_ids"], alone["route_ids"], "route_ids")
    torch.testing.assert_close(found["route_weights"], alone["route_weights"], rtol=1e-5, atol=0.0)


def test_a_step_of_no_rows_has_a_part_of_none() -> None:
    case = CASES["k3"]
    source, x = random_input(case, 0)
    ids, weights = random_routes(case, 0)
    other = Other()
    inputs = {source: x, "route_ids": ids, "route_weights": weights}
    run(case, "experts", "triton", other, **inputs)
    assert [part.shape for part in other.parts] == [x.shape]
