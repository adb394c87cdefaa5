"""Runs one rank's steps: the prepared plan where it serves the step, else the standard forward.

Owns the choice, made from the requests' state and equal on every rank, and the count of every
decode step by path and reason. Does not know requests' life cycles, sampling or scheduling.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from kdecode.cache.batch import StepBatch
from kdecode.cache.caches import Caches
from kdecode.config import ConfigError, EngineConfig, Isa, ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.decode import auto, latency_specialized
from kdecode.decode.latency_specialized import ROW_BUCKETS, Deployment
from kdecode.decode.plan import DecodePlan
from kdecode.decode.step_check import StepError, check_step
from kdecode.decode.taps import Taps
from kdecode.kernels.common import native
from kdecode.model.layout import PackedModel

log = logging.getLogger(__name__)

SPECIALIZED, STANDARD = "specialized", "standard"


def decline_reason(batch: StepBatch, buckets: tuple[int, ...] = ROW_BUCKETS) -> str | None:
    """Why the prepared plans do not serve this step; None when one does.

    Looks at each request's state, never at token counts alone: a prompt of one token is a prefill.
    """
    decoding = [request.is_decode for request in batch.requests]
    if not any(decoding):
        return "prefill"
    if not all(decoding):
        return "mixed prefill and decode"
    if any(len(request.token_ids) != 1 for request in batch.requests):
        return "more than one token a request"
    if not all(request.needs_logits for request in batch.requests):
        return "a decode row without logits"
    if len(batch.requests) not in buckets:
        return f"rows above {buckets[-1]}"
    return None


@dataclass
class StepStats:
    """Counts of steps. Decode steps are those with at least one request past its prompt."""

    decode_steps: Counter[tuple[str, str]] = field(default_factory=Counter)
    prefill_steps: int = 0

    @property
    def coverage(self) -> float | None:
        """Specialised steps / decode steps; None before the first decode step."""
        total = sum(self.decode_steps.values())
        if total == 0:
            return None
        served = sum(n for (path, _), n in self.decode_steps.items() if path == SPECIALIZED)
        return served / total

    def snapshot(self) -> Mapping[tuple[str, str], int]:
        return dict(self.decode_steps)


class StepRunner:
    """One rank's forward: `run` gives the logits of a step and moves the caches.

    `run` leaves torch with the thread count of the path that served the step: what works on the
    logits next should not wake threads that the native pool would have to share the cores with.
    `callers_threads` around both gives it back.
    engine: as `resolve` returns it. Raises BackendRefusedError at construction when latency_specialized is asked for by name on a
    deployment that cannot run it. draft: whose taps are taken in every step that is counted.
    """

    def __init__(
        self,
        packed: PackedModel,
        caches: Caches,
        engine: EngineConfig,
        draft: DraftConfig | None = None,
    ) -> None:
        self.config = packed.config
        self.engine = engine
        self.stats = StepStats()
        self.last_path: tuple[str, str] = (STANDARD, "")
        self._num_threads = engine.resolved_threads()
        self._standard = auto.build_auto_plan(packed, caches, engine)
        self._plans: dict[int, DecodePlan] = {}
        self._logged: set[str] = set()
        # Of the last step: what the draft reads of each of its rows, [R, taps, M].
        self.last_taps: torch.Tensor | None = None
        if engine.decode_backend == "latency_specialized":
            deployment = deployment_of(packed.config, engine)
            for rows in ROW_BUCKETS:
                self._plans[rows] = latency_specialized.build(deployment, packed, caches, rows)
        plans = (self._standard, *self._plans.values())
        self._taps = {} if draft is None else {id(plan): Taps.of(plan, draft) for plan in plans}

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Logits [requests that need them, vocab] fp32, in request order."""
        reason = decline_reason(batch) if self._plans else "decode_backend is auto"
        is_decode_step = any(request.is_decode for request in batch.requests)
        path = STANDARD if reason is not None else SPECIALIZED
        if path == SPECIALIZED:
            logits = self._run_plan(self._plans[batch.num_rows], batch)
        else:
            logits = self._run_standard(batch)
        self.last_path = (path, reason or "")
        if is_decode_step:
            self.stats.decode_steps[self.last_path] += 1
            self._log_fallback(reason)
        else:
            self.stats.prefill_steps += 1
        return logits

    def plan(self, rows: int) -> DecodePlan:
        """The plan that serves a decode step of so many rows."""
        return self._plans.get(rows, self._standard)

    def _run_standard(self, batch: StepBatch) -> torch.Tensor:
        torch.set_num_threads(self._num_threads)
        auto.load_step(self._standard, batch)
        with torch.no_grad():
            self._launch(self._standard)
        return self._standard.buffers["logits"]

    def _run_plan(self, plan: DecodePlan, batch: StepBatch) -> torch.Tensor:
        load_inputs(plan, batch)
        # The native pool owns the cores meanwhile; torch's own threads would only fight it.
        torch.set_num_threads(1)
        self._launch(plan)
        return plan.buffers["logits"].clone()

    def _launch(self, plan: DecodePlan) -> None:
        if self._taps:
            self.last_taps = self._taps[id(plan)].run(plan)
        else:
            plan.run()

    def _log_fallback(self, reason: str | None) -> None:
        if reason is None or not self._plans or reason in self._logged:
            return
        self._logged.add(reason)
        log.info("decode steps run on the standard path: %s (logged once)", reason)


