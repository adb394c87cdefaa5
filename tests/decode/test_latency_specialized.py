"""The specialised plans against the oracle, and both backends on one set of caches.

Every step of the plan is compared from equal inputs, in every buffer and state that it writes; then
what nobody may write. Free slots, free pages and the rows behind a request's length are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from kdecode.cache.batch import StepBatch, StepRequest
from kdecode.cache.caches import Caches
from kdecode.config import EngineConfig
from kdecode.decode import all_reference, latency_specialized
from kdecode.decode.latency_specialized import BackendRefusedError
from kdecode.decode.plan import DecodePlan
from kdecode.decode.runner import SPECIALIZED, StepRunner, deployment_of, load_inputs
from kdecode.decode.verify import check_steps, copy_caches
from kdecode.kernels.common.native import supported_isas
from kdecode.kernels.contract import Tolerance
from kdecode.model.layout import PackedModel, pack_model
from kdecode.model.parameters import ModelParameters
from kdecode.model.weights import CheckpointReader
from kdecode.testing.compare import assert_close, bit_equal
from kdecode.testing.poison import poison_except_, poison_tail_, poisoned

PAGE_TOKENS = 64
NUM_SLOTS, NUM_PAGES = 10, 48
FP8_SCALE = 0.125
RECURRENT_RMS = 3e-3


@dataclass(frozen=True)
class Loaded:
    """One checkpoint through the real loader."""

    packed: PackedModel
    parameters: ModelParameters

    def caches(self, cache_dtype: str) -> Caches:
        config = self.packed.config
        scales = dict.fromkeys(range(config.num_layers), FP8_SCALE)
        return Caches.allocate(
            config,
            "cpu",
            NUM_SLOTS,
            NUM_PAGES,
            PAGE_TOKENS,
            cache_dtype=cache_dtype,
            scales=scales if cache_dtype == "fp8" else None,
        )

    def engine(self, **changes: object) -> EngineConfig:
        base = EngineConfig(
            decode_backend="latency_specialized",
            max_context_tokens=2304,
            num_threads=2,
            page_tokens=PAGE_TOKENS,
        )
        return replace(base, **changes)


@pytest.fixture(scope="module", params=["mini_checkpoint", "mini_linear_checkpoint"])
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    directory: Path = request.getfixturevalue(request.param)
    packed = pack_model(CheckpointReader(directory), "tiles")
    return Loaded(packed, CheckpointReader(directory).load_model())


def _requests(loaded: Loaded, contexts: list[int]) -> tuple[StepRequest, ...]:
    """Decode rows with these contexts, in slots and pages that are not in order."""
    free_pages = iter(range(NUM_PAGES - 1, -1, -1))
    requests = []
    for row, context in enumerate(contexts):
        pages = tuple(next(free_pages) for _ in range(context // PAGE_TOKENS + 1))
        slot = NUM_SLOTS - 1 - row
        requests.append(StepRequest((17 * row + 3,), context, slot, pages, is_decode=True))
    return tuple(requests)


def _fill(caches: Caches, requests: tuple[StepRequest, ...], seed: int) -> None:
    """Realistic contents where requests live, NaN elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    for pools in (caches.conv, caches.recurrent, caches.pages):
        for layer, pool in pools.items():
            scale = 0.3 if pools is caches.recurrent else 1.0
            values = torch.randn(pool.shape, generator=generator) * scale
            if pools is caches.pages and caches.cache_dtype == "fp8":
                values = values / caches.scales[layer]
            pool.copy_(values.to(pool.dtype))
    poison_except_([*caches.conv.values(), *caches.recurrent.values()], [r.slot for r in requests])
    poison_except_(caches.pages.values(), [p for r in requests for p in r.pages])
    for pages in caches.pages.values():
        for request in requests:
            poison_tail_(pages, request.pages, request.start)


def _poison_steps(plan: DecodePlan) -> None:
    for name, tensor in plan.buffers.items():
        if not name.startswith("row_"):
            tensor.copy_(poisoned(tensor.shape, tensor.dtype))


def _check_step(loaded: Loaded, engine: EngineConfig, contexts: list[int]) -> None:
    caches, oracle_caches = loaded.caches(engine.cache_dtype), loaded.caches(engine.cache_dtype)
    requests = _requests(loaded, contexts)
    _fill(caches, requests, seed=len(contexts))
    copy_caches(caches, oracle_caches)
    before = loaded.caches(engine.cache_dtype)
    copy_caches(caches, before)
    deployment = deployment_of(loaded.packed.config, engine)
    plan = latency_specialized.build(deployment, loaded.packed, caches, len(contexts))
    _poison_steps(plan)
    oracle = all_reference.build(
        loaded.parameters, loaded.packed.config, oracle_caches, page_tokens=PAGE_TOKENS
    )
    _check(plan, oracle, loaded, StepBatch(requests))
    _check_untouched(caches, oracle_caches, before, requests)


