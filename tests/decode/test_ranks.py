"""The standard forward on several ranks against one rank: logits, states and cache rows.

Ranks are threads. What differs from one rank is where the sums of divided products are rounded, so
logits and caches agree as two backends do; what every rank has of a value is the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig, ModelConfig
from kdecode.decode.auto import build_auto_plan, run_standard
from kdecode.decode.plan import DecodePlan
from kdecode.kernels import table
from kdecode.kernels.contract import Exchange, Problem, Tolerance
from kdecode.model.layout import TrunkFormat, pack_model
from kdecode.model.outline import outline_model
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.rank_share import share_of
from kdecode.model.synthesis import make_checkpoint
from kdecode.model.weights import CheckpointReader
from kdecode.parallel.ranks import ALONE, Ranks
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.ranks import run_ranks

# The bounds of one rank against the reference.
LOGITS = Tolerance(rtol=0.0, atol=0.5, rms_ratio=2e-2)
STATE = Tolerance(rtol=0.0, atol=0.25, rms_ratio=1.5e-2)
ROWS = Tolerance(rtol=0.0, atol=0.4, rms_ratio=2.5e-2)
FAMILIES = {"k3": "mini_16_checkpoint", "linear": "mini_linear_16_checkpoint"}
PAGE_TOKENS, NUM_PAGES, NUM_SLOTS = 16, 12, 3
# A verify step of four rows, of which so many stay.
DRAFTED, KEPT = 4, 2


@dataclass(frozen=True)
class Outcome:
    """What one rank has after every step, and at the end."""

    logits: list[Tensor]
    prefixes: list[Tensor]
    conv: dict[int, Tensor]
    recurrent: dict[int, Tensor]
    pages: dict[int, Tensor]
    config: ModelConfig


def steps(vocab: int) -> list[StepBatch]:
    """A prompt in chunks, a second one beside decoding, decode rows, a verify step, one after it.

    The second request has slot 2 and the later pages.
    """
    tokens = torch.randint(vocab, (120,), generator=torch.Generator().manual_seed(7)).tolist()
    first, second = tuple(range(6)), tuple(range(6, 12))

    def one(begin: int, end: int, start: int, is_decode: bool = False) -> StepRequest:
        return StepRequest(tuple(tokens[begin:end]), start, 0, first, is_decode)

    def other(begin: int, end: int, start: int, is_decode: bool = False) -> StepRequest:
        return StepRequest(tuple(tokens[60 + begin : 60 + end]), start, 2, second, is_decode)

    verified = replace(one(43, 43 + DRAFTED, 43, True), is_verify=True, all_logits=True)
    after = 43 + KEPT
    return [
        StepBatch((one(0, 23, 0),)),
        StepBatch((one(23, 40, 23),)),
        StepBatch((one(40, 41, 40, True), other(0, 30, 0))),
        StepBatch((one(41, 42, 41, True), other(30, 31, 30, True))),
        StepBatch((one(42, 43, 42, True), other(31, 32, 31, True))),
        StepBatch((verified,)),
        StepBatch((one(after, after + 1, after, True), other(32, 33, 32, True))),
    ]


def run_steps(
    directory: Path, trunk: TrunkFormat, ranks: Ranks, exchange: Exchange | None
) -> Outcome:
    reader = CheckpointReader(directory, ranks=ranks)
    packed = pack_model(reader, trunk)
    engine = EngineConfig(page_tokens=PAGE_TOKENS, max_context_tokens=96)
    caches = Caches.allocate(reader.config, "cpu", NUM_SLOTS, NUM_PAGES, PAGE_TOKENS)
    plan = build_auto_plan(packed, caches, engine, ranks, exchange)
    logits, prefixes = [], []
    for batch in steps(reader.whole.vocab_size):
        logits.append(run_standard(plan, batch))
        prefixes.append(plan.buffers["prefix"].clone())
        if batch.requests[0].is_verify:
            caches.commit({batch.requests[0].slot: KEPT})
    return Outcome(logits, prefixes, caches.conv, caches.recurrent, caches.pages, reader.config)


def run_all(directory: Path, size: int, trunk: TrunkFormat = "rows") -> list[Outcome]:
    if size == 1:
        return [run_steps(directory, trunk, ALONE, None)]
    return run_ranks(size, lambda ranks, exchange: run_steps(directory, trunk, ranks, exchange))


def joined_windows(found: list[Outcome], layer: int) -> Tensor:
    """[slots, W - 1, 3D] of all heads: each rank has its own heads' q, k and v."""
    parts = [outcome.conv[layer].chunk(3, dim=-1) for outcome in found]
    return torch.cat([part[place] for place in range(3) for part in parts], dim=-1)


