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
from kdecode.cache.budget import context_of, pages_for
from kdecode.cache.caches import Caches
from kdecode.cache.open_rows import OpenSpan
from kdecode.config import CompileForm, ConfigError, EngineConfig, Isa, ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.decode import auto, latency_specialized
from kdecode.decode.compiled import CompiledStep, compile_step
from kdecode.decode.device import device_arch, on_device
from kdecode.decode.graph import GraphPool, capture
from kdecode.decode.latency_specialized import Deployment
from kdecode.decode.plan import DecodePlan
from kdecode.decode.rank_link import RankLink
from kdecode.decode.served_steps import decline_reason, plan_sizes, row_buckets
from kdecode.decode.standard_graph import record, takes, waiting_ops
from kdecode.decode.step_check import StepError, check_step
from kdecode.decode.taps import Taps
from kdecode.kernels.common import native
from kdecode.kernels.contract import PlanMemory
from kdecode.model.layout import PackedModel
from kdecode.parallel.context import WHOLE
from kdecode.parallel.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

SPECIALIZED, STANDARD = "specialized", "standard"
_INPUTS = ("row_token", "row_slot", "row_position", "row_pages")


@dataclass
class StepStats:
    """Counts of steps. Decode steps are those with at least one request past its prompt.

    recorded_steps: those of the standard path that were a replay of CUDA graphs.
    compiled_steps: those of it that ran compiled.
    """

    decode_steps: Counter[tuple[str, str]] = field(default_factory=Counter)
    prefill_steps: int = 0
    recorded_steps: int = 0
    compiled_steps: int = 0

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
    engine: as `resolve` returns it. Raises BackendRefusedError at construction when
    latency_specialized is asked for by name on a deployment that cannot run it. draft: whose taps
    are taken in every step that is counted.
    verify_rows: rows of one request (its anchor and drafts) of the verify steps that get plans.
    link: to the other ranks, of which ``packed`` is one's share; None for a rank that is alone.
    """

    def __init__(
        self,
        packed: PackedModel,
        caches: Caches,
        engine: EngineConfig,
        draft: DraftConfig | None = None,
        verify_rows: tuple[int, ...] = (),
        link: RankLink | None = None,
    ) -> None:
        self.config = packed.config
        self._packed, self._caches = packed, caches
        self.engine = engine
        self.stats = StepStats()
        self.last_path: tuple[str, str] = (STANDARD, "")
        self._num_threads = engine.resolved_threads()
        self._link = link
        ranks, exchange = (ALONE, None) if link is None else (link.ranks, link.exchange)
        self._standard = auto.build_auto_plan(packed, caches, engine, ranks, exchange)
        # By rows and rows of one request.
        self._plans: dict[tuple[int, int], DecodePlan] = {}
        self._buckets = row_buckets(engine)
        self._verify_rows = verify_rows
        self._logged: set[str] = set()
        self._pools: list[GraphPool] = []
        # Of the specialised plans; None where there are none.
        self.deployment: Deployment | None = None
        self._last_plan = self._standard
        # Of the last step: what the draft reads of each of its rows, [R, taps, M].
        self.last_taps: torch.Tensor | None = None
        if engine.decode_backend == "latency_specialized":
            self.deployment = deployment_of(packed.config, engine, ranks)
            if link is not None:
                self.deployment = replace(self.deployment, shared=link.shared)
            with on_device(engine.device):
                self._plans = self._build_plans(self.deployment, draft)
        # Of the standard path, what `compile_decode` made, by rows.
        self._compiled: dict[int, CompiledStep] = {}
        # The standard plan's graphs, by rows.
        self._recorded: dict[int, DecodePlan] = {}
        if engine.decode_backend == "auto" and engine.device != "cpu":
            with on_device(engine.device):
                self._recorded = self._record_standard(draft)
        plans = (self._standard, *self._plans.values(), *self._recorded.values())
        self._taps = {} if draft is None else {id(plan): Taps.of(plan, draft) for plan in plans}

    def _build_plans(
        self, deployment: Deployment, draft: DraftConfig | None
    ) -> dict[tuple[int, int], DecodePlan]:
        """Every prepared plan; on CUDA with its graphs, for which the caches have to be free."""
        memory, plans = PlanMemory(deployment.place), {}
        # Most rows first: the others use the beginning of its memory.
        sizes = plan_sizes(self._buckets, self._verify_rows, self.engine.max_requests)
        for size in sorted(sizes, reverse=True):
            plans[size] = latency_specialized.build(
                deployment, self._packed, self._caches, *size, memory
            )
        if not deployment.is_cuda:
            return plans
        pool = self._new_pool()
        for size, plan in plans.items():
            ranges = () if draft is None else Taps.of(plan, draft).ranges(plan)
            plans[size] = capture(plan, pool, ranges)
        return plans

    def _record_standard(self, draft: DraftConfig | None) -> dict[int, DecodePlan]:
        """Graphs of the standard plan, where nothing of it waits; the caches have to be free."""
        plan = self._standard
        waiting = waiting_ops(plan)
        if not self._all_ranks(not waiting):
            what = f"{', '.join(waiting) or 'another rank'} cannot be recorded"
            log.info("standard steps are launched one by one and not as CUDA graphs: %s", what)
            return {}
        whole = [(0, len(plan.steps))]
        ranges = whole if draft is None else Taps.of(plan, draft).ranges(plan)
        pages = pages_for(self.engine.max_context_tokens, self._caches.page_tokens)
        pool = self._new_pool()
        sizes = sorted(self._buckets, reverse=True)
        return {rows: record(plan, rows, pages, pool, ranges) for rows in sizes}

    def _all_ranks(self, says: bool) -> bool:
        """Whether every rank says so; each asks once, at the same place."""
        if self._link is None:
            return says
        own = torch.tensor([[int(says)]], device=self.engine.device)
        return bool(self._link.exchange.gather(own).all())

    def _new_pool(self) -> GraphPool:
        self._pools.append(GraphPool())
        return self._pools[-1]

    def close(self) -> None:
        """Ends the graphs. Connections between ranks that graphs have exchanges of cannot end
        before them (`parallel/nccl.py`)."""
        with on_device(self.engine.device):
            for pool in self._pools:
                pool.close()
        self._pools.clear()

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Logits [requests that need them, vocab] fp32, in request order."""
        if self._link is not None:
            return self._run_linked(self._link, batch)
        with on_device(self.engine.device):
            return self._run(batch)

    def _run_linked(self, link: RankLink, batch: StepBatch) -> torch.Tensor:
        # What is wrong with a step has to be found before another rank begins it.
        check_step(batch, self._standard.buffers.limits)
        self._caches.open_rows.require_none()
        with link.around_step(batch) as compare, on_device(self.engine.device):
            logits = self._run(batch)
            compare(self._last_plan.buffers["prefix"])
        return logits

    def _run(self, batch: StepBatch) -> torch.Tensor:
        reason: str | None = "decode_backend is auto"
        if self._plans:
            most = self.engine.max_requests
            reason = decline_reason(batch, self._buckets, self._verify_rows, most)
        is_decode_step = any(request.is_decode for request in batch.requests)
        path = STANDARD if reason is not None else SPECIALIZED
        if path == SPECIALIZED:
            size = batch.num_rows, len(batch.requests[0].token_ids)
            logits = self._run_plan(self._plans[size], batch)
        elif batch.num_rows in self._recorded and takes(batch):
            logits = self._run_plan(self._recorded[batch.num_rows], batch)
            self.stats.recorded_steps += 1
        elif batch.num_rows in self._compiled and takes(batch):
            torch.set_num_threads(self._num_threads)
            logits = self._compiled[batch.num_rows].run(batch)
            self.stats.compiled_steps += 1
        else:
            torch.set_num_threads(self._num_threads)
            logits = auto.run_standard(self._standard, batch, self._launch)
        self.last_path = (path, reason or "")
        if is_decode_step:
            self.stats.decode_steps[self.last_path] += 1
            self._log_fallback(reason)
        else:
            self.stats.prefill_steps += 1
        return logits

    def compile_decode(self, rows: int, form: CompileForm) -> float:
        """From now on, standard steps of so many single rows run compiled.

        Returns the seconds that it took. The caches have to be free. Raises CompileError.
        """
        with callers_threads():
            torch.set_num_threads(self._num_threads)
            step = compile_step(self._packed, self._caches, self.engine, rows, form)
        self._compiled[rows] = step
        return step.seconds

    def plan(self, rows: int, rows_per_request: int = 1) -> DecodePlan:
        """The plan that serves a decode or verify step of so many rows."""
        return self._plans.get((rows, rows_per_request), self._standard)

    def verify_plan(self, requests: int, rows_per_request: int) -> DecodePlan:
        """The plan of a verify step of any size that one is made for, prepared or not."""
        size = requests * rows_per_request, rows_per_request
        if size in self._plans or self.deployment is None:
            return self.plan(*size)
        if size not in plan_sizes(self._buckets, (rows_per_request,), requests):
            return self._standard
        return latency_specialized.build(self.deployment, self._packed, self._caches, *size)

    def _run_plan(self, plan: DecodePlan, batch: StepBatch) -> torch.Tensor:
        load_inputs(plan, batch)
        if self.engine.device == "cpu":
            # The native pool owns the cores meanwhile; torch's own threads would only fight it.
            torch.set_num_threads(1)
        self._launch(plan)
        return plan.buffers["logits"].clone()

    def _launch(self, plan: DecodePlan) -> None:
        self._last_plan = plan
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


