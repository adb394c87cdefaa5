"""kda_out_norm in Triton against torch's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton_cases as cases

from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import Buffers
from kdecode.kernels.kda_out_norm import torch_impl, triton_impl
from kdecode.kernels.kda_out_norm.op import CONTRACT
from kdecode.kernels.linear.product import ProductSettings
from kdecode.testing.cases import tiny_k3
from kdecode.testing.compare import assert_close


def normed(module, rank, rows, dim):
    config, device, generator = tiny_k3(), cases.DEVICE, torch.Generator().manual_seed(2)
    config = replace(config, kda=replace(config.kda, num_heads=3, head_dim=dim))
    g_b = torch.randn(3 * dim, rank or 1, generator=generator).bfloat16().to(device)
    weights = SimpleNamespace(
        o_norm=torch.rand(dim, generator=generator).to(device),
        g_b=Matrix("rows", 3 * dim, rank, g_b) if rank else None,
        conv=torch.empty(4, 9 * dim),
    )
    columns = 9 * dim + (rank or 3 * dim) + 7
    out = 5 * torch.randn(rows, 3, dim, generator=generator)
    buffers = Buffers(
        kda_proj=torch.randn(rows, columns, generator=generator).bfloat16().to(device),
        kda_out=out.bfloat16().to(device),
    )
    buffers.products = ProductSettings(device)
    problem = cases.Case(config, None, None).problem(1, 1)
    assert module.refuse(problem) == []
    module.prepare(problem, weights, buffers).run()
    return buffers["attn_out"].cpu()


@pytest.mark.parametrize("rank", [None, 24])
@pytest.mark.parametrize(("rows", "dim"), [(1, 16), (8, 48), (19, 16)])
def test_heads_equal_those_of_torch(rank, rows, dim):
    ours, theirs = (normed(module, rank, rows, dim) for module in (triton_impl, torch_impl))
    assert_close(ours, theirs, CONTRACT.tolerance, "attn_out")
