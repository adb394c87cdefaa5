"""kda_commit in torch: one slot of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.kernels.common.step import RowEffects


def move(window: Tensor, state: Tensor, rows: RowEffects, kept: int) -> None:
    """window [W - 1, 3D] and state [H, K, V], in place, past the first ``kept`` rows."""
    samples = torch.cat([window, rows.samples[:kept]])
    window.copy_(samples[kept:])
    keys, decays, corrections = (x[:kept] for x in (rows.keys, rows.decays, rows.corrections))
    total = decays.sum(0)
    # The decay that came after a row; no exponent is above 0.
    later = (total - decays.cumsum(0)).exp_()
    state.mul_(total.exp_().unsqueeze(-1))
    state.baddbmm_((later * keys).permute(1, 2, 0), corrections.transpose(0, 1))
