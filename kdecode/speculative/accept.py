"""Verification: which drafts are accepted, and the distribution of the token after them.

Pure functions on probability rows, batched over B rounds, in fp64. `verify` at the end decides one
round. Knows no model, cache or sampling parameter: the rows come in processed (temperature, top-k,
top-p, penalties). Every function takes

    p       [B, N + 1, vocab]   target; row i is the distribution after i drafts
    drafts  [B, N]              token ids, -1 behind the drafts of a shorter round
    q       [B, N, vocab]       the distribution each draft was drawn from, or None for one-hot

Standard: draft i is accepted with probability min(p_i / q_i, 1), after all before it. Block
(arXiv 2403.10444): the run is judged as a whole; never fewer are accepted in expectation. Both
emit tokens that are distributed exactly as the target's. Synthetic: accepted at stated rates.

Where the standard and the block form leave no residual for the extra token, which exact arithmetic
excludes after a true rejection, and synthetic rejection does not, the token is the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kdecode.speculative.streams import Streams
from kdecode.speculative.types import Proposal, Verdict

ExactMethod = Literal["standard", "block"]


@dataclass(frozen=True)
class Accepted:
    """count [B]: accepted drafts. weight [B]: of the target's row in the extra token's residual."""

    count: Tensor
    weight: Tensor


def num_drafts(drafts: Tensor) -> Tensor:
    """Drafts of each round [B]. Raises ValueError unless -1 stands only behind them."""
    is_real = drafts >= 0
    count = is_real.sum(-1)
    if not torch.equal(is_real, torch.arange(drafts.shape[-1]) < count.unsqueeze(-1)):
        raise ValueError("A draft stands behind a -1, which ends the drafts of its round.")
    return count


def chances(p: Tensor, drafts: Tensor, q: Tensor | None) -> Tensor:
    """p_i(d_i) / q_i(d_i) of each draft, [B, N]; 0 for padding.

    Infinite where a draft has no probability of its own, which no drawn draft has.
    """
    is_real = drafts >= 0
    ids = drafts.clamp_min(0).unsqueeze(-1)
    target = p[:, :-1].gather(-1, ids).squeeze(-1).double()
    if q is not None:
        own = q.gather(-1, ids).squeeze(-1).double()
        # 0 / 0 is a draft that neither would choose: rejected.
        target = torch.where(target > 0, target / own, target)
    return torch.where(is_real, target, torch.zeros_like(target))


def run_weights(p: Tensor, drafts: Tensor, q: Tensor | None) -> Tensor:
    """r_0 = 1, r_i = min(r_{i-1} p_i(d_i) / q_i(d_i), 1) of block verification, [B, N + 1]."""
    ratio = chances(p, drafts, q)
    weights = [torch.ones_like(p[:, 0, 0], dtype=torch.float64)]
    for place in range(drafts.shape[-1]):
        weights.append((weights[-1] * ratio[:, place]).clamp_max(1.0))
    return torch.stack(weights, dim=-1)


def run_chances(p: Tensor, drafts: Tensor, q: Tensor | None) -> Tensor:
    """h_i of block verification, that a run of i drafts is accepted unless a longer one is; [B, N].

    h_i = m / (m + 1 - r_i), m the mass of the residual behind the run; the last run has r. 0 for
    padding.
    """
    weights = run_weights(p, drafts, q)[:, 1:]
    count = num_drafts(drafts)
    runs = []
    for place in range(drafts.shape[-1]):
        weight = weights[:, place]
        length = torch.full_like(count, place + 1)
        mass = residual(p, drafts, q, Accepted(length, weight)).sum(-1)
        spare = mass + 1 - weight
        # 0 / 0: nothing of the run was uncertain.
        run = torch.where(spare > 0, mass / spare, torch.ones_like(mass))
        run = torch.where(count == place + 1, weight, run)
        runs.append(torch.where(count > place, run, torch.zeros_like(run)))
    return torch.stack(runs, dim=-1) if runs else weights


def residual(p: Tensor, drafts: Tensor, q: Tensor | None, accepted: Accepted) -> Tensor:
    """max(weight * p - q, 0) behind the accepted run, [B, vocab], not normalised.

    q is 0 behind the last draft, where the row is the target's own.
    """
    count = accepted.count
    batch = torch.arange(p.shape[0])
    rows = p[batch, count.clamp_max(p.shape[1] - 1)].double() * accepted.weight.unsqueeze(-1)
    is_rejected = count < num_drafts(drafts)
    if not bool(is_rejected.any()):
        return rows
    place = count.clamp_max(drafts.shape[1] - 1)
    if q is None:
        ids = drafts[batch, place].clamp_min(0)
        own = torch.zeros_like(rows).scatter_(1, ids.unsqueeze(-1), 1.0)
    else:
        own = q[batch, place].double()
    return torch.where(is_rejected.unsqueeze(-1), (rows - own).clamp_min(0.0), rows)


def accept_standard(p: Tensor, drafts: Tensor, q: Tensor | None, uniforms: Tensor) -> Accepted:
    """The leading drafts with u < p / q. uniforms [B, N] of [0, 1)."""
    holds = uniforms < chances(p, drafts, q)
    count = holds.long().cumprod(-1).sum(-1)
    return Accepted(count, torch.ones_like(p[:, 0, 0], dtype=torch.float64))


def accept_block(p: Tensor, drafts: Tensor, q: Tensor | None, uniforms: Tensor) -> Accepted:
    """The longest run i with u_i < h_i. uniforms [B, N] of [0, 1)."""
    holds = uniforms < run_chances(p, drafts, q)
    lengths = torch.arange(1, drafts.shape[-1] + 1)
    count = (holds * lengths).amax(-1) if lengths.numel() else num_drafts(drafts)
    weight = run_weights(p, drafts, q).gather(-1, count.unsqueeze(-1)).squeeze(-1)
    return Accepted(count, weight)


def conditional_rates(rates: Sequence[float]) -> list[float]:
    """How often draft i holds once all before it do, from how often it and all before it do."""
    before = [1.0, *rates]
    return [rate / last if last > 0 else 0.0 for rate, last in zip(rates, before, strict=False)]


def accept_synthetic(drafts: Tensor, rates: Sequence[float], uniforms: Tensor) -> Accepted:
    """The leading drafts with u_i < rate_i / rate_{i-1}; padding never holds. uniforms [B, N]."""
    limits = torch.tensor(conditional_rates(rates[: drafts.shape[-1]]), dtype=torch.float64)
    num_drafts(drafts)
    holds = (uniforms < limits) & (drafts >= 0)
    count = holds.long().cumprod(-1).sum(-1)
    return Accepted(count, torch.ones(drafts.shape[0], dtype=torch.float64))


def accept_greedy(best: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """best [B, N + 1], the target's first choice of each row -> accepted [B], token [B]."""
    num_drafts(drafts)
    count = (drafts == best[:, :-1]).long().cumprod(-1).sum(-1)
    return count, best.gather(-1, count.unsqueeze(-1)).squeeze(-1)


