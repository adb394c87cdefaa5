"""What the tests of the Triton kernels share: models in CUDA formats, chains of ops, the oracle.

A chain is some ops of a CUDA plan, prepared once on poisoned buffers and caches, that run inside of
a forward whose other stages are the reference's: every read is given the oracle's value, every
buffer and state that is written is compared by the tolerance of the op's contract
(`verify.check_steps`), and slots, pages and cached rows that are not the step's must keep their
bits. On a machine without a GPU the kernels run in Triton's interpreter.

    case = make_case(k3_config())
    chain = Chain(case, [Use("expert_up", 1), Use("expert_down", 1)], rows=3)
    chain.check(decode_step([5, 0, 17]))
    chain.check(decode_step([1, 2, 3], turn=1))        # other slots and pages, the same launches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlp_cases
import torch
from auto_cases import packed_model
from native_cases import fill
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.cache.open_rows import KeptRows
from kdecode.config import ModelConfig
from kdecode.decode import all_reference
from kdecode.decode.buffers import device_buffers, input_buffers, row_effects, value_buffers
from kdecode.decode.device import device_arch
from kdecode.decode.plan import DecodePlan, Step
from kdecode.decode.staging import stage_inputs
from kdecode.decode.step_check import StepLimits
from kdecode.decode.verify import StepCheck, check_steps, copy_caches
from kdecode.kernels import table
from kdecode.kernels.common.matrix import Matrix
from kdecode.kernels.contract import Buffers, PlanMemory, Problem, Tolerance
from kdecode.kernels.kda_commit.move import move
from kdecode.model.layout import PackedLayer, PackedMlp, PackedModel, to_device
from kdecode.model.parameters import MlpParameters, ModelParameters, MoeParameters, Mxfp4
from kdecode.model.stages import layer_stages, model_stages
from kdecode.testing.cases import tiny_k3, tiny_linear
from kdecode.testing.poison import poison_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Kernels in CuTe DSL are compiled for it when they run.
ARCH = device_arch("cuda")
PAGE_TOKENS = 8
MAX_CONTEXT = 128
FP8_SCALE = 0.125
# (slots, pages) of the caches of steps of up to 8 requests, and of up to 64.
FEW, MANY = (11, 72), (67, 200)


# Models. Layers 0 to 2 are KDA layers and 3 is an MLA layer; layer 0 has a dense MLP.


def k3_config(**moe: Any) -> ModelConfig:
    """K3's form with sizes that are no powers of two; keywords change the mixture of experts."""
    return _resized(tiny_k3(), {"latent_width": 96, "expert_format": "mxfp4", **moe})


def linear_config(**moe: Any) -> ModelConfig:
    """Kimi-Linear's form: SiLU, softplus gate, plain residual, bf16 experts at the model width."""
    return _resized(tiny_linear(), {"expert_format": "bf16", **moe})


def _resized(config: ModelConfig, moe: dict[str, Any]) -> ModelConfig:
    sizes = {"num_experts": 24, "top_k": 5, "expert_width": 96, **moe}
    rank = None if config.mla.q_rank is None else 40
    return replace(
        config,
        hidden_size=160,
        vocab_size=177,
        dense_width=112,
        kda=replace(config.kda, num_heads=3),
        mla=replace(config.mla, num_heads=3, q_rank=rank, kv_rank=48),
        moe=replace(config.moe, **sizes),
    )


@dataclass(frozen=True)
class Case:
    """A model: canonical on the host, packed as CUDA plans read it on `DEVICE`."""

    config: ModelConfig
    parameters: ModelParameters
    packed: PackedModel

    def problem(
        self, layer: int | None, rows: int, each: int = 1, cache_dtype: str = "bf16"
    ) -> Problem:
        return Problem(
            config=self.config,
            layer=layer,
            rows=rows,
            rows_per_request=each,
            device=DEVICE,
            cache_dtype=cache_dtype,
            page_tokens=PAGE_TOKENS,
            max_context_tokens=MAX_CONTEXT,
            isa="",
            arch=ARCH,
        )


