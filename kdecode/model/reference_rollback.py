"""Taking back rows of a step that were not accepted: the deferred form, in plain torch.

A step over N + 1 rows keeps the states it started from and, for each row of a KDA layer, what
the row did: its key k, its decay g and its correction u (`delta_rule_chunk`), and its raw sample.
With m rows accepted the state is

    S_m = e^{sum of g_1..m} S_0 + sum over t <= m of (e^{sum of g_t+1..m} k_t) u_t^T

which is the recurrence, solved; nothing is run again. The window moves by m samples, and MLA rows
are cut off. One number m serves every layer. Functions read the first m rows only, so that what
lies behind them may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kdecode.config import KdaConfig, ModelConfig
from kdecode.model.reference import RequestState
from kdecode.model.reference_common import Rounding
from kdecode.model.reference_kda import delta_rule_chunk, kda_heads


class Corrections(NamedTuple):
    """What each row of a step did to the state of one KDA layer; all wide."""

    k: Tensor  # [T, H, K], normalised
    g: Tensor  # [T, H, K]
    u: Tensor  # [T, H, V]


def corrections(
    config: KdaConfig, kda_qkv: Tensor, g: Tensor, beta: Tensor, state: Tensor, rounding: Rounding
) -> Corrections:
    """From the inputs of `kda_step` and the state [H, K, V] that they met."""
    heads = kda_heads(config, kda_qkv, rounding)
    g, beta = rounding.wide(g), rounding.wide(beta)
    _, u, _ = delta_rule_chunk(*heads, g, beta, state=rounding.wide(state))
    return Corrections(heads.k, g, u)


def state_after(state: Tensor, rows: Corrections, kept: int) -> Tensor:
    """The state [H, K, V] after the first ``kept`` rows, from the one before them."""
    _check_kept(kept, rows.u.shape[0])
    k, g, u = (x[:kept] for x in rows)
    total = g.cumsum(0)
    # The decay that came after a row: each difference is <= 0, so that nothing overflows.
    later = (g.sum(0) - total).exp()
    return g.sum(0).exp().unsqueeze(-1) * state + torch.einsum("thk,thv->hkv", later * k, u)


def window_after(window: Tensor, samples: Tensor, kept: int) -> Tensor:
    """The convolution window [W - 1, 3D] after the first ``kept`` raw samples [T, 3D]."""
    _check_kept(kept, samples.shape[0])
    width = window.shape[0]
    return torch.cat([window, samples[:kept].to(window.dtype)])[-width:]


@dataclass
class StepRecord:
    """What one step of one request did, layer by layer: pass `on_kda` to its `Options`."""

    config: ModelConfig
    before: RequestState
    rounding: Rounding
    rows: dict[int, Corrections] = field(default_factory=dict)
    samples: dict[int, Tensor] = field(default_factory=dict)

    def on_kda(
        self, layer: int, kda_proj: Tensor, kda_qkv: Tensor, g: Tensor, beta: Tensor
    ) -> None:
        kda, state = self.config.kda, self.before.recurrent[layer]
        self.rows[layer] = corrections(kda, kda_qkv, g, beta, state, self.rounding)
        self.samples[layer] = kda_proj[:, : 3 * kda.width]

    def keep(self, after: RequestState, kept: int) -> RequestState:
        """The request's state with the first ``kept`` rows of the step; ``after``: with all."""
        before = self.before
        end = before.num_tokens + kept
        _check_kept(kept, after.num_tokens - before.num_tokens)
        result = before.clone()
        result.num_tokens = end
        for layer, state in before.recurrent.items():
            result.recurrent[layer] = state_after(state, self.rows[layer], kept)
            window = before.windows[layer]
            result.windows[layer] = window_after(window, self.samples[layer], kept)
        for layer, rows in after.rows.items():
            result.rows[layer] = rows[:end]
        return result


def _check_kept(kept: int, rows: int) -> None:
    if not 0 <= kept <= rows:
        raise ValueError(f"{kept} of {rows} rows cannot be kept.")
