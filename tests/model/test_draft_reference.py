"""The draft's reference: rotation, taps, context, block and heads against plain restatements."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from kdecode.config import GqaConfig, MlaConfig, ModelConfig
from kdecode.config_draft import DraftConfig, DraftKind, RopeConfig
from kdecode.kernels.contract import Tolerance
from kdecode.model.draft_parameters import DraftParameters, GqaParameters
from kdecode.model.draft_reference import (
    DraftState,
    Taps,
    append_context,
    block,
    block_hidden,
    context_rows,
    frequencies,
    rotate,
)
from kdecode.model.draft_synthesis import draft_document, make_draft
from kdecode.model.draft_weights import load_draft
from kdecode.model.parameters import MlaParameters, ModelParameters
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.reference import GOLD, ROUNDED, Options, RequestState, forward, rms_norm
from kdecode.model.weights import CheckpointReader
from kdecode.testing.cases import random_parameters, tiny_k3, tiny_linear
from kdecode.testing.compare import assert_close
from kdecode.testing.poison import poison_

KINDS: tuple[DraftKind, ...] = get_args(DraftKind)
EXACT = Tolerance(rtol=1e-10, atol=1e-10, rms_ratio=1e-10)
MINI = ModelConfig.from_checkpoint(released_config(PRESETS["mini"]))
TOKENS = 11


@dataclasses.dataclass(frozen=True)
class Case:
    config: DraftConfig
    p: DraftParameters
    target: ModelParameters


@pytest.fixture(scope="module")
def target(mini_checkpoint: Path) -> ModelParameters:
    return CheckpointReader(mini_checkpoint).load_model()


@pytest.fixture(scope="module", params=KINDS)
def case(
    request: pytest.FixtureRequest,
    target: ModelParameters,
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    """A draft of each kind; the window of the one that has one is shorter than the context."""
    directory = tmp_path_factory.mktemp("drafts") / request.param
    make_draft(directory, "mini", request.param, seed=0)
    config = DraftConfig.from_checkpoint(directory)
    if config.window is not None:
        config = dataclasses.replace(config, window=5)
    return Case(config, load_draft(directory, config), target)


def _random_taps(config: DraftConfig, tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, len(config.taps), config.hidden_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _state(case: Case, tokens: int = TOKENS, split: int = 100) -> DraftState:
    state = DraftState.new(case.config, GOLD)
    for part in torch.split(_random_taps(case.config, tokens), split):
        append_context(case.p, case.config, state, part, GOLD)
    return state


def test_yarn_frequencies_of_the_release() -> None:
    rope = RopeConfig(64, 50000.0, True, factor=32.0, original_positions=32768)
    found = frequencies(rope)
    for pair, value in {
        0: 1.0,
        15: 6.2713e-3,
        16: 4.0783e-3,
        20: 6.4724e-4,
        25: 2.5447e-5,
        26: 4.7527e-6,
        31: 8.7644e-7,
    }.items():
        assert found[pair].item() == pytest.approx(value, rel=2e-5)


def test_plain_frequencies() -> None:
    found = frequencies(RopeConfig(8, 10000.0, False))
    assert found.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_rotation_turns_pairs_as_complex_numbers(is_interleaved: bool) -> None:
    rope = RopeConfig(8, 100.0, is_interleaved, amplitude=1.25)
    x = torch.randn(3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 5, 1000])
    turned = rotate(rope, x, positions, GOLD)
    for t in range(3):
        for pair in range(4):
            a, b = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pair + 4)
            angle = int(positions[t]) * 100.0 ** (-2 * pair / 8)
            for head in range(2):
                z = complex(x[t, head, a], x[t, head, b]) * 1.25
                z *= complex(math.cos(angle), math.sin(angle))
                assert turned[t, head, a].item() == pytest.approx(z.real, abs=1e-12)
                assert turned[t, head, b].item() == pytest.approx(z.imag, abs=1e-12)


class _Tags(Taps):
    """Taps fed with rows that name their layer, instead of by a forward pass."""

    def feed(self, layers: int, tokens: int, width: int) -> None:
        for layer in range(layers):
            self.on_layer(layer, torch.full((tokens, width), float(layer)))


@pytest.mark.parametrize("taps", [(0,), (8,), (0, 3, 8), tuple(range(9))])
def test_tags_of_the_tapped_layers(target: ModelParameters, taps: tuple[int, ...]) -> None:
    """The first layer, the last one, and every one between: what comes out names its layer."""
    config = _with_taps(taps, "prefix")
    tags = _Tags(config, MINI, target, torch.tensor([1, 2]), GOLD)
    with pytest.raises(ValueError, match="not come past the layers"):
        tags.rows()
    tags.feed(MINI.num_layers, 2, MINI.hidden_size)
    rows = tags.rows()
    assert rows.shape == (2, len(taps), MINI.hidden_size)
    assert rows[:, :, 0].tolist() == [list(map(float, taps))] * 2
    assert bool((rows == rows[:, :, :1]).all())


def _with_taps(taps: tuple[int, ...], stream: str) -> DraftConfig:
    config = DraftConfig.from_checkpoint(draft_document("inferact", MINI))
    return dataclasses.replace(config, taps=taps, tap_stream=stream)  # type: ignore[arg-type]


def _tapped(
    config: DraftConfig, model: ModelConfig, parameters: ModelParameters, ids: Tensor
) -> Tensor:
    taps = Taps(config, model, parameters, ids, GOLD)
    options = Options(on_layer=taps.on_layer)
    forward(parameters, model, ids, RequestState.new(model, GOLD), GOLD, options)
    return taps.rows()


@pytest.mark.parametrize("layer", range(5))
def test_the_mixture_is_what_the_next_layer_reads(layer: int) -> None:
    """A model cut after the tap, whose final mix is the next layer's, normalises the mixture."""
    model = tiny_k3()
    parameters = random_parameters(model)
    ids = torch.tensor([5, 9, 3, 7])
    config = _with_taps((layer,), "attn_res")
    tap = _tapped(config, model, parameters, ids)[:, 0]
    is_last = layer + 1 == model.num_layers
    next_mix = parameters.final_mix if is_last else parameters.layers[layer + 1].attn_mix
    width = model.hidden_size
    cut = dataclasses.replace(
        parameters,
        layers=parameters.layers[: layer + 1],
        final_mix=next_mix,
        norm=torch.ones(width),
        lm_head=torch.eye(width),
    )
    kinds = (model.layer_kinds[: layer + 1], model.mlp_kinds[: layer + 1])
    short = dataclasses.replace(model, layer_kinds=kinds[0], mlp_kinds=kinds[1])
    expected = forward(cut, short, ids, RequestState.new(short, GOLD), GOLD)
    normed = rms_norm(tap, torch.ones(width), model.rms_eps, GOLD)
    assert_close(normed, expected, EXACT, f"mixture after layer {layer}")
    prefix = _tapped(dataclasses.replace(config, tap_stream="prefix"), model, parameters, ids)[:, 0]
    assert (prefix - tap).abs().max() > 0.05


