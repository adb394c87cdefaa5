"""The native chunked delta rule against the recurrence in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdecode.kernels.kda_recurrence.native import delta_rule_chunks
from kdecode.testing.cases import decay_parameters
from kdecode.testing.compare import bit_equal

HEADS = 3


def _inputs(tokens: int, decay: str, width: int = 32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv bf16, not normalised, g, beta, state; the decays of `test_chunk.py`."""
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, 3, HEADS, width, generator=generator)
    # Keys of neighbouring tokens are alike: the triangular system is then far from the identity.
    qkv[:, 1] = 0.3 * qkv[:, 1] + torch.randn(HEADS, width, generator=generator)
    noise = torch.randn(tokens, HEADS, width, generator=generator)
    if decay == "trained":
        a_log, dt_bias = decay_parameters(HEADS, width, generator)
        z = noise + dt_bias.view(HEADS, width)
        g = -a_log.exp().unsqueeze(-1) * torch.nn.functional.softplus(z)
    else:
        g = {
            "bounded": -5 * torch.sigmoid(4 * noise),
            "weak": -1e-3 * torch.sigmoid(noise),
            "strong": -30 * torch.sigmoid(4 * noise),
        }[decay]
    beta = torch.sigmoid(torch.randn(tokens, HEADS, generator=generator) + 2)
    state = torch.randn(HEADS, width, width, generator=generator)
    return qkv.bfloat16(), g, beta, state


def _recurrence(qkv: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token in fp64, straight from the definition."""
    q, k, v = qkv.double().unbind(1)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * q.shape[-1] ** -0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    g, beta, state = g.double(), beta.double(), state.double()
    outs = []
    for t in range(q.shape[0]):
        state = g[t].exp().unsqueeze(-1) * state
        u = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t].unsqueeze(-1) * u.unsqueeze(-2)
        outs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outs), state


def _run(qkv: Tensor, g: Tensor, beta: Tensor, state: Tensor, isa: str) -> Tensor:
    out = torch.full_like(qkv[:, 2], float("nan"))
    delta_rule_chunks(qkv, g, beta, state=state, out=out, isa=isa)
    return out


def _assert_near(actual: Tensor, gold: Tensor, name: str, bound: float) -> None:
    assert bool(torch.isfinite(actual).all()), name
    error = (actual.double() - gold).square().sum().sqrt() / gold.square().sum().sqrt()
    assert error < bound, f"{name}: relative error {error:.3g}"


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 63, 64, 65, 130, 200])
@pytest.mark.parametrize("decay", ["bounded", "weak", "trained", "strong"])
def test_chunks_equal_the_recurrence(isa: str, tokens: int, decay: str) -> None:
    qkv, g, beta, state = _inputs(tokens, decay)
    gold_out, gold_state = _recurrence(qkv, g, beta, state)
    out = _run(qkv, g, beta, state, isa)
    _assert_near(out, gold_out, "outputs", 2e-3)  # one rounding to bf16
    # Sums of decays reach 1900 in "strong"; differences of such fp32 numbers are off by 1e-4.
    _assert_near(state, gold_state, "state", 2e-5 if decay == "strong" else 3e-6)


@pytest.mark.parametrize("width", [16, 48, 128])
def test_heads_of_any_width(isa: str, width: int) -> None:
    qkv, g, beta, state = _inputs(70, "bounded", width)
    gold_out, gold_state = _recurrence(qkv, g, beta, state)
    out = _run(qkv, g, beta, state, isa)
    _assert_near(out, gold_out, "outputs", 2e-3)
    _assert_near(state, gold_state, "state", 3e-6)


@pytest.mark.parametrize("sizes", [(1, 129), (64, 66), (63, 67), (65, 65), (1, 1, 128), (7,) * 18])
def test_carry_over_at_any_boundary(isa: str, sizes: tuple[int, ...]) -> None:
    qkv, g, beta, state = _inputs(sum(sizes), "bounded")
    gold_out, gold_state = _recurrence(qkv, g, beta, state)
    parts = zip(*(x.split(sizes) for x in (qkv, g, beta)), strict=True)
    out = torch.cat([_run(*part, state, isa) for part in parts])
    _assert_near(out, gold_out, "outputs", 2e-3)
    _assert_near(state, gold_state, "state", 3e-6)


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
