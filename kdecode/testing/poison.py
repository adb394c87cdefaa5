"""NaN-poisoned memory: what a kernel must not read, it finds filled with NaN or absurd integers.

Floats become NaN, integers a huge negative number that faults or is refused when used as an index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP8_NAN = 0x7F  # NaN in both formats


def poison_(x: Tensor) -> Tensor:
    """Fills ``x`` in place; any dtype but bool."""
    if x.dtype in _FP8_TYPES:
        x.view(torch.uint8).fill_(_FP8_NAN)
    elif x.dtype.is_floating_point:
        x.fill_(float("nan"))
    elif x.dtype == torch.bool:
        raise ValueError("A bool tensor has no value that could mark it as unwritten.")
    else:
        info = torch.iinfo(x.dtype)
        x.fill_(info.min + 1 if info.min < 0 else info.max)
    return x


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new poisoned tensor."""
    return poison_(torch.empty(tuple(shape), dtype=dtype))


def is_poison(x: Tensor) -> Tensor:
    """Elements that still have the poison value, as a bool tensor of the shape of ``x``."""
    if x.dtype in _FP8_TYPES:
        return x.view(torch.uint8) == _FP8_NAN
    if x.dtype.is_floating_point:
        return torch.isnan(x)
    return x == poisoned((), x.dtype)


def poison_except_(pools: Iterable[Tensor], used: Iterable[int]) -> None:
    """Poisons every entry (page or slot, axis 0) of each pool that is not in ``used``, in place."""
    kept = set(used)
    for pool in pools:
        out_of_range = sorted(i for i in kept if not 0 <= i < pool.shape[0])
        if out_of_range:
            raise IndexError(
                f"Entries {out_of_range} are not in a pool of {pool.shape[0]} entries."
            )
        for index in range(pool.shape[0]):
            if index not in kept:
                poison_(pool[index])


def poison_tail_(pages: Tensor, table: Sequence[int], num_tokens: int) -> None:
    """Poisons the rows behind a request's length in its own pages, in place.

    pages [num_pages, page_tokens, width], table: the request's page numbers.
    """
    page_tokens = pages.shape[1]
    for position in range(num_tokens, len(table) * page_tokens):
        poison_(pages[table[position // page_tokens], position % page_tokens])
