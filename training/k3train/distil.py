"""Training of the draft against the frozen target.

Owns the loss: each draft is to have the target's distribution at its place (cross-entropy), to lose
as little as possible of what verification accepts (half of their L1 distance), and its confidence
is to be the mass that would be accepted. Drafts count less the further they are from the anchor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3train.draft import Draft
from k3train.pretrain import SHORT_TOKENS, Batches
from k3train.target import Target

NUM_DRAFTS = 7
ROUNDS_PER_SEQUENCE = 96
_PLACE_DECAY = 0.8
_CONFIDENCE_WEIGHT = 0.1
_DISTANCE_WEIGHT = 1.0
# Rounds of the held-out figures; their anchors are the same every time.
_HELD_OUT_SEQUENCES = 16


class Distillation:
    """The learner of `k3train.run`."""

    def __init__(
        self, draft: Draft, target: Target, batches: Batches, held_out: Tensor, sequences: int
    ) -> None:
        """held_out [S, T] ids; sequences: of one step."""
        self._draft, self._target, self._batches = draft, target, batches
        self._held_out = held_out[:_HELD_OUT_SEQUENCES].to(target.device)
        self._sequences = sequences

    def state(self) -> dict[str, Tensor]:
        return self._draft.state()

    def load(self, state: dict[str, Tensor]) -> None:
        self._draft.load(state)

    def step(self, step: int) -> dict[str, float]:
        batch = self._batches.at(step).to(self._target.device)
        # Long sequences are cut, so that every step has the same number of rounds.
        ids = batch[:, : SHORT_TOKENS + 1].repeat(self._sequences, 1)[: self._sequences]
        losses, accepted = self._losses(ids, torch.Generator().manual_seed(step))
        torch.stack(list(losses.values())).sum().backward()
        figures = {name: float(value.detach()) for name, value in losses.items()}
        return {**figures, "accepted_length": expected_length(accepted)}

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        losses, accepted = self._losses(self._held_out, torch.Generator().manual_seed(0))
        return {
            "held_out_cross_entropy": float(losses["cross_entropy"]),
            "held_out_accepted_length": expected_length(accepted),
        }

    def _losses(self, ids: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """-> losses by name, and the mass accepted at each place [rounds, N]."""
        tokens, device = ids.shape[1], ids.device
        shape = (ids.shape[0], ROUNDS_PER_SEQUENCE)
        anchors = torch.randint(1, tokens - NUM_DRAFTS, shape, generator=generator).to(device)
        with torch.no_grad():
            seen = self._target(ids, taps=self._draft.config.taps)
            places = anchors.unsqueeze(-1) + torch.arange(NUM_DRAFTS, device=device)
            rows = places.flatten(1).unsqueeze(-1).expand(-1, -1, seen.hidden.shape[-1])
            hidden = seen.hidden.gather(1, rows).view(*places.shape, -1)
            wanted = torch.softmax(seen.logits(hidden).float(), dim=-1)
            taps = torch.stack([seen.taps[layer] for layer in self._draft.config.taps], dim=2)
        rounds = self._draft(taps, ids, anchors, NUM_DRAFTS)
        log_drafts = torch.log_softmax(rounds.logits.float(), dim=-1)
        weight = _PLACE_DECAY ** torch.arange(NUM_DRAFTS, device=device)
        weight = weight / weight.sum()
        entropy = -(wanted * log_drafts).sum(-1)
        overlap = torch.minimum(wanted, log_drafts.exp()).sum(-1)
        confidence = F.binary_cross_entropy_with_logits(
            rounds.confidence.float(), overlap.detach(), reduction="none"
        )
        losses = {
            "cross_entropy": (entropy * weight).sum(-1).mean(),
            "distance": _DISTANCE_WEIGHT * ((1 - overlap) * weight).sum(-1).mean(),
            "confidence": _CONFIDENCE_WEIGHT * (confidence * weight).sum(-1).mean(),
        }
        return losses, overlap.detach().flatten(0, -2)


def expected_length(accepted: Tensor) -> float:
    """Mean tokens of a round, the target's own included. accepted [rounds, N] probabilities."""
    return float(1 + accepted.cumprod(-1).sum(-1).mean())
