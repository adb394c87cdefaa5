"""The native convolution against its definition in fp64."""

from __future__ import annotations

import pytest
import torch

from kdecode.kernels.kda_conv import native
from kdecode.testing.compare import bit_equal


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (4, 9), (40,)])
@pytest.mark.parametrize("channels", [48, 700])
def test_convolution_and_window(isa: str, sizes: tuple[int, ...], channels: int) -> None:
    """Requests cut anywhere, columns of a wider buffer, more channels than one block has."""
    generator = torch.Generator().manual_seed(channels)
    proj = torch.randn(sum(sizes), channels + 32, generator=generator).bfloat16()
    window = torch.randn(3, channels, generator=generator).bfloat16()
    taps = torch.randn(4, channels, generator=generator)
    raw = proj[:, :channels]
    samples = torch.cat([window, raw])
    gold = sum(samples[j : j + len(raw)].double() * taps[j].double() for j in range(4))
    gold = gold * torch.sigmoid(gold)
    outs = [native.convolve(part, window, taps, isa) for part in raw.split(sizes)]
    error = (torch.cat(outs).double() - gold).abs()
    assert bool((error <= gold.abs() * 2.0**-8 + 1e-5).all())
    bit_equal(window, samples[-3:], "window")


def test_what_does_not_fit_is_refused() -> None:
    taps, window = torch.zeros(4, 16), torch.zeros(3, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="neighbouring bf16 columns"):
        native.convolve(torch.zeros(5, 16), window, taps)
    with pytest.raises(ValueError, match="its shape is"):
        native.convolve(torch.zeros(5, 8, dtype=torch.bfloat16), window, taps)
    assert native.takes(4)
    assert not native.takes(3)
