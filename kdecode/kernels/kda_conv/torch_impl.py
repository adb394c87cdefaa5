"""kda_conv in torch: requests with one row together, the others one by one, no loop over tokens.

On a CPU the rows of a prompt take the native convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kdecode.kernels.common.step import RequestSpan
from kdecode.kernels.contract import Buffers, Prepared, Problem

# (raw, window, taps, isa) -> the convolution of one request's rows; the window is moved.
Convolution = Callable[[Tensor, Tensor, Tensor, str | None], Tensor]


def refuse(problem: Problem) -> list[str]:
    return []


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed KDA layer."""
    assert problem.layer is not None
    prompt = _native_convolution(weights.conv)
    return _Conv(weights.conv, buffers.caches.conv[problem.layer], prompt, buffers)


def _native_convolution(taps: Tensor) -> Convolution | None:
    """Where there is one."""
    if taps.device.type != "cpu":
        return None
    from kdecode.kernels.kda_conv import native

    return native.convolve if native.takes(taps.shape[0]) else None


@dataclass(frozen=True)
class _Conv:
    taps: Tensor  # [W, 3D] fp32, newest last
    windows: Tensor  # [slots, W - 1, 3D] bf16
    prompt: Convolution | None
    buffers: Buffers

    def run(self) -> None:
        step = self.buffers.step
        raw = self.buffers["kda_proj"][:, : self.taps.shape[1]]
        if not step.multi:
            self.buffers["kda_qkv"] = self._single(raw, step.single_slots)
            return
        out = raw.new_empty(raw.shape)
        if step.single:
            rows = step.single_rows
            out.index_copy_(0, rows, self._single(raw[rows], step.single_slots))
        for span in step.multi:
            out[span.first : span.last] = self._span(raw[span.first : span.last], span)
        self.buffers["kda_qkv"] = out

    def _single(self, raw: Tensor, slots: Tensor) -> Tensor:
        """One row of each request. raw [R, 3D] -> [R, 3D]."""
        samples = torch.cat([self.windows.index_select(0, slots), raw.unsqueeze(1)], dim=1)
        self.windows.index_copy_(0, slots, samples[:, 1:])
        convolved = (samples.float() * self.taps).sum(1)  # [R, W, 3D]
        return F.silu(convolved, inplace=True).to(raw.dtype)

    def _span(self, raw: Tensor, span: RequestSpan) -> Tensor:
        """The rows of one request. raw [T, 3D] -> [T, 3D]."""
        window, tokens = self.windows[span.slot], raw.shape[0]
        if self.prompt is not None and not span.is_verify:
            return self.prompt(raw, window, self.taps, self.buffers.products.isa)
        samples = torch.cat([window, raw])
        if not span.is_verify:
            window.copy_(samples[tokens:])
        convolved = samples[:tokens] * self.taps[0]
        for tap in range(1, self.taps.shape[0]):
            convolved.addcmul_(samples[tap : tap + tokens].float(), self.taps[tap])
        return F.silu(convolved, inplace=True).to(raw.dtype)
