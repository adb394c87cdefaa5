"""exchange: every rank's block of parts goes to all of them (`common/rank_parts.py`).

It covers no stage and computes nothing: the step behind it, `rank_whole`, makes the values whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdecode.kernels.common.rank_parts import Part, Place
from kdecode.kernels.contract import OpContract, Tolerance


@dataclass(frozen=True)
class ExchangeUse:
    """Which of the plan's exchanges."""

    place: Place


def contract_of(parts: tuple[Part, ...]) -> OpContract:
    """Of the exchange of these parts."""
    return OpContract(
        name="exchange",
        covers=(),
        reads=tuple(part.buffer for part in parts),
        writes=(),
        mutates=(),
        tolerance=Tolerance(rtol=0.0, atol=0.0, rms_ratio=0.0),
    )


CONTRACT = contract_of(())
