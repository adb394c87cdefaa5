"""Reference: stages around the mixers, the router and the experts, against the formulas."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kdecode.config import Activation, ModelConfig
from kdecode.kernels.contract import Tolerance
from kdecode.model import reference
from kdecode.model.parameters import (
    KdaParameters,
    MixParameters,
    MlaParameters,
    MlpParameters,
    MoeParameters,
    Mxfp4,
)
from kdecode.model.reference import GOLD, GOLD32, ROUNDED, Rounding
from kdecode.testing.cases import random_parameters, tiny_k3, tiny_linear
from kdecode.testing.compare import assert_close

EXACT = Tolerance(rtol=1e-12, atol=1e-12, rms_ratio=1e-12)
SITU = Activation("situ", beta=4.0, linear_beta=25.0)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (1.0, 1.0, 0.7158178),
        (-2.0, 3.0, -0.6578738),
        (8.0, -30.0, -80.3396524),
        (0.5, -0.25, -0.0774021),
    ],
)
def test_situ_check_values(gate: float, up: float, expected: float) -> None:
    out = reference.activate(torch.tensor([gate]), torch.tensor([up]), SITU, GOLD)
    assert out.item() == pytest.approx(expected, abs=5e-8)


def test_situ_is_bounded_and_refuses_missing_bounds() -> None:
    large = torch.tensor([1e4])
    assert reference.activate(large, large, SITU, GOLD).item() == pytest.approx(100.0)
    with pytest.raises(ValueError, match="linear_beta=None"):
        reference.activate(large, large, Activation("situ", beta=4.0), GOLD)


def test_silu_gate() -> None:
    gate, up = _randn(8), _randn(8, seed=1)
    out = reference.activate(gate, up, Activation("silu"), GOLD)
    assert_close(out, gate / (1 + (-gate).exp()) * up, EXACT, "silu")


def test_rms_norm_rounds_once() -> None:
    """Weight and statistics are wide: bf16 of the exact result, not of a rounded intermediate."""
    x = _randn(64, 48).bfloat16()
    weight = (_randn(48, seed=1).abs() + 0.5).bfloat16()
    exact = (
        torch.stack(
            [row / math.sqrt(sum(v * v for v in row.tolist()) / 48 + 1e-5) for row in x.double()]
        )
        * weight.double()
    )
    assert_close(reference.rms_norm(x, weight, 1e-5, GOLD), exact, EXACT, "rms_norm")
    rounded = reference.rms_norm(x, weight, 1e-5, ROUNDED)
    assert rounded.dtype == torch.bfloat16
    assert (rounded != exact.bfloat16()).float().mean() < 0.01


def _mix_by_loops(sources: list[list[float]], norm: list[float], proj: list[float]) -> list[float]:
    scores = []
    for x in sources:
        dot = sum(v * n * w for v, n, w in zip(x, norm, proj, strict=True))
        scores.append(dot / math.sqrt(sum(v * v for v in x) / len(x) + 1e-5))
    weights = [math.exp(s - max(scores)) for s in scores]
    total = sum(weights)
    return [
        sum(w / total * x[d] for w, x in zip(weights, sources, strict=True))
        for d in range(len(norm))
    ]


def test_mix_averages_the_raw_sources() -> None:
    norm, proj = _randn(6).abs(), _randn(6, seed=1)
    snapshots, prefix = _randn(3, 2, 6, seed=2), _randn(2, 6, seed=3) * 5
    out = reference.mix(MixParameters(norm, proj), prefix, snapshots, 1e-5, GOLD)
    for row in range(2):
        sources = [*snapshots[:, row].tolist(), prefix[row].tolist()]
        expected = _mix_by_loops(sources, norm.tolist(), proj.tolist())
        assert out[row].tolist() == pytest.approx(expected, abs=1e-13)


def test_mix_of_one_source_is_that_source() -> None:
    prefix = _randn(2, 6).bfloat16()
    weights = MixParameters(torch.ones(6), torch.ones(6))
    none = prefix.new_zeros(0, 2, 6)
    assert torch.equal(reference.mix(weights, prefix, none, 1e-5, ROUNDED), prefix)
    some = prefix.new_zeros(1, 2, 6)
    assert torch.equal(reference.mix(None, prefix, some, 1e-5, ROUNDED), prefix)


def _attention(config: ModelConfig, p: KdaParameters | MlaParameters, x: Tensor) -> Tensor:
    """Attention of a whole sequence without any cache, from the public stages."""
    if isinstance(p, KdaParameters):
        proj = reference.kda_in_proj(p, x, GOLD)
        window = proj.new_zeros(config.kda.conv_width - 1, 3 * config.kda.width)
        qkv, _ = reference.kda_conv(p, proj, window, GOLD)
        g, beta = reference.kda_gate(p, config.kda, proj, GOLD)
        dim = config.kda.head_dim
        empty = proj.new_zeros(config.kda.num_heads, dim, dim)
        out, _ = reference.kda_step(config.kda, qkv, g, beta, empty, GOLD)
        out = reference.kda_out_norm(p, out, proj, config.rms_eps, GOLD)
    else:
        proj = reference.mla_in_proj(p, x, GOLD)
        rows = reference.mla_insert(p, config.mla, proj, GOLD)
        out = reference.mla_plain(p, config.mla, proj, rows, 0, GOLD)
    return reference.attn_out_proj(p, out, GOLD)


def _mlp(config: ModelConfig, p: MlpParameters | MoeParameters, x: Tensor) -> Tensor:
    if isinstance(p, MlpParameters):
        return reference.dense_mlp(x, p, config.activation, GOLD)
    ids, weights = reference.route(p, config.moe, x, GOLD)
    z = reference.latent_down(p, x, GOLD)
    y = reference.experts(p, config.activation, z, ids, weights, GOLD)
    routed = reference.latent_up(p, y, config.rms_eps, GOLD)
    return routed + reference.shared_mlp(p, config.activation, x, GOLD)


def test_attention_residuals_of_25_layers_against_lists() -> None:
    """Snapshots are the raw prefixes before layers 0, 12 and 24, seen only from the push on."""
    config = tiny_k3(num_layers=25, attn_res_block=12)
    parameters = random_parameters(config)
    ids = torch.tensor([5, 17, 40])

    def mixed(prefix: Tensor, blocks: list[Tensor], weights: MixParameters | None) -> Tensor:
        assert weights is not None
        norm, proj = weights.norm.double().tolist(), weights.proj.double().tolist()
        rows = [
            _mix_by_loops([b[t].tolist() for b in blocks] + [prefix[t].tolist()], norm, proj)
            for t in range(len(ids))
        ]
        return torch.tensor(rows, dtype=torch.float64)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return reference.rms_norm(x, weight, config.rms_eps, GOLD)

    prefix = parameters.embed[ids].double()
    blocks: list[Tensor] = []
    counts, expected = [], []
    for layer, p in enumerate(parameters.layers):
        h = mixed(prefix, blocks, p.attn_mix)
        fresh = layer in (0, 12, 24)
        if fresh:
            blocks.append(prefix)
        a = _attention(config, p.attention, normed(h, p.input_norm))
        prefix = a if fresh else prefix + a
        h = mixed(prefix, blocks, p.mlp_mix)
        prefix = prefix + _mlp(config, p.mlp, normed(h, p.post_norm))
        counts.append(len(blocks))
        expected.append(prefix)
    assert (counts[11], counts[12], counts[23], counts[24]) == (1, 2, 2, 3)
    assert counts[-1] == config.num_snapshots
    final = normed(mixed(prefix, blocks, parameters.final_mix), parameters.norm)

    actual: dict[int, Tensor] = {}
    options = reference.Options(on_layer=actual.__setitem__)
    state = reference.RequestState.new(config, GOLD)
    logits = reference.forward(parameters, config, ids, state, GOLD, options)
    tolerance = Tolerance(rtol=1e-9, atol=1e-9, rms_ratio=1e-9)
    for layer, prefix in enumerate(expected):
        assert_close(actual[layer], prefix, tolerance, f"prefix after layer {layer}")
    assert_close(logits, final @ parameters.lm_head.double().T, tolerance, "logits")


def test_residual_roundings() -> None:
    """bf16(prefix + bf16(routed + shared)): the inner rounding is visible."""
    one = torch.ones(1, 1).bfloat16()
    tiny = torch.full((1, 1), 2.0**-8).bfloat16()
    inner = reference.mlp_residual(one, one, tiny, ROUNDED)
    assert inner.item() == 2.0
    exact = reference.mlp_residual(one, one, tiny, GOLD)
    assert exact.item() == 2.0 + 2.0**-8
    prefix, snapshots = reference.attn_residual(one, one.new_zeros(0, 1, 1), tiny, True, ROUNDED)
    assert torch.equal(prefix, tiny)
    assert torch.equal(snapshots, one.unsqueeze(0))
    prefix, _ = reference.attn_residual(one, snapshots, tiny, False, ROUNDED)
    assert prefix.item() == 1.0  # a tie, to even


def _moe(config: ModelConfig) -> MoeParameters:
    p = random_parameters(config).layers[1].mlp
    assert isinstance(p, MoeParameters)
    return p


def test_router_ties_take_the_lowest_expert() -> None:
    config = tiny_k3()
    p = dataclasses.replace(_moe(config), router=torch.zeros(8, 64), router_bias=torch.zeros(8))
    ids, weights = reference.route(p, config.moe, torch.ones(2, 64), GOLD32)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert ids.dtype == torch.int32
    bias = torch.tensor([0.0, 1, 1, 0, 1, 1, 0, 1])
    p = dataclasses.replace(p, router_bias=bias)
    assert reference.route(p, config.moe, torch.ones(2, 64), GOLD32)[0].tolist() == [[1, 2, 4]] * 2
    assert weights.sum(-1).tolist() == pytest.approx([1.0, 1.0])


def test_router_bias_changes_ids_and_not_weights() -> None:
    config = tiny_k3()
    x = _randn(4, 64).bfloat16()
    p = dataclasses.replace(_moe(config), router_bias=torch.zeros(8))
    scores = torch.sigmoid(x.double() @ p.router.double().T)
    bias = torch.zeros(8)
    bias[5] = 3.0
    biased = dataclasses.replace(p, router_bias=bias)
    for parameters in (p, biased):
        ids, weights = reference.route(parameters, config.moe, x, GOLD)
        chosen = scores.gather(1, ids.long())
        assert_close(weights, chosen / chosen.sum(1, keepdim=True), EXACT, "weights")
    assert (ids[:, 0] == 5).all()


def test_router_with_a_large_bias_and_tiny_scores() -> None:
    """In fp32, bias 12 swallows sigmoids of 1e-7; weights must not come from biased - bias."""
    config = tiny_k3()
    base = _moe(config)
    logits = torch.linspace(-19.0, -15.0, 8)
    router = torch.zeros(8, 64)
    router[:, 0] = logits
    p = dataclasses.replace(base, router=router, router_bias=torch.full((8,), 12.0))
    x = torch.zeros(1, 64)
    x[0, 0] = 1.0
    ids, weights = reference.route(p, config.moe, x, GOLD32)
    scores = torch.sigmoid(logits.double())[ids[0].long()]
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-6)
    assert weights[0].tolist() == pytest.approx((scores / scores.sum()).tolist(), rel=1e-5)
    assert len(set(weights[0].tolist())) == 3


def test_router_scaling_and_no_renormalisation() -> None:
    x = _randn(3, 64)
    config = tiny_linear()
    p = _moe(config)
    _, weights = reference.route(p, config.moe, x, GOLD)
    assert weights.sum(1).tolist() == pytest.approx([2.446] * 3)
    raw = dataclasses.replace(config.moe, is_renormalized=False)
    ids, weights = reference.route(p, raw, x, GOLD)
    scores = torch.sigmoid(x @ p.router.double().T).gather(1, ids.long())
    assert_close(weights, scores * 2.446, EXACT, "weights")


def test_experts_are_the_weighted_sum_of_each() -> None:
    config = tiny_k3()
    p = _moe(config)
    z = _randn(5, 32)
    ids = torch.tensor([[0, 3, 7], [3, 2, 1], [7, 6, 5], [0, 1, 2], [4, 0, 6]], dtype=torch.int32)
    weights = _randn(5, 3, seed=4).abs()
    out = reference.experts(p, config.activation, z, ids, weights, GOLD)
    for row in range(5):
        expected = torch.zeros(32, dtype=torch.float64)
        for place, expert in enumerate(ids[row].tolist()):
            gate, up = p.w1[expert].double() @ z[row], p.w3[expert].double() @ z[row]
            product = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
            expected += weights[row, place] * (p.w2[expert].double() @ product)
        assert_close(out[row], expected, EXACT, f"row {row}")


def test_mxfp4_experts_are_their_dequantised_weights() -> None:
    """Codes and scales decoded here by the format's definition: low nibble first, 2^(s - 127)."""
    config = tiny_k3()
    p = _moe(config)
    generator = torch.Generator().manual_seed(0)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

    def quantised() -> tuple[Mxfp4, Tensor]:
        packed = torch.randint(0, 256, (32, 16), generator=generator, dtype=torch.uint8)
        scale = torch.randint(122, 127, (32, 1), generator=generator, dtype=torch.uint8)
        rows = []
        for row in range(32):
            nibbles = [n for byte in packed[row].tolist() for n in (byte & 15, byte >> 4)]
            factor = 2.0 ** (int(scale[row, 0]) - 127)
            rows.append([(-1) ** (n >> 3) * magnitudes[n & 7] * factor for n in nibbles])
        return Mxfp4(packed, scale), torch.tensor(rows, dtype=torch.float64)

    pairs = [[quantised() for _ in range(8)] for _ in range(3)]
    packed = dict(zip(("w1", "w3", "w2"), (tuple(q for q, _ in x) for x in pairs), strict=True))
    dense = dict(zip(("w1", "w3", "w2"), (tuple(d for _, d in x) for x in pairs), strict=True))
    z = _randn(4, 32)
    ids = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 0], [7, 3, 1]], dtype=torch.int32)
    weights = _randn(4, 3, seed=1).abs()
    outs = [
        reference.experts(
            dataclasses.replace(p, **tensors), config.activation, z, ids, weights, GOLD
        )
        for tensors in (packed, dense)
    ]
    assert torch.equal(*outs)


