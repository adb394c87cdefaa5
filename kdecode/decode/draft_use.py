"""What the plans of a draft have in common on every device: where they run, and their cache rows.

Owns the deployment of a draft, the draft's view of the caches, and the metadata of rows: places,
pages and rotations, checked, because what follows them does so unseen. Does not know steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdecode.cache.caches import Caches
from kdecode.cache.mirror import tell_nobody
from kdecode.cache.open_rows import OpenRows
from kdecode.config_draft import DraftConfig
from kdecode.decode.deployment import Deployment
from kdecode.decode.draft_standard import ContextRows
from kdecode.decode.step_check import StepError
from kdecode.kernels.common.native import MAX_ROWS
from kdecode.model.draft_reference import frequencies
from kdecode.model.draft_tiles import plan_config
from kdecode.parallel.context import WHOLE
from kdecode.parallel.ranks import ALONE

# Rows of one pass over committed tokens: those of a round, and many for prompts.
CONTEXT_ROWS = (MAX_ROWS, 32, 16, *range(9, 0, -1))


def draft_deployment(config: DraftConfig, target: Deployment, num_drafts: int) -> Deployment:
    """Where the draft's plans run: with the target, on bf16 rows, with room for the block."""
    return replace(
        target,
        config=plan_config(config),
        cache_dtype="bf16",
        max_context_tokens=target.max_context_tokens + num_drafts,
        rotation_scale=config.rope.score_scale,
        is_causal_block=config.is_causal,
        window=config.window,
        # Rank 0 has all of it.
        ranks=ALONE,
        shared=None,
        context=WHOLE,
        # Kernels in CuTe DSL and steps beside others were made for the target.
        gpu_kernels="triton",
        shared_experts="inside",
        weight_prefetch="off",
        expert_products="exact",
    )


def draft_caches(caches: Caches) -> Caches:
    """The draft's rows as the pages of a model of its own."""
    return replace(
        caches,
        cache_dtype="bf16",
        conv={},
        recurrent={},
        pages=caches.draft,
        scales=dict.fromkeys(caches.draft, 1.0),
        draft={},
        open_rows=OpenRows(),
        tell=tell_nobody,
        context=WHOLE,
    )


@dataclass(frozen=True)
class Row:
    """A cache row's position and the pages of its request."""

    position: int
    pages: Sequence[int]


class RowWriter:
    """Writes the metadata of rows into a program's inputs."""

    def __init__(self, config: DraftConfig, deployment: Deployment, caches: Caches) -> None:
        """deployment, caches: the draft's own."""
        self._amplitude = config.rope.amplitude
        self._frequencies = frequencies(config.rope).numpy()
        self._page_tokens = deployment.page_tokens
        self._limit = deployment.max_context_tokens
        self._num_pages = next(iter(caches.pages.values())).shape[0]
        # Where the rows of a block go that lie behind all of a request's pages: on nobody's.
        self.spare_pages = range(caches.num_pages, self._num_pages)

    def write(self, arrays: Mapping[str, NDArray[Any]], rows: Sequence[Row]) -> None:
        """row_position, row_rotation and row_pages. Raises StepError, with nothing written, for a
        place that does not exist.

        Rows of one request should have one object of pages, which are thousands of a long context.
        """
        furthest: dict[int, Row] = {}
        for row in rows:
            self._check_position(row)
            known = furthest.setdefault(id(row.pages), row)
            if row.position > known.position:
                furthest[id(row.pages)] = row
        tables = {key: self._checked_pages(row) for key, row in furthest.items()}
        positions = np.array([row.position for row in rows])
        arrays["row_position"][:] = positions
        angles = positions[:, None] * self._frequencies
        turned = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        arrays["row_rotation"][:] = turned * self._amplitude
        listed = arrays["row_pages"]
        listed.fill(-1)
        for number, row in enumerate(rows):
            used = tables[id(row.pages)]
            listed[number, : len(used)] = used

    def places(self, parts: Sequence[ContextRows]) -> tuple[Tensor, Tensor]:
        """Positions of committed tokens, and where their rows are among those of all pages, int64.

        Raises StepError as `write` does.
        """
        positions, places = [], []
        for part in parts:
            last = part.start + part.taps.shape[0] - 1
            for position in (part.start, last):
                self._check_position(Row(position, part.pages))
            used = torch.from_numpy(self._checked_pages(Row(last, part.pages))).long()
            own = torch.arange(part.start, last + 1)
            positions.append(own)
            places.append(used[own // self._page_tokens] * self._page_tokens)
            places[-1] += own % self._page_tokens
        return torch.cat(positions), torch.cat(places)

    def fits(self, position: int, count: int, pages: Sequence[int]) -> bool:
        """Whether a block's rows lie on these pages."""
        return position + count <= len(pages) * self._page_tokens

    def _check_position(self, row: Row) -> None:
        tokens = self._page_tokens
        if not 0 <= row.position < min(self._limit, len(row.pages) * tokens):
            raise StepError(
                f"Position {row.position} of a draft's cache is not one of {len(row.pages)} "
                f"pages of {tokens} tokens, and of at most {self._limit} tokens."
            )

    def _checked_pages(self, row: Row) -> NDArray[np.int32]:
        """The pages up to a row's."""
        used = np.array(row.pages[: row.position // self._page_tokens + 1], dtype=np.int32)
        if used.min() < 0 or used.max() >= self._num_pages:
            raise StepError(
                f"The pages {used.tolist()} of a draft's cache are not all of its "
                f"{self._num_pages}."
            )
        return used


def context_passes(parts: Sequence[ContextRows]) -> Iterator[tuple[Sequence[Row], Tensor]]:
    """Committed tokens in passes of prepared numbers of rows, each with what was tapped there."""
    taps = torch.cat([part.taps for part in parts])
    rows = [
        Row(part.start + place, part.pages) for part in parts for place in range(part.taps.shape[0])
    ]
    first = 0
    while first < len(rows):
        count = next(size for size in CONTEXT_ROWS if size <= len(rows) - first)
        yield rows[first : first + count], taps[first : first + count]
        first += count


def check_tokens(tokens: Sequence[int], vocab: int) -> None:
    """Raises ValueError for a token that does not exist."""
    for token in tokens:
        if not 0 <= token < vocab:
            raise ValueError(f"Token {token} is not of the vocabulary of {vocab}.")


def check_drafts(asked: int, prepared: int) -> None:
    """Raises ValueError for a block of another number of drafts than its plan has rows for."""
    if asked != prepared:
        raise ValueError(f"{asked} drafts are asked for; the plan has {prepared} rows.")
