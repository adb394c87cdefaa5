"""The chunked delta rule of one request in Triton: `chunk.py` in three launches.

`_pairs` and `_solve` make of every chunk and head, all at once, what its tokens do to any state;
`_scan` goes through the chunks one after the other, a head's value columns in several programs.
Exponents are those of `chunk.py`: between sub-blocks of 16 tokens both factors are taken from the
later one's first token, inside of one from its middle, or directly where the gate has no bound.

Products are those of two bf16 numbers a factor, a value and what its rounding left: tensor cores
then lose 2^-16 of a factor. What is multiplied twice is stored so, as [.., 2, rows, columns].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kdecode.kernels.common.tile_table import choose
from kdecode.kernels.common.triton_delta import L2_EPS
from kdecode.kernels.common.triton_launch import Launch, divide_up
from kdecode.kernels.common.triton_ops import dot_bf16

CHUNK = 64
SUB = 16
_SUB = tl.constexpr(SUB)
# Tokens whose factors are in memory at a time: 3 KiB a token and head of 128.
SEGMENT = 32 * CHUNK
# Largest |exponent| of a factor inside of a sub-block, so that products stay inside fp32's range.
_MAX_EXPONENT = 40.0


@dataclass(frozen=True)
class ChunkTile:
    """solve_d: columns of one product of `_solve`. scan_v: value columns of a program of `_scan`.
    Powers of two. scan_stages: chunks that are on their way to a program of `_scan`.
    """

    pair_warps: int
    solve_d: int
    solve_warps: int
    scan_v: int
    scan_warps: int
    scan_stages: int


def tile(heads: int, head_dim: int, arch: str) -> ChunkTile:
    """A scan has few programs, one a head and block of columns: narrow blocks, all at once."""
    default = ChunkTile(8, 64, 4, 16, 8, 1)
    return choose("kda_chunk", arch, f"{heads} heads of {head_dim}", default)


@dataclass(frozen=True)
class Span:
    """The rows of one request. qkv [T, 3, H, K] bf16, not normalised, decay g [T, H, K] and beta
    [T, H] fp32, state [H, K, V] fp32, out [T, H, V] bf16.
    """

    qkv: Tensor
    decay: Tensor
    beta: Tensor
    state: Tensor
    out: Tensor

    def rows(self, first: int, last: int) -> Span:
        """Some of them, whose state is the same."""
        own = slice(first, last)
        return Span(self.qkv[own], self.decay[own], self.beta[own], self.state, self.out[own])


@dataclass(frozen=True)
class Recorded:
    """Of rows that only read the state: normalised keys and corrections, [T, H, K] fp32."""

    keys: Tensor
    corrections: Tensor


def delta_rule_chunks(
    span: Span, lower_bound: float | None, arch: str, *, is_verify: bool = False
) -> Recorded | None:
    """Fills ``out`` and moves the state past the rows; of rows to verify, records them instead."""
    tokens, _, heads, dim = span.qkv.shape
    chosen, recorded, segment = tile(heads, dim, arch), None, SEGMENT
    if is_verify:
        recorded = Recorded(*(torch.empty_like(span.decay) for _ in range(2)))
        segment = tokens  # all from the state that stays
    for first in range(0, tokens, segment):
        for launch in launches(span.rows(first, first + segment), recorded, lower_bound, chosen):
            launch.run()
    return recorded


def launches(
    span: Span, recorded: Recorded | None, lower_bound: float | None, chosen: ChunkTile
) -> tuple[Launch, ...]:
    """The launches, of tensors on any device, the meta device too."""
    tokens, _, heads, dim = span.qkv.shape
    chunk = CHUNK if tokens > SUB else SUB
    chunks, width = divide_up(tokens, chunk), max(16, triton.next_power_of_2(dim))

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty((chunks, heads, *shape), dtype=dtype, device=span.qkv.device)

    lower, values = make(chunk, chunk, dtype=torch.float32), make(chunk, dim, dtype=torch.float32)
    reads, grown, keys = make(2, chunk, chunk), make(2, chunk, dim), make(2, chunk, dim)
    queries, carried = make(2, chunk, dim), make(2, dim, chunk)
    kept = make(dim, dtype=torch.float32)
    sizes = {"HEADS": heads, "DIM": dim, "CHUNK": chunk}
    is_verify = recorded is not None
    is_bounded = lower_bound is not None and -lower_bound * (SUB // 2) <= _MAX_EXPONENT
    inputs = {"qkv": span.qkv, "beta": span.beta, "tokens": tokens}
    block_d, block_v = min(width, chosen.solve_d), min(width, chosen.scan_v)
    # Where nothing is recorded, another tensor stands for what is not written.
    own_keys = kept if recorded is None else recorded.keys
    corrections = kept if recorded is None else recorded.corrections
    pairs = Launch(
        _pairs,
        (chunks, heads, chunk // SUB),
        inputs
        | {"decay": span.decay, "unit_keys": own_keys, "lower": lower, "reads": reads}
        | {"grown": grown, "queries": queries, "carried": carried, "kept": kept},
        sizes | {"BLOCK_D": width, "IS_BOUNDED": is_bounded, "IS_VERIFY": is_verify},
        num_warps=chosen.pair_warps,
    )
    solve = Launch(
        _solve,
        (chunks, heads),
        inputs | {"lower": lower, "grown": grown, "keys": keys, "values": values},
        sizes | {"BLOCK_D": block_d},
        num_warps=chosen.solve_warps,
    )
    scan = Launch(
        _scan,
        (divide_up(dim, block_v), heads),
        {"keys": keys, "values": values, "queries": queries, "carried": carried, "reads": reads}
        | {"kept": kept, "state": span.state, "out": span.out, "corrections": corrections}
        | {"tokens": tokens},
        sizes | {"BLOCK_D": width, "BLOCK_V": block_v, "IS_VERIFY": is_verify},
        num_warps=chosen.scan_warps,
        num_stages=chosen.scan_stages,
    )
    return pairs, solve, scan


@triton.jit
def _split(x):
    """fp32 as the sum of two bf16 numbers, to 2^-16."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _product(a_high, a_low, b_high, b_low, acc):
    """acc + a b for factors in two parts; the product of both rests is below what they lost."""
    return dot_bf16(a_high, b_high, dot_bf16(a_high, b_low, dot_bf16(a_low, b_high, acc)))


