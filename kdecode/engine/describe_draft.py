"""What a draft launches on a GPU of any architecture, from configurations alone.

Owns what an engine decides from settings for its draft, as `describe.py` does for its model: the
steps have their launches, to be printed and compiled, and nothing can run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig, ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.decode import draft_cuda, draft_specialized
from kdecode.decode.draft_use import CONTEXT_ROWS, draft_caches, draft_deployment
from kdecode.decode.latency_specialized import BackendRefusedError
from kdecode.decode.plan import DecodePlan, Step, cannot_run
from kdecode.engine.describe import gpu_outline
from kdecode.model.draft_tiles import outline_draft_plan, outline_draft_weights


@dataclass(frozen=True)
class DraftLaunches:
    """block: of so many requests. context: what caches ``context_rows`` committed tokens."""

    block: DecodePlan
    context: tuple[Step, ...]
    context_rows: int


def describe_draft_launches(
    target: ModelConfig,
    engine: EngineConfig,
    draft: DraftConfig,
    arch: str,
    requests: int,
    num_drafts: int,
) -> DraftLaunches:
    """The plans of a round of so many requests. Raises BackendRefusedError with every reason why
    the draft has none, and ValueError for more requests than a block has."""
    deployment = gpu_outline(target, engine, arch)
    reasons = draft_specialized.refuse(draft, deployment, num_drafts)
    if reasons:
        raise BackendRefusedError(reasons)
    most = draft_cuda.most_requests(num_drafts)
    if requests > most:
        raise ValueError(
            f"{requests} requests; a block of {num_drafts} drafts has at most {most} of them."
        )
    own = draft_deployment(draft, deployment, num_drafts)
    packed = outline_draft_plan(draft, "rows")
    weights = outline_draft_weights(draft, packed)
    caches = Caches.allocate(target, "meta", 1, 1, engine.page_tokens, draft=draft)
    rows = draft_caches(caches)
    block = draft_cuda.build(own, weights, packed, rows, requests, num_drafts)
    # Of a round whose drafts are all accepted, in passes of which this is the first.
    count = next(size for size in CONTEXT_ROWS if size <= requests * (num_drafts + 1))
    context = draft_cuda.build_context(own, weights, rows, count)
    return DraftLaunches(replace(block, launch=cannot_run), context.steps, count)
