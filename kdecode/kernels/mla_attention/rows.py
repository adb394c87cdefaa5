"""Cache rows of one MLA layer as torch reads and writes them: bf16, or E4M3 with a scale.

stored = E4M3(clamp(row / scale, +-448)); what is read is bf16(stored * scale).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdecode.kernels.common.step import RequestSpan

FP8_MAX = 448.0


@dataclass(frozen=True)
class CacheRows:
    """pages [num_pages, rows of a page, width]."""

    pages: Tensor
    scale: float

    @property
    def is_fp8(self) -> bool:
        return self.pages.dtype == torch.float8_e4m3fn

    def insert(self, places: Tensor, rows: Tensor) -> None:
        """Writes rows [R, width] bf16 at places [R] (page * rows of a page + place)."""
        flat = self.pages.flatten(0, 1)
        if not self.is_fp8:
            flat.index_copy_(0, places, rows)
            return
        scaled = (rows.float() / self.scale).clamp_(-FP8_MAX, FP8_MAX)
        # Index operators do not take fp8; its bytes move as they are.
        stored = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        flat.view(torch.uint8).index_copy_(0, places, stored)

    def gather(self, span: RequestSpan) -> Tensor:
        """The rows of a request [context, width] bf16; a view when its pages are consecutive."""
        return self.values(self.stored(span, span.context_tokens))

    def stored(self, span: RequestSpan, count: int) -> Tensor:
        """The first so many rows [count, width] on a request's pages, as they are stored."""
        stored = self.pages
        if span.first_page is not None:
            stored = stored[span.first_page : span.first_page + span.pages.shape[0]]
        elif self.is_fp8:
            chosen = stored.view(torch.uint8).index_select(0, span.pages)
            stored = chosen.view(torch.float8_e4m3fn)
        else:
            stored = stored.index_select(0, span.pages)
        return stored.flatten(0, 1)[:count]

    def values(self, stored: Tensor) -> Tensor:
        """What stored rows stand for, bf16."""
        return (stored.float() * self.scale).to(torch.bfloat16) if self.is_fp8 else stored
