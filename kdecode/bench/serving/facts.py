"""What a running server says of itself: its resolved configuration, and what it does not tell.

Owns the reading of our `/config/fingerprint` and of what vLLM exposes. Command lines and log lines
are not read: they say what was asked for, not what runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kdecode.bench.serving.client import Client
from kdecode.bench.serving.counters import read_counters
from kdecode.bench.serving.http import HttpError, exchange, fetch_json
from kdecode.bench.verdicts import COMPARED_SETTING, flatten

Study = Literal["non-speculative", "speculative", "synthetic acceptance"]

# Last parts of vLLM's names: of processes, addresses and folders, and what free memory decides.
_RECORDED = re.compile(
    r"(^|[._])(instance_id|(\w+_)?ports?|(\w+_)?ip|host|hostname|(\w+_)?cache_(dir|root|path)"
    r"|num_(gpu|cpu)_blocks|otlp_traces_endpoint|served_model_name"
    r"|vllm_(assets_cache|config_root|rpc_base_path|usage_\w+|logging_\w+|build_url"
    r"|object_storage_shm_buffer_name))$"
)
# What vLLM's report of the system has where there is nothing to say.
_NOTHING = ("", "None", "N/A", "Could not collect")
# Of the text of `lscpu`: the rest are vulnerabilities, caches, and clocks that change.
_CPU_LINES = ("Model name", "CPU(s)", "Socket(s)")
# What has to be told; a server without a resolved configuration tells none of it.
CANNOT_SEE = (
    "decode backend",
    "parallel sizes",
    "speculative configuration",
    "batch and token limits",
    "graph mode",
    "hardware model and count",
)


@dataclass(frozen=True)
class ServerFacts:
    """One server. config: flat, by dotted name. recorded: told, but not part of the comparison.

    unread: what must be equal and could not be read, so that no ratio is possible. unchecked: what
    no server of this kind tells.
    """

    kind: Literal["kdecode", "vllm", "other"]
    model: str
    config: Mapping[str, Any]
    recorded: Mapping[str, Any]
    unread: tuple[str, ...]
    unchecked: tuple[str, ...]

    @property
    def accelerators(self) -> int | None:
        """How many devices serve the model; None where it is not told."""
        count = self.config.get("hardware.count")
        return count if isinstance(count, int) else None

    @property
    def study(self) -> Study:
        """Which kind of results the server gives; kinds are never in one table."""
        if self.config.get("outputs_valid") is False or self.requested_length is not None:
            return "synthetic acceptance"
        drafts = ("speculative.method", "speculative_config.method")
        is_speculative = any(self.config.get(name) for name in drafts)
        return "speculative" if is_speculative else "non-speculative"

    @property
    def requested_length(self) -> float | None:
        """Tokens a round that synthetic acceptance is to give."""
        for prefix in ("speculative", "speculative_config"):
            rates = self.config.get(f"{prefix}.synthetic_acceptance_rates")
            if rates:
                return 1 + float(sum(rates))
            length = self.config.get(f"{prefix}.synthetic_acceptance_length")
            if length is not None:
                return float(length)
        return None


async def read_facts(client: Client) -> ServerFacts:
    """Asks the server. Raises HttpError when it does not answer or serves no model."""
    models = await fetch_json(client.target, "/v1/models", headers=client.headers)
    cards = (models or {}).get("data")
    cards = cards if isinstance(cards, list) else []
    names = [card["id"] for card in cards if isinstance(card, Mapping) and "id" in card]
    if not names:
        raise HttpError(f"{client.target.authority} serves no model: /v1/models lists none.")
    if client.model is not None and client.model not in names:
        raise HttpError(
            f"{client.target.authority} does not serve {client.model!r}; it serves "
            f"{', '.join(map(repr, names))}."
        )
    model = client.model or names[0]
    found = await fetch_json(client.target, "/config/fingerprint", headers=client.headers)
    if found is not None and isinstance(found.get("config"), Mapping):
        return _ours(model, found)
    path = "/server_info?config_format=json"
    info = await fetch_json(client.target, path, headers=client.headers)
    if info is not None and isinstance(info.get("vllm_config"), Mapping):
        return _vllm(model, info)
    return await _outside(client, model)


async def read_metrics(client: Client) -> dict[Any, float]:
    """The server's counters; none where it has no /metrics."""
    found = await exchange(client.target, "GET", "/metrics", headers=client.headers, timeout_s=30)
    if found.status != 200:
        return {}
    return read_counters(found.body.decode(errors="replace"))