def make_case(config: ModelConfig, seed: int = 0) -> Case:
    """Seeded parameters. Packing is written apart from `model/layout.py` on purpose."""
    return packed_case(config, mlp_cases.make_case(config, seed).parameters)


def packed_case(config: ModelConfig, parameters: ModelParameters) -> Case:
    """Of parameters that are given, such as one rank's."""
    packed = packed_model(config, parameters, "rows")
    layers = [
        _on_device(canonical.mlp, layer)
        for canonical, layer in zip(parameters.layers, packed.layers, strict=True)
    ]
    outside = to_device(replace(packed, layers=()), DEVICE)
    return Case(config, parameters, replace(outside, layers=tuple(layers)))


def _on_device(moe: MlpParameters | MoeParameters, layer: PackedLayer) -> PackedLayer:
    if isinstance(moe, MlpParameters) or isinstance(layer.mlp, PackedMlp):
        return to_device(layer, DEVICE)
    pairs = [_below(gate, up) for gate, up in zip(moe.w1, moe.w3, strict=True)]
    blocks = zip(_block(pairs), _block(list(moe.w2)), strict=True)
    moved = to_device(replace(layer, mlp=replace(layer.mlp, experts=())), DEVICE)
    return replace(moved, mlp=replace(moved.mlp, experts=tuple(PackedMlp(*b) for b in blocks)))


def _below(gate: Any, up: Any) -> Any:
    """Gate rows, then up rows."""
    if isinstance(gate, Mxfp4):
        return Mxfp4(torch.cat([gate.packed, up.packed]), torch.cat([gate.scale, up.scale]))
    return torch.cat([gate, up])


def _block(weights: list[Any]) -> list[Matrix]:
    """Matrices of one shape that lie in one block of the device: "rows" or "mxfp4_rows"."""
    rows, cols = weights[0].shape
    if isinstance(weights[0], Mxfp4):
        data = torch.stack([weight.packed for weight in weights]).to(DEVICE)
        scales = torch.stack([weight.scale for weight in weights]).to(DEVICE)
        pairs = zip(data, scales, strict=True)
        return [Matrix("mxfp4_rows", rows, cols, *pair) for pair in pairs]
    return [Matrix("rows", rows, cols, data) for data in torch.stack(weights).to(DEVICE)]


# Steps.


def decode_step(contexts: Sequence[int], turn: int = 0) -> StepBatch:
    """Rows with so many tokens cached, in slots and pages out of order; turn: others of them."""
    return StepBatch(tuple(_requests(contexts, 1, turn)))


def verify_step(contexts: Sequence[int], each: int, turn: int = 0) -> StepBatch:
    """Requests with so many tokens cached, an anchor and ``each - 1`` drafts of each."""
    verified = [
        replace(request, all_logits=True, is_verify=True)
        for request in _requests(contexts, each, turn)
    ]
    return StepBatch(tuple(verified))