@triton.jit
def _wide_product(a, b, acc):
    """acc + a b for fp32 factors."""
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    return _product(a_high, a_low, b_high, b_low, acc)


@triton.jit
def _store_split(at, x, DISTANCE: tl.constexpr, mask):
    high, low = _split(x)
    tl.store(at, high, mask=mask)
    tl.store(at + DISTANCE, low, mask=mask)


@triton.jit
def _unit_rows(at, inside, scale):
    """bf16 rows by their length, times scale; fp32."""
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return x * (scale / tl.sqrt(tl.sum(x * x, 1) + L2_EPS))[:, None]


@triton.jit(do_not_specialize=["tokens"])
def _pairs(
    qkv,
    decay,
    beta,
    unit_keys,
    lower,
    reads,
    grown,
    queries,
    carried,
    kept,
    tokens,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    IS_VERIFY: tl.constexpr,
):
    """Grid: (chunks, heads, sub-blocks): a sub-block with itself and those before it.

    lower: beta_i <k_i, k_j e^{G_i - G_j}>, reads: <q_i, k_j e^{G_i - G_j}>, grown: k e^G, queries:
    q e^G, carried: (k e^{G_last - G})^T, kept: e^{G_last}. Rows behind the last token are 0: they
    neither decay nor change a state.
    """
    SUBS: tl.constexpr = CHUNK // _SUB
    WIDTH: tl.constexpr = HEADS * DIM
    chunk, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s = tl.arange(0, _SUB)
    d = tl.arange(0, BLOCK_D)
    in_d = (d < DIM)[None, :]
    start = chunk * CHUNK
    first = start + block * _SUB
    token = first + s
    inside = (token < tokens)[:, None] & in_d
    at = token.to(tl.int64)[:, None] * WIDTH + (head * DIM + d)[None, :]
    # A row of qkv is three rows of decay long.
    at_q = token.to(tl.int64)[:, None] * (3 * WIDTH) + (head * DIM + d)[None, :]
    q = _unit_rows(qkv + at_q, inside, DIM**-0.5)
    k = _unit_rows(qkv + at_q + WIDTH, inside, 1.0)
    b = tl.load(beta + token * HEADS + head, mask=token < tokens, other=0.0)
    inner = tl.cumsum(tl.load(decay + at, mask=inside, other=0.0), 0)
    if IS_VERIFY:
        tl.store(unit_keys + at, k, mask=inside)

    # e^{G_i - G_j} = e^{G_i - G_before} e^{G_before - G_j}, neither above 1. From the sub-block
    # before this one back to the chunk's first; between: the decay of those that lie between.
    place = (chunk * HEADS + head).to(tl.int64)
    row = place * (CHUNK * CHUNK) + (block * _SUB + s)[:, None] * CHUNK
    row_split = row + place * (CHUNK * CHUNK)
    grow = tl.exp(inner)
    k_high, k_low = _split(k * grow)
    q_high, q_low = _split(q * grow)
    between = tl.zeros([BLOCK_D], tl.float32)
    zero = tl.zeros([_SUB, _SUB], tl.float32)
    for back in range(0, block):
        other = block - 1 - back
        earlier = start + other * _SUB + s
        in_earlier = (earlier < tokens)[:, None] & in_d
        at_k = earlier.to(tl.int64)[:, None] * (3 * WIDTH) + (WIDTH + head * DIM + d)[None, :]
        at_g = earlier.to(tl.int64)[:, None] * WIDTH + (head * DIM + d)[None, :]
        g = tl.load(decay + at_g, mask=in_earlier, other=0.0)
        whole = tl.sum(g, 0)
        ratio = tl.exp((whole + between)[None, :] - tl.cumsum(g, 0))
        right = tl.trans(_unit_rows(qkv + at_k, in_earlier, 1.0) * ratio)
        high, low = _split(right)
        column = (other * _SUB + s)[None, :]
        tl.store(lower + row + column, b[:, None] * _product(k_high, k_low, high, low, zero))
        _store_split(
            reads + row_split + column,
            _product(q_high, q_low, high, low, zero),
            CHUNK * CHUNK,
            None,
        )
        between += whole

    if IS_BOUNDED:
        middle = tl.sum(tl.where((s == _SUB // 2 - 1)[:, None], inner, 0.0), 0)
        centred = inner - middle[None, :]
        up, right = tl.exp(centred), tl.trans(k * tl.exp(-centred))
        own_k = _wide_product(k * up, right, zero)
        own_q = _wide_product(q * up, right, zero)
    else:
        own_k, own_q = _direct(k, q, inner)
    column = (block * _SUB + s)[None, :]
    own_k = tl.where(s[:, None] > s[None, :], own_k, 0.0)
    own_q = tl.where(s[:, None] >= s[None, :], own_q, 0.0)
    tl.store(lower + row + column, b[:, None] * own_k)
    _store_split(reads + row_split + column, own_q, CHUNK * CHUNK, None)
    for later in range(block + 1, SUBS):
        column = (s + later * _SUB)[None, :]
        tl.store(lower + row + column, zero)
        _store_split(reads + row_split + column, zero, CHUNK * CHUNK, None)

    rest = tl.zeros([BLOCK_D], tl.float32)
    for later in range(block + 1, SUBS):
        after = start + later * _SUB + s
        in_after = (after < tokens)[:, None] & in_d
        at_g = after.to(tl.int64)[:, None] * WIDTH + (head * DIM + d)[None, :]
        rest += tl.sum(tl.load(decay + at_g, mask=in_after, other=0.0), 0)
    own = tl.sum(tl.where((s == _SUB - 1)[:, None], inner, 0.0), 0)
    to = place * (2 * CHUNK * DIM) + (block * _SUB + s)[:, None] * DIM + d[None, :]
    up = tl.exp(inner + between[None, :])
    _store_split(grown + to, k * up, CHUNK * DIM, in_d)
    _store_split(queries + to, q * up, CHUNK * DIM, in_d)
    left = tl.trans(k * tl.exp((own + rest)[None, :] - inner))
    to = place * (2 * CHUNK * DIM) + d[:, None] * CHUNK + (block * _SUB + s)[None, :]
    _store_split(carried + to, left, CHUNK * DIM, (d < DIM)[:, None])
    if block == SUBS - 1:
        tl.store(kept + place * DIM + d, tl.exp(between + own), mask=d < DIM)


@triton.jit
def _direct(k, q, inner):
    """<k_i, k_j e^{G_i - G_j}> and <q_i, ..> of one sub-block [16, D], a column at a time, for
    decays of any strength. Above the diagonal: to be cut.
    """
    s = tl.arange(0, _SUB)
    own_k = tl.zeros([_SUB, _SUB], tl.float32)
    own_q = tl.zeros([_SUB, _SUB], tl.float32)
    for j in range(_SUB):
        is_row = (s == j)[:, None]
        base = tl.sum(tl.where(is_row, inner, 0.0), 0)
        other = tl.sum(tl.where(is_row, k, 0.0), 0)
        # Rows before j would grow instead of decay, without a limit.
        ratio = tl.exp(tl.minimum(inner - base[None, :], 0.0)) * other[None, :]
        own_k += tl.where((s == j)[None, :], tl.sum(ratio * k, 1)[:, None], 0.0)
        own_q += tl.where((s == j)[None, :], tl.sum(ratio * q, 1)[:, None], 0.0)
    return own_k, own_q


@triton.jit(do_not_specialize=["tokens"])
def _solve(
    qkv,
    beta,
    lower,
    grown,
    keys,
    values,
    tokens,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (chunks, heads). values: (I + L)^-1 beta V, keys: (I + L)^-1 beta K e^G."""
    WIDTH: tl.constexpr = HEADS * DIM
    chunk, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, CHUNK)
    token = chunk * CHUNK + i
    place = (chunk * HEADS + head).to(tl.int64)
    b = tl.load(beta + token * HEADS + head, mask=token < tokens, other=0.0)
    matrix = tl.load(lower + (place * CHUNK + i)[:, None] * CHUNK + i[None, :])
    high, low = _split(_inverse(matrix, CHUNK) * b[None, :])
    zero = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    for start in range(0, DIM, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        in_d = (d < DIM)[None, :]
        line = token.to(tl.int64)[:, None] * (3 * WIDTH) + (2 * WIDTH + head * DIM + d)[None, :]
        v = tl.load(qkv + line, mask=(token < tokens)[:, None] & in_d, other=0.0)
        to = (place * CHUNK + i)[:, None] * DIM + d[None, :]
        tl.store(values + to, dot_bf16(high, v, dot_bf16(low, v, zero)), mask=in_d)
        to += place * (CHUNK * DIM)
        k_high = tl.load(grown + to, mask=in_d, other=0.0)
        k_low = tl.load(grown + to + CHUNK * DIM, mask=in_d, other=0.0)
        key = _product(high, low, k_high, k_low, zero)
        _store_split(keys + to, key, CHUNK * DIM, in_d)


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangular matrix.

    Sub-blocks on the diagonal D by substitution, a row at a time; the rest by (I + N)^-1 D^-1 with
    N = D^-1 (what is left), whose fourth power is 0. Powers of ``lower`` itself would cancel.
    """
    SUBS: tl.constexpr = CHUNK // _SUB
    a, s, i = tl.arange(0, SUBS), tl.arange(0, _SUB), tl.arange(0, CHUNK)
    is_own = a[:, None, None, None] == a[None, None, :, None]
    own = tl.sum(tl.where(is_own, tl.reshape(lower, [SUBS, _SUB, SUBS, _SUB]), 0.0), 2)
    identity = tl.where(s[:, None] == s[None, :], 1.0, 0.0)
    x = tl.broadcast_to(identity[None, :, :], [SUBS, _SUB, _SUB])
    for row in range(1, _SUB):
        is_row = (s == row)[None, :, None]
        weights = tl.sum(tl.where(is_row, own, 0.0), 1)
        known = tl.sum(weights[:, :, None] * x, 1)
        x -= tl.where(is_row, known[:, None, :], 0.0)
    diagonal = tl.reshape(tl.where(is_own, x[:, :, None, :], 0.0), [CHUNK, CHUNK])
    if SUBS == 1:
        return diagonal
    else:
        zero = tl.zeros([CHUNK, CHUNK], tl.float32)
        rest = tl.where((i // _SUB)[:, None] == (i // _SUB)[None, :], 0.0, lower)
        n = _wide_product(diagonal, rest, zero)
        square = _wide_product(n, n, zero)
        cube = _wide_product(n, square, zero)
        series = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - n + square - cube
        return _wide_product(series, diagonal, zero)


@triton.jit(do_not_specialize=["tokens"])
def _scan(
    keys,
    values,
    queries,
    carried,
    reads,
    kept,
    state,
    out,
    corrections,
    tokens,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_VERIFY: tl.constexpr,
):
    """Grid: (blocks of value columns, heads). The state stays in registers over all chunks.

    U = values - keys S; O = queries S + reads U; S = kept S + carried U.
    """
    head = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_D)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_d, in_v = d < DIM, v < DIM
    cell = (head * DIM + d)[:, None] * DIM + v[None, :]
    in_cell = in_d[:, None] & in_v[None, :]
    s = tl.load(state + cell, mask=in_cell, other=0.0)
    zero = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    for chunk in range(0, tl.cdiv(tokens, CHUNK)):
        place = (chunk * HEADS + head).to(tl.int64)
        by_token = place * (2 * CHUNK * DIM) + i[:, None] * DIM + d[None, :]
        by_channel = place * (2 * CHUNK * DIM) + d[:, None] * CHUNK + i[None, :]
        by_pair = place * (2 * CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
        k_high = tl.load(keys + by_token, mask=in_d[None, :], other=0.0)
        k_low = tl.load(keys + by_token + CHUNK * DIM, mask=in_d[None, :], other=0.0)
        at = (place * CHUNK + i)[:, None] * DIM + v[None, :]
        u = tl.load(values + at, mask=in_v[None, :], other=0.0)
        q_high = tl.load(queries + by_token, mask=in_d[None, :], other=0.0)
        q_low = tl.load(queries + by_token + CHUNK * DIM, mask=in_d[None, :], other=0.0)
        m_high = tl.load(reads + by_pair)
        m_low = tl.load(reads + by_pair + CHUNK * CHUNK)
        c_high = tl.load(carried + by_channel, mask=in_d[:, None], other=0.0)
        c_low = tl.load(carried + by_channel + CHUNK * DIM, mask=in_d[:, None], other=0.0)
        decay = tl.load(kept + place * DIM + d, mask=in_d, other=0.0)

        s_high, s_low = _split(s)
        u -= _product(k_high, k_low, s_high, s_low, zero)
        u_high, u_low = _split(u)
        o = _product(q_high, q_low, s_high, s_low, zero)
        o = _product(m_high, m_low, u_high, u_low, o)
        s = _product(c_high, c_low, u_high, u_low, decay[:, None] * s)

        token = chunk * CHUNK + i
        to = token.to(tl.int64)[:, None] * (HEADS * DIM) + (head * DIM + v)[None, :]
        inside = (token < tokens)[:, None] & in_v[None, :]
        tl.store(out + to, o.to(tl.bfloat16), mask=inside)
        if IS_VERIFY:
            tl.store(corrections + to, u, mask=inside)
    if not IS_VERIFY:
        tl.store(state + cell, s, mask=in_cell)
