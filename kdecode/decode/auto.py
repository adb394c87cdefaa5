"""The `auto` backend: the standard forward in torch, for any step.

Prefill in chunks, decode and both mixed, any number of rows: one step a stage, but for latent
attention, which is one. Implementations are chosen when the plan is built (on a GPU some are in
Triton); a run derives the batch's metadata once and launches the steps. Rounding points are those
of the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kdecode.cache.batch import StepBatch
from kdecode.cache.caches import Caches
from kdecode.cache.open_rows import KeptRows, OpenSpan
from kdecode.config import EngineConfig, ModelConfig
from kdecode.decode.buffers import value_buffers
from kdecode.decode.device import device_arch, has_triton, is_for_triton
from kdecode.decode.plan import Buffer, DecodePlan, Step
from kdecode.decode.step_check import StepLimits
from kdecode.decode.step_tensors import derive
from kdecode.decode.traffic import stage_weight_bytes
from kdecode.kernels import table
from kdecode.kernels.attn_res.op import MixWeights
from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.common.opaque import OpaqueOperators
from kdecode.kernels.common.step import RowEffects
from kdecode.kernels.contract import Buffers, Exchange, Problem
from kdecode.kernels.kda_commit.move import move
from kdecode.kernels.linear.product import ProductSettings
from kdecode.kernels.mlp.op import MlpWeights
from kdecode.kernels.projection.op import ProjectionWeights
from kdecode.kernels.residual.op import ResidualUse
from kdecode.kernels.rms_norm.op import NormWeights
from kdecode.model.layout import PackedKda, PackedMlp, PackedModel, PackedMoe
from kdecode.model.rank_share import (
    Exchanged,
    context_exchanges,
    covered_exchanges,
    stage_exchange,
)
from kdecode.model.stages import layer_stages
from kdecode.parallel.ranks import ALONE, Ranks

# Ops whose kernels take any number of rows, on a device that has them.
_TRITON_OPS = frozenset(
    {
        "kda_conv",
        "kda_gate",
        "kda_recurrence",
        "kda_out_norm",
        "mla_attention",
        "route",
        "experts",
    }
)


def build_auto_plan(
    packed: PackedModel,
    caches: Caches,
    engine: EngineConfig,
    ranks: Ranks = ALONE,
    exchange: Exchange | None = None,
    operators: OpaqueOperators | None = None,
    *,
    is_described: bool = False,
) -> DecodePlan:
    """The plan of every step that no other backend serves. Run it with `run_standard`.

    ranks: of several, ``packed`` is one rank's share; exchange: None for a plan that does not run.
    operators: for a plan whose steps of single rows are compiled, what it calls as it is.
    is_described: for a device that need not be here; such a plan does not run.
    """
    config = packed.config
    specs = _buffer_specs(config, ranks)
    buffers = Buffers()
    buffers.caches = caches
    buffers.exchange = exchange
    buffers.limits = StepLimits.of(config, caches, engine.max_context_tokens, ranks)
    buffers.products = ProductSettings(engine.device, engine.isa)
    buffers.operators = operators
    with_triton = (is_for_triton if is_described else has_triton)(engine.device)
    names = frozenset(spec.name for spec in specs)
    builder = _Builder(packed, engine, buffers, names, ranks, with_triton)
    steps = [builder.step("embed", None, ("embed",), packed, (), ("prefix", "residual_stack"))]
    for layer in range(config.num_layers):
        steps += builder.attention(layer)
        steps += builder.mlp(layer)
    steps += builder.head()
    return DecodePlan(
        backend="auto",
        config=config,
        rows=None,
        rows_per_request=1,
        steps=tuple(steps),
        buffer_specs=specs,
        buffers=buffers,
    )


def run_standard(
    plan: DecodePlan,
    batch: StepBatch,
    launch: Callable[[DecodePlan], None] = DecodePlan.run,
) -> torch.Tensor:
    """One step: moves the caches, returns logits [requests that need them, vocab] fp32.

    launch: runs the loaded plan. Raises StepError, with nothing written, for a batch that names
    what does not exist.
    """
    load_step(plan, batch)
    with torch.no_grad():
        launch(plan)
    return plan.buffers["logits"]


def load_step(plan: DecodePlan, batch: StepBatch) -> None:
    """Derives the batch's metadata; nothing of the last step's stays. Raises StepError.

    The rows of verified requests are open from here on, for `Caches.commit` after the run.
    """
    buffers = plan.buffers
    buffers.caches.open_rows.require_none()
    buffers.batch = batch
    buffers.step = derive(batch, buffers.limits, buffers.products.device)
    buffers.effects = {}
    spans = [
        OpenSpan(span.slot, span.start, span.first, span.num_rows)
        for span in buffers.step.multi
        if span.is_verify
    ]
    buffers.caches.open_rows.open(spans, partial(_commit, buffers.caches, buffers.effects))


def _commit(
    caches: Caches,
    effects: Mapping[tuple[int, int], RowEffects],
    kept: Sequence[KeptRows],
) -> None:
    with torch.no_grad():
        for rows in kept:
            slot = rows.span.slot
            for layer, window in caches.conv.items():
                state = caches.recurrent[layer][slot]
                move(window[slot], state, effects[slot, layer], rows.kept)


def _buffer_specs(config: ModelConfig, ranks: Ranks) -> tuple[Buffer, ...]:
    shape = (config.num_snapshots + 1, "T", config.hidden_size)
    return (*value_buffers(config, "T", ranks), Buffer("residual_stack", shape, torch.bfloat16))


@dataclass(frozen=True)
class _Builder:
    """Turns stages into steps, in order."""

    packed: PackedModel
    engine: EngineConfig
    buffers: Buffers
    names: frozenset[str]
    ranks: Ranks
    with_triton: bool

    @property
    def config(self) -> ModelConfig:
        return self.packed.config

    def step(
        self,
        op: str,
        layer: int | None,
        covers: tuple[str, ...],
        weights: Any,
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
    ) -> Step:
        """Prepares one step. reads, writes: empty for those of the op's contract."""
        contract = table.contract(op)
        problem = self._problem(layer)
        impl = self._choose(op, problem)
        implementation = table.implementation(op, impl)
        return Step(
            layers=(layer,),
            covers=covers,
            op=op,
            impl=impl,
            reads=self._present(reads or contract.reads),
            writes=self._present(writes or contract.writes),
            run=implementation.prepare(problem, weights, self.buffers).run,
            tolerance=contract.tolerance,
            weight_bytes=sum(stage_weight_bytes(self.packed, layer, stage) for stage in covers),
            exchanges=self._exchanges(covers),
        )

    def _choose(self, op: str, problem: Problem) -> str:
        """Triton where the device and the op have it; torch takes everything.

        The form for compilers in a plan for one, where there is another than torch's.
        """
        if self.buffers.operators is not None and (op, "compiled") in table.TABLE:
            reasons = table.implementation(op, "compiled").refuse(problem)
            if reasons:
                raise ValueError(f"{op} cannot be compiled: {' '.join(reasons)}")
            return "compiled"
        if op in _TRITON_OPS and self.with_triton:
            reasons = table.implementation(op, "triton").refuse(problem)
            if not reasons:
                return "triton"
        reasons = table.implementation(op, "torch").refuse(problem)
        if reasons:
            raise ValueError(f"The standard path cannot run {op}: {' '.join(reasons)}")
        return "torch"

    def attention(self, layer: int) -> Iterator[Step]:
        entry, config = self.packed.layers[layer], self.config
        weights = entry.attention
        before = config.snapshots_before(layer)
        yield self._mix(layer, "attn_mix", entry.attn_mix, before)
        yield self._norm(layer, "attn_norm", entry.input_norm, ("attn_mix", "attn_in"))
        if isinstance(weights, PackedKda):
            yield self._project(layer, "kda_in_proj", weights.in_proj, ("attn_in", "kda_proj"))
            yield self.step("kda_conv", layer, ("kda_conv",), weights)
            yield self.step("kda_gate", layer, ("kda_gate",), weights)
            yield self.step("kda_recurrence", layer, ("kda_step",), weights)
            yield self.step("kda_out_norm", layer, ("kda_out_norm",), weights)
        else:
            yield self._project(layer, "mla_in_proj", weights.in_proj, ("attn_in", "mla_proj"))
            covers = table.contract("mla_attention").covers
            yield self.step("mla_attention", layer, covers, weights)
        yield self._project(layer, "attn_out_proj", weights.o_proj, ("attn_out", "attn_delta"))
        use = ResidualUse("attn_delta", before, is_push=config.is_snapshot_layer(layer))
        yield self._add(layer, "attn_residual", use)

    def mlp(self, layer: int) -> Iterator[Step]:
        entry = self.packed.layers[layer]
        count = self.config.snapshots_before(layer + 1)
        yield self._mix(layer, "mlp_mix", entry.mlp_mix, count)
        yield self._norm(layer, "mlp_norm", entry.post_norm, ("mlp_mix", "mlp_in"))
        if isinstance(entry.mlp, PackedMlp):
            yield self._gated(layer, "dense_mlp", entry.mlp, "mlp_delta")
            yield self._add(layer, "mlp_residual", ResidualUse("mlp_delta", count))
        else:
            yield from self._moe(layer, entry.mlp, count)

    def head(self) -> Iterator[Step]:
        packed, count = self.packed, self.config.num_snapshots
        yield self._mix(None, "final_mix", packed.final_mix, count)
        yield self._norm(None, "head_norm", packed.norm, ("final_mix", "head_in"))
        yield self._project(None, "head", packed.head, ("head_in", "logits"), is_head=True)

    def _moe(self, layer: int, moe: PackedMoe, num_snapshots: int) -> Iterator[Step]:
        is_alone = self.ranks.is_alone
        yield from (self._mixture if is_alone else self._mixture_of_ranks)(layer, moe)
        delta = "expert_sum" if moe.latent_up is None else "routed"
        shared = None if moe.shared is None else "shared"
        yield self._add(layer, "mlp_residual", ResidualUse(delta, num_snapshots, shared=shared))

    def _mixture(self, layer: int, moe: PackedMoe) -> Iterator[Step]:
        yield self.step("route", layer, ("route",), moe)
        if moe.latent_down is not None:
            yield self._project(layer, "latent_down", moe.latent_down, ("mlp_in", "latent"))
        source = "mlp_in" if moe.latent_down is None else "latent"
        reads = (source, "route_ids", "route_weights")
        yield self.step("experts", layer, ("experts",), moe, reads)
        if moe.latent_up is not None:
            yield self.step("latent_up", layer, ("latent_up",), moe)
        if moe.shared is not None:
            yield self._gated(layer, "shared_mlp", moe.shared, "shared")

    def _mixture_of_ranks(self, layer: int, moe: PackedMoe) -> Iterator[Step]:
        """In as few exchanges as `latency_specialized` has: values that do not need each other
        are one step, and travel together."""
        stages = layer_stages(self.config, layer)

        def present(*names: str) -> tuple[str, ...]:
            return tuple(name for name in names if name in stages)

        choice = "route_ids", "route_weights"
        covers = present("route", "latent_down")
        yield self.step("route", layer, covers, moe, ("mlp_in",), (*choice, "latent"))
        covers = present("experts", "latent_up", "shared_mlp")
        reads, writes = ("mlp_in", "latent", *choice), ("expert_sum", "routed", "shared")
        yield self.step("experts", layer, covers, moe, reads, writes)

    def _mix(
        self, layer: int | None, stage: str, weight: torch.Tensor | None, num_snapshots: int
    ) -> Step:
        weights = MixWeights(weight, num_snapshots, stage)
        reads = ("prefix", "snapshots") if num_snapshots else ("prefix",)
        return self.step("attn_res", layer, (stage,), weights, reads, (stage,))

    def _norm(
        self, layer: int | None, stage: str, weight: torch.Tensor, names: tuple[str, str]
    ) -> Step:
        weights = NormWeights(weight, *names)
        return self.step("rms_norm", layer, (stage,), weights, names[:1], names[1:])

    def _project(
        self,
        layer: int | None,
        stage: str,
        matrix: Matrix,
        names: tuple[str, str],
        *,
        is_head: bool = False,
    ) -> Step:
        exchanged = self._exchanged(stage)
        exchange = None if exchanged is None else exchanged.kind
        assert exchange != "swap", "only attention gives each rank something else"
        weights = ProjectionWeights(matrix, *names, is_head, exchange)
        return self.step("projection", layer, (stage,), weights, names[:1], names[1:])

    def _gated(self, layer: int, stage: str, mlp: PackedMlp, output: str) -> Step:
        weights = MlpWeights(mlp.gate_up, mlp.down, output)
        return self.step("mlp", layer, (stage,), weights, ("mlp_in",), (output,))

    def _add(self, layer: int, stage: str, use: ResidualUse) -> Step:
        reads, writes = ["prefix", use.delta], ["prefix"]
        if use.shared is not None:
            reads.append(use.shared)
            writes.append("mlp_delta")
        if use.is_push:
            writes.append("snapshots")
        return self.step("residual", layer, (stage,), use, tuple(reads), tuple(writes))

    def _exchanges(self, covers: tuple[str, ...]) -> tuple[tuple[Exchanged, ...], ...]:
        """Of a step, in order; those of a row that decodes where that makes a difference."""
        if "mla_attend" in covers and not self.buffers.caches.context.is_whole:
            # The logarithm of the sum of exponentials.
            return context_exchanges(self.config, self.ranks.size, 1)
        return covered_exchanges(self.config, self.ranks.size, covers)

    def _exchanged(self, stage: str) -> Exchanged | None:
        return stage_exchange(self.config, self.ranks.size, stage)

    def _present(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Without the buffers that this model does not have."""
        return tuple(name for name in names if name in self.names)

    def _problem(self, layer: int | None) -> Problem:
        engine = self.engine
        return Problem(
            config=self.config,
            layer=layer,
            rows=None,
            rows_per_request=1,
            device=engine.device,
            cache_dtype=engine.cache_dtype,
            page_tokens=self.buffers.caches.page_tokens,
            max_context_tokens=engine.max_context_tokens,
            isa="",
            arch=device_arch(engine.device),
            ranks=self.ranks,
            context=self.buffers.caches.context,
        )
