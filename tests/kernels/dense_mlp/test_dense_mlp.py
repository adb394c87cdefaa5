"""The native dense MLP against the reference stages that it covers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mlp_cases import (
    ROWS,
    assert_rounded_alike,
    fill_residual,
    latent_config,
    make_buffers,
    make_case,
    plain_config,
    prepare,
)

from kdecode.kernels.dense_mlp.cpu import refuse
from kdecode.kernels.dense_mlp.op import CONTRACT
from kdecode.model import reference
from kdecode.model.reference import GOLD, ROUNDED
from kdecode.testing.compare import assert_close, bit_equal

LAYER = 0
CASES = {"situ": make_case(latent_config()), "silu": make_case(plain_config())}


def run(case, rows, pool, isa):
    """Buffers after the step, and the prefix before it."""
    buffers = make_buffers(case.config, rows, pool)
    fill_residual(case, buffers, num_snapshots=1)
    before = buffers["prefix"].clone()
    prepare(case, "dense_mlp", LAYER, buffers, isa).run()
    return buffers, before


def oracle(case, before, buffers, rounding):
    """What the step has to write, by buffer. Layer 0 sees the one snapshot that it pushed."""
    layer, config = case.layer(LAYER), case.config
    snapshots = buffers["snapshots"][:1] if "snapshots" in buffers else torch.empty(0)
    mix = reference.mlp_mix(layer.mlp_mix, before, snapshots, config.rms_eps, rounding)
    mlp_in = reference.mlp_norm(mix, layer.post_norm, config.rms_eps, rounding)
    delta = reference.dense_mlp(mlp_in, layer.mlp, config.activation, rounding)
    prefix = reference.mlp_residual(before, delta, None, rounding)
    return {"mlp_mix": mix, "mlp_in": mlp_in, "mlp_delta": delta, "prefix": prefix}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", ROWS)
def test_matches_the_reference(name, rows, pool, isa):
    case = CASES[name]
    buffers, before = run(case, rows, pool, isa)
    for buffer, gold in oracle(case, before, buffers, GOLD).items():
        assert_close(buffers[buffer], gold, CONTRACT.tolerance, buffer)
    rounded = oracle(case, before, buffers, ROUNDED)
    assert_rounded_alike(buffers["mlp_mix"], rounded["mlp_mix"], "mlp_mix")
    assert_rounded_alike(buffers["mlp_in"], rounded["mlp_in"], "mlp_in")
    # From the step's own input, so that no rounding of it matters.
    activation = case.config.activation
    delta = reference.dense_mlp(buffers["mlp_in"], case.layer(LAYER).mlp, activation, ROUNDED)
    assert_rounded_alike(buffers["mlp_delta"], delta, "mlp_delta")
    prefix = reference.mlp_residual(before, buffers["mlp_delta"], None, ROUNDED)
    bit_equal(buffers["prefix"], prefix, "prefix")


@pytest.mark.parametrize("name", CASES)
def test_a_row_depends_neither_on_the_others_nor_on_the_threads(name, pool, two_threads, isa):
    case = CASES[name]
    together, before = run(case, 8, two_threads, isa)
    alone = make_buffers(case.config, 1, pool)
    alone["prefix"].copy_(before[6:7])
    if "snapshots" in alone:
        alone["snapshots"].copy_(together["snapshots"][:, 6:7])
    prepare(case, "dense_mlp", LAYER, alone, isa).run()
    for buffer in CONTRACT.writes:
        bit_equal(alone[buffer][0], together[buffer][6], buffer)


def test_refuses_widths_that_tiles_cannot_hold():
    config = replace(CASES["situ"].config, dense_width=100)
    (reason,) = refuse(replace(CASES["situ"], config=config).problem(LAYER, 1, "portable"))
    assert "100" in reason
    assert refuse(CASES["situ"].problem(LAYER, 8, "portable")) == []


def test_a_matrix_of_another_size_is_not_accepted(pool):
    case = CASES["situ"]
    config = replace(case.config, dense_width=96)
    with pytest.raises(ValueError, match=r"\[224, 160\].*\[192, 160\]"):
        prepare(
            replace(case, config=config), "dense_mlp", 0, make_buffers(config, 1, pool), "portable"
        )
