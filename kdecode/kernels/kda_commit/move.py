"""kda_commit in torch, for the standard path: one slot of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.kernels.common.step import RowEffects


def move(window: Tensor, state: Tensor, rows: RowEffects, kept: int) -> None:
    """window [W - 1, 3D] and state [H, K, V], in place, past the first ``kept`` rows."""
    samples = torch.cat([window, rows.samples[:kept]])
    window.copy_(samples[kept:])
    keys, decays, corrections = (x[:kept] for x in (rows.keys, rows.decays, rows.corrections))
    # Decay from each row on, summed from the last row: differences of sums would lose digits.
    since = decays.flip(0).cumsum(0).flip(0).exp_()  # no exponent is above 0
    later = torch.cat([since[1:], torch.ones_like(since[:1])])
    state.mul_(since[0].unsqueeze(-1))
    state.baddbmm_(later.mul_(keys).permute(1, 2, 0), corrections.transpose(0, 1))