def test_streams_are_one_without_attention_residuals() -> None:
    model = tiny_linear()
    parameters, ids = random_parameters(model), torch.tensor([5, 9, 3])
    rows = [_tapped(_with_taps((1, 3), s), model, parameters, ids) for s in ("prefix", "attn_res")]
    assert torch.equal(rows[0], rows[1])


def test_taps_do_not_depend_on_how_a_prompt_is_cut() -> None:
    model = tiny_k3()
    parameters, ids = random_parameters(model), torch.tensor([5, 9, 3, 7, 1])
    config = _with_taps((1, 4), "attn_res")
    whole = _tapped(config, model, parameters, ids)
    state, parts = RequestState.new(model, GOLD), []
    for part in torch.split(ids, 2):
        taps = Taps(config, model, parameters, part, GOLD)
        forward(parameters, model, part, state, GOLD, Options(on_layer=taps.on_layer))
        parts.append(taps.rows())
    assert_close(torch.cat(parts), whole, EXACT, "taps")


def test_context_rows_by_hand(case: Case) -> None:
    config, p = case.config, case.p
    taps = _random_taps(config, 3) * torch.arange(1, len(config.taps) + 1).view(1, -1, 1)
    found = context_rows(p, config, taps, GOLD)
    assert (p.tap_norms is not None) == config.has_tap_norms
    for t in range(3):
        parts = [taps[t, place] for place in range(len(config.taps))]
        if p.tap_norms is not None:
            parts = [_norm(x, w) for x, w in zip(parts, p.tap_norms, strict=True)]
        expected = _norm(p.context_proj.double() @ torch.cat(parts), p.context_norm)
        assert_close(found[t], expected, EXACT, "context")


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * weight.double()


