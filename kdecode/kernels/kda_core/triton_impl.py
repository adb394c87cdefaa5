"""kda_core in Triton: a program has one head, or a block of its value columns, and a slot's rows.

A program keeps its part of the state in registers from the first row to the last, whatever the
number of rows. Where a head is split, the last of its programs to arrive normalises the whole head
and moves the part of the window that all of them read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.tile_table import choose
from kdecode.kernels.common.triton_delta import (
    convolved,
    delta_row,
    log_decay,
    taps_at,
    unit,
)
from kdecode.kernels.common.triton_launch import Launch, TritonStep, row_block, tensor_for
from kdecode.kernels.common.triton_ops import (
    dot_bf16,
    is_last_arrival,
    prefetch,
    round_bf16,
    sigmoid,
    wait_for_previous,
)
from kdecode.kernels.contract import Buffers, Problem

BF16, FP32 = torch.bfloat16, torch.float32

CONV_WIDTH = 4
MAX_HEAD_DIM = 256
# Rows that share one product with f_b and one with g_b: the fewest that a tensor core takes.
_BLOCK_T = tl.constexpr(16)


def refuse(problem: Problem) -> list[str]:
    """Every reason why this problem cannot run."""
    kda, reasons = problem.config.kda, []
    if problem.rows is None:
        reasons.append("kda_core is built for a fixed number of rows; this plan takes any number.")
    if kda.conv_width != CONV_WIDTH:
        reasons.append(
            f"The KDA convolution has {CONV_WIDTH} taps in Triton; the model's has "
            f"{kda.conv_width}."
        )
    if not 16 <= kda.head_dim <= MAX_HEAD_DIM:
        reasons.append(
            f"KDA heads have 16 to {MAX_HEAD_DIM} channels in Triton; the model's have "
            f"{kda.head_dim}."
        )
    return reasons


@dataclass(frozen=True)
class CoreTile:
    """block_v: value columns of a program, a power of two; the head's own or more: no split."""

    block_v: int
    num_warps: int


