"""Snapshots of what runs: a change of a plan is a change of a file in `tests/plans`.

Described from configurations, so that the released models are among them. The instruction set is
set, because it is part of the text, and so is the format, because packed sizes follow the weights.
``pytest tests/decode/test_plans.py --update-plans`` writes the files again.
"""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from released import kimi_k3, kimi_linear

from kdecode.config import ConfigError, DecodeBackend, EngineConfig, ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.decode.latency_specialized import BackendRefusedError
from kdecode.decode.plan import PlanError
from kdecode.engine.describe import describe_draft, describe_plan
from kdecode.engine.engine import LLM
from kdecode.model.draft_synthesis import draft_document
from kdecode.model.presets import PRESETS, released_config

PLANS = Path(__file__).parents[1] / "plans"
CONFIGS = {
    "mini": released_config(PRESETS["mini"]),
    "kimi-linear-mini": released_config(PRESETS["kimi-linear-mini"]),
    "kimi-k3": kimi_k3(),
    "kimi-linear-48b": kimi_linear(),
}
# Backend, rows, and how many of them are one request's.
CASES: dict[str, tuple[DecodeBackend, int, int]] = {
    "auto": ("auto", 1, 1),
    "latency_specialized.1": ("latency_specialized", 1, 1),
    "latency_specialized.8": ("latency_specialized", 8, 1),
    "latency_specialized.verify": ("latency_specialized", 8, 8),
}
DRAFTED = ("mini", "kimi-k3")
# One rank's plan: what it exchanges with the others is part of the text.
SHARED = ("kimi-k3", "kimi-linear-48b")
RANKS = 16
# Ops of the standard path that are Triton's on a GPU.
KDA_KERNELS = ("kda_conv", "kda_gate", "kda_recurrence", "kda_out_norm")
STANDARD_KERNELS = {*KDA_KERNELS, "mla_attention", "route", "experts"}
UPDATE = "pytest tests/decode/test_plans.py --update-plans"


def _engine(backend: DecodeBackend, **changes: object) -> EngineConfig:
    settings = {"isa": "portable", "lossless_packing": "off", "max_context_tokens": 1024}
    return EngineConfig(decode_backend=backend, num_threads=1, **{**settings, **changes})


def _described(model: str, case: str) -> str:
    backend, rows, each = CASES[case]
    config = ModelConfig.from_checkpoint(CONFIGS[model])
    return describe_plan(config, _engine(backend), rows, each)[0].explain()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", CONFIGS)
def test_plan_is_the_committed_one(request: pytest.FixtureRequest, model: str, case: str) -> None:
    _check_snapshot(request, _described(model, case), PLANS / f"{model}.{case}.txt")


def _check_snapshot(request: pytest.FixtureRequest, text: str, path: Path) -> None:
    if request.config.getoption("--update-plans"):
        path.write_text(text, encoding="utf-8")
    committed = path.read_text(encoding="utf-8")
    lines = difflib.unified_diff(committed.splitlines(), text.splitlines(), "committed", "now")
    assert text == committed, "\n".join([*lines, f"If it is meant: {UPDATE}"])


@pytest.mark.parametrize("model", DRAFTED)
def test_plan_of_a_draft_is_the_committed_one(request: pytest.FixtureRequest, model: str) -> None:
    target = ModelConfig.from_checkpoint(CONFIGS[model])
    draft = DraftConfig.from_checkpoint(draft_document("inferact", target))
    text = describe_draft(target, _engine("latency_specialized"), draft, 7).explain()
    _check_snapshot(request, text, PLANS / f"{model}.draft.txt")


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
@pytest.mark.parametrize("model", SHARED)
def test_plan_of_a_rank_is_the_committed_one(
    request: pytest.FixtureRequest, model: str, backend: DecodeBackend
) -> None:
    config = ModelConfig.from_checkpoint(CONFIGS[model])
    text = describe_plan(config, _engine(backend, tensor_parallel_size=RANKS), 1)[0].explain()
    _check_snapshot(request, text, PLANS / f"{model}.ranks-{RANKS}.{backend}.txt")