def _ours(model: str, found: Mapping[str, Any]) -> ServerFacts:
    config = dict(flatten(found["config"]))
    hardware = found.get("hardware") or {}
    config |= dict(flatten(hardware, "hardware."))
    return ServerFacts(
        kind="kdecode",
        model=model,
        config=config,
        recorded={"digest": found.get("digest")},
        unread=() if hardware else ("hardware model and count",),
        unchecked=("clocks", "temperature", "other processes of the machine"),
    )


def _vllm(model: str, info: Mapping[str, Any]) -> ServerFacts:
    """A vLLM started with VLLM_SERVER_DEV_MODE=1, which tells everything that it resolved."""
    flat = dict(flatten(info["vllm_config"]))
    recorded = {name: value for name, value in flat.items() if _RECORDED.search(name)}
    config = {name: value for name, value in flat.items() if name not in recorded}
    backend = config.pop(f"additional_config.{COMPARED_SETTING}", "auto")
    system = {
        name: value
        for name, value in (info.get("system_env") or {}).items()
        if value not in _NOTHING
    }
    cpu = _cpu(str(system.get("cpu_info", "")))
    parallel = [flat.get(f"parallel_config.{n}") for n in ("world_size", "data_parallel_size")]
    count = 1
    for size in parallel:
        count *= size if isinstance(size, int) else 1
    is_cpu = flat.get("device_config.device") == "cpu"
    # A ROCm build names no device but its runtime.
    names = [system.get(key) for key in ("nvidia_gpu_models", "intel_gpu_models")]
    hip = system.get("hip_runtime_version")
    name = next(filter(None, names), None if hip is None else f"HIP runtime {hip}")
    hardware = {
        "hardware.name": cpu if is_cpu else name,
        "hardware.count": None if parallel[0] is None else count,
        "hardware.cpu": cpu,
        "versions.torch": system.get("torch_version"),
        "versions.driver": system.get("nvidia_driver_version"),
        "versions.vllm": system.get("vllm_version"),
    }
    environment = {
        f"env.{name}": value
        for name, value in (info.get("vllm_env") or {}).items()
        if not _RECORDED.search(name.lower())
    }
    return ServerFacts(
        kind="vllm",
        model=model,
        config={COMPARED_SETTING: backend, **config, **hardware, **environment},
        recorded=recorded,
        unread=() if parallel[0] is not None else ("hardware model and count",),
        unchecked=("weights digest (the model's name and revision are compared)", "clocks"),
    )


def _cpu(lscpu: str) -> str | None:
    """Which processor, and how many."""
    pairs = dict(line.split(":", 1) for line in lscpu.splitlines() if ":" in line)
    told = [f"{name} {pairs[name].strip()}" for name in _CPU_LINES if name in pairs]
    return ", ".join(told) or None


async def _outside(client: Client, model: str) -> ServerFacts:
    """Any other server: its version and the labels of its cache, which decide nothing."""
    version = await fetch_json(client.target, "/version", headers=client.headers)
    config: dict[str, Any] = {"model": model, "version": (version or {}).get("version")}
    kind: Literal["vllm", "other"] = "other"
    for name, labels in await read_metrics(client):
        if name.startswith("vllm:"):
            kind = "vllm"
        if name == "vllm:cache_config_info":
            config |= {f"cache.{key}": value for key, value in labels if "num_gpu" not in key}
    return ServerFacts(
        kind=kind,
        model=model,
        config=config,
        recorded={},
        unread=CANNOT_SEE,
        unchecked=("weights digest", "template digest", "clocks"),
    )