def deployment_of(
    config: ModelConfig, engine: EngineConfig, ranks: Ranks = ALONE, *, runs: bool = True
) -> Deployment:
    """The deployment that a resolved configuration asks for; native threads where it runs.

    config: of several ranks, the share of one.
    """
    if engine.isa is None:
        raise ValueError("The configuration has no instruction set yet; `resolve` decides it.")
    has_threads = runs and engine.device == "cpu"
    return Deployment(
        config=config,
        device=engine.device,
        isa=engine.isa,
        threads=native.Pool(engine.resolved_threads()) if has_threads else None,
        cache_dtype=engine.cache_dtype,
        page_tokens=engine.page_positions,
        max_context_tokens=engine.max_context_tokens,
        arch=device_arch(engine.device),
        ranks=ranks,
        context=WHOLE if ranks.is_alone else context_of(engine, ranks),
        gpu_exchange=engine.gpu_exchange,
        gpu_kernels=engine.gpu_kernels,
        shared_experts=engine.shared_experts,
        weight_prefetch=engine.weight_prefetch,
        expert_products=engine.expert_products,
    )


def load_inputs(plan: DecodePlan, batch: StepBatch) -> None:
    """Writes a step's metadata into a static plan's input buffers; nothing of the last step stays.

    The rows of a verify step are open from here on, for `Caches.commit` after the run. Raises
    StepError, with nothing written, for a batch that names what does not exist or that is not one
    of the plan's rows.
    """
    buffers, requests, each = plan.buffers, batch.requests, plan.rows_per_request
    check_step(batch, buffers.limits)
    if plan.rows != each * len(requests) or any(len(r.token_ids) != each for r in requests):
        raise StepError(
            f"The step has {batch.num_rows} rows of {len(requests)} requests; this plan takes "
            f"{plan.rows} rows, {each} a request."
        )
    if any(request.is_verify != (each > 1) for request in requests):
        raise StepError(
            f"A plan of {each} rows a request {'verifies' if each > 1 else 'does not verify'}; a "
            "request of the step says otherwise."
        )
    open_rows = buffers.caches.open_rows
    open_rows.require_none()
    # numpy, because torch takes several microseconds an assignment.
    staging = buffers.staging
    arrays = {n: buffers[n].numpy() for n in _INPUTS} if staging is None else staging.arrays()
    pages, page_tokens = arrays["row_pages"], buffers.limits.page_tokens
    pages.fill(-1)
    for row in range(batch.num_rows):
        request = requests[row // each]
        used = request.pages[: (request.start + row % each) // page_tokens + 1]
        pages[row, : len(used)] = used
    rows = [(request, place) for request in requests for place in range(each)]
    arrays["row_token"][:] = [request.token_ids[place] for request, place in rows]
    arrays["row_slot"][:] = [request.slot for request, _ in rows]
    arrays["row_position"][:] = [request.start + place for request, place in rows]
    if staging is not None:
        staging.send()
    if plan.commit is not None:
        spans = [
            OpenSpan(request.slot, request.start, number * each, each)
            for number, request in enumerate(requests)
        ]
        open_rows.open(spans, plan.commit)