@pytest.mark.parametrize("model", CONFIGS)
def test_auto_has_no_exchange_that_latency_specialized_does_without(model: str) -> None:
    """Layer by layer: a comparison would count what the baseline does too often."""
    size = 2 if model.endswith("mini") else RANKS
    config = ModelConfig.from_checkpoint(CONFIGS[model])
    counts: list[Counter[int | None]] = []
    backends: tuple[DecodeBackend, ...] = ("auto", "latency_specialized")
    for backend in backends:
        plan, _ = describe_plan(config, _engine(backend, tensor_parallel_size=size), 1)
        counts.append(Counter())
        for step in plan.steps:
            counts[-1][step.layers[0]] += len(step.exchanges)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_plan_of_a_rank_that_shares_positions_exchanges_more(backend: DecodeBackend) -> None:
    """In the attention of MLA layers; nothing else of the plan differs."""
    config = ModelConfig.from_checkpoint(CONFIGS["kimi-k3"])
    settings = {"tensor_parallel_size": 8, "page_tokens": 32}
    apart = describe_plan(config, _engine(backend, **settings), 1)[0]
    shared = _engine(backend, **settings, decode_context_parallel_size=8)
    plan = describe_plan(config, shared, 1)[0]
    for ours, theirs in zip(plan.steps, apart.steps, strict=True):
        found = [[(v.kind, v.value, v.row_bytes) for v in values] for values in ours.exchanges]
        if "mla_attend" in ours.covers:
            assert theirs.exchanges == ()
            # 96 heads, of which 12 are this rank's, of 512 + 64 numbers.
            stats = ("swap", "mla_stats", 96 * 4 * (1 if backend == "auto" else 2))
            assert found == [
                [("gather", "mla_query", 12 * 576 * 2)],
                [("swap", "mla_sums", 96 * 512 * 4), stats],
            ]
        else:
            assert ours.exchanges == theirs.exchanges
    if backend == "latency_specialized":
        buffers = {spec.name: spec.shape for spec in plan.buffer_specs}
        # 1024 positions, on pages of 32 for each of 8 ranks.
        assert buffers["row_pages"] == (1, 4)


def test_a_draft_of_auto_and_one_of_grouped_attention_have_no_plan() -> None:
    target = ModelConfig.from_checkpoint(CONFIGS["mini"])
    draft = DraftConfig.from_checkpoint(draft_document("inferact", target))
    with pytest.raises(BackendRefusedError, match="decode_backend is auto, whose drafts run in"):
        describe_draft(target, _engine("auto"), draft, 7)
    draft = DraftConfig.from_checkpoint(draft_document("radixark", target))
    with pytest.raises(BackendRefusedError, match="grouped-query attention"):
        describe_draft(target, _engine("latency_specialized"), draft, 7)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("model", CONFIGS)
def test_a_layer_is_at_most_four_launches(model: str, rows: int) -> None:
    """Three with a dense MLP, four with a mixture of experts, whatever the attention and rows."""
    config = ModelConfig.from_checkpoint(CONFIGS[model])
    plan, _ = describe_plan(config, _engine("latency_specialized", max_requests=rows), rows)
    assert (plan.backend, plan.rows) == ("latency_specialized", rows)
    launches = Counter(step.layers[0] for step in plan.steps if step.layers[0] is not None)
    expected = {"dense": 3, "moe": 4}
    assert [launches[layer] for layer in range(config.num_layers)] == [
        expected[kind] for kind in config.mlp_kinds
    ]


def test_every_snapshot_belongs_to_a_case() -> None:
    expected = {f"{model}.{case}.txt" for model in CONFIGS for case in CASES}
    expected |= {f"{model}.draft.txt" for model in DRAFTED}
    expected |= {
        f"{model}.ranks-{RANKS}.{backend}.txt"
        for model in SHARED
        for backend in ("auto", "latency_specialized")
    }
    assert {path.name for path in PLANS.glob("*.txt")} == expected


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][2] == 1])
@pytest.mark.parametrize("model", ["mini", "kimi-linear-mini"])
def test_an_engine_runs_the_plan_that_was_described(
    request: pytest.FixtureRequest, model: str, case: str
) -> None:
    fixture = "mini_checkpoint" if model == "mini" else "mini_linear_checkpoint"
    backend, rows, _ = CASES[case]
    llm = LLM(request.getfixturevalue(fixture), _engine(backend))
    assert llm.decode_plan(rows).explain() == _described(model, case)


