"""The delta rule in chunked form, fp32: the tokens of one request without a loop over tokens.

A chunk is 64 tokens in sub-blocks of 16. Exponents: between sub-blocks, both factors of
``e^{G_i - G_j}`` are taken from the later one's first token and are at most 1. Inside a sub-block
they are taken from its middle when the gate's lower bound keeps them small (K3: at most e^40);
an unbounded gate gets the differences themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
SUB = 16
# Largest |exponent| of a factor inside a sub-block, so that products stay far inside fp32's range.
_MAX_EXPONENT = 40.0


def delta_rule_chunks(
    qkv: Tensor, g: Tensor, beta: Tensor, *, state: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """qkv [T, 3, H, K] (q, k normalised), g [T, H, K], beta [T, H], all fp32.

    Returns the read-out [T, H, V], and the corrections u as [N * H, C, V] (`token_rows` gives
    [T, H, V]), both fp32. state [H, K, V] fp32 is moved past the T tokens in place.
    """
    tokens, _, heads, _ = qkv.shape
    chunk = min(CHUNK, -(-tokens // SUB) * SUB)
    # Chunks and heads are one batch axis [B]; only the loop at the end tells them apart.
    q, k, v, g = (_chunked(x, chunk) for x in (*qkv.unbind(1), g))  # [B, C, K or V]
    beta = _chunked(beta.unsqueeze(-1), chunk)  # [B, C, 1]
    total = g.cumsum(1)
    pairs, reads = _pair_products(q, k, g, total, lower_bound)
    identity = torch.eye(chunk, device=g.device).expand_as(pairs)
    lower = pairs.mul_(beta)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
    grown = total.exp()
    # U = inverse beta V - (inverse beta K e^G) S; only their combination needs the state.
    value = torch.bmm(inverse, v * beta)
    key = torch.bmm(inverse, (k * grown).mul_(beta))
    last = total[:, -1:]  # [B, 1, K]
    carried = (k * (last - total).exp_()).transpose(1, 2)  # [B, K, C]
    kept = last.exp().transpose(1, 2)  # [B, K, 1]
    query = q * grown
    out = torch.empty_like(v)
    for begin in range(0, out.shape[0], heads):
        own = slice(begin, begin + heads)
        correction = value[own].baddbmm_(key[own], state, alpha=-1)  # U
        torch.bmm(reads[own], correction, out=out[own])
        out[own].baddbmm_(query[own], state)
        state.mul_(kept[own]).baddbmm_(carried[own], correction)
    return token_rows(out, heads, tokens), value


def token_rows(x: Tensor, heads: int, tokens: int) -> Tensor:
    """[N * H, C, V] of chunks -> [T, H, V]."""
    return x.view(-1, heads, *x.shape[1:]).transpose(1, 2).flatten(0, 1)[:tokens]


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """[T, H, K] -> [N * H, C, K]. Rows behind T are 0: they neither decay nor change a state."""
    padding = -x.shape[0] % chunk
    if padding:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding))
    return x.view(-1, chunk, *x.shape[1:]).transpose(1, 2).flatten(0, 1).contiguous()


def _pair_products(
    q: Tensor, k: Tensor, g: Tensor, total: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """<k_i, k_j e^{G_i - G_j}> for j < i and <q_i, k_j e^{G_i - G_j}> for j <= i; [B, C, C]."""
    batch, chunk, width = q.shape
    pairs = q.new_zeros(batch, chunk, chunk)
    reads = torch.zeros_like(pairs)
    blocks = (batch * (chunk // SUB), SUB, width)
    # G of each sub-block alone: small numbers, small errors.
    inner = g.view(blocks).cumsum(1)
    is_bounded = lower_bound is not None and -lower_bound * (SUB // 2) <= _MAX_EXPONENT
    diagonal = _bounded_diagonal if is_bounded else _direct_diagonal
    own_pairs, own_reads = diagonal(k.view(blocks), q.view(blocks), inner)
    _put_diagonal(pairs, own_pairs.tril_(-1))
    _put_diagonal(reads, own_reads.tril_())
    grown = inner.exp_().view_as(q)
    grown_k, grown_q = k * grown, q * grown
    for begin in range(SUB, chunk, SUB):
        # e^{G_i - G_j} = e^{G_i - G_before} e^{G_before - G_j}, neither above 1.
        block = slice(begin, begin + SUB)
        ratio = (total[:, begin - 1 : begin] - total[:, :begin]).exp_()
        keys = ratio.mul_(k[:, :begin]).transpose(1, 2)
        pairs[:, block, :begin] = torch.bmm(grown_k[:, block], keys)
        reads[:, block, :begin] = torch.bmm(grown_q[:, block], keys)
    return pairs, reads


def _put_diagonal(target: Tensor, blocks: Tensor) -> None:
    """Sub-blocks [B * C / SUB, SUB, SUB] on the diagonal of target [B, C, C]."""
    batch, chunk, _ = target.shape
    count = chunk // SUB
    places = target.view(batch, count, SUB, count, SUB).diagonal(dim1=1, dim2=3)
    places.copy_(blocks.view(batch, count, SUB, SUB).permute(0, 2, 3, 1))


def _bounded_diagonal(k: Tensor, q: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """k, q, inner [B', SUB, K] -> products [B', SUB, SUB]; above the diagonal: to be cut."""
    centred = inner - inner[:, SUB // 2 - 1 : SUB // 2]
    grown = centred.exp()
    keys = centred.neg_().exp_().mul_(k).transpose(1, 2)
    return torch.bmm(k * grown, keys), torch.bmm(grown.mul_(q), keys)


def _direct_diagonal(k: Tensor, q: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """As `_bounded_diagonal`, for decays of any strength: a column of pairs at a time."""
    kk = k.new_empty(*k.shape[:2], SUB)
    qk = torch.empty_like(kk)
    for j in range(SUB):
        # Rows before j would grow instead of decay, without a limit; they are cut anyway.
        ratio = (inner - inner[:, j : j + 1]).clamp_(max=0).exp_().mul_(k[:, j : j + 1])
        kk[..., j] = (ratio * k).sum(-1)
        qk[..., j] = ratio.mul_(q).sum(-1)
    return kk, qk
