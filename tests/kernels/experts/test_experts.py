"""experts and route in torch: free choices of experts, grouped and unpacked, against the stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import Buffers, Problem
from kdecode.kernels.experts import torch_impl as experts
from kdecode.kernels.experts.op import CONTRACT
from kdecode.kernels.linear.product import ProductSettings
from kdecode.kernels.route import torch_impl as route
from kdecode.testing.cases import tiny_k3, tiny_linear
from kdecode.testing.compare import assert_close

NUM_EXPERTS, WIDTH, INNER = 6, 64, 32


def _config(form: str) -> ModelConfig:
    config = tiny_k3() if form == "mxfp4_tiles" else tiny_linear()
    moe = replace(config.moe, num_experts=NUM_EXPERTS, top_k=3, latent_width=None)
    return replace(config, hidden_size=WIDTH, moe=moe)


def _prepare(kind: Any, config: ModelConfig, weights: Any, buffers: Buffers) -> Any:
    buffers.products = ProductSettings("cpu")
    problem = Problem(config, 1, None, 1, "cpu", "bf16", 16, 64, "")
    assert kind.refuse(problem) == []
    return kind.prepare(problem, weights, buffers)


def _expert(random_matrix: Callable[..., Any], form: str, seed: int) -> tuple[Any, Tensor, Tensor]:
    """One packed expert, its gate_up [2 INNER, WIDTH] (gate first) and down, fp64."""
    if form == "rows":
        generator = torch.Generator().manual_seed(seed)
        gate_up = (torch.randn(2 * INNER, WIDTH, generator=generator) / 8).bfloat16()
        down = (torch.randn(WIDTH, INNER, generator=generator) / 6).bfloat16()
        packed = SimpleNamespace(
            gate_up=Matrix("rows", 2 * INNER, WIDTH, gate_up),
            down=Matrix("rows", WIDTH, INNER, down),
        )
        return packed, gate_up.double(), down.double()
    scale = (121, 123)
    gate_up = random_matrix(form, 2 * INNER, WIDTH, seed, scale)
    down = random_matrix(form, WIDTH, INNER, seed + 100, scale)
    packed = SimpleNamespace(gate_up=gate_up.matrix, down=down.matrix)
    turns = gate_up.dense.view(-1, 2, 16, WIDTH)
    return packed, turns.transpose(0, 1).reshape(-1, WIDTH), down.dense


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def _oracle(config: ModelConfig, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = _bf16(x.double() @ gate_up.T).chunk(2, dim=-1)
    if config.activation.kind == "silu":
        product = torch.nn.functional.silu(gate) * up
    else:
        product = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    return _bf16(_bf16(product) @ down.T)


@pytest.mark.parametrize("form", ["rows", "tiles", "mxfp4_tiles"])
@pytest.mark.parametrize("rows", [1, 2, 9, 40])
@pytest.mark.parametrize("is_native", [False, True])
def test_experts(random_matrix: Callable[..., Any], form: str, rows: int, is_native: bool) -> None:
    """All unpacked, all grouped: one oracle."""
    config = _config(form)
    packed = [_expert(random_matrix, form, seed) for seed in range(NUM_EXPERTS)]
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, WIDTH, generator=generator) / 4).bfloat16()
    # Expert 0 is everybody's, so that counts are uneven; expert 5 is nobody's.
    others = torch.rand(rows, NUM_EXPERTS - 2, generator=generator).argsort(1)[:, :2] + 1
    ids = torch.cat([others[:, :1], torch.zeros(rows, 1, dtype=torch.int64), others[:, 1:]], dim=1)
    weights = torch.rand(rows, 3, generator=generator)
    buffers = Buffers(mlp_in=x, route_ids=ids.int(), route_weights=weights)
    prepared = _prepare(experts, config, SimpleNamespace(experts=[e[0] for e in packed]), buffers)
    if form != "rows":
        assert prepared.is_native
        prepared = replace(prepared, is_native=is_native)
    prepared.run()
    gold = torch.zeros(rows, WIDTH, dtype=torch.float64)
    for row in range(rows):
        for place in range(3):
            _, gate_up, down = packed[int(ids[row, place])]
            out = _oracle(config, x[row : row + 1], gate_up, down)[0]
            gold[row] += weights[row, place].double() * out
    assert_close(buffers["expert_sum"], gold, CONTRACT.tolerance, "expert_sum")


def _route(router: Tensor, bias: Tensor, x: Tensor) -> Buffers:
    config, buffers = _config("rows"), Buffers(mlp_in=x)
    weights = SimpleNamespace(router=Matrix("rows", *router.shape, router), router_bias=bias)
    _prepare(route, config, weights, buffers).run()
    return buffers


def test_the_bias_only_selects() -> None:
    """A bias far above the scores: weights recovered as biased - bias would round to zero."""
    x = torch.ones(1, WIDTH).bfloat16()
    router = torch.zeros(NUM_EXPERTS, WIDTH).bfloat16()
    router[:, 0] = torch.tensor([-12.0, -13, -14, -2, -1, 0])
    bias = torch.tensor([12.0, 12.0, 12.0, 0.0, 0.0, 0.0])
    buffers = _route(router, bias, x)
    # 12 + sigmoid(-12..-14) are one fp32 number or nearly; the order among them is by score.
    assert sorted(buffers["route_ids"][0].tolist()) == [0, 1, 2]
    scores = torch.sigmoid(torch.tensor([-12.0, -13, -14], dtype=torch.float64))
    expected = scores / scores.sum() * 2.446
    got = dict(
        zip(buffers["route_ids"][0].tolist(), buffers["route_weights"][0].tolist(), strict=True)
    )
    assert [got[i] for i in range(3)] == pytest.approx(expected.tolist(), rel=1e-5)


def test_equal_scores_choose_the_lowest_expert() -> None:
    x, router = torch.ones(3, WIDTH).bfloat16(), torch.zeros(NUM_EXPERTS, WIDTH).bfloat16()
    buffers = _route(router, torch.tensor([0.0, 0, 1, 0, 0, 0]), x)
    assert buffers["route_ids"].tolist() == [[2, 0, 1]] * 3
    assert buffers["route_ids"].dtype == torch.int32
