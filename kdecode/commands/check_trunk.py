"""`kdecode check --trunk-format`: what a trunk of integers costs, in the distributions it gives.

Owns the comparison of one engine with itself on the checkpoint's own weights: same tokens, same
kernels but for the format. The other checks do not apply, because their reference has the
checkpoint's weights. A cost is no error, so it has no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from kdecode.commands.common import weights_note, write_json
from kdecode.config import DecodeBackend, EngineConfig

if TYPE_CHECKING:
    from torch import Tensor

    from kdecode.bench.peers import Divergence

# Logits of every sequence, [positions, vocab] each.
Run = Callable[[EngineConfig], Sequence["Tensor"]]


@dataclass(frozen=True)
class TrunkCost:
    """divergence: KL(the checkpoint's weights || integers)."""

    trunk_format: str
    divergence: Divergence

    def document(self) -> dict[str, Any]:
        return {
            "trunk_format": self.trunk_format,
            "weights_differ_from_checkpoint": True,
            "divergence": asdict(self.divergence),
        }

    def report(self, config: EngineConfig) -> str:
        found = self.divergence
        return (
            f"{weights_note(config)}\n"
            f"KL from the released weights, same tokens, {found.positions} positions: "
            f"{found.mean:.2e} nats (largest {found.largest:.2e}); "
            f"{found.same_choice} of {found.positions} same choices\n"
            "the steps are not checked: their reference has the checkpoint's weights"
        )


def backends(trunk_format: str) -> tuple[DecodeBackend, ...]:
    """Those that have such a trunk."""
    return get_args(DecodeBackend) if trunk_format == "bf16" else ("latency_specialized",)


def run(is_json: bool, config: EngineConfig, logits: Run) -> int:
    """Prints the cost; the command's exit code."""
    cost = trunk_cost(config, logits)
    if is_json:
        write_json(cost.document(), "-")
    else:
        print(cost.report(config))
    return 0


def trunk_cost(config: EngineConfig, run: Run) -> TrunkCost:
    """Runs the engine twice, one after the other, so that only one model is in memory."""
    from kdecode.bench.peers import divergence

    exact, changed = (
        np.concatenate([logits.float().numpy() for logits in run(each)])
        for each in (replace(config, trunk_format="bf16"), config)
    )
    return TrunkCost(config.trunk_format, divergence(exact, changed))
