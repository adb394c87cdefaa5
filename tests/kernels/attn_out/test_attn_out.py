"""attn_out against the reference stages that it covers."""

from __future__ import annotations

import attention_cases as cases
import pytest
import torch

from kdecode.kernels.attn_out import cpu
from kdecode.kernels.attn_out.op import CONTRACT
from kdecode.kernels.common.native import Pool, supported_isas
from kdecode.model import reference as ref
from kdecode.testing.compare import bit_equal

ISAS = supported_isas()


@pytest.fixture(scope="module")
def pool():
    return Pool(2)


def run_layer(config, layer, inputs, setting):
    parameters = cases.layer_parameters(config, layer)
    buffers = cases.buffers_of(config, layer, inputs, setting)
    buffers["attn_out"] = cases.rows_of(tuple(buffers["attn_out"].shape), 3)
    problem = setting.problem(config, layer, inputs.shape[1])
    assert cpu.refuse(problem) == []
    step = cpu.prepare(problem, cases.pack_layer(parameters, config), buffers)
    cases.run_poisoned(step, buffers)
    return parameters.attention, buffers


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 33, 64])
@pytest.mark.parametrize(("form", "layer"), [("k3", 0), ("k3", 1), ("k3", 4), ("linear", 3)])
def test_values(isa, rows, form, layer, pool):
    config = cases.model(form)
    inputs = cases.inputs_of(config, layer, rows)
    attention, buffers = run_layer(config, layer, inputs, cases.Setting(isa, pool))
    delta = ref.attn_out_proj(attention, buffers["attn_out"], ref.ROUNDED)
    cases.compare(buffers, {"attn_delta": delta}, CONTRACT.tolerance)
    # From the op's own delta on, everything is exact.
    prefix, snapshots = ref.attn_residual(
        inputs[-1],
        inputs[:-1],
        buffers["attn_delta"],
        config.is_snapshot_layer(layer),
        ref.ROUNDED,
    )
    bit_equal(buffers["prefix"], prefix, "prefix")
    if config.attn_res_block is not None:
        count = len(snapshots)
        bit_equal(buffers["snapshots"][:count], snapshots, "snapshots")
        assert torch.isnan(buffers["snapshots"][count:]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layer", [1, 2])
def test_a_row_does_not_depend_on_the_others(isa, layer, pool):
    config = cases.model("k3")
    inputs = cases.inputs_of(config, layer, 8)
    setting = cases.Setting(isa, pool)
    _, together = run_layer(config, layer, inputs, setting)
    for row in range(8):
        buffers = cases.buffers_of(config, layer, inputs[:, row : row + 1], setting)
        buffers["attn_out"] = together["attn_out"][row : row + 1].clone()
        packed = cases.pack_layer(cases.layer_parameters(config, layer), config)
        cpu.prepare(setting.problem(config, layer, 1), packed, buffers).run()
        for name in ("attn_delta", "prefix"):
            bit_equal(together[name][row], buffers[name][0], f"row {row} {name}")
