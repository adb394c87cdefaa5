"""Inputs of the delta rule over many tokens, and the rule itself, for every form of it."""

from __future__ import annotations

import torch
from torch import Tensor

from kdecode.testing.cases import decay_parameters


def delta_rule_inputs(
    tokens: int, decay: str, *, heads: int, width: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv (not normalised), g, beta, state; fp32.

    decay "bounded": K3's range down to -5. "weak": close to 0. "trained": the softplus form with
    the A and dt of trained checkpoints. "strong": to e^-30 a token, as an unbounded gate may.
    """
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, 3, heads, width, generator=generator)
    # Keys of neighbouring tokens are alike: the triangular system is then far from the identity.
    qkv[:, 1] = 0.3 * qkv[:, 1] + torch.randn(heads, width, generator=generator)
    noise = torch.randn(tokens, heads, width, generator=generator)
    if decay == "trained":
        a_log, dt_bias = decay_parameters(heads, width, generator)
        z = noise + dt_bias.view(heads, width)
        g = -a_log.exp().unsqueeze(-1) * torch.nn.functional.softplus(z)
    else:
        g = {
            "bounded": -5 * torch.sigmoid(4 * noise),
            "weak": -1e-3 * torch.sigmoid(noise),
            "strong": -30 * torch.sigmoid(4 * noise),
        }[decay]
    beta = torch.sigmoid(torch.randn(tokens, heads, generator=generator) + 2)
    state = torch.randn(heads, width, width, generator=generator)
    return qkv, g, beta, state


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token in fp64, straight from the definition; q scaled, q and k of unit length."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    outs = []
    for t in range(q.shape[0]):
        state = g[t].exp().unsqueeze(-1) * state
        u = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t].unsqueeze(-1) * u.unsqueeze(-2)
        outs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outs), state


def assert_near(actual: Tensor, gold: Tensor, name: str, bound: float) -> None:
    """Every number finite, and the error of all of them together below the bound."""
    assert bool(torch.isfinite(actual).all()), name
    error = (actual.double() - gold).square().sum().sqrt() / gold.square().sum().sqrt()
    assert error < bound, f"{name}: relative error {error:.3g}"
