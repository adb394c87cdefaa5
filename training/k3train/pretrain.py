"""Training of the target: batches of the corpus and needle items, balanced routers, loss.

Owns what a batch is and how the routers' correction biases follow the experts' loads. A step has
about the same number of tokens whether its sequences are short or long.
"""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from k3train.target import Target
from kdecode.eval.needles import needle
from kdecode.model.tokenizer import Tokenizer

STEP_TOKENS = 8192
SHORT_TOKENS, LONG_TOKENS = 512, 2304
# One step in so many has long sequences; one sequence in so many is a needle item.
LONG_EVERY, NEEDLE_EVERY = 4, 16
_BIAS_RATE = 1e-3
HELD_OUT_TOKENS = 32_768


class Batches:
    """Sequences by step: a function of the seed, the step and the texts."""

    def __init__(self, tokenizer: Tokenizer, stream: NDArray[np.uint16], seed: int) -> None:
        self._tokenizer, self._stream, self._seed = tokenizer, stream, seed

    def at(self, step: int) -> Tensor:
        """[B, T + 1] ids."""
        rng = random.Random(f"{self._seed}:{step}")
        tokens = LONG_TOKENS if step % LONG_EVERY == LONG_EVERY - 1 else SHORT_TOKENS
        rows = [self._sequence(rng, tokens + 1) for _ in range(STEP_TOKENS // tokens)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _sequence(self, rng: random.Random, length: int) -> NDArray[np.uint16]:
        start = rng.randrange(len(self._stream) - length)
        if rng.randrange(NEEDLE_EVERY):
            return self._stream[start : start + length]
        # The filler is cut so that the whole fits; the item ends the sequence.
        filler = self._stream[start : start + rng.randrange(16, length - 80)]
        item = needle(rng, self._tokenizer.decode(filler.tolist(), skip_special=True))
        ids = self._tokenizer.encode_text(f"{item.prompt}{item.answer}")
        before = self._stream[start + len(filler) :][: max(0, length - len(ids))]
        return np.concatenate([before, np.asarray(ids, dtype=np.uint16)])[-length:]


class Pretraining:
    """The learner of `k3train.run`."""

    def __init__(
        self, target: Target, batches: Batches, held_out: NDArray[np.uint16], held_out_bytes: float
    ) -> None:
        """held_out_bytes: bytes of text a held-out token stands for."""
        self._target, self._batches = target, batches
        usable = min(HELD_OUT_TOKENS, (len(held_out) - 1) // SHORT_TOKENS * SHORT_TOKENS)
        kept = torch.from_numpy(held_out[: usable + 1].astype(np.int64))
        self._held_out = kept.to(target.device)
        self._bytes_per_token = held_out_bytes

    def state(self) -> dict[str, Tensor]:
        return self._target.state()

    def load(self, state: dict[str, Tensor]) -> None:
        self._target.load(state)

    def step(self, step: int) -> dict[str, float]:
        batch = self._batches.at(step).to(self._target.device)
        forward = self._target(batch[:, :-1])
        loss = cross_entropy(forward.logits(), batch[:, 1:])
        loss.backward()
        return {"loss": float(loss.detach()), "imbalance": self._balance(forward.loads)}

    def _balance(self, loads: dict[str, Tensor]) -> float:
        """Moves every bias by one small step towards an even load; -> the largest share of even."""
        worst = 1.0
        for slot, load in loads.items():
            mean = load.float().mean()
            bias = self._target.router_bias[f"{slot}.router_bias"]
            bias += _BIAS_RATE * torch.sign(mean - load.float())
            worst = max(worst, float(load.max() / mean))
        return worst

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        inputs = self._held_out[:-1].view(-1, SHORT_TOKENS)
        labels = self._held_out[1:].view(-1, SHORT_TOKENS)
        total = 0.0
        for part, wanted in zip(inputs.split(8), labels.split(8), strict=True):
            mean = cross_entropy(self._target(part).logits(), wanted)
            total += float(mean) * part.shape[0] / inputs.shape[0]
        bits = total / np.log(2) / self._bytes_per_token
        return {"held_out_loss": total, "held_out_bits_per_byte": float(bits)}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())
