"""What keeps an engine from being built, found before any weight is read, and all of it at once.

Owns the checks of a configuration against a model, a checkpoint's headers and this machine. Does
not know how anything is packed or run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from kdecode.cache.budget import engine_cache_size
from kdecode.config import ConfigError, EngineConfig, ModelConfig, torch_run
from kdecode.decode import latency_specialized
from kdecode.decode.latency_specialized import BackendRefusedError
from kdecode.decode.runner import check_processor, deployment_of, resolve
from kdecode.engine.prefix_caching import check_prefix_caching
from kdecode.engine.scheduler import check_step_tokens
from kdecode.engine.speculation import draft_config
from kdecode.model.rank_share import refuse_division, share_of
from kdecode.model.weights import CheckpointReader
from kdecode.parallel.ranks import Ranks

log = logging.getLogger(__name__)


def check_deployment(reader: CheckpointReader, engine: EngineConfig) -> None:
    """Raises with every reason why this machine cannot run the checkpoint like that.

    BackendRefusedError where the backend has reasons of its own, else ConfigError.
    """
    config = reader.config
    _check(
        config,
        engine,
        lambda: check_context(config, engine),
        lambda: check_processor(engine),
        lambda: check_devices(engine),
        lambda: check_cache_scales(reader, engine),
        lambda: check_draft(config, engine),
    )


def check_description(config: ModelConfig, engine: EngineConfig) -> None:
    """The same without a checkpoint and for any machine."""
    _check(
        config,
        engine,
        lambda: check_context(config, engine),
        lambda: check_draft(config, engine),
    )


def refuse_ranks(config: ModelConfig, engine: EngineConfig) -> list[str]:
    """Every reason why so many ranks cannot run a model, whatever the backend."""
    size = engine.tensor_parallel_size
    if size == 1:
        return []
    reasons = refuse_division(config, size)
    if engine.device.startswith("cuda:"):
        reasons.append(
            f"tensor_parallel_size is {size} and device {engine.device!r}; each rank has a GPU of "
            "its own, the first of a host cuda:0: set device to 'cuda'."
        )
    if engine.changes_weights:
        reasons.append(
            f"tensor_parallel_size is {size} and trunk_format {engine.trunk_format!r}; integers of "
            "a rank's part are not those of the whole matrix: set trunk_format to 'bf16'."
        )
    return reasons


def check_context(config: ModelConfig, engine: EngineConfig) -> None:
    if engine.max_context_tokens > config.max_positions:
        raise ConfigError(
            f"max_context_tokens is {engine.max_context_tokens:,}; the model was made for at most "
            f"{config.max_positions:,} positions."
        )


def check_draft(config: ModelConfig, engine: EngineConfig) -> None:
    """Raises ConfigError for a draft that is none, or that does not fit the model."""
    draft_config(engine, config)


def check_caches(config: ModelConfig, share: ModelConfig, engine: EngineConfig) -> None:
    """Raises ConfigError for a budget without room for a request, or steps without room for all.

    share: of the model, what one rank has.
    """
    speculative = engine.speculative
    size = engine_cache_size(share, engine, draft_config(engine, config))
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    check_step_tokens(engine.max_step_tokens, size.num_slots, num_drafts)


def check_device(device: str) -> None:
    """Raises ConfigError unless torch can use the device now."""
    name, _, index = device.partition(":")
    if name == "cpu":
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device is {device!r}, but torch {torch.__version__} finds no CUDA device here; set "
            "device to 'cpu', or install a torch build for CUDA where there is a GPU."
        )
    count = torch.cuda.device_count()
    if index and int(index) >= count:
        raise ConfigError(f"device is {device!r}; there are {count} CUDA devices, from cuda:0 on.")


def check_devices(engine: EngineConfig) -> None:
    """Raises ConfigError unless each rank of this host can use a device of its own now."""
    check_device(engine.device)
    size = engine.tensor_parallel_size
    if size == 1 or engine.device == "cpu":
        return
    run = torch_run()
    here = size if run is None else run.local_size
    if here is None:
        raise ConfigError(
            "LOCAL_WORLD_SIZE is not set, by which the GPUs of a host are counted; torchrun sets "
            "it where it sets WORLD_SIZE."
        )
    found = torch.cuda.device_count()
    if here > found:
        raise ConfigError(
            f"tensor_parallel_size is {size} and device {engine.device!r}; each of the {here} "
            f"ranks on this host needs a GPU of its own, and torch finds {found}."
        )
    # Here, because a rank that is alone needs nothing of what ranks exchange values through.
    from kdecode.parallel import nccl, symmetric

    # Where it is for every rank together to find out, NCCL is what is left.
    reasons = nccl.refuse()
    if engine.gpu_exchange == "symmetric":
        reasons = symmetric.refuse(range(here), is_one_host=here == size)
    if reasons:
        raise ConfigError(" ".join(reasons))


def warn_of_copies(engine: EngineConfig) -> None:
    """Logs it where torchrun has started several processes, and each will be a whole engine."""
    try:
        run = torch_run()
    except ConfigError:
        # Of variables that nothing here depends on.
        return
    if engine.tensor_parallel_size == 1 and run is not None and run.size > 1:
        log.warning(
            "torchrun has started %d processes (WORLD_SIZE), and this one runs the whole model by "
            "itself: tensor_parallel_size is 1.",
            run.size,
        )


def check_cache_scales(reader: CheckpointReader, engine: EngineConfig) -> None:
    """Raises ConfigError for the first layer of an fp8 cache that nobody gives a scale."""
    for layer, kind in enumerate(reader.config.layer_kinds):
        if kind == "mla" and not reader.has_cache_scale(layer):
            engine.layer_cache_scale(layer, None)


def _check(config: ModelConfig, engine: EngineConfig, *checks: Callable[[], None]) -> None:
    problems = refuse_ranks(config, engine)
    ranks = Ranks(0, engine.tensor_parallel_size)
    # None where the model cannot be divided; why is among the problems.
    share = None if refuse_division(config, ranks.size) else share_of(config, ranks.size)
    if share is not None:
        checks += (
            partial(check_caches, config, share, engine),
            partial(check_prefix_caching, share, engine),
        )
    for check in checks:
        try:
            check()
        except ConfigError as error:
            # Two checks may need the same draft.
            if str(error) not in problems:
                problems.append(str(error))
    if engine.decode_backend == "latency_specialized" and share is not None:
        deployment = deployment_of(share, resolve(engine), ranks, runs=False)
        refusals = latency_specialized.refuse(deployment)
        if refusals:
            raise BackendRefusedError(refusals, problems)
    if len(problems) > 1:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"No backend can run this configuration:\n{lines}")
    if problems:
        raise ConfigError(problems[0])
