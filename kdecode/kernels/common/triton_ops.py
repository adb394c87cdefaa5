"""Device functions that several Triton kernels share.

Rounding is that of ARCHITECTURE.md: sums in fp32, one rounding to bf16 where a buffer is written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# The interpreter multiplies the bits of bf16 numbers as integers, so there they become fp32 first.
IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot_bf16(a, b, acc):
    """acc + a b for bf16 a [M, K], b [K, N] and fp32 acc, exact products, fp32 sums."""
    if IS_INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def to_bf16(x):
    """fp32 rounded to the nearest bf16, to even between two."""
    return x.to(tl.bfloat16)


@triton.jit
def round_bf16(x):
    """fp32 values that bf16 can hold: what the next stage would read from a buffer."""
    return to_bf16(x).to(tl.float32)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Of fp32; small x by its series, where the quotient would cancel."""
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    square = x * x
    small = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    return tl.where(square < 0.01, small, tl.where(x < 0, -large, large))


@triton.jit
def gated(gate, up, beta, bound, IS_SITU: tl.constexpr):
    """The gated activation of fp32 values, not rounded: silu(gate) up, or SiTU with its bounds."""
    if IS_SITU:
        return beta * tanh(gate / beta) * sigmoid(gate) * (bound * tanh(up / bound))
    else:
        return gate * sigmoid(gate) * up


@triton.jit
def wait_for_previous():
    """Returns once the launch before this one is over, and lets the one after it begin to load.

    For a launch that begins early (`Launch.begins_early`), and of no effect in others: every
    program calls it before it reads what a launch writes, and before it writes anything.
    """
    if not IS_INTERPRETED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Has the lines of memory at these addresses brought into the second-level cache."""
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def is_last_arrival(counter, expected):
    """Whether this program is the last of ``expected`` that came here; resets the counter then.

    What every program stored before is visible to the last one after this. Nobody waits.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == expected - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def wait_for_word(word):
    """Returns once another program of this launch has made an int32 word other than 0, by an atomic
    operation that releases what it stored before. Somebody has to see to it that it runs."""
    seen = tl.atomic_add(word, 0, sem="acquire")
    while seen == 0:
        seen = tl.atomic_add(word, 0, sem="acquire")
