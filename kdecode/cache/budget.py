"""Sizes of the caches: bytes of a KDA slot and of an MLA page, and what a memory budget holds.

Pure arithmetic on the configuration; allocates nothing. ``page_tokens`` are the positions that a
page covers; where ranks share them, its bytes are those of its rows on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.config import ConfigError, EngineConfig, ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.parallel.context import WHOLE, ContextShare
from kdecode.parallel.ranks import Ranks

# Bytes of one cached number of an MLA row.
CACHE_ITEM_BYTES = {"bf16": 2, "fp8": 1}
_BF16_BYTES, _FP32_BYTES = 2, 4


@dataclass(frozen=True)
class CacheSize:
    """How many slots and pages to allocate, and the bytes that they take."""

    num_slots: int
    num_pages: int
    num_bytes: int


def item_bytes(cache_dtype: str) -> int:
    if cache_dtype not in CACHE_ITEM_BYTES:
        raise ConfigError(
            f"cache_dtype is {cache_dtype!r}; it can be {' or '.join(sorted(CACHE_ITEM_BYTES))}."
        )
    return CACHE_ITEM_BYTES[cache_dtype]


def slot_bytes(config: ModelConfig) -> int:
    """One request's KDA state in all layers: windows (bf16) and recurrent states (fp32)."""
    kda = config.kda
    window = (kda.conv_width - 1) * 3 * kda.width * _BF16_BYTES
    recurrent = kda.width * kda.head_dim * _FP32_BYTES
    return config.layer_kinds.count("kda") * (window + recurrent)


def page_bytes(
    config: ModelConfig,
    page_tokens: int,
    cache_dtype: str,
    draft: DraftConfig | None = None,
    context: ContextShare = WHOLE,
) -> int:
    """One page in all MLA layers, and in those of a draft, whose rows are bf16 and never shared."""
    row = config.mla.cache_width * item_bytes(cache_dtype)
    target = config.layer_kinds.count("mla") * context.page_rows(page_tokens) * row
    if draft is None:
        return target
    return target + draft.num_layers * page_tokens * draft.cache_width * _BF16_BYTES


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that hold ``num_tokens`` tokens."""
    return -(-num_tokens // page_tokens)


def size_from_budget(
    config: ModelConfig,
    budget_bytes: int,
    max_requests: int,
    max_context_tokens: int,
    page_tokens: int,
    cache_dtype: str,
    draft: DraftConfig | None = None,
    context: ContextShare = WHOLE,
) -> CacheSize:
    """Slots first, as many as ``max_requests``, then pages for the rest of the budget.

    Room for one request of ``max_context_tokens`` is kept whatever the number of slots, and no more
    pages are made than all slots could fill. ConfigError if the budget cannot hold that request.
    """
    for name, value in (("max_requests", max_requests), ("max_context_tokens", max_context_tokens)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it has to be at least 1.")
    slot = slot_bytes(config)
    page = page_bytes(config, page_tokens, cache_dtype, draft, context)
    pages_of_one = pages_for(max_context_tokens, page_tokens) if page else 0
    needed = slot + pages_of_one * page
    if budget_bytes < needed:
        raise ConfigError(
            f"The cache budget is {budget_bytes:,} bytes; one request of {max_context_tokens:,} "
            f"tokens needs {needed:,}: a KDA slot of {slot:,}, and pages of {page:,} each with "
            f"{pages_of_one * page:,} in all. Raise the budget or lower max_context_tokens."
        )
    num_slots = max_requests
    if slot:
        num_slots = min(max_requests, (budget_bytes - pages_of_one * page) // slot)
    num_pages = 0
    if page:
        num_pages = min(num_slots * pages_of_one, (budget_bytes - num_slots * slot) // page)
    return CacheSize(num_slots, num_pages, num_slots * slot + num_pages * page)


def engine_cache_size(
    config: ModelConfig, engine: EngineConfig, draft: DraftConfig | None = None
) -> CacheSize:
    """Slots and pages of an engine; by default enough for every request at full length.

    config: what one rank has. All ranks get the same numbers, as if each had the draft's rows.
    """
    budget, page_tokens = engine.cache_budget_bytes, engine.page_positions
    context = context_of(engine, Ranks(0, engine.tensor_parallel_size))
    if budget is None:
        page = page_bytes(config, page_tokens, engine.cache_dtype, draft, context)
        pages = pages_for(engine.max_context_tokens, page_tokens)
        budget = engine.max_requests * (slot_bytes(config) + pages * page)
    return size_from_budget(
        config,
        budget,
        engine.max_requests,
        engine.max_context_tokens,
        page_tokens,
        engine.cache_dtype,
        draft,
        context,
    )


def context_of(engine: EngineConfig, ranks: Ranks) -> ContextShare:
    """What one rank of an engine stores of every request's positions."""
    size, interleave = engine.decode_context_parallel_size, engine.context_interleave_tokens
    return ContextShare.of(size, ranks, interleave)
