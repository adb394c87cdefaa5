"""Bytes of slots and pages, and sizes from a budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kdecode.cache.budget import engine_cache_size, page_bytes, size_from_budget, slot_bytes
from kdecode.cache.caches import Caches
from kdecode.config import ConfigError, EngineConfig, KdaConfig, MlaConfig, ModelConfig
from kdecode.config_draft import DraftConfig, DraftKind
from kdecode.model.draft_synthesis import draft_document
from kdecode.model.presets import PRESETS, released_config
from kdecode.parallel.context import ContextShare
from kdecode.parallel.ranks import Ranks
from kdecode.testing.cases import tiny_k3, tiny_linear

CONFIG = tiny_k3()


def test_released_k3_sizes() -> None:
    """One request's state and one token of K3, as published."""
    layers = list(range(93))
    kinds = tuple("mla" if layer % 4 == 3 or layer == 92 else "kda" for layer in layers)
    config = replace(
        CONFIG,
        layer_kinds=kinds,
        kda=KdaConfig(96, 128, 4, -5.0, True),
        mla=MlaConfig(96, 1536, 512, 128, 64, 128, True, 1e-5),
    )
    assert slot_bytes(config) == 434_110_464 + 15_261_696
    assert page_bytes(config, 1, "bf16") == 27_648
    assert page_bytes(config, 64, "fp8") == 64 * 13_824


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("config", [tiny_k3(), tiny_linear()])
def test_sizes_are_those_of_the_tensors(config: object, cache_dtype: str) -> None:
    scales = dict.fromkeys(range(5), 1.0)
    caches = Caches.allocate(
        config,  # type: ignore[arg-type]
        "cpu",
        3,
        5,
        16,
        cache_dtype=cache_dtype,
        scales=scales,
    )
    expected = 3 * slot_bytes(CONFIG) + 5 * page_bytes(config, 16, cache_dtype)  # type: ignore[arg-type]
    assert caches.num_bytes == expected


def test_a_generous_budget_is_not_used_up() -> None:
    size = size_from_budget(CONFIG, 10**9, 4, 100, 16, "bf16")
    assert (size.num_slots, size.num_pages) == (4, 4 * 7)
    assert size.num_bytes == 4 * slot_bytes(CONFIG) + 28 * page_bytes(CONFIG, 16, "bf16")


def test_slots_leave_room_for_one_whole_request() -> None:
    slot, page = slot_bytes(CONFIG), page_bytes(CONFIG, 16, "bf16")
    size = size_from_budget(CONFIG, 2 * slot + 8 * page, 4, 100, 16, "bf16")
    assert size.num_slots == 2
    assert 7 <= size.num_pages <= 8
    assert size.num_bytes <= 2 * slot + 8 * page


def test_exactly_one_request_fits() -> None:
    needed = slot_bytes(CONFIG) + 7 * page_bytes(CONFIG, 16, "bf16")
    size = size_from_budget(CONFIG, needed, 4, 100, 16, "bf16")
    assert (size.num_slots, size.num_pages, size.num_bytes) == (1, 7, needed)
    with pytest.raises(ConfigError, match=f"{needed - 1:,} bytes; one request of 100 tokens"):
        size_from_budget(CONFIG, needed - 1, 4, 100, 16, "bf16")


@pytest.mark.parametrize("kind", ["inferact", "radixark"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_page_has_the_rows_of_the_draft_too(kind: DraftKind, dtype: str) -> None:
    config = ModelConfig.from_checkpoint(released_config(PRESETS["mini"]))
    draft = DraftConfig.from_checkpoint(draft_document(kind, config))
    page = page_bytes(config, 16, dtype, draft)
    own = draft.num_layers * 16 * draft.cache_width * 2
    assert page == page_bytes(config, 16, dtype) + own
    budget = 2 * slot_bytes(config) + 9 * page
    size = size_from_budget(config, budget, 2, 100, 16, dtype, draft)
    assert (size.num_slots, size.num_pages, size.num_bytes) == (2, 9, budget)
    scales = dict.fromkeys(range(config.num_layers), 1.0)
    caches = Caches.allocate(config, "cpu", 2, 9, 16, cache_dtype=dtype, scales=scales, draft=draft)
    assert caches.num_bytes == budget


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_ranks_that_share_positions_have_pages_of_their_rows_only(dtype: str) -> None:
    """The draft's rows apart, and every rank has as many pages as the others."""
    config = ModelConfig.from_checkpoint(released_config(PRESETS["mini"]))
    draft = DraftConfig.from_checkpoint(draft_document("inferact", config))
    context = ContextShare(Ranks(3, 4), 8)
    page = page_bytes(config, 64, dtype, draft, context)
    own = draft.num_layers * 64 * draft.cache_width * 2
    assert page == page_bytes(config, 16, dtype) + own
    scales = dict.fromkeys(range(config.num_layers), 1.0)
    caches = Caches.allocate(
        config, "cpu", 2, 9, 64, cache_dtype=dtype, scales=scales, draft=draft, context=context
    )
    assert caches.num_bytes == 2 * slot_bytes(config) + 9 * page
    # 200 tokens are on 4 pages of 64 positions.
    size = size_from_budget(config, caches.num_bytes, 2, 200, 64, dtype, draft, context)
    assert (size.num_slots, size.num_pages) == (2, 8)


def test_an_engine_of_ranks_that_share_positions() -> None:
    config = ModelConfig.from_checkpoint(released_config(PRESETS["mini"]))
    settings = {"page_tokens": 16, "max_context_tokens": 200, "max_requests": 2}
    alone = engine_cache_size(config, EngineConfig(**settings))
    shared = engine_cache_size(
        config,
        EngineConfig(**settings, tensor_parallel_size=4, decode_context_parallel_size=4),
    )
    assert alone.num_pages == 2 * 13
    assert shared.num_pages == 2 * 4
    assert shared.num_bytes - 2 * slot_bytes(config) == 2 * 4 * page_bytes(config, 16, "bf16")


def test_a_page_of_incomplete_turns_is_refused() -> None:
    settings = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "page_tokens": 24}
    assert EngineConfig(**settings, context_interleave_tokens=8).page_positions == 48
    with pytest.raises(ConfigError, match="interleave_tokens is 16 and page_tokens 24"):
        EngineConfig(**settings, context_interleave_tokens=16)
    # Nobody takes turns.
    with pytest.raises(ConfigError, match="only ranks that share positions"):
        EngineConfig(page_tokens=32, context_interleave_tokens=16)


def test_a_model_of_one_kind_of_layer() -> None:
    only_kda = replace(CONFIG, layer_kinds=("kda",) * 5)
    only_mla = replace(CONFIG, layer_kinds=("mla",) * 5)
    assert size_from_budget(only_kda, 10**9, 4, 100, 16, "bf16").num_pages == 0
    assert size_from_budget(only_mla, 10**9, 4, 100, 16, "bf16").num_slots == 4


@pytest.mark.parametrize("name", ["max_requests", "max_context_tokens"])
def test_nothing_to_hold_is_refused(name: str) -> None:
    values = {"max_requests": 1, "max_context_tokens": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        size_from_budget(CONFIG, 10**9, *values.values(), 16, "bf16")  # type: ignore[arg-type]
