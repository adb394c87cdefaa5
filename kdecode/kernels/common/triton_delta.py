"""Device functions of the KDA kernels: one row of the delta rule and what leads to its inputs.

Every kernel that moves a recurrent state moves it through `delta_row` or `moved`, so that a state
has the same bits whichever of them it went through.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdecode.kernels.common.triton_ops import round_bf16, sigmoid

L2_EPS = tl.constexpr(1e-6)
_SOFTPLUS_LINEAR_ABOVE = tl.constexpr(20.0)


@triton.jit
def softplus(z):
    """ln(1 + e^z); z itself above 20."""
    # ln(1 + t) = 2 artanh(s) with s = t / (2 + t) <= 1/3, by its series: exact to fp32 for small t.
    t = tl.exp(-tl.abs(z))
    s = t / (2.0 + t)
    square = s * s
    p = square / 15.0 + 1.0 / 13.0
    p = p * square + 1.0 / 11.0
    p = p * square + 1.0 / 9.0
    p = p * square + 1.0 / 7.0
    p = p * square + 1.0 / 5.0
    p = p * square + 1.0 / 3.0
    p = p * square + 1.0
    return tl.where(z > _SOFTPLUS_LINEAR_ABOVE, z, tl.maximum(z, 0.0) + 2.0 * s * p)


@triton.jit
def log_decay(z, scale, LOWER_BOUND: tl.constexpr):
    """g of the gate; LOWER_BOUND None selects the softplus form. scale: exp(A_log)."""
    if LOWER_BOUND is None:
        return -scale * softplus(z)
    else:
        return LOWER_BOUND * sigmoid(scale * z)


@triton.jit
def taps_at(taps, STRIDE: tl.constexpr, mask):
    """The four taps of some channels, oldest first. taps: pointers to the first."""
    first = tl.load(taps, mask=mask, other=0.0)
    second = tl.load(taps + STRIDE, mask=mask, other=0.0)
    third = tl.load(taps + 2 * STRIDE, mask=mask, other=0.0)
    return first, second, third, tl.load(taps + 3 * STRIDE, mask=mask, other=0.0)


@triton.jit
def convolved(oldest, second, third, newest, taps):
    """SiLU of the four-tap convolution, rounded to what bf16 holds. taps: of `taps_at`."""
    y = oldest.to(tl.float32) * taps[0]
    y = tl.fma(second.to(tl.float32), taps[1], y)
    y = tl.fma(third.to(tl.float32), taps[2], y)
    y = tl.fma(newest.to(tl.float32), taps[3], y)
    return round_bf16(y * sigmoid(y))


@triton.jit
def unit(x, scale):
    """x [D] fp32 by its length, times scale."""
    return x * (scale / tl.sqrt(tl.sum(x * x, 0) + L2_EPS))


@triton.jit
def moved(state, decay, k, u):
    """diag(decay) state + k u^T for state [K, V]."""
    kept = decay[:, None] * state
    return tl.fma(
        tl.broadcast_to(k[:, None], kept.shape), tl.broadcast_to(u[None, :], kept.shape), kept
    )


@triton.jit
def delta_row(state, q, k, v, decay, beta):
    """One token. q, k [K] normalised, v [V], decay e^g [K], state [K, V] -> state, o [V], u [V].

    Both read-outs use the state before the update: o = q^T S = (q e^g)^T S_old + <q, k> u.
    """
    read_k = tl.sum((k * decay)[:, None] * state, 0)
    read_q = tl.sum((q * decay)[:, None] * state, 0)
    u = beta * (v - read_k)
    return moved(state, decay, k, u), tl.sum(q * k, 0) * u + read_q, u
