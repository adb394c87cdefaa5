"""Rolling a step back by its corrections equals running only what was kept, in every part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdecode.config import KdaConfig, ModelConfig
from kdecode.kernels.contract import Tolerance
from kdecode.model import reference
from kdecode.model.reference import GOLD, GOLD32, Options, RequestState, forward
from kdecode.model.reference_rollback import (
    Corrections,
    StepRecord,
    corrections,
    state_after,
    window_after,
)
from kdecode.testing.cases import decay_parameters, random_parameters, tiny_k3, tiny_linear
from kdecode.testing.compare import assert_close, bit_equal, state_close

EXACT = Tolerance(rtol=1e-11, atol=1e-12, rms_ratio=1e-12)
KDA = KdaConfig(2, 8, 4, gate_lower_bound=-5.0, is_gate_full_rank=True)
MODELS = {"k3": tiny_k3(), "linear": tiny_linear()}
ROWS = 8
# What the memory behind the kept rows holds: zeros hide what bytes show.
FILLS = ("zeros", "bytes")


def _fill(x: Tensor, fill: str) -> None:
    raw = x.view(torch.uint8)
    raw.copy_((torch.arange(raw.numel()) % 251).view(raw.shape) if fill == "bytes" else raw * 0)


def _inputs(strength: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    a_log, dt_bias = decay_parameters(KDA.num_heads, KDA.head_dim, generator)
    z = randn(ROWS, 2, 8) * 2 + dt_bias.view(2, 8) + strength
    g = reference.decay(z, a_log.double().view(2, 1), -5.0)
    return randn(ROWS, 3 * KDA.width), g, torch.sigmoid(randn(ROWS, 2)), randn(2, 8, 8)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("strength", [-6.0, 0.0, 6.0])
@pytest.mark.parametrize("kept", range(ROWS + 1))
def test_state_equals_the_recurrence_over_the_kept_rows(
    kept: int, strength: float, fill: str
) -> None:
    qkv, g, beta, state = _inputs(strength)
    rows = corrections(KDA, qkv, g, beta, state, GOLD)
    stored = Corrections(*(x.contiguous().clone() for x in rows))
    for x in stored:
        _fill(x[kept:], fill)
    expected = state
    if kept:
        expected = reference.kda_step(KDA, qkv[:kept], g[:kept], beta[:kept], state, GOLD)[1]
    assert_close(state_after(state, stored, kept), expected, EXACT, "state")


def test_corrections_are_those_of_the_recurrence() -> None:
    qkv, g, beta, state = _inputs(0.0)
    rows = corrections(KDA, qkv, g, beta, state, GOLD)
    heads = reference.kda_heads(KDA, qkv, GOLD)
    for t in range(ROWS):
        decayed = g[t].exp().unsqueeze(-1) * state
        read = (heads.k[t].unsqueeze(-1) * decayed).sum(1)
        expected = beta[t].unsqueeze(-1) * (heads.v[t] - read)
        assert_close(rows.u[t], expected, EXACT, f"correction {t}")
        one = slice(t, t + 1)
        state = reference.kda_step(KDA, qkv[one], g[one], beta[one], state, GOLD)[1]


def test_fp32_stays_near_fp64_over_many_rounds() -> None:
    """200 rounds of 3 kept rows of 8: the deferred form drifts no more than the recurrence."""
    _, g, beta, state = _inputs(0.0)
    deferred, recurrent = state.float(), state.float()
    generator = torch.Generator().manual_seed(4)
    for _ in range(200):
        qkv = torch.randn(ROWS, 3 * KDA.width, generator=generator, dtype=torch.float64)
        state = reference.kda_step(KDA, qkv[:3], g[:3], beta[:3], state, GOLD)[1]
        kept = (qkv[:3], g[:3], beta[:3])
        recurrent = reference.kda_step(KDA, *kept, recurrent, GOLD32)[1]
        rows = corrections(KDA, qkv, g, beta, deferred, GOLD32)
        deferred = state_after(deferred, rows, 3)
    tolerance = Tolerance(rtol=1e-4, atol=1e-5, rms_ratio=1e-6)
    assert_close(recurrent, state, tolerance, "recurrent")
    assert_close(deferred, state, tolerance, "deferred")


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("kept", range(6))
def test_windows_of_q_k_and_v(kept: int, fill: str) -> None:
    """Each convolution apart; fewer kept rows than the window is long, as many, and more."""
    width = KDA.width
    window = torch.arange(3.0).view(3, 1) + torch.arange(3.0).repeat_interleave(width) * 100
    samples = torch.arange(3.0, 8.0).view(5, 1) + torch.arange(3.0).repeat_interleave(width) * 100
    _fill(samples[kept:], fill)
    found = window_after(window, samples, kept)
    for part in range(3):
        columns = found[:, part * width : (part + 1) * width]
        expected = torch.tensor([kept, kept + 1.0, kept + 2.0]) + part * 100
        bit_equal(columns, expected.view(3, 1).expand(3, width), f"convolution {part}")


def test_more_than_all_rows_cannot_be_kept() -> None:
    qkv, g, beta, state = _inputs(0.0)
    rows = corrections(KDA, qkv, g, beta, state, GOLD)
    for kept in (-1, ROWS + 1):
        with pytest.raises(ValueError, match=f"{kept} of {ROWS} rows cannot be kept"):
            state_after(state, rows, kept)
        with pytest.raises(ValueError, match=f"{kept} of {ROWS} rows cannot be kept"):
            window_after(torch.zeros(3, 48), qkv, kept)


def _tensors(state: RequestState) -> dict[str, Tensor]:
    return (
        {f"window.{layer}": x for layer, x in state.windows.items()}
        | {f"recurrent.{layer}": x for layer, x in state.recurrent.items()}
        | {f"rows.{layer}": x for layer, x in state.rows.items()}
    )


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_request_in_rounds_equals_the_request_token_by_token(name: str, fill: str) -> None:
    """Every number of kept rows, drafts that are garbage behind them, and steps of one row between.

    After each round the whole state is that of plain decoding: windows, recurrent states, rows.
    """
    config: ModelConfig = MODELS[name]
    parameters = random_parameters(config)
    generator = torch.Generator().manual_seed(7)
    true_ids = torch.randint(0, config.vocab_size, (40,), generator=generator)
    tolerances = dict.fromkeys(("window", "recurrent", "rows"), EXACT)
    plain, state = RequestState.new(config, GOLD), RequestState.new(config, GOLD)
    position = 0
    for count, kept in ((1, 1), (5, 3), (1, 1), (5, 5), (5, 1), (1, 1), (4, 2), (5, 4), (2, 1)):
        wrong = torch.randint(0, config.vocab_size, (count - kept,), generator=generator)
        ids = torch.cat([true_ids[position : position + kept], wrong])
        record = StepRecord(config, state.clone(), GOLD)
        after = state.clone()
        options = Options(kda_form="chunked", on_kda=record.on_kda)
        logits = forward(parameters, config, ids, after, GOLD, options)
        for layer, rows in record.rows.items():
            record.rows[layer] = kept_rows = Corrections(*(x.contiguous().clone() for x in rows))
            for x in kept_rows:
                _fill(x[kept:], fill)
        for layer, samples in record.samples.items():
            record.samples[layer] = stored = samples.contiguous().clone()
            _fill(stored[kept:], fill)
        state = record.keep(after, kept)
        for place in range(kept):
            one = true_ids[position + place].view(1)
            expected = forward(parameters, config, one, plain, GOLD)
            assert_close(logits[place], expected[0], EXACT, f"logits at {position + place}")
        position += kept
        assert state.num_tokens == plain.num_tokens == position
        state_close(_tensors(state), _tensors(plain), tolerances, f"state at {position}")


def test_keeping_nothing_is_the_state_before() -> None:
    config = MODELS["k3"]
    parameters = random_parameters(config)
    state = RequestState.new(config, GOLD)
    forward(parameters, config, torch.tensor([4, 9, 2]), state, GOLD)
    record, after = StepRecord(config, state.clone(), GOLD), state.clone()
    forward(parameters, config, torch.tensor([1, 7]), after, GOLD, Options(on_kda=record.on_kda))
    back = record.keep(after, 0)
    assert back.num_tokens == 3
    for key, x in _tensors(back).items():
        assert torch.equal(x, _tensors(state)[key]), key
    with pytest.raises(ValueError, match="3 of 2 rows"):
        record.keep(after, 3)
