"""The standard forward on several ranks against one rank: logits, states and cache rows.

Ranks are threads. What differs from one rank is where the sums of divided products are rounded, so
logits and caches agree as two backends do; what every rank has of a value is the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from standard_rank_cases import (
    FAMILIES,
    PAGE_TOKENS,
    Outcome,
    Setting,
    check,
    run_all,
    run_steps,
    steps,
)

from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig, ModelConfig
from kdecode.decode.auto import build_auto_plan
from kdecode.decode.plan import DecodePlan
from kdecode.kernels.contract import Exchange
from kdecode.model.layout import TrunkFormat
from kdecode.model.outline import outline_model
from kdecode.model.presets import PRESETS, released_config
from kdecode.model.rank_share import share_of
from kdecode.model.synthesis import make_checkpoint
from kdecode.parallel.ranks import ALONE, Ranks
from kdecode.testing.compare import bit_equal
from kdecode.testing.ranks import run_ranks


@pytest.fixture(scope="module")
def whole_runs(request: pytest.FixtureRequest) -> Callable[[str, TrunkFormat], Outcome]:
    kept: dict[tuple[str, str], Outcome] = {}

    def run(family: str, trunk: TrunkFormat) -> Outcome:
        if (family, trunk) not in kept:
            directory = request.getfixturevalue(FAMILIES[family])
            (kept[family, trunk],) = run_all(directory, 1, Setting(trunk))
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
    found = run_all(request.getfixturevalue(FAMILIES[family]), 4, Setting("tiles"))
    check(found, whole_runs(family, "tiles"))


@pytest.mark.slow
def test_two_ranks_of_a_larger_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "medium", "medium", seed=0)
    (whole,) = run_all(tmp_path / "medium", 1)
    # Roundings of 12 layers: on one rank a trunk in rows and one in tiles differ by as much.
    check(run_all(tmp_path / "medium", 2), whole, rms_ratio=4e-2)


def described(config: ModelConfig, ranks: Ranks) -> DecodePlan:
    share = share_of(config, ranks.size)
    engine = EngineConfig(page_tokens=PAGE_TOKENS, max_context_tokens=96)
    caches = Caches.allocate(share, "meta", 1, 1, PAGE_TOKENS)
    return build_auto_plan(outline_model(share, "rows", ranks=ranks), caches, engine, ranks)


def test_a_plan_names_what_its_steps_exchange() -> None:
    config = ModelConfig.from_checkpoint(released_config(PRESETS["mini-16"]))
    plan = described(config, Ranks(1, 8))
    found = [
        (step.layers[0], step.covers[0], [(v.kind, v.value, v.row_bytes) for v in values])
        for step in plan.steps
        for values in step.exchanges
    ]
    dense = [
        ("attn_out_proj", [("reduce", "attn_delta", 1024)]),
        ("dense_mlp", [("reduce", "mlp_delta", 1024)]),
    ]
    mixture = [
        ("attn_out_proj", [("reduce", "attn_delta", 1024)]),
        ("route", [("gather", "router_logits", 16), ("gather", "latent", 32)]),
        ("experts", [("reduce", "expert_sum", 512), ("reduce", "shared", 1024)]),
        ("experts", [("gather", "routed", 64)]),
    ]
    assert found == [
        (None, "embed", [("reduce", "prefix", 1024)]),
        *((0, *entry) for entry in dense),
        *((layer, *entry) for layer in range(1, 5) for entry in mixture),
        (None, "head", [("gather", "logits", 384)]),
    ]
    assert not any(step.exchanges for step in described(config, ALONE).steps)


def test_a_plan_of_several_ranks_needs_an_exchange(mini_16_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="runs with an exchange; this one has none"):
        run_steps(mini_16_checkpoint, Setting(), Ranks(0, 4), None)


class Counted:
    """An exchange, and how often it was one."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self.number = exchange, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("reduce", "gather", "swap"):
            self.number += 1
        made: Callable[..., Any] = getattr(self._exchange, name)
        return made


@pytest.mark.parametrize(
    ("family", "preset"), [("k3", "mini-16"), ("linear", "kimi-linear-mini-16")]
)
def test_a_run_has_the_exchanges_that_its_plan_names(
    family: str, preset: str, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(FAMILIES[family])
    config = ModelConfig.from_checkpoint(released_config(PRESETS[preset]))
    batches = steps(config.vocab_size)[:3]

    def run(ranks: Ranks, exchange: Exchange) -> int:
        counted: Any = Counted(exchange)
        run_steps(directory, Setting(), ranks, counted, batches)
        return int(counted.number)

    named = sum(len(step.exchanges) for step in described(config, Ranks(0, 2)).steps)
    assert run_ranks(2, run) == [len(batches) * named] * 2