def tile(problem: Problem) -> CoreTile:
    """A quarter of a wide head: its state and the head's part of f_b fit into 4 warps' registers,
    and more programs wait for memory at a time.
    """
    width = triton.next_power_of_2(problem.config.kda.head_dim)
    default = CoreTile(width if width < 64 else width // 4, 4)
    return choose("kda_core", problem.arch, shape_key(problem), default)


def shape_key(problem: Problem) -> str:
    """What the tile table calls this problem."""
    assert problem.rows is not None
    kda = problem.config.kda
    return (
        f"rows {row_block(problem.rows)} by {problem.rows_per_request}, "
        f"{kda.num_heads} heads of {kda.head_dim}"
    )


def prepare(problem: Problem, weights: Any, buffers: Buffers) -> TritonStep:
    """weights: a `PackedLayer` whose ``attention`` is a `PackedKda`, its matrices in "rows"."""
    reasons = refuse(problem)
    if reasons or problem.rows is None:
        raise ValueError(" ".join(reasons))
    rows, kda, packed = problem.rows, problem.config.kda, weights.attention
    chosen = tile(problem)
    width = triton.next_power_of_2(kda.head_dim)
    splits = max(1, width // chosen.block_v)
    runs = rows // problem.rows_per_request
    constants = {
        "HEADS": kda.num_heads,
        "DIM": kda.head_dim,
        "GATE": kda.width if packed.g_b is None else packed.g_b.cols,
        "RANK": packed.f_b.cols,
        "EACH": problem.rows_per_request,
        "EPS": problem.config.rms_eps,
        "LOWER_BOUND": kda.gate_lower_bound,
        "IS_LOW_RANK": packed.g_b is not None,
        "BLOCK_D": width,
        "BLOCK_V": min(width, chosen.block_v),
        "BLOCK_RANK": max(16, triton.next_power_of_2(packed.f_b.cols)),
        "BLOCK_GATE": 16
        if packed.g_b is None
        else max(16, triton.next_power_of_2(packed.g_b.cols)),
        "SPLITS": splits,
    }
    arguments: dict[str, Tensor | int | float] = {
        **_weights(problem, packed),
        **_tensors(problem, packed, buffers),
        "counters": buffers.counters(runs * kda.num_heads),
        "rows": rows,
    }
    grid = (kda.num_heads * splits, runs)
    launch = Launch(
        _core, grid, arguments, constants, num_warps=chosen.num_warps, begins_early=True
    )
    return TritonStep(launch)


def _weights(problem: Problem, packed: Any) -> dict[str, Tensor]:
    kda = problem.config.kda
    width, heads = kda.width, kda.num_heads
    f_b = tensor_for(packed.f_b.data, BF16, (width, packed.f_b.cols), name="The KDA f_b")
    g_b = f_b  # not read
    if packed.g_b is not None:
        g_b = tensor_for(packed.g_b.data, BF16, (width, packed.g_b.cols), name="The KDA g_b")
    return {
        "taps": tensor_for(packed.conv, FP32, (CONV_WIDTH, 3 * width), name="The KDA taps"),
        "f_b": f_b,
        "g_b": g_b,
        "dt_bias": tensor_for(packed.dt_bias, FP32, (width,), name="The KDA dt_bias"),
        "decay_scale": tensor_for(packed.decay_scale, FP32, (heads,), name="The KDA decay scale"),
        "o_norm": tensor_for(packed.o_norm, FP32, (kda.head_dim,), name="The KDA o_norm"),
    }


def _tensors(problem: Problem, packed: Any, buffers: Buffers) -> dict[str, Tensor]:
    """Buffers, caches and, of a verify step, what its rows would do to them."""
    kda, rows, layer = problem.config.kda, problem.rows, problem.layer
    assert rows is not None
    assert layer is not None
    width, heads, dim = kda.width, kda.num_heads, kda.head_dim
    gate = width if packed.g_b is None else packed.g_b.cols
    columns = 3 * width + gate + packed.f_b.cols + heads
    window, state = buffers.caches.conv[layer], buffers.caches.recurrent[layer]
    slots = window.shape[0]
    shapes: dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]] = {
        "proj": (buffers["kda_proj"], BF16, (rows, columns)),
        "row_slot": (buffers["row_slot"], torch.int32, (rows,)),
        "window": (window, BF16, (slots, CONV_WIDTH - 1, 3 * width)),
        "state": (state, FP32, (slots, heads, dim, dim)),
        "attn_out": (buffers["attn_out"], BF16, (rows, width)),
        "head_out": (buffers.scratch("kda_out", (rows, width), BF16), BF16, (rows, width)),
    }
    if problem.rows_per_request > 1:
        effects = buffers.effects[layer]
        shapes |= {
            "keys": (effects.keys, FP32, (rows, heads, dim)),
            "decays": (effects.decays, FP32, (rows, heads, dim)),
            "corrections": (effects.corrections, FP32, (rows, heads, dim)),
            "samples": (effects.samples, BF16, (rows, 3 * width)),
        }
    checked = {name: tensor_for(*spec, name=name) for name, spec in shapes.items()}
    if problem.rows_per_request == 1:
        # Not written.
        checked |= dict.fromkeys(("keys", "decays", "corrections"), checked["state"])
        checked["samples"] = checked["window"]
    return checked


