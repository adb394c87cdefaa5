"""The part of `kdecode check` about a draft: its cache rows and logits against the reference.

The forward is the one that the backend's engine has. Taps and drafts are made up, so that nothing
depends on what target or draft would say.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kdecode.commands.check import ModelCheck, distance
from kdecode.decode.draft_standard import ContextRows, DraftRequest
from kdecode.engine.draft import make_forward
from kdecode.model.draft_reference import DraftState, append_context, block
from kdecode.model.draft_weights import load_draft
from kdecode.model.reference import GOLD, ROUNDED

if TYPE_CHECKING:
    from kdecode.engine.worker import Worker
    from kdecode.model.parameters import ModelParameters
    from kdecode.model.reference import Rounding

_CONTEXT = 40
_ANCHOR = 1


def check_draft(worker: Worker, target: ModelParameters) -> tuple[ModelCheck, ...]:
    """Median distances from gold of the cached rows, layer by layer, and of each draft's logits."""
    config, speculative = worker.draft, worker.engine.speculative
    assert config is not None
    assert speculative is not None
    parameters = load_draft(speculative.model, config)
    count = speculative.num_speculative_tokens
    generator = torch.Generator().manual_seed(0)
    shape = (_CONTEXT, len(config.taps), config.hidden_size)
    taps = torch.randn(shape, generator=generator).bfloat16()
    drafts = torch.randint(0, config.vocab_size, (count,), generator=generator).tolist()

    def reference(rounding: Rounding) -> tuple[list[Tensor], list[Tensor]]:
        state = DraftState.new(config, rounding)
        append_context(parameters, config, state, rounding.narrow(taps), rounding)
        found = block(
            parameters,
            config,
            target,
            state,
            _ANCHOR,
            count,
            lambda place, logits: drafts[place],
            rounding,
        )
        return state.rows, list(found.logits)

    own = _run(worker, taps, drafts)
    gold, rounded = reference(GOLD), reference(ROUNDED)
    return tuple(
        ModelCheck(quantity, _median(ours, wanted), _median(near, wanted))
        for quantity, ours, near, wanted in zip(
            ("draft rows", "draft logits"), own, rounded, gold, strict=True
        )
    )


def _run(worker: Worker, taps: Tensor, drafts: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The rows of each layer, and the logits of each place, of the engine's own forward."""
    assert worker.draft is not None
    assert worker.packed_draft is not None
    caches = worker.caches
    forward = make_forward(
        worker.packed_draft, worker.draft, worker.engine, worker.packed, worker.runner, caches
    )
    logits: list[Tensor] = []

    def choose(place: int, row: Tensor) -> list[int]:
        logits.append(row[0].clone())
        return [drafts[place]]

    pages = caches.allocate_pages(_CONTEXT + len(drafts))
    try:
        forward.append([ContextRows(0, pages, taps.to(worker.engine.device))])
        forward.block([DraftRequest(_ANCHOR, _CONTEXT, pages)], len(drafts), choose)
        rows = [pool[list(pages)].flatten(0, 1)[:_CONTEXT].cpu() for pool in caches.draft.values()]
    finally:
        caches.free_pages(pages)
    return rows, [row.cpu() for row in logits]


def _median(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    return statistics.median(distance(a, b) for a, b in zip(found, wanted, strict=True))