def _check(plan: DecodePlan, oracle: DecodePlan, loaded: Loaded, batch: StepBatch) -> None:
    checks = list(check_steps(plan, oracle, batch, loaded.parameters))
    assert [str(check) for check in checks if not check.is_within] == []
    assert {"conv", "recurrent", "cache row", "route", "logits"} <= {c.buffer for c in checks}
    # From equal inputs, a projection that rounds to the other bf16 neighbour moves a state by less
    # than its op may move an output.
    states = [check for check in checks if check.buffer == "recurrent"]
    assert [str(check) for check in states if check.rms_ratio > RECURRENT_RMS] == []


def _check_untouched(
    caches: Caches, oracle: Caches, before: Caches, requests: tuple[StepRequest, ...]
) -> None:
    """What belongs to nobody keeps every bit; a window's old samples are moved, not computed."""
    used = [request.slot for request in requests]
    free = [slot for slot in range(NUM_SLOTS) if slot not in used]
    for layer, state in caches.recurrent.items():
        name = f"state of layer {layer}"
        bit_equal(state[free], before.recurrent[layer][free], name)
        window = caches.conv[layer]
        bit_equal(window[used, :-1], oracle.conv[layer][used, :-1], f"window of layer {layer}")
        bit_equal(window[free], before.conv[layer][free], f"window of layer {layer}")
    for layer, pages in caches.pages.items():
        written = torch.zeros(pages.shape[:2], dtype=torch.bool)
        for request in requests:
            page, place = divmod(request.start, PAGE_TOKENS)
            written[request.pages[page], place] = True
        untouched = pages.view(torch.uint8)[~written]
        bit_equal(untouched, before.pages[layer].view(torch.uint8)[~written], "pages")


@pytest.mark.parametrize("rows", range(1, 9))
def test_rows(loaded: Loaded, rows: int) -> None:
    contexts = [0, 1, 2, 3, 63, 64, 65, 200][-rows:]
    _check_step(loaded, loaded.engine(), contexts)


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("isa", supported_isas())
def test_instruction_sets_and_cache_types(loaded: Loaded, isa: str, cache_dtype: str) -> None:
    scale = FP8_SCALE if cache_dtype == "fp8" else None
    engine = loaded.engine(isa=isa, cache_dtype=cache_dtype, cache_scale=scale)
    _check_step(loaded, engine, [5, 130, 64])


def test_long_context(loaded: Loaded) -> None:
    _check_step(loaded, loaded.engine(), [2047])


def test_one_row_and_eight_rows_agree_bit_for_bit(loaded: Loaded) -> None:
    contexts = [3, 64, 9, 1, 0, 130, 63, 7]
    requests = _requests(loaded, contexts)
    together, alone = loaded.caches("bf16"), loaded.caches("bf16")
    _fill(together, requests, seed=1)
    copy_caches(together, alone)
    deployment = deployment_of(loaded.packed.config, loaded.engine())
    plan = latency_specialized.build(deployment, loaded.packed, together, 8)
    load_inputs(plan, StepBatch(requests))
    plan.run()
    single = latency_specialized.build(deployment, loaded.packed, alone, 1)
    for row, request in enumerate(requests):
        load_inputs(single, StepBatch((request,)))
        single.run()
        bit_equal(single.buffers["logits"][0], plan.buffers["logits"][row], f"row {row}")
    for layer, state in together.recurrent.items():
        bit_equal(state, alone.recurrent[layer], f"state of layer {layer}")
    for layer, pages in together.pages.items():
        bit_equal(pages, alone.pages[layer], f"pages of layer {layer}")


def test_two_runs_of_one_plan_with_other_requests(loaded: Loaded) -> None:
    """Nothing of the last step's metadata is used again: slots, lengths and order all change."""
    requests = _requests(loaded, [70, 5, 1])
    caches, oracle_caches = loaded.caches("bf16"), loaded.caches("bf16")
    _fill(caches, requests, seed=2)
    copy_caches(caches, oracle_caches)
    plan = latency_specialized.build(
        deployment_of(loaded.packed.config, loaded.engine()), loaded.packed, caches, 2
    )
    oracle = all_reference.build(
        loaded.parameters, loaded.packed.config, oracle_caches, page_tokens=PAGE_TOKENS
    )
    for pair in ((requests[0], requests[1]), (requests[2], requests[0])):
        _check(plan, oracle, loaded, StepBatch(pair))
        requests = (replace(requests[0], start=71), *requests[1:])
        copy_caches(caches, oracle_caches)