@contextmanager
def callers_threads() -> Iterator[None]:
    """Gives torch's thread count back to the caller, whatever runs set it to inside the block.

    A step sets the count that its path needs; setting and restoring it takes 0.2 us.
    """
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def resolve(engine: EngineConfig) -> EngineConfig:
    """The configuration with the instruction set that this processor and build have, unless set.

    The one place that chooses it: weights are packed for it, and both paths multiply with it.
    """
    if engine.isa is not None:
        return engine
    return replace(engine, isa=cast(Isa, native.detect_isa()))


def check_processor(engine: EngineConfig) -> None:
    """Raises ConfigError for threads or an instruction set that this process cannot have."""
    cores = len(os.sched_getaffinity(0))
    if engine.resolved_threads() > cores:
        raise ConfigError(
            f"num_threads is {engine.num_threads}; this process may use {cores} cores, so it must "
            f"be from 1 to {cores}."
        )
    supported = native.supported_isas()
    if engine.isa is not None and engine.isa not in supported:
        raise ConfigError(
            f"isa is {engine.isa!r}; this processor and build have {', '.join(supported)}."
        )


def deployment_of(config: ModelConfig, engine: EngineConfig) -> Deployment:
    """The native deployment that a resolved configuration asks for."""
    if engine.isa is None:
        raise ValueError("The configuration has no instruction set yet; `resolve` decides it.")
    return Deployment(
        config=config,
        device=engine.device,
        isa=engine.isa,
        pool=native.Pool(engine.resolved_threads()),
        cache_dtype=engine.cache_dtype,
        page_tokens=engine.page_tokens,
        max_context_tokens=engine.max_context_tokens,
    )


def load_inputs(plan: DecodePlan, batch: StepBatch) -> None:
    """Writes a step's metadata into a static plan's input buffers; nothing of the last step stays.

    Raises StepError, with nothing written, for a batch that names what does not exist or does not
    have one token in each of the plan's rows.
    """
    buffers, requests = plan.buffers, batch.requests
    check_step(batch, buffers.limits)
    if not len(requests) == batch.num_rows == plan.rows:
        raise StepError(
            f"The step has {batch.num_rows} rows of {len(requests)} requests; this plan takes "
            f"{plan.rows} requests of one row."
        )
    # numpy, because torch takes several microseconds an assignment.
    pages, page_tokens = buffers["row_pages"].numpy(), buffers.limits.page_tokens
    pages.fill(-1)
    for row, request in enumerate(requests):
        used = request.pages[: request.start // page_tokens + 1]
        pages[row, : len(used)] = used
    buffers["row_token"].numpy()[:] = [request.token_ids[0] for request in requests]
    buffers["row_slot"].numpy()[:] = [request.slot for request in requests]
    buffers["row_position"].numpy()[:] = [request.start for request in requests]
