"""The plan of a decode step from a configuration alone: no checkpoint, no memory, no device.

Owns what `Worker` and `StepRunner` decide from settings, for models whose weights are not at hand.
What it returns prints and validates like the plan of an engine, and cannot run.
"""

from __future__ import annotations

from dataclasses import replace

from kdecode.cache.budget import context_of
from kdecode.cache.caches import Caches
from kdecode.config import ConfigError, EngineConfig, ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.decode import draft_specialized, latency_specialized
from kdecode.decode.auto import build_auto_plan
from kdecode.decode.device import is_for_triton
from kdecode.decode.latency_specialized import Deployment
from kdecode.decode.plan import DecodePlan, cannot_run
from kdecode.decode.runner import deployment_of, resolve
from kdecode.decode.served_steps import plan_sizes, row_buckets
from kdecode.engine.preflight import check_context, check_description
from kdecode.engine.rank import trunk_format
from kdecode.model.layout import TrunkFormat, mxfp4_format
from kdecode.model.outline import outline_bytes, outline_model
from kdecode.model.rank_share import share_of
from kdecode.parallel.ranks import ALONE, Ranks

_PACKING_NOTE = (
    "bf16 weights are counted at 16 bits; how far they pack without loss depends on their values"
)
_TORCH_NOTE = (
    "Triton is not installed here, so that this is the plan without it; where it is installed some "
    "operations have kernels of their own: pip install 'kdecode[gpu]'"
)
_CHANGED_NOTE = "the trunk is in {}: its weights differ from the checkpoint's"


def describe_plan(
    config: ModelConfig, engine: EngineConfig, rows: int, rows_per_request: int = 1
) -> tuple[DecodePlan, int]:
    """The plan that would serve a decode step of so many rows, and all packed weights in bytes.

    Of several ranks both are those of one, as each has the same. rows_per_request: above 1 for a
    verify step of an engine that speculates with so many. Raises ConfigError and
    BackendRefusedError as an engine does.
    """
    engine = resolve(engine)
    check_description(config, engine)
    ranks = Ranks(0, engine.tensor_parallel_size)
    share, trunk = share_of(config, ranks.size), trunk_format(engine)
    # How far 12 bits reach is not known without the weights.
    form: TrunkFormat = "tiles" if trunk == "tiles12" else trunk
    packed = outline_model(share, form, mxfp4_format(engine.device), ranks)
    size = outline_bytes(packed)
    notes = (_PACKING_NOTE,) if trunk == "tiles12" else ()
    if engine.changes_weights:
        notes = (_CHANGED_NOTE.format(engine.trunk_format),)
    verify_rows = (rows_per_request,) if rows_per_request > 1 else ()
    sizes = plan_sizes(row_buckets(engine), verify_rows, rows // rows_per_request)
    is_served = (rows, rows_per_request) in sizes
    if engine.decode_backend == "latency_specialized" and is_served:
        deployment = deployment_of(share, engine, ranks, runs=False)
        plan = latency_specialized.describe(deployment, packed, rows, rows_per_request)
        return replace(plan, notes=(*plan.notes, *notes)), size
    caches = _meta_caches(share, engine, ranks)
    plan = build_auto_plan(packed, caches, engine, ranks, is_described=True)
    if engine.device != "cpu" and not is_for_triton(engine.device):
        notes = (*notes, _TORCH_NOTE)
    steps = tuple(replace(step, run=cannot_run) for step in plan.steps)
    return replace(plan, steps=steps, notes=notes), size


def describe_launches(
    config: ModelConfig,
    engine: EngineConfig,
    arch: str,
    rows: int,
    rows_per_request: int = 1,
    ranks: Ranks = ALONE,
) -> DecodePlan:
    """The CUDA plan of so many rows on an architecture ("sm_90"), made of tensors without memory.

    Its steps have their launches, which `decode.launches` prints and compiles; nothing can run.
    ranks: of several, ``config`` is one rank's share.
    Raises ConfigError and BackendRefusedError as an engine does.
    """
    check_context(config, engine)
    if rows not in latency_specialized.ROW_BUCKETS:
        most = latency_specialized.ROW_BUCKETS[-1]
        raise ConfigError(f"{rows} rows; a CUDA plan has from 1 to {most}.")
    deployment = gpu_outline(config, engine, arch, ranks)
    packed = outline_model(config, "rows", "mxfp4_rows", ranks)
    plan = latency_specialized.build(
        deployment, packed, _meta_caches(config, engine, ALONE), rows, rows_per_request
    )
    return replace(plan, launch=cannot_run)


def gpu_outline(
    config: ModelConfig, engine: EngineConfig, arch: str, ranks: Ranks = ALONE
) -> Deployment:
    """On a GPU of an architecture, with tensors that have no memory."""
    return Deployment(
        config=config,
        device="cuda",
        isa="",
        threads=None,
        cache_dtype=engine.cache_dtype,
        page_tokens=engine.page_tokens,
        max_context_tokens=engine.max_context_tokens,
        arch=arch,
        tensors="meta",
        ranks=ranks,
        gpu_exchange=engine.gpu_exchange,
        gpu_kernels=engine.gpu_kernels,
        shared_experts=engine.shared_experts,
        weight_prefetch=engine.weight_prefetch,
        expert_products=engine.expert_products,
    )


def _meta_caches(config: ModelConfig, engine: EngineConfig, ranks: Ranks) -> Caches:
    # Scales matter to a run only; the released checkpoints have none.
    scales = dict.fromkeys(range(config.num_layers), 1.0)
    return Caches.allocate(
        config,
        "meta",
        1,
        1,
        engine.page_positions,
        cache_dtype=engine.cache_dtype,
        scales=scales,
        context=context_of(engine, ranks),
    )


def describe_draft(
    target: ModelConfig, engine: EngineConfig, draft: DraftConfig, num_drafts: int
) -> DecodePlan:
    """The plan of a draft's block. Raises BackendRefusedError with every reason why it has none."""
    engine = resolve(engine)
    if engine.decode_backend != "latency_specialized":
        reason = f"decode_backend is {engine.decode_backend}, whose drafts run in torch."
        raise latency_specialized.BackendRefusedError([reason])
    deployment = deployment_of(target, engine, runs=False)
    return draft_specialized.describe(draft, deployment, num_drafts)
