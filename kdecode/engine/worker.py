"""From a checkpoint directory to an object that executes scheduled steps, on one rank or several.

Owns the order of building (reader, packed weights, caches, runner), the choice of tokens after a
step, and what was resolved on the way. Does not know requests' life cycles or text. Rounding points
are those of the backends.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kdecode.cache.mirror import tell_nobody
from kdecode.config import EngineConfig, ModelConfig
from kdecode.decode.runner import StepRunner, callers_threads, resolve
from kdecode.engine.draft import DraftWeights, pack_weights
from kdecode.engine.judge import choose
from kdecode.engine.loop import StepResult
from kdecode.engine.preflight import check_deployment, warn_of_copies
from kdecode.engine.rank import allocate_caches, trunk_format
from kdecode.engine.request import Request, TokenLogprobs
from kdecode.engine.sampling import token_logprobs
from kdecode.engine.scheduler import ScheduledStep
from kdecode.engine.speculation import Speculation, draft_config, verify_rows
from kdecode.model.draft_weights import load_draft
from kdecode.model.layout import PackedModel, pack_matrix, pack_model, to_device
from kdecode.model.weights import CheckpointReader
from kdecode.parallel.ranks import ALONE

if TYPE_CHECKING:
    from kdecode.engine.leader import Leader

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
    """Executes steps on the weights and caches of the rank that decides, and of those it leads.

    Raises ConfigError for settings that the model cannot have, CheckpointError for files that are
    not a checkpoint, BackendRefusedError for a backend that the deployment cannot run.
    """

    def __init__(
        self, directory: Path, engine: EngineConfig, progress: Progress = no_progress
    ) -> None:
        begin = time.perf_counter()
        whole = reader = CheckpointReader(directory)
        self.config = reader.config
        self.engine = engine = resolve(engine)
        self.weights_digest = weights_digest(directory)
        check_deployment(reader, engine)
        warn_of_copies(engine)
        self.draft = draft_config(engine, self.config)
        # The other ranks of the model; None for one that is alone.
        self.leader: Leader | None = None
        self._end_graphs: Callable[[], None] = lambda: None
        if engine.tensor_parallel_size > 1:
            # Here, because a rank that is alone needs nothing of what processes are made of.
            from kdecode.engine.leader import start_ranks

            self.leader = start_ranks(directory, self.config, engine)
            self.engine = engine = replace(engine, device=self.leader.device)
            reader = CheckpointReader(directory, ranks=self.leader.ranks)
        try:
            self._build(whole, reader, progress, begin)
        except BaseException:
            self.close()
            raise

    def _build(
        self, whole: CheckpointReader, reader: CheckpointReader, progress: Progress, begin: float
    ) -> None:
        """whole: of the tensors of all ranks; reader: of this one's, the same where it is alone."""
        engine, leader = self.engine, self.leader
        opened = time.perf_counter()

        def packing(done: int, total: int) -> None:
            if leader is not None:
                # Packing takes minutes, which are wasted once another rank is lost.
                leader.check()
            progress("packing", done, total)

        self.packed = pack_model(
            reader,
            trunk_format(engine),
            packing,
            engine.device,
            engine.isa,
        )
        self.packed_draft: DraftWeights | None = None
        # What a draft reads of the target: a whole one, of which a rank has a part.
        self.draft_target = self.packed
        if self.draft is not None and engine.speculative is not None:
            loaded = load_draft(engine.speculative.model, self.draft)
            self.packed_draft = pack_weights(loaded, self.draft, engine, self.config)
            if leader is not None:
                self.draft_target = whole_ends(whole, self.packed, self.packed_draft, engine)
        packed = time.perf_counter()
        self.caches = allocate_caches(
            self.packed,
            engine,
            self.draft,
            ranks=ALONE if leader is None else leader.ranks,
            tell=tell_nobody if leader is None else leader.tell,
        )
        self.runner = StepRunner(
            self.packed,
            self.caches,
            engine,
            self.draft,
            verify_rows(engine),
            None if leader is None else leader.link,
        )
        self._end_graphs = self.runner.close
        if leader is not None:
            leader.wait_until_built()
        self.speculation: Speculation | None = None
        if self.draft is not None and self.packed_draft is not None:
            self.speculation = Speculation.of(
                engine, self.draft, self.packed_draft, self.draft_target, self.runner, self.caches
            )
        self.build_times = BuildTimes(opened - begin, packed - opened, time.perf_counter() - packed)

    @property
    def draft_bytes(self) -> int:
        """Memory of the draft's tensors, with what it has of the target in whole copies."""
        every = (self.packed, self.draft_target, self.packed_draft)
        return packed_bytes(every) - packed_bytes(self.packed)

    @property
    def gpu_exchange(self) -> str | None:
        """How the GPUs of several ranks exchange values; None where there are none."""
        return None if self.leader is None else self.leader.gpu_exchange

    def close(self) -> None:
        """Ends the other ranks, if there are any; no step can run after it."""
        if self.leader is not None:
            # First: connections cannot end before graphs that have exchanges of them.
            try:
                self._end_graphs()
            finally:
                self.leader.close()

    def cache_identity(self) -> dict[str, Any]:
        """What decides the contents of the caches, beside the caches' own settings."""
        return {
            "weights_digest": self.weights_digest,
            "decode_backend": self.engine.decode_backend,
            "isa": self.engine.isa,
            "trunk_format": self.engine.trunk_format,
            "gpu_kernels": self.engine.gpu_kernels,
            "shared_experts": self.engine.shared_experts,
            "expert_products": self.engine.expert_products,
            # Sums of parts are rounded otherwise than whole ones.
            "tensor_parallel_size": self.engine.tensor_parallel_size,
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


def whole_ends(
    reader: CheckpointReader, packed: PackedModel, draft: DraftWeights, engine: EngineConfig
) -> PackedModel:
    """A rank's model with whole copies of the embedding and the head, as far as a draft has none of
    its own. reader: of the whole model."""
    if draft.embed is not None and draft.head is not None:
        return packed
    embed, head = packed.embed, packed.head
    if draft.embed is None:
        embed = reader.load_embed().clone().to(engine.device)
    if draft.head is None:
        *_, weight = reader.load_head()
        head = to_device(pack_matrix(weight, trunk_format(engine), engine.isa), engine.device)
    reader.drop_outside()
    return replace(packed, config=reader.config, embed=embed, head=head)


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


def packed_bytes(packed: PackedModel | DraftWeights | tuple[Any, ...] | None) -> int:
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
