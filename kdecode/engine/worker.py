"""One rank: from a checkpoint directory to an object that executes scheduled steps.

Owns the order of building (reader, packed weights, caches, runner), the choice of tokens after a
step, and what was resolved on the way. Does not know requests' life cycles or text. Rounding points
are those of the backends.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdecode.cache.budget import page_bytes, pages_for, size_from_budget, slot_bytes
from kdecode.cache.caches import Caches
from kdecode.config import ConfigError, EngineConfig, ModelConfig
from kdecode.decode.runner import StepRunner, callers_threads, resolve
from kdecode.engine.loop import StepResult
from kdecode.engine.preflight import check_deployment
from kdecode.engine.request import Request, TokenLogprobs
from kdecode.engine.sampling import BadLogits, Draw, sample, token_logprobs
from kdecode.engine.scheduler import ScheduledStep
from kdecode.model.layout import PackedMla, PackedModel, TrunkFormat, pack_model, tile_format
from kdecode.model.weights import CheckpointReader

Progress = Callable[[str, int, int], None]


def no_progress(label: str, done: int, total: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class BuildTimes:
    """Seconds: opening and checking the checkpoint; packing all weights; preparing the plans."""

    open_s: float
    pack_s: float
    prepare_s: float


class Worker:
    """Executes steps on one rank's weights and caches.

    Raises ConfigError for settings that the model cannot have, CheckpointError for files that are
    not a checkpoint, BackendRefusedError for a backend that the deployment cannot run.
    """

    def __init__(
        self, directory: Path, engine: EngineConfig, progress: Progress = no_progress
    ) -> None:
        begin = time.perf_counter()
        reader = CheckpointReader(directory)
        self.config = reader.config
        self.engine = engine = resolve(engine)
        self.weights_digest = weights_digest(directory)
        check_deployment(reader, engine)
        opened = time.perf_counter()
        self.packed = pack_model(
            reader,
            trunk_format(engine),
            lambda done, total: progress("packing", done, total),
            engine.device,
            engine.isa,
        )
        packed = time.perf_counter()
        self.caches = allocate_caches(self.packed, engine)
        self.runner = StepRunner(self.packed, self.caches, engine)
        self.build_times = BuildTimes(opened - begin, packed - opened, time.perf_counter() - packed)

    @callers_threads()
    def execute(self, step: ScheduledStep) -> StepResult:
        """Runs a step and chooses the tokens of the requests that get one."""
        logits = self.runner.run(step.batch)
        rows = step.choice_rows
        told = prompt_logprobs(logits, step)
        if len(rows) < logits.shape[0]:
            logits = logits[list(rows)]
        return StepResult(choose(logits, step.chooses), logits, self.runner.last_path, told)


def prompt_logprobs(
    logits: Tensor, step: ScheduledStep
) -> list[tuple[Request, list[TokenLogprobs]]]:
    """What the model gave to the tokens of prompts, for requests that ask for it, as far as known.

    The row of a prompt's token tells the token after it. Rows that were told before a preemption
    are not told again.
    """
    told = []
    first = 0
    for share, scheduled in zip(step.shares, step.batch.requests, strict=True):
        request, num_top = share.request, share.request.params.prompt_logprobs
        if scheduled.all_logits and num_top is not None:
            begin = 1 + len(request.prompt_logprobs)
            end = min(scheduled.start + 1 + share.num_tokens, len(request.prompt_ids))
            rows = [
                token_logprobs(
                    logits[first + at - scheduled.start - 1], request.prompt_ids[at], num_top
                )
                for at in range(max(begin, scheduled.start + 1), end)
            ]
            told.append((request, rows))
        first += scheduled.num_logits
    return told


def choose(logits: Tensor, requests: tuple[Request, ...]) -> list[int | BadLogits]:
    """Each request's next token: sampled, or the next one of the reply that it follows."""
    draws = [
        Draw(
            params=request.params,
            seed=request.seed,
            position=request.num_tokens,
            banned_ids=_banned(request),
            controls=request.controls,
        )
        for request in requests
    ]
    tokens = sample(logits, draws)
    for row, request in enumerate(requests):
        if request.forced_ids is not None and not isinstance(tokens[row], BadLogits):
            tokens[row] = request.forced_ids[len(request.output_ids)]
    return tokens


def _banned(request: Request) -> tuple[int, ...]:
    if len(request.output_ids) >= request.params.min_tokens:
        return ()
    return tuple(sorted(request.end_token_ids))


def trunk_format(engine: EngineConfig) -> TrunkFormat:
    """How matrices outside the experts are packed: as the backend's decode steps read them.

    engine: a resolved configuration.
    """
    if engine.decode_backend != "latency_specialized":
        return "rows"
    assert engine.isa is not None, "a resolved configuration has one"
    return tile_format(engine.isa, engine.lossless_packing)


def allocate_caches(packed: PackedModel, engine: EngineConfig) -> Caches:
    """Slots and pages for the budget; by default enough for every request at full length."""
    config = packed.config
    budget = engine.cache_budget_bytes
    if budget is None:
        page = page_bytes(config, engine.page_tokens, engine.cache_dtype)
        pages = pages_for(engine.max_context_tokens, engine.page_tokens)
        budget = engine.max_requests * (slot_bytes(config) + pages * page)
    size = size_from_budget(
        config,
        budget,
        engine.max_requests,
        engine.max_context_tokens,
        engine.page_tokens,
        engine.cache_dtype,
    )
    try:
        return Caches.allocate(
            config,
            engine.device,
            size.num_slots,
            size.num_pages,
            engine.page_tokens,
            cache_dtype=engine.cache_dtype,
            scales=cache_scales(packed, engine),
        )
    except RuntimeError as error:
        # torch's way to say that there is not enough memory, on any device.
        raise ConfigError(
            f"Caches of {size.num_slots} slots and {size.num_pages:,} pages of "
            f"{engine.page_tokens:,} tokens, {budget:,} bytes, cannot be allocated: "
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


def weights_digest(directory: Path) -> str:
    """Names a checkpoint without reading its weights: its JSON files, the sizes of the others."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix == ".json":
            digest.update(f"{path.name}\n".encode() + path.read_bytes())
        elif path.suffix in (".safetensors", ".model"):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def packed_bytes(packed: PackedModel) -> int:
    """Memory of all packed tensors, each counted once."""
    seen: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, tuple):
            for item in value:
                visit(item)
        elif hasattr(value, "__dataclass_fields__") and not isinstance(value, ModelConfig):
            for name in value.__dataclass_fields__:
                visit(getattr(value, name))

    visit(packed)
    return sum(seen.values())


def torch_version() -> str:
    return torch.__version__
