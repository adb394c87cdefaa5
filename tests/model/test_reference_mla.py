"""Reference MLA: absorbed and plain form, cache rows, fp8 storage."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kdecode.config import MlaConfig
from kdecode.kernels.contract import Tolerance
from kdecode.model import reference
from kdecode.model.parameters import MlaParameters
from kdecode.model.reference import GOLD, ROUNDED
from kdecode.testing.cases import random_parameters, tiny_k3, tiny_linear
from kdecode.testing.compare import assert_close

EXACT = Tolerance(rtol=1e-12, atol=1e-12, rms_ratio=1e-12)


def _mla(is_k3: bool) -> tuple[MlaConfig, MlaParameters]:
    config = tiny_k3() if is_k3 else tiny_linear()
    p = random_parameters(config).layers[3].attention
    assert isinstance(p, MlaParameters)
    return config.mla, p


def _absorbed(mla: MlaConfig, p: MlaParameters, proj: Tensor, rows: Tensor, start: int) -> Tensor:
    query = reference.mla_query(p, mla, proj, GOLD)
    latent = reference.mla_attend(mla, query, rows, start, GOLD)
    return reference.mla_value(p, mla, latent, proj, GOLD)


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("is_k3", [True, False])
def test_absorbed_equals_plain(is_k3: bool, start: int) -> None:
    mla, p = _mla(is_k3)
    proj = reference.mla_in_proj(p, torch.randn(start + 6, 64), GOLD)
    rows = reference.mla_insert(p, mla, proj, GOLD)
    plain = reference.mla_plain(p, mla, proj[start:], rows, start, GOLD)
    assert_close(_absorbed(mla, p, proj[start:], rows, start), plain, EXACT, "attn_out")


def test_plain_form_by_loops() -> None:
    """One head at a time, in the checkpoint's row order: of each head W_UK rows, then W_UV rows."""
    mla, p = _mla(is_k3=True)
    x = torch.randn(3, 64, dtype=torch.float64)
    proj = reference.mla_in_proj(p, x, GOLD)
    rows = reference.mla_insert(p, mla, proj, GOLD)

    assert p.q_a_proj is not None
    assert p.q_a_norm is not None
    assert p.q_b_proj is not None
    assert p.g_proj is not None

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    a = norm(x @ p.q_a_proj.double().T, p.q_a_norm)
    q = a @ p.q_b_proj.double().T
    kv = x @ p.kv_a_proj.double().T
    c, k_pe = norm(kv[:, :32], p.kv_a_norm), kv[:, 32:]
    gate = torch.sigmoid(x @ p.g_proj.double().T)
    expected = torch.zeros(3, 32, dtype=torch.float64)
    for h in range(2):
        w = p.kv_b_proj.double()[32 * h : 32 * h + 32]
        keys = torch.cat([c @ w[:16].T, k_pe], dim=1)
        values = c @ w[16:].T
        for t in range(3):
            scores = [(q[t, 24 * h : 24 * h + 24] @ keys[j]).item() / 24**0.5 for j in range(t + 1)]
            weights = [math.exp(s) for s in scores]
            value = sum(w / sum(weights) * values[j] for j, w in enumerate(weights))
            expected[t, 16 * h : 16 * h + 16] = value * gate[t, 16 * h : 16 * h + 16]
    assert_close(rows, torch.cat([c, k_pe], dim=1), EXACT, "rows")
    actual = reference.mla_plain(p, mla, proj, rows, 0, GOLD)
    assert_close(actual, expected, EXACT, "attn_out")


def test_rows_behind_a_token_are_not_read() -> None:
    mla, p = _mla(is_k3=True)
    proj = reference.mla_in_proj(p, torch.randn(6, 64), GOLD)
    rows = reference.mla_insert(p, mla, proj, GOLD)
    expected = _absorbed(mla, p, proj[:4], rows, 0)
    rows[4:] = float("nan")
    assert torch.equal(_absorbed(mla, p, proj[:4], rows, 0), expected)


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_fp8_round_trip_does_not_depend_on_the_scale(scale: float) -> None:
    """Powers of two move no bits as long as no scale leaves the normal range of E4M3."""
    exponents = torch.randint(-4, 6, (40,), generator=torch.Generator().manual_seed(0))
    rows = (torch.linspace(1.0, 1.99, 40) * torch.exp2(exponents.float())).bfloat16().view(4, 10)
    stored = reference.store_rows(rows, "fp8", scale)
    assert stored.dtype == torch.float8_e4m3fn
    read = reference.load_rows(stored, ROUNDED, scale)
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, reference.load_rows(reference.store_rows(rows, "fp8"), ROUNDED))
    assert ((read.float() - rows.float()).abs() <= rows.float().abs() / 16).all()


def test_fp8_clamps_and_bf16_is_untouched() -> None:
    rows = torch.tensor([[1e4, -1e4, 448.0, -460.0]]).bfloat16()
    read = reference.load_rows(reference.store_rows(rows, "fp8", 0.5), ROUNDED, 0.5)
    assert read.tolist() == [[224.0, -224.0, 224.0, -224.0]]
    assert reference.load_rows(reference.store_rows(rows, "bf16"), ROUNDED) is rows


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_fp8_cache_of_a_model(scale: float) -> None:
    """Writer and reader agree on what the scale means: logits stay near those of a bf16 cache."""
    config = tiny_k3()
    parameters = random_parameters(config)
    layers = tuple(
        dataclasses.replace(
            layer, attention=dataclasses.replace(layer.attention, k_scale=torch.tensor(scale))
        )
        if isinstance(layer.attention, MlaParameters)
        else layer
        for layer in parameters.layers
    )
    # Every expert is chosen: a flipped choice would hide what is compared here.
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, top_k=8))
    ids = torch.arange(12)
    exact = reference.RequestState.new(config, GOLD)
    gold = reference.forward(parameters, config, ids, exact, GOLD)
    state = reference.RequestState.new(config, GOLD, "fp8")
    scaled = dataclasses.replace(parameters, layers=layers)
    logits = reference.forward(scaled, config, ids, state, GOLD)
    assert state.rows[3].dtype == torch.float8_e4m3fn
    assert_close(logits, gold, Tolerance(rtol=0.0, atol=0.5, rms_ratio=0.1), "logits")
    assert not torch.equal(logits, gold)
    # The same scale from the engine's settings, for a checkpoint that has none.
    state = reference.RequestState.new(config, GOLD, "fp8", cache_scale=scale)
    assert torch.equal(reference.forward(parameters, config, ids, state, GOLD), logits)