def test_a_request_changes_path_in_mid_stream(loaded: Loaded) -> None:
    """Standard, specialised, standard, specialised, on the same caches, against the oracle."""
    config = loaded.packed.config
    caches, oracle_caches = loaded.caches("bf16"), loaded.caches("bf16")
    runner = StepRunner(loaded.packed, caches, loaded.engine())
    oracle = all_reference.build(loaded.parameters, config, oracle_caches, page_tokens=PAGE_TOKENS)
    prompt = tuple(range(40, 51))
    steps = [StepRequest(prompt, 0, 4, (7, 2), is_decode=False)]
    steps += [StepRequest((60 + i,), 11 + i, 4, (7, 2), is_decode=True) for i in range(8)]
    other = StepRequest((5,), 0, 6, (9,), is_decode=False)
    paths = []
    bound = Tolerance(rtol=5e-2, atol=0.2, rms_ratio=4e-2)
    for number, request in enumerate(steps):
        # A prefill beside it sends every other decode step to the standard path.
        mixed = number % 2 == 0
        batch = StepBatch((request, replace(other, slot=6)) if mixed else (request,))
        if mixed:
            caches.clear_slot(6)
            oracle_caches.clear_slot(6)
        runner.run(batch)
        paths.append(runner.last_path[0])
        oracle.buffers.batch = batch
        oracle.run()
        for layer, state in caches.recurrent.items():
            gold = oracle_caches.recurrent[layer][4]
            assert_close(state[4], gold, bound, f"step {number}, state of layer {layer}")
        copy_caches(caches, oracle_caches)
    assert paths[1::2] == [SPECIALIZED] * 4
    assert runner.stats.coverage == 0.5


def test_drift_over_256_steps(loaded: Loaded) -> None:
    """The recurrent state after 256 free-running steps, against the rounded oracle."""
    caches, oracle_caches = loaded.caches("bf16"), loaded.caches("bf16")
    runner = StepRunner(loaded.packed, caches, loaded.engine())
    oracle = all_reference.build(
        loaded.parameters, loaded.packed.config, oracle_caches, page_tokens=PAGE_TOKENS
    )
    first = next(iter(caches.recurrent))
    pages = (1, 2, 3, 4)
    for position in range(256):
        token = (position * 37) % 1000
        batch = StepBatch((StepRequest((token,), position, 0, pages, is_decode=True),))
        runner.run(batch)
        if position == 0 or loaded.packed.config.layer_kinds[0] == "kda":
            oracle.buffers.batch = batch
            oracle.run_until(_end_of_layer(oracle, first))
    # The first layer's state depends on the tokens alone: no other layer's rounding is in it.
    state, gold = caches.recurrent[first][0], oracle_caches.recurrent[first][0]
    assert_close(state, gold, Tolerance(rtol=2e-2, atol=2e-2, rms_ratio=5e-3), "state")


def _end_of_layer(plan: DecodePlan, layer: int) -> int:
    return max(i for i, step in enumerate(plan.steps) if step.layers == (layer,))


def test_refusal_has_every_reason(loaded: Loaded) -> None:
    config = loaded.packed.config
    odd = replace(config, kda=replace(config.kda, head_dim=24))
    deployment = replace(
        deployment_of(loaded.packed.config, loaded.engine()), config=odd, device="cuda"
    )
    reasons = latency_specialized.refuse(deployment)
    assert any("cuda" in reason for reason in reasons)
    assert any("24" in reason for reason in reasons)
    with pytest.raises(BackendRefusedError) as raised:
        latency_specialized.build(deployment, loaded.packed, loaded.caches("bf16"), 1)
    for reason in reasons:
        assert reason in str(raised.value)
    assert "Set decode_backend to auto" in str(raised.value)


def test_off_means_off(mini_checkpoint: Path) -> None:
    """With auto no plan is built, and every decode step is counted on the standard path."""
    packed = pack_model(CheckpointReader(mini_checkpoint), "rows")
    caches = Caches.allocate(packed.config, "cpu", 2, 4, PAGE_TOKENS)
    runner = StepRunner(packed, caches, EngineConfig(max_context_tokens=128))
    runner.run(StepBatch((StepRequest((1, 2), 0, 0, (0,), is_decode=False),)))
    runner.run(StepBatch((StepRequest((3,), 2, 0, (0,), is_decode=True),)))
    assert runner.last_path[0] == "standard"
    assert runner.stats.coverage == 0.0
    assert runner.stats.prefill_steps == 1
