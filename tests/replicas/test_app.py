"""What the application's arguments become; nothing is started."""

from __future__ import annotations

from typing import Any

import pytest

from kdecode.commands.common import InputError
from kdecode.config import ConfigError
from kdecode.replicas import app


def _config(**args: Any) -> dict[str, Any]:
    """Options of both deployments."""
    ingress = app.build(args)._bound_deployment
    replicas = ingress.init_args[0]._bound_deployment
    return {"ingress": ingress, "replica": replicas}


def test_arguments_are_the_flags_of_the_server() -> None:
    flags, options = app.parse(
        {
            "model": "/models/k3",
            "num_replicas": "2",
            "max-num-seqs": 4,
            "served_model_name": ["k3", "alias"],
            "enable-prefix-caching": False,
            "additional_config": {"decode_backend": "latency_specialized"},
        }
    )
    assert options == {"num_replicas": 2}
    config = app.command.engine_config(flags)
    assert (config.max_requests, config.decode_backend) == (4, "latency_specialized")
    assert (flags.model, flags.served_model_name) == ("/models/k3", ["k3", "alias"])
    assert not config.enable_prefix_caching


def test_options_of_the_deployments() -> None:
    found = _config(model="m", num_replicas=3, threads=5, max_num_seqs=6, drain_seconds=40)
    replica, ingress = found["replica"], found["ingress"]
    assert (replica.num_replicas, replica.max_ongoing_requests) == (3, 24)
    assert replica.ray_actor_options["num_cpus"] == 5
    assert ingress.ray_actor_options["num_cpus"] == 0
    router = replica._deployment_config.request_router_config
    # Overloaded by a batch, unless it is said otherwise.
    assert router.request_router_kwargs == {"max_load_gap": 6}
    assert router.get_request_router_class() is app.PrefixRouter
    # Replicas end before the ingress that waits for them.
    drains = [d._deployment_config.graceful_shutdown_timeout_s for d in (replica, ingress)]
    assert drains == [40, 45]
    # 512 tokens of a step at four bytes.
    assert ingress.init_args[3] == 2048
    assert _config(mamba_block_size=128)["ingress"].init_args[3] == 512
    named = _config(max_load_gap=2)["replica"]._deployment_config.request_router_config
    assert named.request_router_kwargs == {"max_load_gap": 2}
    gpu = _config(device="cuda")["replica"].ray_actor_options
    assert gpu["num_gpus"] == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"port": 8000}, "port .*http_options.port"),
        ({"config": "file.yaml"}, "config"),
        ({"num_replicas": 0}, "num_replicas: 0 is below 1"),
        ({"max_load_gap": "many"}, "max_load_gap: 'many'"),
        ({"no_such_flag": 1}, "--no-such-flag=1, which is no flag"),
        ({"max_num_seqs": "many"}, "max-num-seqs"),
        ({"device": "cuda:1"}, "cuda:1; Ray chooses"),
        ({"model": 5}, "model is 5"),
        ({"enable_prefix_caching": "false"}, "enable-prefix-caching"),
    ],
)
def test_what_cannot_be_used_is_named(args: dict[str, Any], words: str) -> None:
    with pytest.raises((InputError, ConfigError), match=words):
        app.build(args)
