"""Native steps that exchange values with other ranks: what they exchange, and running them.

Owns what they exchange, and the error of an exchange that failed: native steps cannot raise, so
that after each run the exchange is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kdecode.config import ModelConfig
from kdecode.decode.plan import Step
from kdecode.kernels.common.fused import part_bytes
from kdecode.kernels.common.native import SharedExchange
from kdecode.model.rank_share import Exchanged, context_exchanges, covered_exchanges
from kdecode.parallel.shared import exchange_error


def step_exchanges(
    config: ModelConfig, size: int, op: str, covers: Sequence[str], *, shares_context: bool
) -> tuple[tuple[Exchanged, ...], ...]:
    """What the ranks exchange in a native step, an exchange each. config: of one rank's share.

    shares_context: whether each has some of a request's positions.
    """
    if size == 1:
        return ()
    if op == "mla_front" and shares_context:
        # The largest score, and the sum of exponentials.
        return context_exchanges(config, size, 2)
    if op == "embed":
        # The rank that has a token's row shows it; nothing is added.
        return ((Exchanged("gather", "prefix", 2 * config.hidden_size),),)
    return covered_exchanges(config, size, covers)


def most_exchanged(exchanges: Sequence[Sequence[Exchanged]], rows: int) -> int:
    """Bytes of the largest part that a rank gives in one of these."""
    parts = [part_bytes(rows * value.row_bytes for value in values) for values in exchanges]
    return max(parts, default=0)


@dataclass(frozen=True)
class SharedRun:
    """Runs steps begin .. end - 1 of a program. Raises RankError where an exchange has failed.

    run: of the program. steps: those that were prepared, so that what they are bound to is kept.
    """

    shared: SharedExchange
    run: Callable[[int, int], None]
    steps: tuple[Step, ...]

    def __call__(self, begin: int, end: int) -> None:
        first = self.shared.number
        if self.shared.failure is None:
            self.run(begin, end)
        if self.shared.failure is not None:
            self._raise(first, self.steps[begin:end])

    def _raise(self, first: int, steps: Sequence[Step]) -> None:
        names = [exchange_name(step, values) for step in steps for values in step.exchanges]
        failure = self.shared.failure
        assert failure is not None
        number = (failure.number - first) % 2**32
        place = f"in {names[number]}" if number < len(names) else f"in exchange {failure.number}"
        raise exchange_error(self.shared, place)


def exchange_name(step: Step, values: Sequence[Exchanged]) -> str:
    """An exchange as messages name it."""
    layer = "" if step.layers[0] is None else f" of layer {step.layers[0]}"
    return f"the exchange of {' and '.join(value.value for value in values)}{layer}"
