"""The prefix cache that an engine's configuration asks for, and what it says about itself.

Owns the sizes, decided from settings before anything is allocated, and the salt: everything of an
engine that changes what a page or a state contains. Does not know requests.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kdecode.cache.budget import slot_bytes
from kdecode.cache.caches import Caches
from kdecode.cache.prefix import PrefixCache, state_interval
from kdecode.config import ConfigError, EngineConfig, ModelConfig
from kdecode.prefill.chunks import ALIGNMENT

log = logging.getLogger(__name__)

# States that are kept for each request that may run, unless a number of bytes is set.
_STATES_PER_REQUEST = 4


def interval_of(engine: EngineConfig) -> int:
    """Tokens between two places where a prefix can end. Raises ConfigError."""
    return state_interval(
        engine.page_positions, ALIGNMENT, engine.max_step_tokens, engine.state_interval_tokens
    )


def check_prefix_caching(config: ModelConfig, engine: EngineConfig) -> None:
    """Raises ConfigError for an interval or a budget that no prefix cache can have."""
    interval_of(engine)
    budget, state = engine.state_cache_bytes, slot_bytes(config)
    if budget is None:
        return
    if not engine.enable_prefix_caching:
        raise ConfigError(
            f"state_cache_bytes is {budget:,}, but enable_prefix_caching is off; only a prefix "
            "cache keeps states."
        )
    if budget < state:
        raise ConfigError(
            f"state_cache_bytes is {budget:,}; one state of this model takes {state:,}."
        )


def num_states(config: ModelConfig, engine: EngineConfig) -> int:
    """States that are kept. config: of one rank, of which each keeps as many."""
    if engine.state_cache_bytes is None:
        return _STATES_PER_REQUEST * engine.max_requests
    return engine.state_cache_bytes // max(1, slot_bytes(config))


def make_prefix_cache(
    config: ModelConfig, engine: EngineConfig, caches: Caches, identity: Mapping[str, Any]
) -> PrefixCache | None:
    """None where the configuration has none. identity: what else decides the caches' contents."""
    if not engine.enable_prefix_caching:
        return None
    count = num_states(config, engine)
    written = {
        **identity,
        "cache_dtype": caches.cache_dtype,
        "scales": {str(layer): scale for layer, scale in caches.scales.items()},
        "page_tokens": caches.page_tokens,
        "context": [caches.context.ranks.size, caches.context.interleave],
    }
    interval = interval_of(engine)
    if not can_hit(engine):
        log.warning(
            "prefix caching is on and can never hit: a prefix ends on a multiple of %d tokens, and "
            "a prompt has at most %d here; set a smaller state interval",
            interval,
            engine.max_context_tokens - 1,
        )
    try:
        salt = json.dumps(written, sort_keys=True)
        return PrefixCache(caches, interval, count, salt, block_tokens=ALIGNMENT)
    except RuntimeError as error:
        # torch's way to say that there is not enough memory.
        raise ConfigError(
            f"{count:,} states of {slot_bytes(config):,} bytes cannot be allocated for prefixes: "
            f"{str(error).splitlines()[0]}"
        ) from error


def can_hit(engine: EngineConfig) -> bool:
    """The shortest prefix, a token behind it and one of a reply are a request that fits."""
    return interval_of(engine) + 2 <= engine.max_context_tokens


def describe_prefix_cache(
    prefix: PrefixCache | None, engine: EngineConfig
) -> dict[str, Any] | None:
    """What it has done and holds."""
    if prefix is None:
        return None
    counts = prefix.counts
    return {
        **asdict(counts),
        "hit_rate": counts.hits / counts.queries if counts.queries else None,
        "recomputed": counts.queries - counts.hits,
        "min_tokens": prefix.interval_tokens,
        "can_hit": can_hit(engine),
        "pages": prefix.pages.num_named,
        "page_evictions": prefix.pages.num_evictions,
        "states": prefix.states.num_used,
        "state_places": prefix.states.num_places,
        "state_bytes": prefix.states.num_bytes,
        "state_evictions": prefix.states.num_evictions,
    }
