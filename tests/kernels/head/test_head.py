"""The native head against the reference stages that it covers."""

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

from kdecode.kernels.head import cpu
from kdecode.kernels.head.op import CONTRACT
from kdecode.model import reference
from kdecode.model.reference import GOLD, ROUNDED
from kdecode.testing.compare import assert_close, bit_equal

CASES = {"mix": make_case(latent_config()), "plain": make_case(plain_config())}


def run(case, rows, pool, isa):
    buffers = make_buffers(case.config, rows, pool)
    fill_residual(case, buffers, case.config.num_snapshots)
    prepare(case, "head", None, buffers, isa).run()
    return buffers


def oracle(case, buffers, rounding):
    snapshots = buffers.get("snapshots", torch.empty(0))
    p, eps = case.parameters, case.config.rms_eps
    mix = reference.final_mix(p.final_mix, buffers["prefix"], snapshots, eps, rounding)
    head_in = reference.head_norm(mix, p.norm, eps, rounding)
    return {"final_mix": mix, "head_in": head_in, "logits": reference.head(p, head_in, rounding)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", ROWS)
def test_matches_the_reference(name, rows, pool, isa):
    case = CASES[name]
    buffers = run(case, rows, pool, isa)
    for buffer, gold in oracle(case, buffers, GOLD).items():
        assert_close(buffers[buffer], gold, CONTRACT.tolerance, buffer)
    rounded = oracle(case, buffers, ROUNDED)
    for buffer in ("final_mix", "head_in"):
        assert_rounded_alike(buffers[buffer], rounded[buffer], buffer)
    logits = reference.head(case.parameters, buffers["head_in"], ROUNDED)
    assert_rounded_alike(buffers["logits"], logits, "logits")
    assert torch.equal(buffers["logits"], buffers["logits"].to(torch.bfloat16).float())


@pytest.mark.parametrize("name", CASES)
def test_a_row_depends_neither_on_the_others_nor_on_the_threads(name, pool, two_threads, isa):
    case = CASES[name]
    together = run(case, 8, two_threads, isa)
    alone = make_buffers(case.config, 1, pool)
    alone["prefix"].copy_(together["prefix"][5:6])
    if "snapshots" in alone:
        alone["snapshots"].copy_(together["snapshots"][:, 5:6])
    prepare(case, "head", None, alone, isa).run()
    for buffer in CONTRACT.writes:
        bit_equal(alone[buffer][0], together[buffer][5], buffer)


def test_softmax_of_the_mix_survives_large_scores(pool, isa):
    case = CASES["mix"]
    buffers = make_buffers(case.config, 2, pool)
    fill_residual(case, buffers, case.config.num_snapshots)
    packed = case.packed(None)
    packed.final_mix = packed.final_mix * 1e4
    cpu.prepare(case.problem(None, 2, isa), packed, buffers).run()
    weights = replace(case.parameters.final_mix, norm=case.parameters.final_mix.norm.float() * 1e4)
    expected = reference.final_mix(
        weights, buffers["prefix"], buffers["snapshots"], case.config.rms_eps, ROUNDED
    )
    assert_rounded_alike(buffers["final_mix"], expected, "final_mix")


def test_refuses_an_odd_width():
    odd = replace(CASES["mix"], config=replace(CASES["mix"].config, hidden_size=107))
    (reason,) = cpu.refuse(odd.problem(None, 1, "portable"))
    assert "107" in reason
