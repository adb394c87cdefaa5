"""Drafts on `DEVICE`, by the plans of a GPU: one of the smallest checkpoint, and a smaller one.

Without a GPU the kernels run in Triton's interpreter: the deployment says "cuda" and keeps its
tensors on the CPU, as `cuda_cases` has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cuda_cases import DEVICE, deployment
from draft_cases import DraftCase, make_draft_case, other_stack
from draft_rounds import LIMIT, NUM_DRAFTS, PAGE_TOKENS, Rounds

from kdecode.cache.caches import Caches
from kdecode.config import ModelConfig
from kdecode.config_draft import DraftConfig, DraftKind
from kdecode.decode import draft_specialized
from kdecode.decode.deployment import Deployment
from kdecode.decode.draft_device import CudaDraft
from kdecode.model.draft_synthesis import make_draft
from kdecode.model.draft_tiles import pack_draft_plan
from kdecode.model.draft_weights import load_draft
from kdecode.model.layout import PackedModel, pack_model, to_device
from kdecode.model.outline import outline_model
from kdecode.model.weights import CheckpointReader
from kdecode.speculative.dspark import DraftForward
from kdecode.testing.cases import random_parameters
from kdecode.testing.poison import poison_


def draft_target(config: ModelConfig) -> Deployment:
    """The target's deployment."""
    return replace(deployment(config), page_tokens=PAGE_TOKENS, max_context_tokens=LIMIT)


def cuda_rounds(
    checkpoint: Path, folder: Path, kind: DraftKind, pool: Any, num_slots: int = 3
) -> Rounds:
    """folder: where the draft is written; a window is made shorter than a context. pool: of graphs,
    or None. num_slots: of a run at most."""
    make_draft(folder, "mini", kind, seed=0)
    config = DraftConfig.from_checkpoint(folder)
    if config.window is not None:
        config = replace(config, window=5)
    p = load_draft(folder, config)
    packed = pack_model(CheckpointReader(checkpoint), "rows", device=DEVICE)
    caches = Caches.allocate(packed.config, DEVICE, num_slots, 48, PAGE_TOKENS, draft=config)
    weights = to_device(pack_draft_plan(p, config, "rows", None), DEVICE)
    where = draft_target(packed.config)
    assert draft_specialized.refuse(config, where, NUM_DRAFTS) == []
    draft = CudaDraft(weights, config, packed, caches, where, NUM_DRAFTS, pool)
    # What recording has left there is nobody's.
    for rows in caches.draft.values():
        poison_(rows)
    target = CheckpointReader(checkpoint).load_model()
    return Rounds(config, p, target, caches, draft)


@dataclass(frozen=True)
class Parts:
    """What a forward is made of. target: the draft has tables of its own."""

    case: DraftCase
    target: PackedModel
    caches: Caches
    deployment: Deployment

    def rounds(self, draft: DraftForward) -> Rounds:
        # What recording has left there is nobody's.
        for rows in self.caches.draft.values():
            poison_(rows)
        target = random_parameters(self.target.config)
        return Rounds(self.case.config, self.case.p, target, self.caches, draft)


def small_parts(num_slots: int, *, is_grouped: bool = False) -> Parts:
    """Of a much smaller draft, which is quick in the interpreter.

    is_grouped: with grouped-query attention in causal blocks, and a window shorter than a context.
    """
    case = make_draft_case()
    if is_grouped:
        case = make_draft_case(is_grouped=True, is_causal=True, window=20)
    target = outline_model(other_stack(case.config), "rows")
    caches = Caches.allocate(target.config, DEVICE, num_slots, 48, PAGE_TOKENS, draft=case.config)
    return Parts(case, target, caches, draft_target(target.config))


def small_rounds(pool: Any, num_slots: int, *, is_grouped: bool = False) -> Rounds:
    own = small_parts(num_slots, is_grouped=is_grouped)
    weights, config = own.case.weights, own.case.config
    draft = CudaDraft(weights, config, own.target, own.caches, own.deployment, NUM_DRAFTS, pool)
    return own.rounds(draft)
