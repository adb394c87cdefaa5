"""kda_conv in Triton: a launch for the requests with one row, and one for each other request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.step import RequestSpan
from kdecode.kernels.common.triton_delta import convolved, taps_at
from kdecode.kernels.common.triton_launch import Launch, divide_up, tensor_for
from kdecode.kernels.contract import Buffers, Prepared, Problem

CONV_WIDTH = 4
_BLOCK_C = 256
# The rows of one program of a span: the first has all that see the window, so no fewer than three.
_BLOCK_T = 16


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    taps = problem.config.kda.conv_width
    if taps == CONV_WIDTH:
        return []
    return [f"The KDA convolution has {CONV_WIDTH} taps in Triton; the model's has {taps}."]


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> Prepared:
    """weights: the packed KDA layer."""
    reasons = refuse(problem)
    if reasons:
        raise ValueError(" ".join(reasons))
    assert problem.layer is not None
    channels = 3 * problem.config.kda.width
    taps = tensor_for(weights.conv, torch.float32, (CONV_WIDTH, channels), name="The KDA taps")
    windows = buffers.caches.conv[problem.layer]
    shape = (windows.shape[0], CONV_WIDTH - 1, channels)
    return _Conv(taps, tensor_for(windows, torch.bfloat16, shape, name="conv"), buffers)


@dataclass(frozen=True)
class _Conv:
    taps: Tensor  # [4, 3D] fp32, newest last
    windows: Tensor  # [slots, 3, 3D] bf16
    buffers: Buffers

    def run(self) -> None:
        step, proj = self.buffers.step, self.buffers["kda_proj"]
        out = proj.new_empty(proj.shape[0], self.taps.shape[1])
        if step.single:
            self._single(proj, out, step.single_rows, step.single_slots).run()
        for span in step.multi:
            self._span(proj, out, span).run()
        self.buffers["kda_qkv"] = out

    def _single(self, proj: Tensor, out: Tensor, rows: Tensor, slots: Tensor) -> Launch:
        channels = self.taps.shape[1]
        block = min(_BLOCK_C, triton.next_power_of_2(channels))
        return Launch(
            _single,
            (divide_up(channels, block), rows.shape[0]),
            {"proj": proj, "windows": self.windows, "taps": self.taps, "out": out}
            | {"rows": rows, "slots": slots},
            {"COLUMNS": proj.stride(0), "CHANNELS": channels, "BLOCK_C": block},
        )

    def _span(self, proj: Tensor, out: Tensor, span: RequestSpan) -> Launch:
        channels = self.taps.shape[1]
        block = min(_BLOCK_C // 2, triton.next_power_of_2(channels))
        return Launch(
            _span,
            (divide_up(channels, block), divide_up(span.num_rows, _BLOCK_T)),
            {"proj": proj, "windows": self.windows, "taps": self.taps, "out": out}
            | {"first": span.first, "count": span.num_rows, "slot": span.slot},
            {"COLUMNS": proj.stride(0), "CHANNELS": channels, "BLOCK_C": block}
            | {"BLOCK_T": _BLOCK_T, "MOVES": not span.is_verify},
        )


@triton.jit
def _single(
    proj,
    windows,
    taps,
    out,
    rows,
    slots,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid: (blocks of channels, requests)."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < CHANNELS
    row = tl.load(rows + tl.program_id(1))
    window = windows + tl.load(slots + tl.program_id(1)) * (3 * CHANNELS) + c
    oldest = tl.load(window, mask=inside, other=0.0)
    second = tl.load(window + CHANNELS, mask=inside, other=0.0)
    third = tl.load(window + 2 * CHANNELS, mask=inside, other=0.0)
    newest = tl.load(proj + row * COLUMNS + c, mask=inside, other=0.0)
    y = convolved(oldest, second, third, newest, taps_at(taps + c, CHANNELS, inside))
    tl.store(out + row * CHANNELS + c, y.to(tl.bfloat16), mask=inside)
    # A channel is one thread's, which has read all of its samples.
    tl.store(window, second, mask=inside)
    tl.store(window + CHANNELS, third, mask=inside)
    tl.store(window + 2 * CHANNELS, newest, mask=inside)


@triton.jit(do_not_specialize=["first", "count", "slot"])
def _span(
    proj,
    windows,
    taps,
    out,
    first,
    count,
    slot,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MOVES: tl.constexpr,
):
    """Grid: (blocks of channels, blocks of rows). The first block of rows moves the window, which
    no other one reads.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_c = (c < CHANNELS)[None, :]
    in_t = (t < count)[:, None]
    raw = proj + first.to(tl.int64) * COLUMNS + c[None, :]
    window = windows + slot.to(tl.int64) * (3 * CHANNELS) + c[None, :]
    oldest = _samples(raw, window, t - 3, in_t, in_c, COLUMNS, CHANNELS)
    second = _samples(raw, window, t - 2, in_t, in_c, COLUMNS, CHANNELS)
    third = _samples(raw, window, t - 1, in_t, in_c, COLUMNS, CHANNELS)
    newest = _samples(raw, window, t, in_t, in_c, COLUMNS, CHANNELS)
    y = convolved(oldest, second, third, newest, taps_at(taps + c[None, :], CHANNELS, in_c))
    to = out + (first + t).to(tl.int64)[:, None] * CHANNELS + c[None, :]
    tl.store(to, y.to(tl.bfloat16), mask=in_t & in_c)
    if (tl.program_id(1) == 0) & MOVES:
        # One row more than there are: a block has a power of two.
        place = tl.arange(0, 4)
        in_window = (place < 3)[:, None]
        last = _samples(raw, window, count - 3 + place, in_window, in_c, COLUMNS, CHANNELS)
        tl.debug_barrier()
        tl.store(window + place[:, None] * CHANNELS, last, mask=in_window & in_c)


@triton.jit
def _samples(raw, window, place, in_t, in_c, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr):
    """Samples at places after the request's window; negative ones are in it. [T, C]."""
    at = place.to(tl.int64)[:, None]
    mask = in_t & in_c
    new = tl.load(raw + at * COLUMNS, mask=mask & (at >= 0), other=0.0)
    old = tl.load(window + (3 + at) * CHANNELS, mask=mask & (at < 0), other=0.0)
    return tl.where(at < 0, old, new)
