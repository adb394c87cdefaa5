"""A decode step of the standard forward through `torch.compile`.

Owns recording such a step of a fixed number of rows as one graph, and how Inductor compiles it.
Steps are those of `auto`, but for the ops that have a form for compilers (`kernels/<op>/
compiled_impl.py`). A comparison's arm, to see what a compiler makes of the same forward: no engine
uses it by itself.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.config import CompileForm, EngineConfig
from kdecode.decode.auto import build_auto_plan, load_step, run_standard
from kdecode.decode.plan import DecodePlan
from kdecode.kernels.common.opaque import OpaqueOperators
from kdecode.model.layout import PackedModel

# Of Inductor.
_OPTIONS: Mapping[CompileForm, dict[str, Any]] = {
    "default": {},
    "freezing": {"freezing": True},
}


class CompileError(RuntimeError):
    """A step that cannot be compiled; the message says why."""


@dataclass(frozen=True)
class CompiledStep:
    """The compiled step of one number of rows. seconds: what recording and compiling it took."""

    plan: DecodePlan
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    seconds: float

    def run(self, batch: StepBatch) -> Tensor:
        """As `auto.run_standard`, for a step that `standard_graph.takes`."""
        return run_standard(self.plan, batch, self._launch)

    def _launch(self, plan: DecodePlan) -> None:
        step = plan.buffers.step
        logits = self.forward(step.token_ids, step.cache_rows, step.single_slots)
        plan.buffers["logits"] = logits


def compile_step(
    packed: PackedModel, caches: Caches, engine: EngineConfig, rows: int, form: CompileForm
) -> CompiledStep:
    """Records and compiles; minutes. torch must have the threads that the step will have.

    Takes slots and pages of ``rows`` requests meanwhile. Raises CompileError.
    """
    import torch._inductor.config as inductor

    reasons = refuse(packed, engine)
    if reasons:
        raise CompileError(" ".join(reasons))
    begin = time.perf_counter()
    plan = build_auto_plan(packed, caches, engine, operators=OpaqueOperators())
    with torch.no_grad(), _made_up_step(caches, rows) as batch:
        try:
            forward = torch.compile(record(plan, batch), dynamic=False, fullgraph=True)
            step = CompiledStep(plan, forward, 0.0)
            # It is compiled when it first runs. Not by options of `torch.compile`, which come too
            # late for what is made of weights before Inductor.
            with inductor.patch(_OPTIONS[form]):
                step.run(batch)
        except Exception as error:
            first = (str(error).strip().splitlines() or ["no message"])[0]
            raise CompileError(
                f"torch.compile failed with {type(error).__name__}: {first}"
            ) from error
    return replace(step, seconds=time.perf_counter() - begin)


def refuse(packed: PackedModel, engine: EngineConfig) -> list[str]:
    """Every reason why there can be no compiled step."""
    reasons = []
    if engine.decode_backend != "auto":
        reasons.append(f"It is the standard forward; decode_backend is {engine.decode_backend}.")
    if engine.device != "cpu":
        reasons.append(f"Steps are compiled for a CPU; the device is {engine.device}.")
    if engine.tensor_parallel_size > 1:
        reasons.append("A compiled step has no exchanges between ranks.")
    if engine.speculative is not None:
        reasons.append("A draft reads values that a compiled step does not keep.")
    if packed.head.format != "rows":
        reasons.append(f"torch multiplies rows; the trunk is packed as {packed.head.format}.")
    reason = missing_compiler()
    if reason is not None:
        reasons.append(reason)
    return reasons


def missing_compiler() -> str | None:
    """Why Inductor cannot compile for a CPU; None where it finds the C++ compiler that it needs."""
    import torch._inductor.config as inductor

    names = [name for name in inductor.cpp.cxx if name]
    if any(shutil.which(name) for name in names):
        return None
    return f"torch.compile needs a C++ compiler; {', '.join(names)} is not on the PATH."


def record(plan: DecodePlan, batch: StepBatch) -> torch.fx.GraphModule:
    """The operators of one step as a graph of (token ids, cache rows, slots) -> logits.

    The plan runs once on the way. Everything else that it reads, weights and caches, are the
    graph's own tensors.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    load_step(plan, batch)
    loaded = plan.buffers.step

    def forward(token_ids: Tensor, cache_rows: Tensor, slots: Tensor) -> Tensor:
        plan.buffers.step = replace(
            loaded, token_ids=token_ids, cache_rows=cache_rows, single_slots=slots
        )
        for step in plan.steps:
            step.run()
        return plan.buffers["logits"]

    graph = make_fx(forward)(loaded.token_ids, loaded.cache_rows, loaded.single_slots)
    # Values of the recording, which the graph makes anew.
    plan.buffers.clear()
    return graph


@contextmanager
def _made_up_step(caches: Caches, rows: int) -> Iterator[StepBatch]:
    """Requests of one token each, on places of their own, which are free again afterwards."""
    requests = []
    with ExitStack() as held:
        for _ in range(rows):
            slot = caches.allocate_slot()
            held.callback(caches.free_slot, slot)
            pages = caches.allocate_pages(1)
            held.callback(caches.free_pages, pages)
            requests.append(
                StepRequest(token_ids=(0,), start=0, slot=slot, pages=pages, is_decode=True)
            )
        yield StepBatch(tuple(requests))
