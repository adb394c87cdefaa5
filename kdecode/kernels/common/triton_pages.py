"""Device functions over paged caches: which page a token lies on, and where a row's page is.

Owns the addressing alone; what a row of a page is, the attention kernels know.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page_numbers(entry, first, end, place, PAGE_TOKENS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Page numbers of the tokens of a round: one where a page has them all. 0 from ``end`` on.

    entry: the request's list of pages. place: [BLOCK_T]; first: a multiple of BLOCK_T.
    """
    if PAGE_TOKENS % BLOCK_T == 0:
        return tl.load(entry + first // PAGE_TOKENS, mask=first < end, other=0)
    else:
        token = first + place
        return tl.load(entry + token // PAGE_TOKENS, mask=token < end, other=0)


@triton.jit
def row_page(row_position, row_pages, row, max_pages, PAGE_TOKENS: tl.constexpr):
    """(page, place on it) of a row of the step; page -1 where it has none."""
    position = tl.load(row_position + row)
    entry = row_pages + row * max_pages + position // PAGE_TOKENS
    page = tl.load(entry, mask=position >= 0, other=-1)
    return page, position % PAGE_TOKENS
