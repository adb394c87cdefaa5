"""Which forward a draft has: its own plans where backend, device and layout allow it, else torch.

Owns that choice, made once before the draft's weights are packed, because they read different
layouts, and logged with its reasons. Does not know rounds.
"""

from __future__ import annotations

import logging

from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig, ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.decode import draft_specialized
from kdecode.decode.device import on_device
from kdecode.decode.draft_device import CudaDraft
from kdecode.decode.draft_specialized import SpecializedDraft
from kdecode.decode.draft_standard import StandardDraft
from kdecode.decode.graph import GraphPool
from kdecode.decode.runner import StepRunner, deployment_of
from kdecode.model.draft_layout import PackedDraft, pack_draft
from kdecode.model.draft_parameters import DraftParameters
from kdecode.model.draft_tiles import DraftPlanWeights, pack_draft_plan
from kdecode.model.layout import PackedModel, tile_format, to_device
from kdecode.speculative.dspark import DraftForward

log = logging.getLogger(__name__)

DraftWeights = PackedDraft | DraftPlanWeights


def plan_refusals(engine: EngineConfig, draft: DraftConfig, target: ModelConfig) -> list[str]:
    """Every reason why the draft runs in torch; [] where it has plans."""
    assert engine.speculative is not None
    if engine.decode_backend != "latency_specialized":
        return [f"decode_backend is {engine.decode_backend}."]
    deployment = deployment_of(target, engine, runs=False)
    return draft_specialized.refuse(draft, deployment, engine.speculative.num_speculative_tokens)


def pack_weights(
    parameters: DraftParameters,
    draft: DraftConfig,
    engine: EngineConfig,
    target: ModelConfig,
) -> DraftWeights:
    """Copies a draft out of its mapped file, as its forward reads it: bf16 whatever the trunk's."""
    reasons = plan_refusals(engine, draft, target)
    if reasons:
        if engine.decode_backend == "latency_specialized":
            log.info("the draft runs in torch: %s", " ".join(reasons))
        return pack_draft(parameters, draft, engine.device)
    if engine.device != "cpu":
        return to_device(pack_draft_plan(parameters, draft, "rows", engine.isa), engine.device)
    assert engine.isa is not None, "a resolved configuration has one"
    trunk = tile_format(engine.isa, engine.lossless_packing)
    return pack_draft_plan(parameters, draft, trunk, engine.isa)


def make_forward(
    weights: DraftWeights,
    draft: DraftConfig,
    engine: EngineConfig,
    packed: PackedModel,
    runner: StepRunner,
    caches: Caches,
) -> DraftForward:
    """The forward that reads these weights. The native one shares the threads of the target's; on
    a GPU the caches have to be free meanwhile."""
    if isinstance(weights, PackedDraft):
        return StandardDraft(weights, draft, packed, caches, engine)
    assert engine.speculative is not None
    assert runner.deployment is not None
    count = engine.speculative.num_speculative_tokens
    if engine.device == "cpu":
        return SpecializedDraft(weights, draft, packed, caches, runner.deployment, count)
    with on_device(engine.device):
        pool = GraphPool()
        return CudaDraft(weights, draft, packed, caches, runner.deployment, count, pool)
