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

from torch import Tensor

from kdecode.cache.budget import engine_cache_size
from kdecode.cache.caches import Caches
from kdecode.config import ConfigError, EngineConfig, ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.decode.runner import StepRunner, callers_threads, resolve
from kdecode.engine.draft import DraftWeights, pack_weights
from kdecode.engine.judge import choose
from kdecode.engine.loop import StepResult
from kdecode.engine.preflight import check_deployment
from kdecode.engine.request import Request, TokenLogprobs
from kdecode.engine.sampling import token_logprobs
from kdecode.engine.scheduler import ScheduledStep
from kdecode.engine.speculation import Speculation, draft_config, verify_rows
from kdecode.model.draft_weights import load_draft
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
        self.draft = draft_config(engine, self.config)
        opened = time.perf_counter()
        self.packed = pack_model(
            reader,
            trunk_format(engine),
            lambda done, total: progress("packing", done, total),
            engine.device,
            engine.isa,
        )
        self.packed_draft: DraftWeights | None = None
        if self.draft is not None and engine.speculative is not None:
            loaded = load_draft(engine.speculative.model, self.draft)
            self.packed_draft = pack_weights(loaded, self.draft, engine, self.config)
        packed = time.perf_counter()
        self.caches = allocate_caches(self.packed, engine, self.draft)
        self.runner = StepRunner(self.packed, self.caches, engine, self.draft, verify_rows(engine))
        self.speculation: Speculation | None = None
        if self.draft is not None and self.packed_draft is not None:
            self.speculation = Speculation.of(
                engine, self.draft, self.packed_draft, self.packed, self.runner, self.caches
            )
        self.build_times = BuildTimes(opened - begin, packed - opened, time.perf_counter() - packed)

    def cache_identity(self) -> dict[str, Any]:
        """What decides the contents of the caches, beside the caches' own settings."""
        return {
            "weights_digest": self.weights_digest,
            "decode_backend": self.engine.decode_backend,
            "isa": self.engine.isa,
            "trunk_format": self.engine.trunk_format,
            # Its rows are on the target's pages.
            "speculative": self.resolved_speculation(),
        }

    def resolved_speculation(self) -> dict[str, Any] | None:
        """Everything that was decided about drafts."""
        speculative = self.engine.speculative
        if speculative is None or self.draft is None:
            return None
        return {
            "method": speculative.method,
            "weights_digest": weights_digest(Path(speculative.model)),
            "num_speculative_tokens": speculative.num_speculative_tokens,
            "draft_sample_method": speculative.draft_sample_method,
            "rejection_sample_method": speculative.rejection_sample_method,
            "synthetic_acceptance_rates": (
                list(speculative.acceptance_rates()) if speculative.is_synthetic else None
            ),
            "enable_adaptive_verification": speculative.enable_adaptive_verification,
            "taps": list(self.draft.taps),
            "tap_stream": self.draft.tap_stream,
        }

    @callers_threads()
    def execute(self, step: ScheduledStep) -> StepResult:
        """Runs a step and chooses the tokens of the requests that get one."""
        if self.speculation is not None and any(share.num_drafts for share in step.shares):
            return StepResult(self.speculation.round(step), self.runner.last_path)
        logits = self.runner.run(step.batch)
        if self.speculation is not None:
            self.speculation.observe(step)
        rows = step.choice_rows
        told = prompt_logprobs(logits, step)
        if len(rows) < logits.shape[0]:
            logits = logits[list(rows)]
        return StepResult(choose(logits, step.chooses), self.runner.last_path, told)


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
    packed: PackedModel, engine: EngineConfig, draft: DraftConfig | None = None
) -> Caches:
    """Slots and pages for the budget. Raises ConfigError where there is no such memory."""
    config = packed.config
    size = engine_cache_size(config, engine, draft)
    try:
        return Caches.allocate(
            config,
            engine.device,
            size.num_slots,
            size.num_pages,
            engine.page_tokens,
            cache_dtype=engine.cache_dtype,
            scales=cache_scales(packed, engine),
            draft=draft,
        )
    except RuntimeError as error:
        # torch's way to say that there is not enough memory, on any device.
        raise ConfigError(
            f"The caches cannot be allocated (KDA slots: {size.num_slots:,}, pages of "
            f"{engine.page_tokens:,} tokens: {size.num_pages:,}, bytes: {size.num_bytes:,}): "
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
    # Nothing else is read, and a pipe could be waited for without end.
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        if path.suffix == ".json":
            digest.update(f"{path.name}\n".encode() + path.read_bytes())
        elif path.suffix in (".safetensors", ".model"):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def packed_bytes(packed: PackedModel | DraftWeights | None) -> int:
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
