"""A decode step of a configuration without a checkpoint: built with random weights and timed.

Owns the order of building, as `worker.py` does for a checkpoint. Knows neither requests nor text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig, ModelConfig
from kdecode.decode import latency_specialized
from kdecode.decode.auto import build_auto_plan
from kdecode.decode.inspect import PlanCost
from kdecode.decode.inspect_device import DevicePlanProbe, plan_probe
from kdecode.decode.plan import DecodePlan
from kdecode.decode.runner import check_processor, deployment_of, resolve
from kdecode.decode.served_steps import row_buckets
from kdecode.decode.tune import Tuned
from kdecode.engine.preflight import check_description, check_device
from kdecode.engine.rank import allocate_caches, trunk_format
from kdecode.model.layout import PackedModel, pack_model
from kdecode.model.random_reader import RandomReader
from kdecode.model.rank_share import share_of
from kdecode.parallel.ranks import ALONE, Ranks
from kdecode.parallel.stand_in import OwnParts, exchange_alone


def inspect_shape(
    config: ModelConfig,
    engine: EngineConfig,
    rows: int,
    runs: int,
    seed: int,
    progress: Callable[[int, int], None],
    num_ranks: int = 1,
) -> PlanCost:
    """What each step of a decode step costs, at ``engine.max_context_tokens`` tokens of context.

    Of several ranks, one rank's steps, as if it never had to wait for another; on a GPU they
    exchange nothing, and the matrices of which ranks gather rows are whole. Raises ConfigError and
    BackendRefusedError as an engine does.
    """
    engine, ranks = resolve(engine), Ranks(0, num_ranks)
    if engine.device != "cpu":
        config, ranks = share_of(config, num_ranks), ALONE
    packed, caches = _made_up(config, engine, seed, progress, ranks)
    exchange = None if ranks.is_alone else OwnParts(ranks)
    shared = None
    if not ranks.is_alone and engine.decode_backend == "latency_specialized":
        part_bytes = latency_specialized.exchange_bytes(packed.config, ranks.size, rows)
        shared = exchange_alone(ranks, part_bytes)
    plan = step_plan(packed, caches, engine, rows, ranks, exchange, shared)
    threads = engine.resolved_threads()
    with plan_probe(packed, plan, caches, rows, engine.max_context_tokens, threads) as probe:
        return probe.measure(runs)


def step_plan(
    packed: PackedModel,
    caches: Caches,
    engine: EngineConfig,
    rows: int,
    ranks: Ranks,
    exchange: Any,
    shared: Any,
) -> DecodePlan:
    """The plan of one decode step, and not all of an engine's: on a GPU each would be compiled.

    exchange, shared: of several ranks; see `RankLink`.
    """
    if engine.decode_backend == "latency_specialized" and rows in row_buckets(engine):
        deployment = replace(deployment_of(packed.config, engine, ranks), shared=shared)
        return latency_specialized.build(deployment, packed, caches, rows)
    return build_auto_plan(packed, caches, engine, ranks, exchange)


def tune_shape(
    config: ModelConfig,
    engine: EngineConfig,
    rows: Sequence[int],
    kernels: Sequence[str],
    progress: Callable[[int, int], None],
) -> Iterator[Tuned]:
    """The best tiles of the CUDA plans of so many rows, as each is found.

    kernels: names in the tile table; none for all. Raises ConfigError and BackendRefusedError.
    """
    engine = resolve(engine)
    packed, caches = _made_up(config, engine, 0, progress)
    deployment = deployment_of(config, engine)
    for count in rows:
        plan = latency_specialized.build(deployment, packed, caches, count)
        build = partial(
            latency_specialized.build,
            deployment,
            packed,
            caches,
            count,
            # What one of these plans is given as its inputs all of them have.
            memory=plan.buffers.memory,
        )
        context, threads = engine.max_context_tokens, engine.resolved_threads()
        with DevicePlanProbe(packed, plan, caches, count, context, threads) as probe:
            yield from probe.tune(build, kernels)


def _made_up(
    config: ModelConfig,
    engine: EngineConfig,
    seed: int,
    progress: Callable[[int, int], None],
    ranks: Ranks = ALONE,
) -> tuple[PackedModel, Caches]:
    """Random weights and empty caches of a resolved configuration; those of one of ``ranks``."""
    reader = RandomReader(config, seed, ranks)
    # First: without the device it would be described as the oldest there is, with its reasons.
    check_device(engine.device)
    check_description(reader.config, engine)
    check_processor(engine)
    packed = pack_model(reader, trunk_format(engine), progress, engine.device, engine.isa)
    return packed, allocate_caches(packed, engine)