def _requests(contexts: Sequence[int], each: int, turn: int) -> list[StepRequest]:
    num_slots, num_pages = FEW if len(contexts) <= 8 else MANY
    slots = [(num_slots - 1 - row + 3 * turn) % num_slots for row in range(len(contexts))]
    free = iter([(num_pages - 1 - page + 5 * turn) % num_pages for page in range(num_pages)])
    requests = []
    for row, (context, slot) in enumerate(zip(contexts, slots, strict=True)):
        pages = tuple(next(free) for _ in range(-(-(context + each) // PAGE_TOKENS)))
        ids = tuple((29 * row + 7 * place + 11 * turn + 3) % 90 for place in range(each))
        requests.append(StepRequest(ids, context, slot, pages, is_decode=True))
    return requests


# Chains.


@dataclass(frozen=True)
class Use:
    """One op of a chain. weights: None for the layer's `PackedLayer`, or the `PackedModel` outside
    of the stack. stages, reads, writes: None for those of the contract that the layer has.
    """

    op: str
    layer: int | None
    weights: Any = None
    stages: tuple[tuple[int | None, str], ...] | None = None
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] | None = None


class Chain:
    """Ops bound to their buffers once, for any number of steps of ``rows`` rows.

    buffers, caches: what the ops are bound to, after `check` with its results.
    """

    def __init__(
        self,
        case: Case,
        uses: Sequence[Use],
        rows: int,
        each: int = 1,
        cache_dtype: str = "bf16",
        impl: str = "triton",
    ) -> None:
        self.case, self.cache_dtype, self._each = case, cache_dtype, each
        size = FEW if rows // each <= 8 else MANY
        self.caches = _allocate_caches(case, size, DEVICE, cache_dtype)
        self._oracle_caches = _allocate_caches(case, size, "cpu", cache_dtype)
        self.buffers = make_buffers(case.config, rows, each, self.caches)
        self._layers = {use.layer for use in uses}
        bound = [self._bind(use, rows, impl) for use in uses]
        self.steps = tuple(step for step, _ in bound)
        # What each op's `prepare` returned.
        self.prepared = tuple(prepared for _, prepared in bound)
        self.plan = self._plan(rows)

    def check(self, batch: StepBatch, seed: int = 0) -> list[StepCheck]:
        """Runs a step from fresh caches; AssertionError for what is wrong with it."""
        fill(self._oracle_caches, batch.requests, seed)
        copy_caches(self._oracle_caches, self.caches)
        before = _allocate_caches(self.case, _size(self.caches), "cpu", self.cache_dtype)
        copy_caches(self._oracle_caches, before)
        poison_buffers(self.buffers)
        oracle = all_reference.build(
            self.case.parameters, self.case.config, self._oracle_caches, page_tokens=PAGE_TOKENS
        )
        first, last = self._span
        with torch.no_grad():
            found = list(check_steps(self.plan, oracle, batch, self.case.parameters))
        checks = [check for check in found if first <= check.step < last]
        wrong = [str(check) for check in checks if not check.is_within]
        assert not wrong, "\n".join(wrong)
        assert checks or not any(step.stages for step in self.steps), "nothing was compared"
        self._check_untouched(before, batch)
        return checks

    def _bind(self, use: Use, rows: int, impl: str) -> tuple[Step, Any]:
        config, contract = self.case.config, table.contract(use.op)
        weights = use.weights
        if weights is None:
            packed = self.case.packed
            weights = packed if use.layer is None else packed.layers[use.layer]
        module = table.implementation(use.op, impl)
        problem = self.case.problem(use.layer, rows, self._each, self.cache_dtype)
        assert module.refuse(problem) == []
        prepared = module.prepare(problem, weights, self.buffers)
        stages = use.stages
        if stages is None:
            present = None if use.layer is None else layer_stages(config, use.layer)
            kept = [s for s in contract.covers if present is None or s in present]
            stages = tuple((use.layer, stage) for stage in kept)
        step = Step(
            layers=tuple(layer for layer, _ in stages) or (use.layer,),
            covers=tuple(stage for _, stage in stages),
            op=use.op,
            impl=impl,
            reads=self._present(contract.reads if use.reads is None else use.reads),
            writes=self._present(contract.writes if use.writes is None else use.writes),
            run=prepared.run,
            tolerance=contract.tolerance,
        )
        return step, prepared

    def _present(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name in self.buffers)

    def _plan(self, rows: int) -> DecodePlan:
        config = self.case.config
        stages = list(model_stages(config))
        own = [stage for step in self.steps for stage in step.stages]
        at = stages.index(own[0]) if own else len(stages)
        assert stages[at : at + len(own)] == own, f"{own} do not follow each other in the model"
        specs = _specs(config, rows)
        everything = tuple(spec.name for spec in specs if spec.lifetime == "step")
        before = [_skip(stage, everything) for stage in stages[:at]]
        after = [_skip(stage, ()) for stage in stages[at + len(own) :]]
        self._span = len(before), len(before) + len(self.steps)
        return DecodePlan(
            backend="chain",
            config=config,
            rows=rows,
            rows_per_request=self._each,
            steps=(*before, *self.steps, *after),
            buffer_specs=specs,
            buffers=self.buffers,
            commit=self._commit if self._each > 1 else None,
        )

    def _commit(self, kept: Sequence[KeptRows]) -> None:
        """In torch, for the layers whose rows the chain has recorded."""
        for rows in kept:
            span, slot = rows.span, rows.span.slot
            for layer in self._layers & self.buffers.effects.keys():
                effects = self.buffers.effects[layer]
                own = slice(span.first, span.first + span.count)
                parts = {name: getattr(effects, name)[own] for name in _EFFECTS}
                window, state = self.caches.conv[layer][slot], self.caches.recurrent[layer][slot]
                move(window, state, replace(effects, **parts), rows.kept)

    def _check_untouched(self, before: Caches, batch: StepBatch) -> None:
        used = [request.slot for request in batch.requests]
        free = [slot for slot in range(self.caches.num_slots) if slot not in used]
        for name in ("conv", "recurrent"):
            for layer, pool in getattr(self.caches, name).items():
                _same_bits(pool[free], getattr(before, name)[layer][free], f"{name} {layer}")
        for layer, pages in self.caches.pages.items():
            kept = torch.ones(pages.shape[:2], dtype=torch.bool)
            for request in batch.requests:
                for position in range(request.start, request.start + len(request.token_ids)):
                    page, place = divmod(position, PAGE_TOKENS)
                    kept[request.pages[page], place] = False
            _same_bits(pages.cpu()[kept], before.pages[layer][kept], f"pages {layer}")


_EFFECTS = ("keys", "decays", "corrections", "samples")


def make_buffers(config: ModelConfig, rows: int, each: int, caches: Caches) -> Buffers:
    """Every buffer of a CUDA plan on `DEVICE`; of verify rows also their effects."""
    buffers = stage_inputs(_specs(config, rows), PlanMemory(DEVICE))
    buffers.caches = caches
    buffers.limits = StepLimits.of(config, caches, MAX_CONTEXT)
    if each > 1:
        buffers.effects = row_effects(config, rows, buffers.memory)
        shape = (rows // each, 3)
        buffers["kept_rows"] = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
    return buffers


def poison_buffers(buffers: Buffers) -> None:
    """Everything that a step writes or has as scratch; `Buffers.counters` are the ops' own."""
    for tensor in buffers.values():
        poison_(tensor)
    for effects in getattr(buffers, "effects", {}).values():
        for name in _EFFECTS:
            poison_(getattr(effects, name))


def _specs(config: ModelConfig, rows: int) -> tuple[Any, ...]:
    inputs = input_buffers(rows, -(-MAX_CONTEXT // PAGE_TOKENS))
    return (*inputs, *value_buffers(config, rows), *device_buffers(config, rows))


def _allocate_caches(case: Case, size: tuple[int, int], device: str, cache_dtype: str) -> Caches:
    scales = dict.fromkeys(range(case.config.num_layers), FP8_SCALE)
    return Caches.allocate(
        case.config,
        device,
        *size,
        PAGE_TOKENS,
        cache_dtype=cache_dtype,
        scales=scales if cache_dtype == "fp8" else None,
    )


def _size(caches: Caches) -> tuple[int, int]:
    return caches.num_slots, caches.num_pages


def _skip(stage: tuple[int | None, str], writes: tuple[str, ...]) -> Step:
    """A stage that only the oracle runs."""
    exact = Tolerance(0.0, 0.0, 0.0)
    return Step(stage[:1], stage[1:], "skipped", "none", (), writes, lambda: None, exact)


def _same_bits(ours: Tensor, wanted: Tensor, name: str) -> None:
    ours, wanted = (x.cpu().contiguous().view(torch.uint8) for x in (ours, wanted))
    assert torch.equal(ours, wanted), f"{name}: what the step does not own has changed"