def _turn(config: DraftConfig, x: Tensor, position: int) -> Tensor:
    return rotate(config.rope, x.unsqueeze(0), torch.tensor([position]), GOLD)[0]


def _plain_block(case: Case, taps: Tensor, anchor: int, count: int) -> Tensor:
    """The block with expanded keys and values, token by token and head by head."""
    config, p = case.config, case.p
    context = context_rows(p, config, taps, GOLD)
    start = taps.shape[0]
    table = (case.target.embed if p.embed is None else p.embed).double()
    x = [table[anchor if k == 0 else config.mask_id] for k in range(count)]
    for layer in p.layers:
        normed = [_norm(row, layer.input_norm) for row in x]
        keys, values = zip(
            *(
                _key_value(config, layer.attention, row, position)
                for position, row in enumerate([*context, *normed])
            ),
            strict=True,
        )
        for k in range(count):
            first = 0 if config.window is None else max(0, start - config.window)
            last = start + k if config.is_causal else start + count - 1
            seen = range(first, last + 1)
            query, scale = _query(config, layer.attention, normed[k], start + k)
            heads = []
            for h in range(query.shape[0]):
                scores = torch.stack([query[h] @ keys[j][h] * scale for j in seen])
                weights = torch.softmax(scores, dim=0)
                heads.append(sum(w * values[j][h] for w, j in zip(weights, seen, strict=True)))
            x[k] = x[k] + layer.attention.o_proj.double() @ torch.cat(heads)
        for k in range(count):
            h = _norm(x[k], layer.post_norm)
            gate, up = layer.mlp.gate_proj.double() @ h, layer.mlp.up_proj.double() @ h
            x[k] = x[k] + layer.mlp.down_proj.double() @ (gate * torch.sigmoid(gate) * up)
    return torch.stack([_norm(row, p.norm) for row in x])


