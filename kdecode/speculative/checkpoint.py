"""A copy of the recurrent state of some KDA slots, to go back to when drafts are rejected.

Owns the memory of the copies: as many slots again as may speculate at once. The convolution windows
and the recurrent states are one thing here, so that neither can be restored without the other. MLA
pages need none: later tokens overwrite them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.cache.caches import Caches


class SlotCheckpoints:
    """One place for each slot of the caches; what was saved stays until it is saved again."""

    def __init__(self, caches: Caches) -> None:
        self._live = (*caches.conv.values(), *caches.recurrent.values())
        self._saved = tuple(torch.empty_like(tensor) for tensor in self._live)
        # Tokens that the saved state of a slot has seen.
        self._num_tokens: dict[int, int] = {}

    def save(self, slot: int, num_tokens: int) -> None:
        """Keeps the state of a slot, which has seen so many tokens."""
        self._copy(self._live, self._saved, slot)
        self._num_tokens[slot] = num_tokens

    def restore(self, slot: int, num_tokens: int) -> None:
        """Puts it back. Raises LookupError unless that very state was saved."""
        found = self._num_tokens.get(slot)
        if found != num_tokens:
            raise LookupError(
                f"KDA slot {slot} should go back to its state after {num_tokens} tokens; the saved "
                f"one is {'absent' if found is None else f'that after {found}'}."
            )
        self._copy(self._saved, self._live, slot)

    def forget(self, slot: int) -> None:
        """For a slot whose request has ended: its state is nobody's."""
        self._num_tokens.pop(slot, None)

    @staticmethod
    def _copy(source: tuple[Tensor, ...], target: tuple[Tensor, ...], slot: int) -> None:
        for old, new in zip(source, target, strict=True):
            new[slot].copy_(old[slot])