def test_rows_that_no_specialised_plan_serves_get_the_standard_forward() -> None:
    config = ModelConfig.from_checkpoint(CONFIGS["mini"])
    plan, _ = describe_plan(config, _engine("latency_specialized"), 9)
    assert (plan.backend, plan.rows) == ("auto", None)


@pytest.mark.parametrize("case", CASES)
def test_a_described_plan_says_that_it_cannot_run(case: str) -> None:
    backend, rows, each = CASES[case]
    config = ModelConfig.from_checkpoint(CONFIGS["mini"])
    plan, _ = describe_plan(config, _engine(backend), rows, each)
    for launch in (plan.run, lambda: plan.run_until(0)):
        with pytest.raises(PlanError, match="has no weights and cannot run"):
            launch()


def test_nine_rows_of_one_request_have_a_plan_and_ten_are_refused() -> None:
    config = ModelConfig.from_checkpoint(CONFIGS["mini"])
    plan, _ = describe_plan(config, _engine("latency_specialized"), 9, 9)
    assert (plan.rows, plan.rows_per_request) == (9, 9)
    with pytest.raises(
        BackendRefusedError, match="records at most 9 rows of a request, its anchor"
    ):
        describe_plan(config, _engine("latency_specialized"), 10, 10)


def test_a_description_says_what_it_cannot_know() -> None:
    config = ModelConfig.from_checkpoint(CONFIGS["mini"])
    plan, _ = describe_plan(config, _engine("latency_specialized", lossless_packing="on"), 1)
    note = "bf16 weights are counted at 16 bits; how far they pack without loss depends on their"
    assert plan.explain().splitlines()[-1].startswith(note)
    assert plan.explain().startswith(_described("mini", "latency_specialized.1"))


def test_a_plan_of_another_device_is_described_without_it() -> None:
    config = ModelConfig.from_checkpoint(CONFIGS["mini"])
    plan, size = describe_plan(config, _engine("latency_specialized", device="cuda"), 1)
    assert {step.impl for step in plan.steps} == {"triton"}
    assert plan.explain().splitlines()[-1] == f"{len(plan.steps)} steps in one CUDA graph"
    on_cpu = describe_plan(config, _engine("latency_specialized"), 1)[1]
    # Tiles have rows of padding.
    assert 0.98 * on_cpu < size <= on_cpu


def test_a_description_is_refused_as_an_engine_is() -> None:
    config = ModelConfig.from_checkpoint(CONFIGS["mini"])
    odd = replace(config, mla=replace(config.mla, num_heads=1))
    with pytest.raises(BackendRefusedError, match="must have the same total width"):
        describe_plan(odd, _engine("latency_specialized"), 1)
    with pytest.raises(ConfigError, match="max_context_tokens is 2,000,000"):
        describe_plan(config, _engine("auto", max_context_tokens=2_000_000), 1)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_standard_plan_of_a_gpu_has_its_kernels_with_and_without_the_gpu(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(has_gpu))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    config = ModelConfig.from_checkpoint(CONFIGS["mini"])
    plan, _ = describe_plan(config, _engine("auto", device="cuda", cache_dtype="fp8"), 1)
    on_cpu, _ = describe_plan(config, _engine("auto"), 1)
    assert [step.covers for step in plan.steps] == [step.covers for step in on_cpu.steps]
    assert {step.op for step in plan.steps if step.impl == "triton"} == STANDARD_KERNELS
    assert {step.impl for step in plan.steps if step.op not in STANDARD_KERNELS} == {"torch"}
    assert {step.impl for step in on_cpu.steps} == {"torch"}
    assert plan.notes == ()
    with pytest.raises(PlanError, match="cannot run"):
        plan.run()


def test_a_standard_plan_of_a_gpu_says_that_triton_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kdecode.decode.device.find_spec", lambda name: None)
    config = ModelConfig.from_checkpoint(CONFIGS["mini"])
    plan, _ = describe_plan(config, _engine("auto", device="cuda"), 1)
    assert {step.impl for step in plan.steps} == {"torch"}
    assert plan.explain().splitlines()[-1].startswith("Triton is not installed here")
    assert describe_plan(config, _engine("auto"), 1)[0].notes == ()
