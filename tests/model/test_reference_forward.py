"""Reference forward: a prompt in chunks equals the prompt token by token, states included."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.kernels.contract import Tolerance
from kdecode.model import reference
from kdecode.model.reference import GOLD, GOLD32, ROUNDED, RequestState, Rounding
from kdecode.testing.cases import random_parameters, tiny_k3, tiny_linear
from kdecode.testing.compare import assert_close, state_close

TOKENS = 131
NEAR = Tolerance(rtol=1e-9, atol=1e-9, rms_ratio=1e-9)
MODELS = {"k3": tiny_k3(), "linear": tiny_linear()}


@dataclasses.dataclass(frozen=True)
class Run:
    logits: Tensor
    prefixes: dict[int, Tensor]  # [TOKENS, M] after each layer
    state: dict[str, Tensor]


def _run(
    config: ModelConfig,
    split: int,
    form: reference.KdaForm,
    rounding: Rounding = GOLD,
    tokens: int = TOKENS,
) -> Run:
    parameters = random_parameters(config)
    ids = torch.randint(0, config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1))
    state = RequestState.new(config, rounding)
    prefixes: dict[int, list[Tensor]] = {layer: [] for layer in range(config.num_layers)}
    options = reference.Options(
        kda_form=form, on_layer=lambda layer, prefix: prefixes[layer].append(prefix)
    )
    logits = [
        reference.forward(parameters, config, part, state, rounding, options)
        for part in torch.split(ids, split)
    ]
    assert state.num_tokens == tokens
    return Run(
        torch.cat(logits),
        {layer: torch.cat(parts) for layer, parts in prefixes.items()},
        {f"window.{layer}": x for layer, x in state.windows.items()}
        | {f"recurrent.{layer}": x for layer, x in state.recurrent.items()}
        | {f"rows.{layer}": x for layer, x in state.rows.items()},
    )


@pytest.fixture(scope="module", params=sorted(MODELS))
def token_by_token(request: pytest.FixtureRequest) -> tuple[ModelConfig, Run]:
    config = MODELS[request.param]
    return config, _run(config, 1, "recurrent")


@pytest.mark.parametrize("split", [1, 63, 64, 65, TOKENS])
def test_prompt_in_chunks_equals_token_by_token(
    token_by_token: tuple[ModelConfig, Run], split: int
) -> None:
    config, expected = token_by_token
    actual = _run(config, split, "chunked")
    for layer, prefix in expected.prefixes.items():
        assert_close(actual.prefixes[layer], prefix, NEAR, f"prefix after layer {layer}")
    assert_close(actual.logits, expected.logits, NEAR, "logits")
    bounds = dict.fromkeys(("window", "recurrent", "rows"), NEAR)
    state_close(actual.state, expected.state, bounds, "state")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_roundings_are_near_gold(name: str) -> None:
    """With every expert chosen: a flipped choice at a near-tie is no rounding error."""
    config = MODELS[name]
    moe = dataclasses.replace(config.moe, top_k=config.moe.num_experts)
    config = dataclasses.replace(config, moe=moe)
    gold = _run(config, 48, "recurrent", tokens=48)
    # The K3 gate multiplies an error of z by up to A = 16 inside its sigmoid, hence 8 per cent.
    bounds = {GOLD32: Tolerance(1e-4, 1e-4, 1e-5), ROUNDED: Tolerance(0.1, 0.6, 0.08)}
    for rounding, tolerance in bounds.items():
        found = _run(config, 48, "recurrent", rounding, tokens=48)
        assert_close(found.logits, gold.logits, tolerance, rounding.name)
    assert torch.equal(found.logits, found.logits.bfloat16().float())
    for key, x in found.state.items():
        assert x.dtype == (torch.float32 if key.startswith("recurrent") else torch.bfloat16)


def test_clone_is_independent() -> None:
    config = MODELS["k3"]
    parameters = random_parameters(config)
    state = RequestState.new(config, GOLD)
    reference.forward(parameters, config, torch.arange(4), state, GOLD)
    fork = state.clone()
    first = reference.forward(parameters, config, torch.tensor([7, 8]), state, GOLD)
    again = reference.forward(parameters, config, torch.tensor([7, 8]), fork, GOLD)
    assert torch.equal(first, again)
    assert (state.num_tokens, fork.num_tokens) == (6, 6)
