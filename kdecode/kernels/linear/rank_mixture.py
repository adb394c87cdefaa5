"""The values of a mixture of experts that its ranks exchange, as few times as they depend on.

What reads the same input travels together: router logits beside latents, the experts' sums beside
those of the shared experts. An exchange takes longer for being one than for its bytes, of a few
rows. Owns the products around the experts themselves, for every implementation of `route` and
`experts`; sums have the order of the ranks and one rounding, as those of an exchange of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdecode.kernels.common.activation import make_gated
from kdecode.kernels.common.norm import rms_norm
from kdecode.kernels.contract import Buffers, Exchange, Problem
from kdecode.kernels.linear.product import Linear, make_linear
from kdecode.kernels.linear.ranked import exchange_of, make_gathered


@dataclass(frozen=True)
class Gate:
    """The logits of all experts, fp32 [R, E]; of several ranks, each of which has some rows of the
    router, with them `latent` where there are latents."""

    router: Linear
    latent_down: Linear | None
    num_ranks: int
    buffers: Buffers

    def run(self) -> Tensor:
        x = self.buffers["mlp_in"]
        logits = self.router(x)
        if self.num_ranks == 1:
            return logits
        exchange = exchange_of(self.buffers)
        if self.latent_down is None:
            return exchange.gather(logits)
        parts = logits, self.latent_down(x)
        logits, self.buffers["latent"] = _gather_together(exchange, parts, self.num_ranks)
        return logits


def make_gate(mixture: Any, problem: Problem, buffers: Buffers) -> Gate:
    """mixture: the packed mixture of experts, or one rank's share of it."""
    latent_down = None
    if not problem.ranks.is_alone and mixture.latent_down is not None:
        latent_down = make_linear(mixture.latent_down, buffers.products)
    router = make_linear(mixture.router, buffers.products, torch.float32)
    return Gate(router, latent_down, problem.ranks.size, buffers)


@dataclass(frozen=True)
class MixtureEnd:
    """Of several ranks, what follows the experts: sums, the shared experts, the way up.

    shared: this rank's part of the shared experts, of the normed input; up: ``routed`` of the
    normed sums. None where a model has neither.
    """

    shared: Linear | None
    norm: Callable[[Tensor], Tensor]
    up: Linear | None
    buffers: Buffers

    def run(self, part: Tensor) -> None:
        """part: of the weighted sum of each row's experts, fp32 [R, L or M]."""
        buffers = self.buffers
        exchange = exchange_of(buffers)
        if self.shared is None:
            buffers["expert_sum"] = exchange.reduce(part)
        else:
            parts = part, self.shared(buffers["mlp_in"])
            buffers["expert_sum"], buffers["shared"] = _reduce_together(exchange, parts)
        if self.up is not None:
            buffers["routed"] = self.up(self.norm(buffers["expert_sum"]))


def make_mixture_end(mixture: Any, problem: Problem, buffers: Buffers) -> MixtureEnd | None:
    """mixture: one rank's share of the packed mixture of experts. None for a rank that is alone,
    whose steps behind the experts exchange nothing."""
    if problem.ranks.is_alone:
        return None
    shared, up = None, None
    if mixture.shared is not None:
        shared = _shared_part(mixture.shared, problem, buffers)
    if mixture.latent_up is not None:
        up = make_gathered(mixture.latent_up, problem, buffers)

    def norm(x: Tensor) -> Tensor:
        if mixture.latent_norm is None:
            return x
        return rms_norm(x, mixture.latent_norm, problem.config.rms_eps)

    return MixtureEnd(shared, norm, up, buffers)


def _shared_part(shared: Any, problem: Problem, buffers: Buffers) -> Linear:
    """[R, M] bf16 -> [R, M] fp32, unrounded."""
    gate_up = make_linear(shared.gate_up, buffers.products)
    activation = make_gated(problem.config.activation, shared.gate_up, buffers.products.isa)
    down = make_linear(shared.down, buffers.products, torch.float32)
    return lambda x: down(activation(gate_up(x)))


def _gather_together(exchange: Exchange, parts: Sequence[Tensor], size: int) -> list[Tensor]:
    """Parts [R, w], of dtypes of two bytes or four -> each [R, size * w]."""
    words = [part.view(torch.int16) for part in parts]
    widths = [part.shape[1] for part in words]
    rows = parts[0].shape[0]
    by_rank = exchange.gather(torch.cat(words, dim=1)).view(rows, size, sum(widths))
    return [
        piece.reshape(rows, size * width).view(part.dtype)
        for part, piece, width in zip(parts, by_rank.split(widths, dim=2), widths, strict=True)
    ]


def _reduce_together(exchange: Exchange, parts: Sequence[Tensor]) -> list[Tensor]:
    """Parts fp32 [R, w] -> the sum of each over the ranks, bf16 [R, w]."""
    # One behind the other, so that sums of several rows need no copy.
    line = torch.cat([part.reshape(1, part.numel()) for part in parts], dim=1)
    sums = exchange.reduce(line).split([part.numel() for part in parts], dim=1)
    return [whole.view(part.shape) for part, whole in zip(parts, sums, strict=True)]
