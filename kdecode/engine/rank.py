"""What every rank of an engine builds from a configuration, whether it leads, follows or is alone.

Owns the format of the packed weights, and the sizes and scales of the caches. Does not know steps,
requests or other ranks.
"""

from __future__ import annotations

from kdecode.cache.budget import context_of, engine_cache_size
from kdecode.cache.caches import Caches
from kdecode.cache.mirror import Tell, tell_nobody
from kdecode.config import ConfigError, EngineConfig
from kdecode.config_draft import DraftConfig
from kdecode.model.layout import PackedMla, PackedModel, TrunkFormat, tile_format
from kdecode.parallel.ranks import ALONE, Ranks


def trunk_format(engine: EngineConfig) -> TrunkFormat:
    """How matrices outside the experts are packed: as the backend's decode steps read them.

    engine: a resolved configuration.
    """
    if engine.decode_backend != "latency_specialized" or engine.device != "cpu":
        return "rows"
    if engine.trunk_format != "bf16":
        return "int8_tiles" if engine.trunk_format == "int8" else "int4_tiles"
    assert engine.isa is not None, "a resolved configuration has one"
    return tile_format(engine.isa, engine.lossless_packing)


def allocate_caches(
    packed: PackedModel,
    engine: EngineConfig,
    draft: DraftConfig | None = None,
    *,
    ranks: Ranks = ALONE,
    has_draft_rows: bool = True,
    tell: Tell = tell_nobody,
) -> Caches:
    """Slots and pages for the budget. Raises ConfigError where there is no such memory.

    ranks: of which this is one. draft: whose rows the budget is for, too; has_draft_rows: whether
    they are kept here. tell: see `Caches`.
    """
    config = packed.config
    size = engine_cache_size(config, engine, draft)
    try:
        return Caches.allocate(
            config,
            engine.device,
            size.num_slots,
            size.num_pages,
            engine.page_positions,
            cache_dtype=engine.cache_dtype,
            scales=cache_scales(packed, engine),
            draft=draft if has_draft_rows else None,
            tell=tell,
            context=context_of(engine, ranks),
        )
    except RuntimeError as error:
        # torch's way to say that there is not enough memory, on any device.
        raise ConfigError(
            f"The caches cannot be allocated (KDA slots: {size.num_slots:,}, pages of "
            f"{engine.page_positions:,} tokens: {size.num_pages:,}, bytes: {size.num_bytes:,}): "
            f"{str(error).splitlines()[0]}"
        ) from error


def cache_scales(packed: PackedModel, engine: EngineConfig) -> dict[int, float]:
    """The scale of each MLA layer's cache: the checkpoint's own, else the engine's."""
    scales = {}
    for layer, entry in enumerate(packed.layers):
        if isinstance(entry.attention, PackedMla):
            own = entry.attention.cache_scale
            scales[layer] = engine.layer_cache_scale(layer, None if own is None else float(own))
    return scales
