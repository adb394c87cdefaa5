"""A decode step of ranks that have a GPU each, without a checkpoint: random weights, timed on all.

Owns what every rank builds and that all of them measure one plan together; `shape_probe` has one
rank alone. Knows neither requests nor text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kdecode.config import EngineConfig, ModelConfig
from kdecode.decode.device import adopt_device
from kdecode.decode.inspect import PlanCost
from kdecode.decode.inspect_device import DevicePlanProbe, Together
from kdecode.decode.runner import check_processor, resolve
from kdecode.engine.preflight import check_description, check_devices
from kdecode.engine.rank import allocate_caches, trunk_format
from kdecode.engine.shape_probe import step_plan
from kdecode.model.layout import pack_model
from kdecode.model.random_reader import RandomReader
from kdecode.parallel import launch
from kdecode.parallel.group import Group


def check_ranks(config: ModelConfig, engine: EngineConfig) -> None:
    """Raises ConfigError and BackendRefusedError where this machine cannot run the ranks."""
    engine = resolve(engine)
    check_description(config, engine)
    check_processor(engine)
    check_devices(engine)


def inspect_ranks(
    config: ModelConfig,
    engine: EngineConfig,
    rows: int,
    runs: int,
    progress: Callable[[int, int], None],
) -> PlanCost:
    """What each step of a decode step costs, at ``engine.max_context_tokens`` tokens of context, on
    GPUs of this host, one for each of ``engine.tensor_parallel_size`` ranks.

    Times are of every run the slowest rank's, from when all had come to its beginning; bytes are
    one rank's. Raises as `check_ranks` does, and RankError.
    """
    check_ranks(config, engine)
    engine = resolve(engine)
    group = launch.start(
        engine.tensor_parallel_size,
        follow,
        (config, engine, rows, runs),
        num_threads=engine.resolved_threads(),
        timeout_s=engine.rank_timeout_s,
    )
    try:
        return _inspect(group, config, engine, rows, runs, progress)
    finally:
        group.close()


def follow(group: Group, config: ModelConfig, engine: EngineConfig, rows: int, runs: int) -> None:
    """The life of another rank."""
    _inspect(group, config, engine, rows, runs, lambda done, total: None)


def _inspect(
    group: Group,
    config: ModelConfig,
    engine: EngineConfig,
    rows: int,
    runs: int,
    progress: Callable[[int, int], None],
) -> PlanCost:
    engine = replace(engine, device=group.device_of(engine.device))
    adopt_device(engine.device)
    group.use_device(engine.device, engine.gpu_exchange)
    reader = RandomReader(config, group.ranks.rank, group.ranks)

    def packing(done: int, total: int) -> None:
        # It takes minutes, which are wasted once another rank is lost.
        group.check()
        progress(done, total)

    packed = pack_model(reader, trunk_format(engine), packing, engine.device, engine.isa)
    caches = allocate_caches(packed, engine, ranks=group.ranks)
    plan = step_plan(packed, caches, engine, rows, group.ranks, group.exchange, group.shared)
    context, threads = engine.max_context_tokens, engine.resolved_threads()
    with DevicePlanProbe(packed, plan, caches, rows, context, threads) as probe:
        probe.together = Together(group.exchange.rewind, group.meet, _slowest_of(group))
        cost = probe.measure(runs)
    # What a broken group had still timed means nothing.
    group.settle()
    return replace(cost, gpu_exchange=group.exchange.transport)


def _slowest_of(group: Group) -> Callable[[Sequence[float]], Sequence[float]]:
    def slowest(spent: Sequence[float]) -> Sequence[float]:
        every = group.control.gather(torch.tensor([[*spent]], dtype=torch.float64))
        most: list[float] = every.view(group.ranks.size, -1).amax(dim=0).tolist()
        return most

    return slowest
