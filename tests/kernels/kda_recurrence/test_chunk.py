"""The chunked and the one-token form of the delta rule against the recurrence in fp64."""

from __future__ import annotations

import pytest
import torch
from delta_rule_cases import assert_near, delta_rule_inputs, recurrence
from torch import Tensor

from kdecode.kernels.kda_recurrence.chunk import delta_rule_chunks
from kdecode.kernels.kda_recurrence.torch_impl import delta_rule_step

HEADS, WIDTH = 2, 32


def _inputs(tokens: int, decay: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and k normalised."""
    qkv, *others = delta_rule_inputs(tokens, decay, heads=HEADS, width=WIDTH, seed=seed)
    qkv[:, :2] = torch.nn.functional.normalize(qkv[:, :2], dim=-1)
    qkv[:, 0] *= WIDTH**-0.5
    return (qkv, *others)


def _recurrence(qkv: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return recurrence(*qkv.unbind(1), g, beta, state)


def _assert_near(actual: Tensor, gold: Tensor, name: str, bound: float = 3e-6) -> None:
    assert_near(actual, gold, name, bound)


@pytest.mark.parametrize("tokens", [2, 3, 15, 16, 17, 63, 64, 65, 130, 200])
@pytest.mark.parametrize("decay", ["bounded", "weak", "trained", "strong"])
def test_chunks_equal_the_recurrence(tokens: int, decay: str) -> None:
    qkv, g, beta, state = _inputs(tokens, decay)
    gold_out, gold_state = _recurrence(qkv, g, beta, state)
    lower_bound = {"bounded": -5.0, "weak": -5.0}.get(decay)
    out, _ = delta_rule_chunks(qkv, g, beta, state=state, lower_bound=lower_bound)
    # Sums of decays reach 1900 in "strong"; differences of such fp32 numbers are off by 1e-4.
    bound = 2e-5 if decay == "strong" else 3e-6
    _assert_near(out, gold_out, "outputs", bound)
    _assert_near(state, gold_state, "state", bound)


def test_the_strongest_bounded_decay_stays_finite() -> None:
    """Every token at K3's limit: the factors inside a sub-block reach their largest exponents."""
    qkv, g, beta, state = _inputs(130, "bounded")
    g.fill_(-5.0)
    gold_out, gold_state = _recurrence(qkv, g, beta, state)
    out, _ = delta_rule_chunks(qkv, g, beta, state=state, lower_bound=-5.0)
    _assert_near(out, gold_out, "outputs")
    _assert_near(state, gold_state, "state")


def test_a_bound_too_low_for_factors_takes_the_direct_form() -> None:
    qkv, g, beta, state = _inputs(70, "strong")
    gold_out, _ = _recurrence(qkv, g, beta, state)
    out, _ = delta_rule_chunks(qkv, g, beta, state=state, lower_bound=-30.0)
    _assert_near(out, gold_out, "outputs")


@pytest.mark.parametrize("sizes", [(1, 129), (64, 66), (63, 67), (65, 65), (1, 1, 128), (7,) * 18])
def test_carry_over_at_any_boundary(sizes: tuple[int, ...]) -> None:
    qkv, g, beta, state = _inputs(sum(sizes), "bounded")
    gold_out, gold_state = _recurrence(qkv, g, beta, state)
    outs = [
        delta_rule_chunks(*part, state=state, lower_bound=-5.0)[0]
        for part in zip(*(x.split(sizes) for x in (qkv, g, beta)), strict=True)
    ]
    _assert_near(torch.cat(outs), gold_out, "outputs")
    _assert_near(state, gold_state, "state")


@pytest.mark.parametrize("decay", ["bounded", "strong"])
def test_single_tokens_equal_the_recurrence(decay: str) -> None:
    qkv, g, beta, state = _inputs(40, decay)
    gold_out, gold_state = _recurrence(qkv, g, beta, state)
    outs = [delta_rule_step(qkv[t], g[t].exp(), beta[t], state) for t in range(40)]
    _assert_near(torch.stack(outs), gold_out, "outputs")
    _assert_near(state, gold_state, "state")


@pytest.mark.parametrize("tokens", [256, 1024])
def test_drift_does_not_grow_with_length(tokens: int) -> None:
    """fp32 chunks and fp32 single tokens both stay at rounding errors of the fp64 state."""
    qkv, g, beta, state = _inputs(tokens, "weak")
    stepped = state.clone()
    _, gold_state = _recurrence(qkv, g, beta, state)
    delta_rule_chunks(qkv, g, beta, state=state, lower_bound=-5.0)
    for t in range(tokens):
        delta_rule_step(qkv[t], g[t].exp(), beta[t], stepped)
    _assert_near(state, gold_state, "chunked state")
    _assert_near(stepped, gold_state, "stepped state")
