"""What every Triton kernel relies on: fp32 becomes the nearest bf16, ties to even."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def narrowed(source, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at).to(tl.bfloat16))


def test_fp32_is_rounded_to_the_nearest_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator) * torch.randn(4096, generator=generator).exp2()
    special = [float("nan"), float("inf"), -float("inf"), 3.4e38, 1e-41, -0.0, 1.00390625]
    x[: len(special)] = torch.tensor(special)
    out = torch.empty(4096, dtype=torch.bfloat16, device=DEVICE)
    narrowed[(1,)](x.to(DEVICE), out, 4096)
    assert bool(out[0].isnan())
    assert torch.equal(out.cpu()[1:].view(torch.int16), x.bfloat16()[1:].view(torch.int16))
