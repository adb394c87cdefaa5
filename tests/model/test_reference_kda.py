"""Reference KDA: gates, convolution, recurrence, chunked form, recovery from corrections."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kdecode.config import KdaConfig
from kdecode.kernels.contract import Tolerance
from kdecode.model import reference
from kdecode.model.parameters import KdaParameters
from kdecode.model.reference import GOLD, GOLD32
from kdecode.testing.cases import decay_parameters, random_parameters, tiny_k3, tiny_linear
from kdecode.testing.compare import assert_close

EXACT = Tolerance(rtol=1e-12, atol=1e-12, rms_ratio=1e-12)
KDA = KdaConfig(2, 8, 4, gate_lower_bound=-5.0, is_gate_full_rank=True)
TOKENS = 70


def _wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("a_log", "z", "sigmoid_form", "softplus_form"),
    [
        (0.0, 0.0, -2.5, -0.6931472),
        (1.0, -1.0, -0.3095158, -0.8515335),
        (-0.5, 3.0, -4.3025858, -1.8490617),
        (2.0, 0.7, -4.9718035, -8.1515036),
    ],
)
def test_gate_check_values(
    a_log: float, z: float, sigmoid_form: float, softplus_form: float
) -> None:
    lower = reference.decay(_wide(z), _wide(a_log), -5.0)
    assert lower.item() == pytest.approx(sigmoid_form, abs=6e-8)
    softplus = reference.decay(_wide(z), _wide(a_log), None)
    assert softplus.item() == pytest.approx(softplus_form, abs=6e-8)


def test_softplus_is_linear_above_20_and_keeps_small_values() -> None:
    z = _wide(20.5, 300.0, -30.0)
    expected = [-20.5, -300.0, -math.log1p(math.exp(-30.0))]
    assert reference.decay(z, _wide(0.0), None).tolist() == pytest.approx(expected, rel=1e-12)


def _kda(is_k3: bool) -> tuple[KdaConfig, KdaParameters]:
    config = tiny_k3() if is_k3 else tiny_linear()
    p = random_parameters(config).layers[0].attention
    assert isinstance(p, KdaParameters)
    return config.kda, p


@pytest.mark.parametrize("is_k3", [True, False])
def test_gate_of_every_head_and_channel(is_k3: bool) -> None:
    kda, p = _kda(is_k3)
    proj = torch.randn(3, 3 * 32 + (32 if is_k3 else 16) + 16 + 2, dtype=torch.float64)
    g, beta = reference.kda_gate(p, kda, proj, GOLD)
    f = proj[:, -18:-2] @ p.f_b_proj.double().T
    for t in range(3):
        for h in range(2):
            assert beta[t, h].item() == pytest.approx(1 / (1 + math.exp(-proj[t, -2 + h])))
            for i in range(16):
                z = (f[t, 16 * h + i] + p.dt_bias[16 * h + i]).item()
                a = math.exp(p.a_log[h])
                expected = -5 / (1 + math.exp(-a * z)) if is_k3 else -a * math.log1p(math.exp(z))
                assert g[t, h, i].item() == pytest.approx(expected, rel=1e-12)


def test_lower_bound_form_is_not_a_clamped_softplus() -> None:
    """Inputs where the two differ most; the recurrent state shows it, not only the gate."""
    kda, p = _kda(is_k3=True)
    z = torch.tensor([0.6, -1.0], dtype=torch.float64).view(1, 2, 1)
    dt_bias = z.float().expand(1, 2, 16).reshape(32)
    p = dataclasses.replace(p, a_log=torch.tensor([0.0, 1.5]), dt_bias=dt_bias)
    proj = torch.zeros(4, 3 * 32 + 32 + 16 + 2, dtype=torch.float64)
    qkv = torch.randn(4, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    g, beta = reference.kda_gate(p, kda, proj, GOLD)
    a = p.a_log.double().exp().view(1, 2, 1)
    clamped = (-a * torch.log1p(z.exp())).clamp_min(-5.0).expand_as(g)
    assert (g - clamped).abs().min() > 1.0
    zero = torch.zeros(2, 16, 16, dtype=torch.float64)
    _, state = reference.kda_step(kda, qkv, g, beta, zero, GOLD)
    wrong = reference.kda_step(kda, qkv, clamped, beta, zero, GOLD)[1]
    exact = (-5 / (1 + (-a * z).exp())).expand_as(g)
    right = reference.kda_step(kda, qkv, exact, beta, zero, GOLD)[1]
    assert_close(state, right, Tolerance(1e-6, 1e-9, 1e-6), "state")
    assert (state - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
def test_convolution_by_loops_and_its_window(tokens: int) -> None:
    _, p = _kda(is_k3=True)
    raw = torch.randn(tokens, 96 + 50, dtype=torch.float64)
    window = torch.randn(3, 96, dtype=torch.float64)
    out, after = reference.kda_conv(p, raw, window, GOLD)
    samples = torch.cat([window, raw[:, :96]])
    for c in (0, 31, 32, 63, 64, 95):
        taps = torch.cat([p.q_conv, p.k_conv, p.v_conv])[c].tolist()
        for t in range(tokens):
            y = sum(taps[j] * samples[t + j, c].item() for j in range(4))
            assert out[t, c].item() == pytest.approx(y / (1 + math.exp(-y)), rel=1e-12)
    assert torch.equal(after, samples[-3:])


def _inputs(
    tokens: int, strength: str, lower_bound: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv, g, beta, state; decays as trained checkpoints have them, or all near one extreme."""
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads, dim = KDA.num_heads, KDA.head_dim
    a_log, dt_bias = decay_parameters(heads, dim, generator)
    shift = {"weak": -6.0, "trained": 0.0, "strong": 6.0}[strength]
    z = randn(tokens, heads, dim) * 2 + dt_bias.view(heads, dim) + shift
    g = reference.decay(z, a_log.double().view(heads, 1), lower_bound)
    beta = torch.sigmoid(randn(tokens, heads))
    return randn(tokens, 3 * KDA.width), g, beta, randn(heads, dim, dim)


