"""`serve run kdecode.replicas.app:build model=DIR num_replicas=2`: the application of Ray Serve.

Owns which deployments there are and their options. Its arguments are the flags of `kdecode serve`
and `model`, `num_replicas` and `max_load_gap`; where it listens, on which hosts it runs and every
option of a deployment are Ray's to say (docs/replicas.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

import kdecode.commands.config_file as config_file
import kdecode.commands.serve as command
from kdecode.commands.common import InputError, positive
from kdecode.config import EngineConfig
from kdecode.replicas.ingress import Ingress
from kdecode.replicas.prefixes import BYTES_PER_TOKEN
from kdecode.replicas.replica import Replica
from kdecode.replicas.router import PrefixRouter
from kdecode.server.guard import Limits

# Flags of `kdecode serve` whose part Ray plays.
RAYS_FLAGS = {"host": "http_options.host", "port": "http_options.port", "config": "the args"}
# The ingress holds no queue of its own: what waits, waits for a replica.
INGRESS_REQUESTS = 10_000
# A replica's queue, in batches: enough to order by priority, and not more than may die with it.
QUEUED_BATCHES = 4
HEALTH_PERIOD_S = 2.0
# One that hangs is replaced after three times this.
HEALTH_TIMEOUT_S = 10.0
# Behind the drain time, for the last answers to be read.
GRACE_SECONDS = 5


def build(args: dict[str, Any]) -> Application:
    """What Ray calls with the `args` of a configuration file or of `serve run`.

    Raises InputError, ConfigError.
    """
    flags, options = parse(args)
    num_replicas = options.get("num_replicas", 1)
    return application(flags, num_replicas=num_replicas, max_load_gap=options.get("max_load_gap"))


def parse(args: Mapping[str, Any]) -> tuple[argparse.Namespace, dict[str, int]]:
    """Flags of `kdecode serve`, and options of the application."""
    settings = {name.replace("-", "_"): value for name, value in args.items()}
    for name, place in RAYS_FLAGS.items():
        if name in settings:
            raise InputError(f"{name} is set for replicas; it is Ray's, by {place}.")
    options: dict[str, int] = {
        name: _number(name, settings.pop(name))
        for name in ("num_replicas", "max_load_gap")
        if name in settings
    }
    parser = argparse.ArgumentParser(prog="kdecode serve", exit_on_error=False)
    command.add_arguments(parser)
    arguments = config_file.arguments(settings)
    try:
        flags, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(f"the args of the application: {error}") from error
    if unknown:
        raise InputError(f"the args of the application have {unknown[0]}, which is no flag.")
    flags.model = command.model_of(settings)
    if flags.device.startswith("cuda:"):
        raise InputError(f"--device is {flags.device}; Ray chooses the GPU of a replica: cuda.")
    return flags, options


def application(
    flags: argparse.Namespace,
    *,
    num_replicas: int = 1,
    max_load_gap: int | None = None,
    replica_class: type = Replica,
    router: RequestRouterConfig | None = None,
) -> Application:
    """The application of parsed flags. router: another one than that of prefixes."""
    config = command.engine_config(flags)
    if router is None:
        router = RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"max_load_gap": max_load_gap or config.max_requests},
        )
    replicas = serve.deployment(
        replica_class,
        name="Replica",
        num_replicas=num_replicas,
        ray_actor_options=_resources(config),
        max_ongoing_requests=QUEUED_BATCHES * config.max_requests,
        graceful_shutdown_timeout_s=flags.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        request_router_config=router,
        max_constructor_retry_count=3,
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=INGRESS_REQUESTS,
        graceful_shutdown_timeout_s=flags.drain_seconds + GRACE_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
    )
    limits = Limits(max_body_bytes=flags.max_body_bytes)
    first_bytes = BYTES_PER_TOKEN * (config.state_interval_tokens or config.max_step_tokens)
    found: Application = ingress.bind(replicas.bind(flags), flags.api_key, limits, first_bytes)
    return found


def _resources(config: EngineConfig) -> dict[str, float]:
    """What Ray keeps free for a replica, all of its ranks on one host.

    Without --threads that is a core for each rank, whatever they use.
    """
    ranks = config.tensor_parallel_size
    found: dict[str, float] = {"num_cpus": ranks * (config.num_threads or 1)}
    if config.device == "cuda":
        found["num_gpus"] = ranks
    return found


def _number(name: str, value: Any) -> int:
    try:
        return positive(str(value))
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{name}: {error}.") from error
