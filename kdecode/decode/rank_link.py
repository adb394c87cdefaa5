"""What a runner has to know of the other ranks of its model.

Owns the names, no behaviour: who the others are, what values are exchanged through, and what is to
happen around each step. A rank that is alone has no link.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kdecode.cache.batch import StepBatch
from kdecode.kernels.contract import Exchange
from kdecode.parallel.ranks import Ranks

# Told of the rows of `prefix` that a step has left, which are the same on every rank.
Compare = Callable[[Tensor], None]


class AroundStep(Protocol):
    """What happens around a step that is valid and about to run on every rank."""

    def __call__(self, batch: StepBatch) -> AbstractContextManager[Compare]:
        """On rank 0 the others are told to run it. Whatever breaks a step ends all of them."""
        ...


@dataclass(frozen=True)
class RankLink:
    """exchange: of the standard forward. shared: of the steps of plans; None without such steps."""

    ranks: Ranks
    exchange: Exchange
    shared: Any
    around_step: AroundStep
