"""Muon for the matrices within layers, AdamW for everything else, and the learning rate's course.

Muon (https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by the nearest
orthogonal matrix; scaled to the size of an AdamW step (arXiv 2502.16982), one rate serves both.
torch.optim has it for single matrices only; experts are stacks, which this one takes whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Coefficients of the fifth-order iteration of the published method.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_RMS_OF_ADAM = 0.2
# Tables and tables' likes: rows are looked up or scored one by one.
_NOT_MUON = ("embed", "lm_head", "markov_in", "markov_out", "router", "confidence.proj")


class Optimiser:
    """Steps the parameters by slot; gradients are cleared by `step`."""

    def __init__(self, parameters: Mapping[str, Tensor], weight_decay: float = 0.05) -> None:
        self._muon = {
            slot: tensor
            for slot, tensor in parameters.items()
            if tensor.dim() >= 2 and not slot.endswith((*_NOT_MUON, "_conv"))
        }
        self._momentum = {slot: torch.zeros_like(tensor) for slot, tensor in self._muon.items()}
        self._decay = weight_decay
        rest = [tensor for slot, tensor in parameters.items() if slot not in self._muon]
        tables = [tensor for tensor in rest if tensor.dim() >= 2]
        vectors = [tensor for tensor in rest if tensor.dim() < 2]
        self._adam = torch.optim.AdamW(
            [
                {"params": tables, "weight_decay": weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=(0.9, 0.95),
        )
        self._all = list(parameters.values())

    def step(self, rate: float, clip: float = 1.0) -> float:
        """One update; -> the norm of the gradient before it was clipped."""
        norm = torch.nn.utils.clip_grad_norm_(self._all, clip)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        with torch.no_grad():
            for slot, tensor in self._muon.items():
                self._step_muon(slot, tensor, rate)
        for tensor in self._all:
            tensor.grad = None
        return float(norm)

    def _step_muon(self, slot: str, tensor: Tensor, rate: float) -> None:
        if tensor.grad is None:
            return
        momentum = self._momentum[slot].lerp_(tensor.grad, 0.05)
        update = orthogonal(tensor.grad.lerp(momentum, 0.95))
        size = _RMS_OF_ADAM * max(tensor.shape[-2:]) ** 0.5
        tensor.mul_(1 - rate * self._decay).add_(update, alpha=-rate * size)

    def state(self) -> dict[str, Any]:
        return {"momentum": self._momentum, "adam": self._adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        for slot, tensor in state["momentum"].items():
            self._momentum[slot].copy_(tensor)
        self._adam.load_state_dict(state["adam"])


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly the nearest matrix [..., out, in] with orthonormal rows or columns."""
    a, b, c = _NEWTON_SCHULZ
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x


def rate_at(step: int, steps: int, peak: float, warm_up: int, decay_share: float) -> float:
    """Linear rise, plateau, linear fall over the last share of the steps, if there is one."""
    rise = (step + 1) / warm_up
    fall = (steps - step) / (decay_share * steps) if decay_share else 1.0
    return peak * min(1.0, rise, fall)
