"""The native chunked delta rule against the recurrence in fp64."""

from __future__ import annotations

import pytest
import torch
from delta_rule_cases import assert_near, delta_rule_inputs, recurrence
from torch import Tensor

from kdecode.kernels.kda_recurrence.native import delta_rule_chunks
from kdecode.testing.compare import bit_equal

HEADS = 3


def _inputs(tokens: int, decay: str, width: int = 32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv as the convolution leaves it: bf16."""
    qkv, *others = delta_rule_inputs(tokens, decay, heads=HEADS, width=width, seed=tokens)
    return (qkv.bfloat16(), *others)


def _recurrence(qkv: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = qkv.double().unbind(1)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * q.shape[-1] ** -0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    return recurrence(q, k, v, g, beta, state)


def _run(qkv: Tensor, g: Tensor, beta: Tensor, state: Tensor, isa: str) -> Tensor:
    out = torch.full_like(qkv[:, 2], float("nan"))
    delta_rule_chunks(qkv, g, beta, state=state, out=out, isa=isa)
    return out


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 63, 64, 65, 130, 200])
@pytest.mark.parametrize("decay", ["bounded", "weak", "trained", "strong"])
def test_chunks_equal_the_recurrence(isa: str, tokens: int, decay: str) -> None:
    qkv, g, beta, state = _inputs(tokens, decay)
    gold_out, gold_state = _recurrence(qkv, g, beta, state)
    out = _run(qkv, g, beta, state, isa)
    assert_near(out, gold_out, "outputs", 2e-3)  # one rounding to bf16
    # Sums of decays reach 1900 in "strong"; differences of such fp32 numbers are off by 1e-4.
    assert_near(state, gold_state, "state", 2e-5 if decay == "strong" else 3e-6)


@pytest.mark.parametrize("width", [16, 48, 128])
def test_heads_of_any_width(isa: str, width: int) -> None:
    qkv, g, beta, state = _inputs(70, "bounded", width)
    gold_out, gold_state = _recurrence(qkv, g, beta, state)
    out = _run(qkv, g, beta, state, isa)
    assert_near(out, gold_out, "outputs", 2e-3)
    assert_near(state, gold_state, "state", 3e-6)


@pytest.mark.parametrize("sizes", [(1, 129), (64, 66), (63, 67), (65, 65), (1, 1, 128), (7,) * 18])
def test_carry_over_at_any_boundary(isa: str, sizes: tuple[int, ...]) -> None:
    qkv, g, beta, state = _inputs(sum(sizes), "bounded")
    gold_out, gold_state = _recurrence(qkv, g, beta, state)
    parts = zip(*(x.split(sizes) for x in (qkv, g, beta)), strict=True)
    out = torch.cat([_run(*part, state, isa) for part in parts])
    assert_near(out, gold_out, "outputs", 2e-3)
    assert_near(state, gold_state, "state", 3e-6)


def test_a_token_does_not_see_later_ones(isa: str) -> None:
    qkv, g, beta, state = _inputs(100, "bounded")
    other = [x.clone() for x in (qkv, g, beta)]
    for x in other:
        x[77:] = x[77:].flip(0)
    first = _run(qkv, g, beta, state.clone(), isa)
    second = _run(*other, state.clone(), isa)
    bit_equal(first[:77], second[:77], "rows before the change")


def test_threads_do_not_change_a_bit(isa: str) -> None:
    qkv, g, beta, state = _inputs(90, "bounded")
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            moved = state.clone()
            results.append((_run(qkv, g, beta, moved, isa), moved))
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        bit_equal(one, two, "one thread and two")