def check(found: list[Outcome], whole: Outcome) -> None:
    for number, gold in enumerate(whole.logits):
        for outcome in found:
            bit_equal(outcome.logits[number], found[0].logits[number], f"logits {number}")
            bit_equal(outcome.prefixes[number], found[0].prefixes[number], f"prefix {number}")
        assert_close(found[0].logits[number], gold, LOGITS, f"logits of step {number}")
    for layer, gold in whole.recurrent.items():
        heads = torch.cat([outcome.recurrent[layer] for outcome in found], dim=1)
        assert_close(heads, gold, STATE, f"states of layer {layer}")
        assert_close(joined_windows(found, layer), whole.conv[layer], ROWS, f"windows of {layer}")
    for layer, gold in whole.pages.items():
        for outcome in found:
            bit_equal(outcome.pages[layer], found[0].pages[layer], f"pages of layer {layer}")
        assert_close(found[0].pages[layer], gold, ROWS, f"pages of layer {layer}")


@pytest.fixture(scope="module")
def whole_runs(request: pytest.FixtureRequest) -> Callable[[str, TrunkFormat], Outcome]:
    kept: dict[tuple[str, str], Outcome] = {}

    def run(family: str, trunk: TrunkFormat) -> Outcome:
        if (family, trunk) not in kept:
            directory = request.getfixturevalue(FAMILIES[family])
            (kept[family, trunk],) = run_all(directory, 1, trunk)
        return kept[family, trunk]

    return run


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_have_together_what_one_rank_has(
    family: str,
    size: int,
    request: pytest.FixtureRequest,
    whole_runs: Callable[[str, TrunkFormat], Outcome],
) -> None:
    found = run_all(request.getfixturevalue(FAMILIES[family]), size)
    check(found, whole_runs(family, "rows"))
    # The first layer's state comes before any sum of parts.
    heads = torch.cat([outcome.recurrent[0] for outcome in found], dim=1)
    bit_equal(heads, whole_runs(family, "rows").recurrent[0], "states of layer 0")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trunk_in_tiles_is_divided_too(
    family: str,
    request: pytest.FixtureRequest,
    whole_runs: Callable[[str, TrunkFormat], Outcome],
) -> None:
    check(
        run_all(request.getfixturevalue(FAMILIES[family]), 4, "tiles"), whole_runs(family, "tiles")
    )


@pytest.mark.slow
def test_two_ranks_of_a_larger_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "medium", "medium", seed=0)
    (whole,) = run_all(tmp_path / "medium", 1)
    check(run_all(tmp_path / "medium", 2), whole)


def described(config: ModelConfig, ranks: Ranks) -> DecodePlan:
    share = share_of(config, ranks.size)
    engine = EngineConfig(page_tokens=PAGE_TOKENS, max_context_tokens=96)
    caches = Caches.allocate(share, "meta", 1, 1, PAGE_TOKENS)
    return build_auto_plan(outline_model(share, "rows", ranks=ranks), caches, engine, ranks)


def test_a_plan_names_what_its_steps_exchange() -> None:
    config = ModelConfig.from_checkpoint(released_config(PRESETS["mini-16"]))
    plan = described(config, Ranks(1, 8))
    found = [
        (step.layers[0], step.covers[0], value.kind, value.value, value.row_bytes)
        for step in plan.steps
        for values in step.exchanges
        for value in values
    ]
    dense = [
        ("attn_out_proj", "reduce", "attn_delta", 1024),
        ("dense_mlp", "reduce", "mlp_delta", 1024),
    ]
    mixture = [
        ("attn_out_proj", "reduce", "attn_delta", 1024),
        ("route", "gather", "router_logits", 16),
        ("latent_down", "gather", "latent", 32),
        ("experts", "reduce", "expert_sum", 512),
        ("latent_up", "gather", "routed", 64),
        ("shared_mlp", "reduce", "shared", 1024),
    ]
    assert found == [
        (None, "embed", "reduce", "prefix", 1024),
        *((0, *entry) for entry in dense),
        *((layer, *entry) for layer in range(1, 5) for entry in mixture),
        (None, "head", "gather", "logits", 384),
    ]
    assert not any(step.exchanges for step in described(config, ALONE).steps)


def test_a_plan_of_several_ranks_needs_an_exchange(mini_16_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="runs with an exchange; this one has none"):
        run_steps(mini_16_checkpoint, "rows", Ranks(0, 4), None)


def test_kernels_that_exchange_nothing_are_not_taken() -> None:
    config = ModelConfig.from_checkpoint(released_config(PRESETS["mini-16"]))
    one = Problem(config, 1, None, 1, "cuda", "bf16", PAGE_TOKENS, 96, "", arch="sm_90")
    for op in ("route", "experts"):
        triton = table.implementation(op, "triton")
        assert triton.refuse(one) == []
        assert triton.refuse(replace(one, ranks=Ranks(0, 4))) == [
            "The Triton kernels exchange nothing with other ranks, and there are 4."
        ]
