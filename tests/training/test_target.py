"""The model that trains is the reference: logits, and the delta rule's values and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3train.target import (
    CHUNK_TOKENS,
    Target,
    delta_rule,
    is_expert,
    round_mxfp4,
    slot_shapes,
)
from kdecode.config import ModelConfig
from kdecode.model import mxfp4
from kdecode.model.reference import GOLD32, RequestState, forward
from kdecode.model.weights import CheckpointReader

EXP_RANGE = 5.0


def loaded_target(directory: Path) -> Target:
    """The checkpoint's own weights in the form that trains, in fp32."""
    config = ModelConfig.from_checkpoint(directory)
    target = Target(config, seed=0, dtype=torch.float32)
    model = CheckpointReader(directory).load_model()
    state: dict[str, Tensor] = {}
    for slot, shape in slot_shapes(config).items():
        node: object = model
        for part in slot.split("."):
            node = node[int(part)] if part.isdigit() else getattr(node, part)  # type: ignore[index]
        if is_expert(slot):
            assert isinstance(node, tuple)
            node = torch.stack([mxfp4.dequantise(weight) for weight in node])
        assert isinstance(node, Tensor)
        state[slot] = node.float().view(shape)
    target.load(state)
    return target


def test_logits_are_those_of_the_reference(mini_checkpoint: Path) -> None:
    config = ModelConfig.from_checkpoint(mini_checkpoint)
    target = loaded_target(mini_checkpoint)
    ids = torch.randint(0, config.vocab_size, (2, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = target(ids).logits()
    parameters = CheckpointReader(mini_checkpoint).load_model()
    for row, got in zip(ids, logits, strict=True):
        wanted = forward(parameters, config, row, RequestState.new(config, GOLD32), GOLD32)
        torch.testing.assert_close(got, wanted, atol=2e-3, rtol=0)


def test_taps_are_the_prefix_after_the_layer(mini_checkpoint: Path) -> None:
    target = loaded_target(mini_checkpoint)
    ids = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        result = target(ids, taps=(0, 4, 8))
    assert sorted(result.taps) == [0, 4, 8]
    assert all(tap.shape == (1, 12, target.config.hidden_size) for tap in result.taps.values())


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The rule, token after token."""
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])
    outs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        correction = beta[:, t].unsqueeze(-1) * (v[:, t] - read)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], correction)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outs, 1)


@pytest.mark.parametrize("tokens", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, 3 * CHUNK_TOKENS + 5])
@pytest.mark.parametrize("is_strong", [False, True])
def test_chunks_give_values_and_gradients_of_the_recurrence(tokens: int, is_strong: bool) -> None:
    """Strong: every token decays by the gate's whole bound, the products' extreme."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shape = (2, tokens, 3, 8)
    unit = torch.nn.functional.normalize
    share = (
        torch.ones(shape, dtype=torch.float64) if is_strong else torch.sigmoid(2 * normal(*shape))
    )
    inputs = (
        unit(normal(*shape), dim=-1),
        unit(normal(*shape), dim=-1),
        normal(*shape),
        -EXP_RANGE * share,
        torch.sigmoid(normal(*shape[:3])),
    )
    weights = normal(*shape)
    results = []
    for rule, dtype in ((recurrence, torch.float64), (delta_rule, torch.float32)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = rule(*leaves)
        gradients = torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)
        results.append([x.double() for x in (out, *gradients)])
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def test_experts_are_rounded_as_they_are_packed() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(7, 96, generator=generator) * 0.03
    # Ties, a group of zeros, and the largest codes.
    weight[0, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]) / 64
    weight[0, 8:32] = 0
    weight[1, 32:64] = 0
    weight.requires_grad_()
    rounded = round_mxfp4(weight)
    packed = mxfp4.pack(weight.detach())
    torch.testing.assert_close(rounded, mxfp4.dequantise(packed).float(), atol=0, rtol=0)
    rounded.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones_like(weight))
