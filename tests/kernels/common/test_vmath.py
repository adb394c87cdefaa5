"""The native elementwise maths of every instruction set against fp64."""

from __future__ import annotations

import math

import pytest
import torch

from kdecode.kernels.common import _native
from kdecode.kernels.common.native import supported_isas

INF, NAN = math.inf, math.nan
EXTREMES = (0.0, -0.0, 1e-45, -1e-45, 1e-20, 88.72, 88.73, 1e4, -87.4, -103.0, -104.0, -1e4, 3e38)
SPECIAL = (INF, -INF, NAN)


@pytest.fixture(params=supported_isas())
def isa(request):
    return request.param


def vmath(isa, function, x, second=None):
    x = x.to(torch.float32).contiguous()
    second = x if second is None else second.to(torch.float32).contiguous()
    out = torch.full_like(x, NAN)
    _native.vmath(isa, function, x.data_ptr(), second.data_ptr(), x.numel(), out.data_ptr())
    return out


def spread():
    """Numbers of every size and sign, an odd number of them so that loops have a remainder."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(6001, generator=generator) * 40 - 33
    signs = torch.randint(0, 2, (6001,), generator=generator) * 2 - 1
    return torch.cat([signs * torch.exp2(exponents), torch.tensor(EXTREMES)])


def ulps(actual, gold):
    """Errors in units of gold's last place in fp32; 0 where both overflow to one infinity."""
    rounded = gold.to(torch.float32)
    assert torch.equal(torch.isinf(actual), torch.isinf(rounded))
    finite = torch.isfinite(rounded)
    spacing = torch.exp2(torch.frexp(gold[finite]).exponent.clamp(min=-125).double() - 24)
    return ((actual[finite].double() - gold[finite]) / spacing).abs()


@pytest.mark.parametrize(
    ("function", "gold", "bound"),
    [
        ("exp", torch.exp, 1.5),
        ("sigmoid", torch.sigmoid, 3.0),
        ("tanh", torch.tanh, 2.0),
    ],
)
def test_functions_are_within_a_few_units_in_the_last_place(isa, function, gold, bound):
    x = spread()
    assert ulps(vmath(isa, function, x), gold(x.double())).max() <= bound


def test_silu_is_accurate_where_its_sigmoid_is_a_normal_number(isa):
    x = spread()
    x = x[x > -87.0]
    assert ulps(vmath(isa, "silu", x), x.double() * torch.sigmoid(x.double())).max() <= 3.5


@pytest.mark.parametrize(
    ("function", "at_infinity", "at_minus_infinity"),
    [("exp", INF, 0.0), ("sigmoid", 1.0, 0.0), ("tanh", 1.0, -1.0), ("silu", INF, 0.0)],
)
def test_limits_are_reached_and_nan_is_kept(isa, function, at_infinity, at_minus_infinity):
    out = vmath(isa, function, torch.tensor(SPECIAL))
    assert out[0] == at_infinity
    assert out[1] == at_minus_infinity
    assert out[2].isnan()


def test_situ_matches_published_values_and_stays_finite(isa):
    gate = torch.tensor([1.0, -2.0, 8.0, 0.5, INF, -INF, 3e38])
    up = torch.tensor([1.0, 3.0, -30.0, -0.25, INF, INF, -3e38])
    gold = torch.tensor([0.7158178, -0.6578738, -80.3396524, -0.0774021, 100.0, 0.0, -100.0])
    torch.testing.assert_close(vmath(isa, "situ", gate, up), gold, rtol=2e-6, atol=1e-7)


def test_bf16_rounding_is_to_nearest_even(isa):
    halves = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, -3.4e38, 1e-40])
    x = torch.cat([spread(), halves, torch.tensor(SPECIAL)])
    expected = x.to(torch.bfloat16).to(torch.float32)
    torch.testing.assert_close(vmath(isa, "bf16", x), expected, rtol=0, atol=0, equal_nan=True)


def test_a_nan_with_low_bits_only_stays_nan_in_bf16(isa):
    x = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    assert vmath(isa, "bf16", x).isnan().all()


def test_every_fp8_code_is_widened_as_torch_does(isa):
    codes = torch.arange(256)
    expected = codes.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    torch.testing.assert_close(
        vmath(isa, "fp8_code", codes), expected, rtol=0, atol=0, equal_nan=True
    )


def test_fp8_rounding_is_to_nearest_even_and_clamped(isa):
    codes = torch.arange(0x7E).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    ties = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([spread(), codes, ties, ties.nextafter(codes[1:]), torch.tensor(SPECIAL)])
    x = torch.cat([x, -x])
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32)
    torch.testing.assert_close(vmath(isa, "fp8", x), expected, rtol=0, atol=0, equal_nan=True)
