"""Comparison by the numerics policy: each way to fail fails, and says where."""

from __future__ import annotations

import pytest
import torch

from kdecode.kernels.contract import Tolerance
from kdecode.testing.compare import assert_close, bit_equal, difference, near_tie, state_close

LOOSE = Tolerance(rtol=0.1, atol=0.0, rms_ratio=1.0)
NAN, INF = float("nan"), float("inf")


def test_within_returns_what_was_measured() -> None:
    gold = torch.tensor([[1.0, 2.0], [4.0, 0.0]])
    actual = torch.tensor([[1.0, 2.1], [4.2, 0.0]])
    found = assert_close(actual, gold, LOOSE, "x")
    assert found.index == (0, 1)
    assert found.ratio == pytest.approx(0.5, rel=1e-5)
    assert found.rms_ratio == pytest.approx((0.1**2 + 0.2**2) ** 0.5 / 21**0.5, rel=1e-5)


def test_one_bad_element_is_named() -> None:
    gold = torch.ones(3, 4)
    actual = gold.clone()
    actual[2, 1] = 1.25
    with pytest.raises(
        AssertionError, match=r"mix: the worst element \(2, 1\) is 1.25, wanted 1.0"
    ):
        assert_close(actual, gold, LOOSE, "mix")


def test_many_small_errors_fail_the_aggregate_bound() -> None:
    gold = torch.ones(100)
    tolerance = Tolerance(rtol=0.1, atol=0.0, rms_ratio=0.01)
    assert_close(
        gold + torch.nn.functional.pad(torch.tensor([0.05]), (0, 99)), gold, tolerance, "x"
    )
    with pytest.raises(AssertionError, match=r"RMS-error ratio 0.05, limit 0.01"):
        assert_close(gold * 1.05, gold, tolerance, "x")


@pytest.mark.parametrize(("special", "other"), [(NAN, 1.0), (INF, 1.0), (-INF, INF), (INF, NAN)])
def test_special_values_have_to_be_in_the_same_places(special: float, other: float) -> None:
    gold = torch.tensor([1.0, special, 2.0])
    assert_close(gold.clone(), gold, LOOSE, "x")
    changed = torch.tensor([1.0, other, 2.0])
    for actual, wanted in ((changed, gold), (gold, changed)):
        with pytest.raises(AssertionError, match=r"positions differ in 1 of 3 .*\(1,\)"):
            assert_close(actual, wanted, LOOSE, "x")


def test_zero_tolerance_is_equality() -> None:
    zero = Tolerance(0.0, 0.0, 0.0)
    gold = torch.tensor([0.0, 1.0])
    assert_close(gold.clone(), gold, zero, "x")
    with pytest.raises(AssertionError, match="x"):
        assert_close(torch.tensor([1e-30, 1.0]), gold, zero, "x")


def test_errors_where_gold_is_zero_are_seen() -> None:
    gold = torch.zeros(4)
    with pytest.raises(AssertionError, match="RMS-error ratio inf"):
        assert_close(gold + 1e-3, gold, Tolerance(0.0, 1.0, 0.5), "x")


def test_shapes_and_empty_tensors() -> None:
    with pytest.raises(AssertionError, match=r"shape \(2,\), wanted \(2, 1\)"):
        assert_close(torch.ones(2), torch.ones(2, 1), LOOSE, "x")
    assert difference(torch.ones(0, 3), torch.ones(0, 3), LOOSE).ratio == 0.0


def test_bit_equal() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.uint8):
        x = torch.arange(6).to(dtype)
        bit_equal(x.clone(), x, "x")
    nan = torch.tensor([NAN, 1.0])
    bit_equal(nan.clone(), nan, "x")
    with pytest.raises(
        AssertionError, match=r"1 of 2 elements differ .* \(0,\), is -0.0, wanted 0.0"
    ):
        bit_equal(torch.tensor([-0.0, 1.0]), torch.tensor([0.0, 1.0]), "x")
    with pytest.raises(AssertionError, match=r"bfloat16 .*, wanted torch.float32"):
        bit_equal(torch.ones(2).bfloat16(), torch.ones(2), "x")


def test_near_tie() -> None:
    logits = torch.tensor([1.0, 3.0, 2.875])
    assert near_tie(logits, 1, 0.0) == 0.0
    assert near_tie(logits, 2, 0.125) == 0.125
    with pytest.raises(AssertionError, match=r"token 0 \(logit 1\) lies 2 below token 1"):
        near_tie(logits, 0, 0.125)
    with pytest.raises(AssertionError, match="NaN"):
        near_tie(torch.tensor([1.0, NAN]), 0, 0.125)


def test_state_close() -> None:
    gold = {"window.0": torch.ones(2), "recurrent.0": torch.ones(2)}
    bounds = {"window": Tolerance(0.0, 0.0, 0.0), "recurrent": LOOSE}
    near = dict(gold) | {"recurrent.0": torch.full((2,), 1.01)}
    state_close(near, gold, bounds, "slot 3")
    with pytest.raises(AssertionError, match=r"slot 3.window.0"):
        state_close(gold | {"window.0": torch.full((2,), 1.01)}, gold, bounds, "slot 3")
    with pytest.raises(AssertionError, match="wanted"):
        state_close({"window.0": torch.ones(2)}, gold, bounds, "slot 3")
