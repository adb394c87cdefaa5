"""A prompt in three chunks against the same prompt at once: every layer, and early tokens' effect.

A random model retrieves nothing, but an early token has its effect on the last logits, through the
recurrent states and the latent cache of every chunk between. A prefill that answers from the last
chunk, or that loses a state at a boundary, has another effect or none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from auto_cases import PAGE_TOKENS, Model, Oracle, Session, make_model, tokens_of
from torch import Tensor

from kdecode.cache.batch import StepBatch
from kdecode.decode import all_reference
from kdecode.decode.auto import load_step
from kdecode.decode.plan import DecodePlan
from kdecode.kernels.contract import Tolerance
from kdecode.testing.compare import assert_close

PROMPT = 195
# Ends of the first two chunks: of equal lengths, on and beside the block of 64 tokens that the
# chunked recurrence has, and with chunks shorter than the convolution.
ENDS = ((65, 130), (64, 128), (63, 192), (1, 3))
# The two ways of one prompt differ where a sum is split otherwise and a rounding falls the other
# way, and where a chunk ends beside a block: the rows behind that block are attended in the
# absorbed form there and in the expanded one in the whole prompt. Both differ from the reference by
# all roundings.
SAME = Tolerance(rtol=0.0, atol=0.25, rms_ratio=1.6e-2)
NEAR = Tolerance(rtol=0.0, atol=0.5, rms_ratio=2e-2)


@pytest.fixture(scope="module", params=["k3", "linear"])
def model(request: pytest.FixtureRequest) -> Model:
    return make_model(request.param)


def _hidden_states(plan: DecodePlan, rows: Sequence[int]) -> dict[int, Tensor]:
    """Runs a loaded plan; the residual stream [rows, M] after each layer."""
    states: dict[int, Tensor] = {}
    with torch.no_grad():
        for step in plan.steps:
            step.run()
            if "mlp_residual" in step.covers:
                layer = step.layers[0]
                assert layer is not None
                states[layer] = plan.buffers["prefix"][list(rows)].clone()
    return states


def _in_chunks(model: Model, tokens: list[int], ends: Sequence[int]) -> dict[int, Tensor]:
    """The residual stream at the end of each chunk, by layer: [chunks, M]."""
    session = Session(model)
    request = session.start(skip_pages=1)
    found: dict[int, list[Tensor]] = {}
    for begin, end in itertools.pairwise((0, *ends)):
        load_step(session.plan, StepBatch((request.take(tokens[begin:end]),)))
        for layer, state in _hidden_states(session.plan, [end - begin - 1]).items():
            found.setdefault(layer, []).append(state)
    return {layer: torch.cat(states) for layer, states in found.items()}


@pytest.mark.parametrize("ends", ENDS)
def test_hidden_states_at_chunk_ends_layer_by_layer(model: Model, ends: tuple[int, int]) -> None:
    tokens, all_ends = tokens_of(PROMPT, seed=21), (*ends, PROMPT)
    rows = [end - 1 for end in all_ends]
    chunked = _in_chunks(model, tokens, all_ends)
    session, other = Session(model), Session(model)
    load_step(session.plan, StepBatch((session.start().take(tokens),)))
    whole = _hidden_states(session.plan, rows)
    oracle = all_reference.build(
        model.parameters, model.config, other.caches, page_tokens=PAGE_TOKENS
    )
    oracle.buffers.batch = StepBatch((other.start().take(tokens),))
    reference = _hidden_states(oracle, rows)
    assert sorted(chunked) == sorted(whole) == list(range(model.config.num_layers))
    for layer in chunked:
        assert_close(chunked[layer], whole[layer], SAME, f"layer {layer}, chunks and whole")
        assert_close(chunked[layer], reference[layer], NEAR, f"layer {layer}, chunks and reference")


def _last_logits(model: Model, tokens: list[int], ends: Sequence[int]) -> Tensor:
    session = Session(model)
    request = session.start()
    for begin, end in itertools.pairwise((0, *ends)):
        logits = session.run((request, tokens[begin:end]))[0].clone()
    return logits


@pytest.mark.parametrize("ends", [(65, 130), (64, 128)])
@pytest.mark.parametrize("changed", [range(10, 30), range(100, 120)])
def test_early_tokens_have_the_same_effect_in_chunks_and_at_once(
    model: Model, ends: tuple[int, int], changed: range
) -> None:
    """Other tokens in the first or the second of three chunks move the last logits the same way."""
    tokens = tokens_of(PROMPT, seed=21)
    other = [*tokens]
    other[changed.start : changed.stop] = tokens_of(len(changed), seed=22)
    chunks, whole = (
        _last_logits(model, other, way) - _last_logits(model, tokens, way)
        for way in ((*ends, PROMPT), (PROMPT,))
    )
    wanted = Oracle(model).run(other)[-1] - Oracle(model).run(tokens)[-1]
    assert wanted.norm() > 0
    # But for roundings, of which the distance to the reference's is the measure: the effect of one
    # model is a few units of a logit's last place.
    assert (chunks - whole).norm() < (whole - wanted).norm() < 0.35 * whole.norm()
    assert torch.cosine_similarity(chunks, wanted, dim=0) > 0.9
    assert 0.8 < chunks.norm() / wanted.norm() < 1.25
