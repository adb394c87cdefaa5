"""The caches of one rank: KDA slots and MLA pages, the memory and who has which part of it.

Owns allocation, clearing of slots and the refusal of what a recurrent state cannot do. Both
backends read and write the tensors in place. Does not know requests: slots and pages are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kdecode.cache.budget import item_bytes, pages_for
from kdecode.cache.mirror import ClearSlot, CommitRows, DropRows, Tell, tell_nobody
from kdecode.cache.open_rows import OpenRows
from kdecode.cache.pool import IndexPool
from kdecode.config import ConfigError, ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.config_speculative import MAX_DRAFTS
from kdecode.parallel.context import WHOLE, ContextShare

_CACHE_TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class TruncateError(RuntimeError):
    """A recurrent state was asked to forget tokens, which it cannot."""


@dataclass(frozen=True)
class Caches:
    """Dictionaries are keyed by the 0-based layer number.

    conv: KDA windows [num_slots, W - 1, 3D] bf16, raw q, k, v, oldest sample first.
    recurrent: KDA states [num_slots, H, K, V] fp32.
    pages: MLA rows [num_pages, page_tokens, cache_width], bf16, or E4M3 with ``scales[layer]``
    (stored = row / scale). scales is 1.0 for bf16. Of ranks that share the positions of a request,
    ``context`` says which are here, and a page has their rows only; page_tokens are the positions
    that it covers on all of them together.
    draft: by layer of the draft, its rows [num_pages + spare, page_tokens, width] bf16; a request's
    are on the same pages as its MLA rows, and the spare pages are nobody's.
    open_rows: of a verify step that is not committed. tell: hears of everything that is done to
    slots outside of steps.
    """

    page_tokens: int
    cache_dtype: str
    conv: dict[int, Tensor]
    recurrent: dict[int, Tensor]
    pages: dict[int, Tensor]
    scales: dict[int, float]
    slot_pool: IndexPool
    page_pool: IndexPool
    draft: dict[int, Tensor] = field(default_factory=dict)
    open_rows: OpenRows = field(default_factory=OpenRows)
    tell: Tell = tell_nobody
    context: ContextShare = WHOLE

    @staticmethod
    def allocate(
        config: ModelConfig,
        device: str,
        num_slots: int,
        num_pages: int,
        page_tokens: int,
        *,
        cache_dtype: str = "bf16",
        scales: Mapping[int, float] | None = None,
        draft: DraftConfig | None = None,
        tell: Tell = tell_nobody,
        context: ContextShare = WHOLE,
    ) -> Caches:
        """Allocates every layer's tensors.

        scales: one a layer for an fp8 cache. ConfigError for a missing or impossible one: a default
        would silently clip or lose precision.
        """
        item_bytes(cache_dtype)
        if page_tokens < 1:
            raise ConfigError(f"page_tokens is {page_tokens}; it has to be at least 1.")
        kda, dtype = config.kda, _CACHE_TYPES[cache_dtype]
        conv, recurrent, pages, layer_scales = {}, {}, {}, {}
        for layer, kind in enumerate(config.layer_kinds):
            if kind == "kda":
                window = (num_slots, kda.conv_width - 1, 3 * kda.width)
                state = (num_slots, kda.num_heads, kda.head_dim, kda.head_dim)
                conv[layer] = torch.zeros(window, dtype=torch.bfloat16, device=device)
                recurrent[layer] = torch.zeros(state, dtype=torch.float32, device=device)
            else:
                shape = (num_pages, context.page_rows(page_tokens), config.mla.cache_width)
                pages[layer] = torch.zeros(shape, dtype=dtype, device=device)
                layer_scales[layer] = _scale(layer, cache_dtype, scales or {})
        draft_pages = {}
        if draft is not None:
            # Behind the pages that are given out: room for a block where a request has none left.
            spare = pages_for(MAX_DRAFTS, page_tokens)
            shape = (num_pages + spare, page_tokens, draft.cache_width)
            for layer in range(draft.num_layers):
                draft_pages[layer] = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        return Caches(
            page_tokens=page_tokens,
            cache_dtype=cache_dtype,
            conv=conv,
            recurrent=recurrent,
            pages=pages,
            scales=layer_scales,
            slot_pool=IndexPool(num_slots, "KDA slot"),
            page_pool=IndexPool(num_pages, "MLA page"),
            draft=draft_pages,
            tell=tell,
            context=context,
        )

    @property
    def num_slots(self) -> int:
        return self.slot_pool.size

    @property
    def num_pages(self) -> int:
        return self.page_pool.size

    @property
    def num_bytes(self) -> int:
        """Of everything that is given out: the draft's spare pages are not."""
        parts = (self.conv, self.recurrent, self.pages)
        tensors = [tensor for part in parts for tensor in part.values()]
        tensors += [tensor[: self.num_pages] for tensor in self.draft.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def allocate_slot(self) -> int:
        """A free slot, cleared: a request's first chunk starts from zeros, however short it is."""
        (slot,) = self.slot_pool.allocate()
        self.clear_slot(slot)
        return slot

    def free_slot(self, slot: int) -> None:
        """Gives a slot back; rows of it that are not committed never happened."""
        self.slot_pool.free((slot,))
        self.drop_rows(slot)

    def allocate_pages(self, num_tokens: int) -> tuple[int, ...]:
        """Pages for ``num_tokens`` tokens."""
        return self.page_pool.allocate(pages_for(num_tokens, self.page_tokens))

    def free_pages(self, pages: tuple[int, ...]) -> None:
        self.page_pool.free(pages)

    def clear_slot(self, slot: int) -> None:
        """The state before the first token, in every KDA layer."""
        self._check_slot(slot)
        self.open_rows.drop(slot)
        for state in (*self.conv.values(), *self.recurrent.values()):
            state[slot].zero_()
        self.tell(ClearSlot(slot))

    def drop_rows(self, slot: int) -> None:
        """Rows of a slot that are not committed never happened."""
        if slot in self.open_rows.slots:
            self.open_rows.drop(slot)
            self.tell(DropRows(slot))

    def commit(self, kept: Mapping[int, int]) -> dict[int, int]:
        """Moves slots past the first so many rows of the verify step that was run last.

        kept: for slots of that step, rows that stay, from 1 (the anchor's) to all. Returns how many
        tokens the caches of each slot hold now: its MLA rows behind that are nobody's. ValueError,
        with nothing moved, for a slot without open rows and for a number that it does not have.
        """
        lengths = self.open_rows.commit(kept)
        if kept:
            self.tell(CommitRows(tuple(kept.items())))
        return lengths

    def truncate(self, slot: int, num_tokens: int) -> None:
        """Always raises: a recurrent state has no token axis, so nothing of it can be cut off."""
        self._check_slot(slot)
        raise TruncateError(
            f"KDA slot {slot} cannot be truncated to {num_tokens} tokens: its state is one sum "
            "over all of them. Clear the slot and run the kept tokens again."
        )

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"There is no KDA slot {slot}; the pool has {self.num_slots}.")


def _scale(layer: int, cache_dtype: str, scales: Mapping[int, float]) -> float:
    if cache_dtype == "bf16":
        return 1.0
    if layer not in scales:
        raise ConfigError(
            f"An fp8 cache needs a scale for MLA layer {layer}; scales are given for layers "
            f"{sorted(scales)}. Use the checkpoint's k_scale, name 1.0 explicitly, or choose bf16."
        )
    scale = float(scales[layer])
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"The fp8 cache scale of layer {layer} is {scale}; it has to be above 0.")
    return scale