def test_latent_norm_acts_on_the_summed_experts() -> None:
    config = tiny_k3()
    p = _moe(config)
    assert p.latent_norm is not None
    assert p.latent_up is not None
    y = _randn(2, 32)
    normed = y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt() * p.latent_norm.double()
    out = reference.latent_up(p, y, 1e-5, GOLD)
    assert_close(out, normed @ p.latent_up.double().T, EXACT, "latent_up")
    # Scaling the sum changes nothing but for eps: weights before the norm are relative only.
    assert_close(reference.latent_up(p, y * 1e6, 1e-5, GOLD), out, Tolerance(1e-4, 1e-4, 1e-4), "x")


@pytest.mark.parametrize("rounding", [GOLD, ROUNDED], ids=lambda r: r.name)
def test_buffers_have_the_dtypes_of_the_map(rounding: Rounding) -> None:
    config = tiny_k3()
    parameters = random_parameters(config)
    bf16, fp32 = (
        (torch.bfloat16, torch.float32) if rounding is ROUNDED else (torch.float64, torch.float64)
    )
    x = reference.embed(parameters, torch.tensor([3, 4]), rounding)
    kda = parameters.layers[0].attention
    assert isinstance(kda, KdaParameters)
    proj = reference.kda_in_proj(kda, x, rounding)
    window = proj.new_zeros(3, 3 * config.kda.width)
    qkv, window = reference.kda_conv(kda, proj, window, rounding)
    g, beta = reference.kda_gate(kda, config.kda, proj, rounding)
    state = torch.zeros(2, 16, 16)
    out, state = reference.kda_step(config.kda, qkv, g, beta, state, rounding)
    assert (x.dtype, proj.dtype, qkv.dtype, window.dtype, out.dtype) == (bf16,) * 5
    assert (g.dtype, beta.dtype, state.dtype) == (fp32,) * 3
    assert proj.shape == (2, 3 * 32 + 32 + 16 + 2)
    ids, weights = reference.route(_moe(config), config.moe, x, rounding)
    assert (ids.dtype, weights.dtype) == (torch.int32, fp32)
    assert reference.head(parameters, x, rounding).dtype == fp32
