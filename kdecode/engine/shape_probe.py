"""A decode step of a configuration without a checkpoint: built with random weights and timed.

Owns the order of building, as `worker.py` does for a checkpoint. Knows neither requests nor text.
"""

from __future__ import annotations

from collections.abc import Callable

from kdecode.config import EngineConfig, ModelConfig
from kdecode.decode.inspect import PlanCost, PlanProbe
from kdecode.decode.runner import StepRunner, check_processor, resolve
from kdecode.engine.preflight import check_description
from kdecode.engine.worker import allocate_caches, trunk_format
from kdecode.model.layout import pack_model
from kdecode.model.rank_share import RandomReader


def inspect_shape(
    config: ModelConfig,
    engine: EngineConfig,
    rows: int,
    runs: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> PlanCost:
    """What each step of a decode step costs, at ``engine.max_context_tokens`` tokens of context.

    Raises ConfigError and BackendRefusedError as an engine does.
    """
    engine = resolve(engine)
    check_description(config, engine)
    check_processor(engine)
    reader = RandomReader(config, seed)
    packed = pack_model(reader, trunk_format(engine), progress, engine.device, engine.isa)
    caches = allocate_caches(packed, engine)
    plan = StepRunner(packed, caches, engine).plan(rows)
    threads = engine.resolved_threads()
    with PlanProbe(packed, plan, caches, rows, engine.max_context_tokens, threads) as probe:
        return probe.measure(runs)
