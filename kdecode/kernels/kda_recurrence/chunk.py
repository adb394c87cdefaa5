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
) -> Tensor:
    """qkv [T, 3, H, K] (q, k normalised), g [T, H, K], beta [T, H], fp32 -> [T, H, V] fp32.

    state [H, K, V] fp32 is moved past the T tokens in place.
    """
    tokens = qkv.shape[0]
    chunk = min(CHUNK, -(-tokens // SUB) * SUB)
    q, k, v, g = (_chunked(x, chunk) for x in (*qkv.unbind(1), g))  # [N, H, C, K or V]
    beta = _chunked(beta.unsqueeze(-1), chunk)  # [N, H, C, 1]
    total = g.cumsum(2)
    pairs, reads = _pair_products(q, k, g, total, lower_bound)
    grown = total.exp()
    # (I + L)^-1 applied to both parts of U at once; only their combination needs the state.
    right = torch.cat([v, k * grown], dim=-1).mul_(beta)
    lower = pairs.mul_(beta)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    value, key = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    last = total[:, :, -1:]  # [N, H, 1, K]
    carried = (k * (last - total).exp_()).transpose(-1, -2)  # [N, H, K, C]
    kept = last.exp().transpose(-1, -2)  # [N, H, K, 1]
    query = q * grown
    out = torch.empty_like(v)
    for n in range(q.shape[0]):
        correction = torch.baddbmm(value[n], key[n], state, alpha=-1)  # U
        torch.bmm(reads[n], correction, out=out[n])
        out[n].baddbmm_(query[n], state)
        state.mul_(kept[n]).baddbmm_(carried[n], correction)
    return out.transpose(1, 2).flatten(0, 1)[:tokens]


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """[T, H, K] -> [N, H, C, K]. Rows behind T are 0: they neither decay nor change a state."""
    tokens = x.shape[0]
    padding = -tokens % chunk
    if padding:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding))
    return x.view(-1, chunk, *x.shape[1:]).transpose(1, 2).contiguous()


def _pair_products(
    q: Tensor, k: Tensor, g: Tensor, total: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """<k_i, k_j e^{G_i - G_j}> for j < i and <q_i, k_j e^{G_i - G_j}> for j <= i; [N, H, C, C]."""
    chunk = q.shape[2]
    pairs = q.new_zeros(*q.shape[:3], chunk)
    reads = torch.zeros_like(pairs)
    is_bounded = lower_bound is not None and -lower_bound * (SUB // 2) <= _MAX_EXPONENT
    for begin in range(0, chunk, SUB):
        block = slice(begin, begin + SUB)
        rows = (k[:, :, block], q[:, :, block])
        inner = g[:, :, block].cumsum(2)  # G of the sub-block alone: small numbers, small errors
        diagonal = _bounded_diagonal if is_bounded else _direct_diagonal
        kk, qk = diagonal(*rows, inner)
        pairs[:, :, block, block] = kk.tril_(-1)
        reads[:, :, block, block] = qk.tril_()
        if begin:
            # e^{G_i - G_j} = e^{G_i - G_before} e^{G_before - G_j}, neither above 1.
            grown = inner.exp()
            earlier = total[:, :, :begin]
            before = total[:, :, begin - 1 : begin]
            keys = (k[:, :, :begin] * (before - earlier).exp_()).transpose(-1, -2)
            pairs[:, :, block, :begin] = (rows[0] * grown) @ keys
            reads[:, :, block, :begin] = (rows[1] * grown) @ keys
    return pairs, reads


def _bounded_diagonal(k: Tensor, q: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """k, q, inner [N, H, SUB, K] -> products [N, H, SUB, SUB]; above the diagonal: to be cut."""
    centred = inner - inner[:, :, SUB // 2 - 1 : SUB // 2]
    grown = centred.exp()
    keys = (k * centred.neg_().exp_()).transpose(-1, -2)
    return (k * grown) @ keys, (q * grown) @ keys


def _direct_diagonal(k: Tensor, q: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """As `_bounded_diagonal`, for decays of any strength: a column of pairs at a time."""
    kk = k.new_empty(*k.shape[:3], SUB)
    qk = torch.empty_like(kk)
    for j in range(SUB):
        # Rows before j would grow instead of decay, without a limit; they are cut anyway.
        ratio = (inner - inner[:, :, j : j + 1]).clamp_(max=0).exp_().mul_(k[:, :, j : j + 1])
        torch.sum(ratio * k, dim=-1, out=kk[..., j])
        torch.sum(ratio * q, dim=-1, out=qk[..., j])
    return kk, qk