def test_recurrence_by_loops() -> None:
    qkv, g, beta, state = _inputs(5, "trained", -5.0)
    out, after = reference.kda_step(KDA, qkv, g, beta, state, GOLD)
    dim = KDA.head_dim
    for h in range(KDA.num_heads):
        s = state[h].tolist()
        for t in range(5):
            q, k, v = (qkv[t].view(3, KDA.num_heads, dim)[i, h].tolist() for i in range(3))
            q_scale = dim**-0.5 / math.sqrt(sum(x * x for x in q) + 1e-6)
            k_scale = 1 / math.sqrt(sum(x * x for x in k) + 1e-6)
            q, k = [x * q_scale for x in q], [x * k_scale for x in k]
            s = [[math.exp(g[t, h, i]) * x for x in s[i]] for i in range(dim)]
            for j in range(dim):
                u = beta[t, h].item() * (v[j] - sum(k[i] * s[i][j] for i in range(dim)))
                for i in range(dim):
                    s[i][j] += k[i] * u
                read = sum(q[i] * s[i][j] for i in range(dim))
                assert out[t, h, j].item() == pytest.approx(read, abs=1e-12)
        assert_close(after[h], torch.tensor(s, dtype=torch.float64), EXACT, f"state of head {h}")


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("strength", ["weak", "trained", "strong"])
@pytest.mark.parametrize("chunk_tokens", [1, 16, 63, 64, TOKENS])
def test_chunked_equals_recurrent(
    chunk_tokens: int, strength: str, lower_bound: float | None
) -> None:
    """Odd tails (70 = 64 + 6) and a start state, in fp64."""
    inputs = _inputs(TOKENS, strength, lower_bound)
    expected = reference.kda_step(KDA, *inputs, GOLD)
    actual = reference.kda_chunk(KDA, *inputs, GOLD, chunk_tokens=chunk_tokens)
    assert_close(actual[0], expected[0], EXACT, "kda_out")
    assert_close(actual[1], expected[1], EXACT, "state")


def test_chunked_in_fp32_at_trained_and_strong_decays() -> None:
    for strength in ("trained", "strong"):
        inputs = _inputs(TOKENS, strength)
        gold = reference.kda_step(KDA, *inputs, GOLD)
        tolerance = Tolerance(rtol=1e-4, atol=1e-5, rms_ratio=1e-5)
        for form in (reference.kda_chunk, reference.kda_step):
            out, state = form(KDA, *inputs, GOLD32)
            assert_close(out, gold[0], tolerance, f"kda_out, {strength}")
            assert_close(state, gold[1], tolerance, f"state, {strength}")


def test_carry_over_between_calls() -> None:
    qkv, g, beta, state = _inputs(TOKENS, "trained", -5.0)
    expected = reference.kda_step(KDA, qkv, g, beta, state, GOLD)
    outs, begin = [], 0
    for size in (1, 17, 3, 48, 1):
        part = slice(begin, begin + size)
        form = reference.kda_chunk if size > 1 else reference.kda_step
        out, state = form(KDA, qkv[part], g[part], beta[part], state, GOLD)
        outs.append(out)
        begin += size
    assert begin == TOKENS
    assert_close(torch.cat(outs), expected[0], EXACT, "kda_out")
    assert_close(state, expected[1], EXACT, "state")


@pytest.mark.parametrize("kept", [0, 1, 5, 9])
def test_state_is_recovered_from_corrections(kept: int) -> None:
    """S = e^{sum g} S0 + sum_t (e^{sum of later g} k_t) u_t^T after any number of kept tokens."""
    qkv, g, beta, state = _inputs(9, "trained", -5.0)
    heads = reference.kda_heads(KDA, qkv, GOLD)
    _, u, _ = reference.delta_rule_chunk(*heads, g, beta, state=state)
    recovered = g[:kept].sum(0).exp().unsqueeze(-1) * state
    for t in range(kept):
        later = g[t + 1 : kept].sum(0).exp()
        recovered = recovered + torch.einsum("hk,hv->hkv", later * heads.k[t], u[t])
    expected = state
    if kept:
        expected = reference.kda_step(KDA, qkv[:kept], g[:kept], beta[:kept], state, GOLD)[1]
    assert_close(recovered, expected, EXACT, "state")


@pytest.mark.parametrize("is_k3", [True, False])
def test_output_norm_and_gate(is_k3: bool) -> None:
    _, p = _kda(is_k3)
    out = torch.randn(2, 2, 16, dtype=torch.float64)
    proj = torch.randn(2, 3 * 32 + (32 if is_k3 else 16) + 18, dtype=torch.float64)
    gate = proj[:, 96 : 96 + 32] if is_k3 else proj[:, 96:112]
    if p.g_b_proj is not None:
        gate = gate @ p.g_b_proj.double().T
    normed = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p.o_norm.double()
    expected = normed.view(2, 32) / (1 + (-gate).exp())
    assert_close(reference.kda_out_norm(p, out, proj, 1e-5, GOLD), expected, EXACT, "attn_out")
