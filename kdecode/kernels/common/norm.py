"""RMSNorm in torch: fp32 statistics and weight, one rounding."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., M] bf16, weight [M] fp32 -> bf16."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(torch.bfloat16)
