"""kda_gate in Triton against torch's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton_cases as cases

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import Buffers
from kdecode.kernels.kda_gate import torch_impl, triton_impl
from kdecode.kernels.kda_gate.op import CONTRACT
from kdecode.kernels.linear.product import ProductSettings
from kdecode.testing.cases import tiny_k3
from kdecode.testing.compare import assert_close


def gates(module, lower_bound, rows, dim):
    """kda_decay and kda_beta; the gate's inputs reach both ends of its functions."""
    config, device, generator = tiny_k3(), cases.DEVICE, torch.Generator().manual_seed(2)
    kda = replace(config.kda, num_heads=3, head_dim=dim, gate_lower_bound=lower_bound)
    problem = cases.Case(replace(config, kda=kda), None, None).problem(1, 1)
    f_b = torch.randn(3 * dim, 24, generator=generator).bfloat16().to(device)
    weights = SimpleNamespace(
        f_b=Matrix("rows", 3 * dim, 24, f_b),
        dt_bias=torch.linspace(-20.0, 30.0, 3 * dim).to(device),
        decay_scale=torch.rand(3, generator=generator).exp().to(device),
    )
    proj = torch.randn(rows, 60 + 24 + 3, generator=generator).bfloat16()
    buffers = Buffers(kda_proj=proj.to(device))
    buffers.products = ProductSettings(device)
    assert module.refuse(problem) == []
    module.prepare(problem, weights, buffers).run()
    return buffers["kda_decay"].cpu(), buffers["kda_beta"].cpu()


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(("rows", "dim"), [(1, 16), (8, 48), (19, 16)])
def test_gates_equal_those_of_torch(lower_bound, rows, dim):
    ours = gates(triton_impl, lower_bound, rows, dim)
    theirs = gates(torch_impl, lower_bound, rows, dim)
    for name, actual, gold in zip(("decay", "beta"), ours, theirs, strict=True):
        assert_close(actual, gold, CONTRACT.tolerance, name)
