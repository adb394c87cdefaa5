"""Allocation, clearing and refusals of the caches."""

from __future__ import annotations

import pytest
import torch

from kdecode.cache.caches import Caches, TruncateError
from kdecode.config import ConfigError
from kdecode.testing.cases import tiny_k3
from kdecode.testing.poison import is_poison, poison_except_

CONFIG = tiny_k3()  # KDA layers 0, 1, 2; MLA layers 3, 4


def _caches(**settings: object) -> Caches:
    return Caches.allocate(CONFIG, "cpu", 3, 5, 16, **settings)  # type: ignore[arg-type]


def test_shapes_and_dtypes() -> None:
    caches = _caches()
    assert set(caches.conv) == set(caches.recurrent) == {0, 1, 2}
    assert set(caches.pages) == set(caches.scales) == {3, 4}
    assert caches.conv[0].shape == (3, 3, 96)
    assert caches.conv[0].dtype == torch.bfloat16
    assert caches.recurrent[0].shape == (3, 2, 16, 16)
    assert caches.recurrent[0].dtype == torch.float32
    assert caches.pages[3].shape == (5, 16, 40)
    assert caches.pages[3].dtype == torch.bfloat16
    assert caches.scales == {3: 1.0, 4: 1.0}


def test_fp8_pages_keep_their_scales() -> None:
    caches = _caches(cache_dtype="fp8", scales={3: 0.5, 4: 2.0})
    assert caches.pages[3].dtype == torch.float8_e4m3fn
    assert caches.scales == {3: 0.5, 4: 2.0}


@pytest.mark.parametrize("scales", [None, {}, {3: 1.0}])
def test_a_missing_fp8_scale_is_refused(scales: dict[int, float] | None) -> None:
    with pytest.raises(ConfigError, match="needs a scale for MLA layer"):
        _caches(cache_dtype="fp8", scales=scales)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_fp8_scale_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="scale of layer 3"):
        _caches(cache_dtype="fp8", scales={3: scale, 4: 1.0})


def test_an_unknown_cache_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="'int8'"):
        _caches(cache_dtype="int8")


def test_a_slot_is_cleared_when_given_out_and_others_are_not() -> None:
    caches = _caches()
    states = [*caches.conv.values(), *caches.recurrent.values()]
    poison_except_(states, ())
    slot = caches.allocate_slot()
    for state in states:
        assert not state[slot].any()
        others = [other for other in range(3) if other != slot]
        assert bool(is_poison(state[others]).all())


def test_truncating_a_recurrent_state_raises() -> None:
    caches = _caches()
    with pytest.raises(TruncateError, match="KDA slot 1 cannot be truncated to 7 tokens"):
        caches.truncate(1, 7)


@pytest.mark.parametrize("slot", [-1, 3])
def test_an_unknown_slot_raises(slot: int) -> None:
    with pytest.raises(IndexError, match="the pool has 3"):
        _caches().clear_slot(slot)


def test_pages_cover_the_tokens() -> None:
    caches = _caches()
    assert caches.allocate_pages(16) == (0,)
    assert caches.allocate_pages(17) == (1, 2)