def draw(rows: Tensor, uniforms: Tensor) -> Tensor:
    """A token of each row [B, vocab] of weights, by the inverse of its sums. uniforms [B]."""
    weights = rows.double()
    sums = weights.cumsum(-1)
    total = sums[:, -1]
    if not bool((torch.isfinite(total) & (total > 0)).all()):
        raise ValueError(f"Tokens cannot be drawn from weights with the sums {total.tolist()}.")
    token = torch.searchsorted(sums, (uniforms * total).unsqueeze(-1), right=True).squeeze(-1)
    # A product that is rounded up to the total would point behind the last token with weight.
    positions = torch.arange(weights.shape[-1])
    last = torch.where(weights > 0, positions, torch.zeros_like(positions)).amax(-1)
    return torch.minimum(token, last)


def extra_tokens(
    p: Tensor, drafts: Tensor, q: Tensor | None, accepted: Accepted, uniforms: Tensor
) -> Tensor:
    """The token behind the accepted run of each round [B]. uniforms [B]."""
    rows = residual(p, drafts, q, accepted)
    own = p[torch.arange(p.shape[0]), accepted.count].double()
    is_empty = ~(rows.sum(-1, keepdim=True) > 0)
    return draw(torch.where(is_empty, own, rows), uniforms)


def verify(
    proposal: Proposal,
    target: Tensor,
    streams: Streams,
    method: ExactMethod = "standard",
    rates: Sequence[float] | None = None,
) -> Verdict:
    """Decides one round of a request that samples. target: p [N + 1, vocab].

    rates: of the synthetic method, which then stands in for ``method``.
    """
    count = proposal.num_drafts
    if target.shape[0] != count + 1:
        raise ValueError(f"{count} drafts need {count + 1} rows; the target has {target.shape[0]}.")
    if streams.anchor_position != proposal.anchor_position:
        raise ValueError(
            f"The random numbers are of the round at {streams.anchor_position}, the proposal of "
            f"the one at {proposal.anchor_position}."
        )
    p = target.double().unsqueeze(0)
    drafts = torch.tensor(proposal.drafts, dtype=torch.long).view(1, count)
    q = None if proposal.probabilities is None else proposal.probabilities.unsqueeze(0)
    uniforms = torch.tensor([streams.uniforms("accept", count)], dtype=torch.float64)
    if rates is not None:
        accepted = accept_synthetic(drafts, rates, uniforms)
    elif method == "standard":
        accepted = accept_standard(p, drafts, q, uniforms)
    else:
        accepted = accept_block(p, drafts, q, uniforms)
    extra = torch.tensor([streams.uniform("extra")], dtype=torch.float64)
    token = int(extra_tokens(p, drafts, q, accepted, extra))
    return Verdict(int(accepted.count), token, count, is_synthetic=rates is not None)


def verify_greedy(
    proposal: Proposal,
    best: Sequence[int],
    streams: Streams,
    rates: Sequence[float] | None = None,
) -> Verdict:
    """Decides one round of a greedy request. best: the target's first choice of each row, N + 1.

    The same whatever the exact method is. rates: of the synthetic method.
    """
    count = proposal.num_drafts
    if len(best) != count + 1:
        raise ValueError(f"{count} drafts need {count + 1} rows; the target has {len(best)}.")
    drafts = torch.tensor(proposal.drafts, dtype=torch.long).view(1, count)
    if rates is None:
        accepted, token = accept_greedy(torch.tensor([list(best)]), drafts)
        return Verdict(int(accepted), int(token), count)
    uniforms = torch.tensor([streams.uniforms("accept", count)], dtype=torch.float64)
    held = int(accept_synthetic(drafts, rates, uniforms).count)
    return Verdict(held, best[held], count, is_synthetic=True)