@triton.jit(do_not_specialize=["rows"])
def _core(
    proj,
    row_slot,
    window,
    state,
    attn_out,
    head_out,
    keys,
    decays,
    corrections,
    samples,
    taps,
    f_b,
    g_b,
    dt_bias,
    decay_scale,
    o_norm,
    counters,
    rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GATE: tl.constexpr,
    RANK: tl.constexpr,
    EACH: tl.constexpr,
    EPS: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
    IS_LOW_RANK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_GATE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid: (heads x splits, requests of a verify step or else rows).

    Of the rows of one slot the program of the first has all. EACH > 1: a verify step.
    """
    WIDTH: tl.constexpr = HEADS * DIM
    PROJ: tl.constexpr = 3 * WIDTH + GATE + RANK + HEADS
    head = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    first = tl.program_id(1) * EACH
    slot = tl.load(row_slot + first)
    last = first + EACH
    d = tl.arange(0, BLOCK_D)
    v = split * BLOCK_V + tl.arange(0, BLOCK_V)
    in_d, in_v = d < DIM, v < DIM
    # Channels of the head in each of the three groups.
    q_at = head * DIM + d
    k_at = WIDTH + q_at
    v_at = 2 * WIDTH + head * DIM + v
    head_state = state + (slot.to(tl.int64) * HEADS + head) * DIM * DIM
    past = window + slot.to(tl.int64) * (9 * WIDTH)
    # While the launch before this one runs: weights into registers, the slot as near as it may be.
    f_weight = _head_weight(f_b, head, DIM, RANK, BLOCK_D, BLOCK_RANK)
    held = tl.minimum(d, DIM - 1)
    lines = tl.minimum(split * BLOCK_V + tl.arange(0, (BLOCK_V + 31) // 32) * 32, DIM - 1)
    prefetch(head_state + held[:, None] * DIM + lines[None, :])
    q_taps = taps_at(taps + q_at, 3 * WIDTH, in_d)
    k_taps = taps_at(taps + k_at, 3 * WIDTH, in_d)
    v_taps = taps_at(taps + v_at, 3 * WIDTH, in_v)
    bias = tl.load(dt_bias + q_at, mask=in_d, other=0.0)
    norm = tl.load(o_norm + d, mask=in_d, other=0.0)
    scale = tl.load(decay_scale + head)
    wait_for_previous()

    if EACH == 1:
        before = tl.load(row_slot + tl.maximum(first - 1, 0))
        following = tl.load(row_slot + last, mask=last < rows, other=-1)
        if (first > 0) & (before == slot):
            return
        while following == slot:
            last += 1
            following = tl.load(row_slot + last, mask=last < rows, other=-1)
    cell = d[:, None] * DIM + v[None, :]
    in_cell = in_d[:, None] & in_v[None, :]
    s = tl.load(head_state + cell, mask=in_cell, other=0.0)
    q0, q1, q2 = _window(past + q_at, 3 * WIDTH, in_d)
    k0, k1, k2 = _window(past + k_at, 3 * WIDTH, in_d)
    v0, v1, v2 = _window(past + v_at, 3 * WIDTH, in_v)
    line = proj + first * PROJ
    f_a = 3 * WIDTH + GATE
    q3 = tl.load(line + q_at, mask=in_d, other=0.0)
    k3 = tl.load(line + k_at, mask=in_d, other=0.0)
    v3 = tl.load(line + v_at, mask=in_v, other=0.0)
    b = tl.load(line + f_a + RANK + head)
    f = _head_product(f_weight, proj + f_a, first, last, RANK, PROJ, BLOCK_RANK)

    t16 = tl.arange(0, _BLOCK_T)
    for block in range(first, last, _BLOCK_T):
        end = tl.minimum(block + _BLOCK_T, last)
        outs = tl.zeros([_BLOCK_T, BLOCK_V], tl.float32)
        for row in range(block, end):
            # What the next row needs is on its way while this one is computed.
            line = proj + (row + 1) * PROJ
            has_next = row + 1 < last
            q4 = tl.load(line + q_at, mask=in_d & has_next, other=0.0)
            k4 = tl.load(line + k_at, mask=in_d & has_next, other=0.0)
            v4 = tl.load(line + v_at, mask=in_v & has_next, other=0.0)
            b1 = tl.load(line + f_a + RANK + head, mask=has_next, other=0.0)

            q = unit(convolved(q0, q1, q2, q3, q_taps), DIM**-0.5)
            k = unit(convolved(k0, k1, k2, k3, k_taps), 1.0)
            value = convolved(v0, v1, v2, v3, v_taps)
            z = tl.sum(tl.where(t16[None, :] == row - block, f, 0.0), 1) + bias
            g = log_decay(z, scale, LOWER_BOUND)
            s, out, u = delta_row(s, q, k, value, tl.exp(g), sigmoid(b.to(tl.float32)))
            outs = tl.where(t16[:, None] == row - block, out[None, :], outs)

            if EACH > 1:
                at = row * WIDTH
                tl.store(corrections + at + head * DIM + v, u, mask=in_v)
                tl.store(samples + 3 * at + v_at, v3, mask=in_v)
                if split == 0:
                    tl.store(keys + at + q_at, k, mask=in_d)
                    tl.store(decays + at + q_at, g, mask=in_d)
                    tl.store(samples + 3 * at + q_at, q3, mask=in_d)
                    tl.store(samples + 3 * at + k_at, k3, mask=in_d)
            q0, q1, q2, q3 = q1, q2, q3, q4
            k0, k1, k2, k3 = k1, k2, k3, k4
            v0, v1, v2, v3 = v1, v2, v3, v4
            b = b1

        if SPLITS == 1:
            gate = _gate(
                proj,
                g_b,
                head,
                block,
                end,
                HEADS,
                DIM,
                GATE,
                PROJ,
                IS_LOW_RANK,
                BLOCK_D,
                BLOCK_GATE,
            )
            to = attn_out + (block + t16)[:, None] * WIDTH + q_at[None, :]
            mask = (block + t16 < end)[:, None] & in_d[None, :]
            tl.store(to, _gated_norm(outs, norm, gate, DIM, EPS), mask=mask)
        else:
            to = head_out + (block + t16)[:, None] * WIDTH + (head * DIM + v)[None, :]
            tl.store(to, outs.to(tl.bfloat16), mask=(block + t16 < end)[:, None] & in_v[None, :])
        if end < last:
            f_weight = _head_weight(f_b, head, DIM, RANK, BLOCK_D, BLOCK_RANK)
            f = _head_product(f_weight, proj + f_a, end, last, RANK, PROJ, BLOCK_RANK)

    if EACH == 1:
        tl.store(head_state + cell, s, mask=in_cell)
        _store_window(past + v_at, 3 * WIDTH, v0, v1, v2, in_v)
    if SPLITS == 1:
        if EACH == 1:
            _store_window(past + q_at, 3 * WIDTH, q0, q1, q2, in_d)
            _store_window(past + k_at, 3 * WIDTH, k0, k1, k2, in_d)
    elif is_last_arrival(counters + tl.program_id(1) * HEADS + head, SPLITS):
        # Every program of the head has read the windows of its queries and keys.
        if EACH == 1:
            _store_window(past + q_at, 3 * WIDTH, q0, q1, q2, in_d)
            _store_window(past + k_at, 3 * WIDTH, k0, k1, k2, in_d)
        for block in range(first, last, _BLOCK_T):
            end = tl.minimum(block + _BLOCK_T, last)
            gate = _gate(
                proj,
                g_b,
                head,
                block,
                end,
                HEADS,
                DIM,
                GATE,
                PROJ,
                IS_LOW_RANK,
                BLOCK_D,
                BLOCK_GATE,
            )
            at = (block + t16)[:, None] * WIDTH + q_at[None, :]
            mask = (block + t16 < end)[:, None] & in_d[None, :]
            outs = tl.load(head_out + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(attn_out + at, _gated_norm(outs, norm, gate, DIM, EPS), mask=mask)


@triton.jit
def _window(at, STRIDE: tl.constexpr, mask):
    """The three samples before a run, oldest first."""
    oldest = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + STRIDE, mask=mask, other=0.0)
    return oldest, second, tl.load(at + 2 * STRIDE, mask=mask, other=0.0)


@triton.jit
def _store_window(at, STRIDE: tl.constexpr, oldest, second, newest, mask):
    tl.store(at, oldest, mask=mask)
    tl.store(at + STRIDE, second, mask=mask)
    tl.store(at + 2 * STRIDE, newest, mask=mask)


@triton.jit
def _head_weight(
    weight,
    head,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """The head's rows of a weight [H * DIM, COLS]."""
    d = tl.arange(0, BLOCK_D)
    c = tl.arange(0, BLOCK_COLS)
    at = weight + (head * DIM + d)[:, None] * COLS + c[None, :]
    return tl.load(at, mask=(d < DIM)[:, None] & (c < COLS)[None, :], other=0.0)


@triton.jit
def _head_product(
    weight,
    inputs,
    block,
    end,
    COLS: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """A head's weight by the inputs of 16 rows from ``block`` on: [BLOCK_D, 16], rounded.

    inputs: pointer to the first column of row 0. Rows from ``end`` on are 0.
    """
    c = tl.arange(0, BLOCK_COLS)
    t = block + tl.arange(0, _BLOCK_T)
    at = inputs + c[:, None] + t[None, :] * STRIDE
    x = tl.load(at, mask=(c < COLS)[:, None] & (t < end)[None, :], other=0.0)
    return round_bf16(dot_bf16(weight, x, tl.zeros([weight.shape[0], _BLOCK_T], tl.float32)))


@triton.jit
def _gate(
    proj,
    g_b,
    head,
    block,
    end,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GATE: tl.constexpr,
    PROJ: tl.constexpr,
    IS_LOW_RANK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_GATE: tl.constexpr,
):
    """The output gate of a head's 16 rows from ``block`` on, before its sigmoid: [16, BLOCK_D]."""
    first = proj + 3 * HEADS * DIM
    if IS_LOW_RANK:
        weight = _head_weight(g_b, head, DIM, GATE, BLOCK_D, BLOCK_GATE)
        return tl.trans(_head_product(weight, first, block, end, GATE, PROJ, BLOCK_GATE))
    else:
        d = tl.arange(0, BLOCK_D)
        t = block + tl.arange(0, _BLOCK_T)
        at = first + t[:, None] * PROJ + (head * DIM + d)[None, :]
        mask = (t < end)[:, None] & (d < DIM)[None, :]
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _gated_norm(outs, norm, gate, DIM: tl.constexpr, EPS: tl.constexpr):
    """RMSNorm of a head's read-outs [16, BLOCK_D] times the sigmoid gate, rounded once."""
    x = round_bf16(outs)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + EPS)
    return (x * factor[:, None] * norm[None, :] * sigmoid(gate)).to(tl.bfloat16)