def _key_value(config: DraftConfig, p: Any, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """Keys [H, dim] and values [H, V] of one row."""
    a = config.attention
    if isinstance(a, MlaConfig):
        assert isinstance(p, MlaParameters)
        both = p.kv_a_proj.double() @ x
        latent = _norm(both[: a.kv_rank], p.kv_a_norm)
        turned = _turn(config, both[a.kv_rank :], position)
        up = (p.kv_b_proj.double() @ latent).view(a.num_heads, a.nope_dim + a.v_dim)
        keys = torch.cat([up[:, : a.nope_dim], turned.expand(a.num_heads, -1)], dim=-1)
        return keys, up[:, a.nope_dim :]
    assert isinstance(p, GqaParameters)
    shape = (a.num_kv_heads, a.head_dim)
    heads = (p.k_proj.double() @ x).view(shape)
    keys = torch.stack([_turn(config, _norm(head, p.k_norm), position) for head in heads])
    values = (p.v_proj.double() @ x).view(shape)
    index = [h * a.num_kv_heads // a.num_heads for h in range(a.num_heads)]
    return keys[index], values[index]


def _query(config: DraftConfig, p: Any, x: Tensor, position: int) -> tuple[Tensor, float]:
    a = config.attention
    if isinstance(a, MlaConfig):
        low = _norm(p.q_a_proj.double() @ x, p.q_a_norm)
        heads = (p.q_b_proj.double() @ low).view(a.num_heads, a.qk_dim)
        turned = torch.stack([_turn(config, head[a.nope_dim :], position) for head in heads])
        scale = a.qk_dim**-0.5 * (0.1 * math.log(32) + 1) ** 2
        return torch.cat([heads[:, : a.nope_dim], turned], dim=-1), scale
    assert isinstance(a, GqaConfig)
    heads = (p.q_proj.double() @ x).view(a.num_heads, a.head_dim)
    turned = torch.stack([_turn(config, _norm(head, p.q_norm), position) for head in heads])
    return turned, a.head_dim**-0.5


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("tokens", [0, 1, TOKENS])
def test_block_by_loops(case: Case, tokens: int, count: int) -> None:
    state = _state(case, tokens) if tokens else DraftState.new(case.config, GOLD)
    found = block_hidden(case.p, case.config, case.target, state, 17, count, GOLD)
    expected = _plain_block(case, _random_taps(case.config, tokens), 17, count)
    assert_close(found, expected, EXACT, "hidden")


def test_a_row_sees_later_rows_only_without_causality(case: Case) -> None:
    state = _state(case)
    long, short = (
        block_hidden(case.p, case.config, case.target, state, 17, n, GOLD)[:2] for n in (7, 2)
    )
    if case.config.is_causal:
        assert_close(long, short, EXACT, "hidden")
    else:
        assert (long - short).abs().max() > 1e-3


def test_what_lies_behind_the_window_is_not_read(case: Case) -> None:
    state = _state(case)
    expected = block_hidden(case.p, case.config, case.target, state, 17, 3, GOLD)
    for layer, rows in enumerate(state.rows):
        old = TOKENS if case.config.window is None else case.config.window
        poisoned = rows.clone()
        poison_(poisoned[: TOKENS - old])
        state.rows[layer] = poisoned
    found = block_hidden(case.p, case.config, case.target, state, 17, 3, GOLD)
    assert torch.equal(found, expected)


def test_context_in_parts_equals_context_at_once(case: Case) -> None:
    whole, parts = _state(case), _state(case, split=3)
    assert parts.num_tokens == whole.num_tokens == TOKENS
    for a, b in zip(parts.rows, whole.rows, strict=True):
        assert_close(a, b, EXACT, "rows")


@pytest.mark.parametrize("count", [0, 1, 5])
def test_each_draft_sees_the_one_before_it(case: Case, count: int) -> None:
    """Base logits plus the Markov bias of the token before, and the confidence, by hand."""
    state, p, anchor = _state(case), case.p, 17
    planned = (900, 3, 3, 41, 1000)[:count]
    seen: list[Tensor] = []

    def choose(place: int, logits: Tensor) -> int:
        seen.append(logits)
        return planned[place]

    found = block(p, case.config, case.target, state, anchor, count, choose, GOLD)
    assert found.tokens == planned
    assert len(seen) == count
    assert found.logits.shape == (count, case.config.vocab_size)
    if count == 0:
        assert found.confidence is None
        return
    assert found.confidence is not None
    assert p.confidence is not None
    hidden = block_hidden(p, case.config, case.target, state, anchor, count, GOLD)
    head = (case.target.lm_head if p.lm_head is None else p.lm_head).double()
    for k, previous in enumerate((anchor, *planned[:-1])):
        row = p.markov_in[previous].double()
        expected = head @ hidden[k] + p.markov_out.double() @ row
        assert_close(found.logits[k], expected, EXACT, f"logits {k}")
        assert torch.equal(found.logits[k], seen[k])
        score = p.confidence.weight.double() @ torch.cat([hidden[k], row])
        expected = torch.sigmoid(score + p.confidence.bias.double()[0])
        assert found.confidence[k].item() == pytest.approx(expected.item(), rel=1e-12)
    assert (p.markov_out.double() @ p.markov_in[900].double()).abs().max() > 0.5


def test_rounded_stays_near_gold(case: Case) -> None:
    taps = _random_taps(case.config, TOKENS)
    states = {}
    for rounding in (GOLD, ROUNDED):
        states[rounding.name] = DraftState.new(case.config, rounding)
        append_context(case.p, case.config, states[rounding.name], rounding.narrow(taps), rounding)
    hidden = [
        block_hidden(case.p, case.config, case.target, states[r.name], 17, 7, r)
        for r in (ROUNDED, GOLD)
    ]
    assert hidden[0].dtype == torch.bfloat16
    assert_close(hidden[0], hidden[1], Tolerance(rtol=0.05, atol=0.15, rms_ratio=0.04), "hidden")
