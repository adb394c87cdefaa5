"""Native attention over expanded keys against its definition in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kdecode.kernels.mla_attention import native
from kdecode.testing.cases import tiny_k3
from kdecode.testing.compare import bit_equal

# (heads, nope, rope, v)
SIZES = [(1, 16, 16, 16), (3, 48, 16, 32), (2, 128, 64, 128)]


def _inputs(tokens: int, start: int, size: tuple[int, int, int, int]) -> tuple[Tensor, ...]:
    """query, keys, rest, values as the op has them: columns of wider buffers; NaN around them."""
    heads, nope, rope, v_dim = size
    generator = torch.Generator().manual_seed(tokens + start)
    context = start + tokens

    def rows(count: int, width: int) -> Tensor:
        wide = torch.full((count + 1, width + 32), float("nan"), dtype=torch.bfloat16)
        wide[:count, 16 : 16 + width] = torch.randn(count, width, generator=generator)
        return wide[:count, 16 : 16 + width]

    query = rows(tokens, heads * (nope + rope)).unflatten(1, (heads, -1))
    keys = rows(context, heads * nope).unflatten(1, (heads, -1))
    values = rows(context, heads * v_dim).unflatten(1, (heads, -1))
    return query, keys, rows(context, rope), values


def _gold(query: Tensor, keys: Tensor, rest: Tensor, values: Tensor, scale: float) -> Tensor:
    tokens, context = query.shape[0], keys.shape[0]
    whole = torch.cat([keys, rest.unsqueeze(1).expand(-1, keys.shape[1], -1)], dim=-1)
    scores = torch.einsum("thk,chk->htc", query.double(), whole.double()) * scale
    hidden = torch.ones(tokens, context, dtype=torch.bool).triu_(context - tokens + 1)
    share = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("htc,chv->thv", share, values.double())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("tokens", "start"),
    [(1, 0), (2, 0), (15, 1), (16, 47), (17, 48), (64, 0), (65, 63), (130, 200), (70, 1000)],
)
def test_values(isa: str, size: tuple[int, int, int, int], tokens: int, start: int) -> None:
    inputs = _inputs(tokens, start, size)
    out = native.prompt_attention(*inputs, 0.3, isa)
    gold = _gold(*inputs, 0.3)
    assert out.shape == gold.shape
    assert bool(((out.double() - gold).abs() <= gold.abs() * 2.0**-8 + 1e-5).all())


def test_scores_of_any_size(isa: str) -> None:
    """Scores of a few hundred: nothing overflows, and one token takes it all."""
    query, keys, rest, values = _inputs(40, 90, SIZES[1])
    out = native.prompt_attention(query, keys, rest, values, 20.0, isa)
    gold = _gold(query, keys, rest, values, 20.0)
    assert bool(((out.double() - gold).abs() <= gold.abs() * 2.0**-7 + 1e-3).all())


def test_a_token_does_not_see_later_ones(isa: str) -> None:
    query, keys, rest, values = _inputs(100, 30, SIZES[1])
    out = native.prompt_attention(query, keys, rest, values, 0.3, isa)
    shorter = (query[:57], keys[:87], rest[:87], values[:87])
    bit_equal(native.prompt_attention(*shorter, 0.3, isa), out[:57], "rows before the change")


def test_chunks_and_threads_do_not_change_a_bit(isa: str) -> None:
    """Rounds are counted from the first token of the context, wherever a chunk begins."""
    query, keys, rest, values = _inputs(150, 0, SIZES[1])
    whole = native.prompt_attention(query, keys, rest, values, 0.3, isa)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for begin, end in ((0, 5), (5, 70), (70, 150)):
            parts = (query[begin:end], keys[:end], rest[:end], values[:end])
            bit_equal(native.prompt_attention(*parts, 0.3, isa), whole[begin:end], f"from {begin}")
    finally:
        torch.set_num_threads(threads)


def test_what_does_not_fit_is_refused() -> None:
    query, keys, rest, values = _inputs(4, 3, SIZES[0])
    with pytest.raises(ValueError, match="the last of the tokens"):
        native.prompt_attention(query, keys[:3], rest, values, 1.0)
    with pytest.raises(ValueError, match="rows of bf16 on a CPU; query"):
        native.prompt_attention(query.float(), keys, rest, values, 1.0)
    with pytest.raises(ValueError, match="multiples of 16; one is 8"):
        native.prompt_attention(query[..., :24], keys, rest[:, :8], values, 1.0)
    mla = tiny_k3().mla
    whole = replace(mla, nope_dim=32, rope_dim=16, v_dim=48)
    assert native.takes(whole)
    assert not native.takes(replace(whole, rope_dim=8))
    assert not native.takes(replace(whole, nope_dim=1024))
