"""The CUDA plan against the oracle, step by step, and two runs of one plan with other requests.

Small models with each kind of layer. Without a GPU the kernels run in Triton's interpreter;
`tests/gpu` has the larger models, the graphs and an engine.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from cuda_cases import (
    CONFIGS,
    DEVICE,
    Twins,
    build,
    decode_batch,
    deployment,
    poison,
    verify_batch,
)
from native_cases import Loaded
from triton_cases import make_case

from kdecode.cache.batch import StepBatch
from kdecode.config import ModelConfig
from kdecode.decode import latency_specialized
from kdecode.decode.latency_cuda import launches
from kdecode.decode.plan import DecodePlan, PlanError
from kdecode.decode.runner import load_inputs
from kdecode.decode.step_check import StepError
from kdecode.decode.verify import check_steps, copy_caches
from kdecode.kernels.contract import PlanMemory
from kdecode.model.layout import to_device
from kdecode.model.outline import outline_model
from kdecode.testing.compare import bit_equal


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> Loaded:
    case = make_case(CONFIGS[request.param])
    return Loaded(case.packed, case.parameters)


def _check(plan: DecodePlan, twins: Twins, loaded: Loaded, batch: StepBatch) -> None:
    poison(plan)
    checks = list(check_steps(plan, loaded.oracle(twins.theirs), batch, loaded.parameters))
    assert [str(check) for check in checks if not check.is_within] == []
    assert {"conv", "recurrent", "cache row", "route", "logits"} <= {c.buffer for c in checks}


@pytest.mark.parametrize(
    ("loaded", "contexts", "cache_dtype", "turns"),
    [("k3", [70], "bf16", 1), ("k3", [0, 63, 130], "fp8", 2), ("linear", [5, 64], "bf16", 1)],
    indirect=["loaded"],
)
def test_every_step_against_the_oracle(
    loaded: Loaded, contexts: list[int], cache_dtype: str, turns: int
) -> None:
    """turns: runs of one plan, each with other slots and pages."""
    twins = Twins.of(loaded, cache_dtype)
    plan = build(loaded, twins.ours, len(contexts))
    for turn in range(turns):
        batch = decode_batch(contexts, turn)
        twins.fill(batch, seed=turn)
        _check(plan, twins, loaded, batch)


@pytest.mark.parametrize("loaded", ["k3"], indirect=True)
def test_verified_rows_and_what_stays_of_them(loaded: Loaded) -> None:
    """Every step and the commit of all rows; then a commit of fewer, in other slots."""
    twins, each = Twins.of(loaded), 3
    plan = build(loaded, twins.ours, 2 * each, each)
    batch = verify_batch([62, 1], each)
    twins.fill(batch, seed=1)
    _check(plan, twins, loaded, batch)
    batch = verify_batch([30, 64], each, turn=2)
    twins.fill(batch, seed=2)
    load_inputs(plan, batch)
    plan.run()
    kept = {batch.requests[0].slot: 2, batch.requests[1].slot: 1}
    assert list(twins.ours.commit(kept).values()) == [32, 65]
    # The oracle takes the rows that stay, as steps of their own.
    oracle = loaded.oracle(twins.theirs)
    for request in batch.requests:
        for place in range(kept[request.slot]):
            token = request.token_ids[place : place + 1]
            row = replace(request, token_ids=token, start=request.start + place, is_verify=False)
            oracle.buffers.batch = StepBatch((row,))
            oracle.run()
    slots = sorted(kept)
    for layer, wanted in twins.theirs.recurrent.items():
        found = twins.ours.recurrent[layer][slots].cpu()
        # Of free-running layers: what each is given differs by the roundings of those below it.
        error = (found - wanted[slots]).square().mean().sqrt() / wanted[
            slots
        ].square().mean().sqrt()
        assert error < 0.05, f"state of layer {layer}: {error:.3g}"


@pytest.mark.parametrize("loaded", ["linear"], indirect=True)
def test_a_smaller_plan_in_the_memory_of_a_larger_one(loaded: Loaded) -> None:
    """The bits of a plan with memory of its own, whatever the other has left there."""
    shared, alone = Twins.of(loaded), Twins.of(loaded)
    batch = decode_batch([9])
    shared.fill(batch, seed=3)
    copy_caches(shared.theirs, alone.ours)
    memory = PlanMemory(DEVICE)
    larger = build(loaded, shared.ours, 3, memory=memory)
    plan, own = build(loaded, shared.ours, 1, memory=memory), build(loaded, alone.ours, 1)
    poison(larger)
    for one in (plan, own):
        load_inputs(one, batch)
        one.run()
    bit_equal(plan.buffers["logits"].cpu(), own.buffers["logits"].cpu(), "logits")
    with pytest.raises(StepError, match="this plan takes 3 rows, 1 a request"):
        load_inputs(larger, batch)


def _launched(config: ModelConfig, rows: int) -> list[str]:
    where = replace(deployment(config), tensors="meta")
    plan = latency_specialized.describe(where, outline_model(config, "rows", "mxfp4_rows"), rows)
    with pytest.raises(PlanError, match="cannot run"):
        plan.run()
    return [f"{step.op} {step.layers[0]}" for step in plan.steps]


@pytest.mark.parametrize("rows", [1, 64])
def test_launches_of_each_kind_of_layer(rows: int) -> None:
    """The published path has 13 launches of either kind with a mixture of experts."""
    dense = ["dense_up {0}", "dense_join {0}"]
    moe = ["moe_gate {0}", "expert_up {0}", "expert_down {0}", "moe_join {0}"]
    kda = ["projection {0}", "kda_core {0}", "attn_join {0}", "mix_norm {0}"]
    query = ["projection {0}", "mla_query_up {0}", "mla_query {0}"]
    mla = [*query, "mla_attend {0}", "mla_value {0}", "attn_join {0}", "mix_norm {0}"]
    assert _launched(CONFIGS["k3"], rows) == [
        "embed_norm None",
        *(name.format(0) for name in (*kda, *dense)),
        *(name.format(1) for name in ("mix_norm {0}", *kda, *moe)),
        *(name.format(2) for name in ("mix_norm {0}", *mla, *moe)),
        "mix_norm None",
        "projection None",
    ]


@pytest.mark.parametrize("each", [1, 4])
def test_every_launch_of_a_plan_without_memory(each: int) -> None:
    """What a compiler takes: the plan is built from tensors that have no data."""
    config = CONFIGS["k3"]
    where = replace(deployment(config), tensors="meta")
    packed = outline_model(config, "rows", "mxfp4_rows")
    twins = Twins.of(Loaded(to_device(packed, "meta"), make_case(config).parameters))
    plan = latency_specialized.build(where, packed, twins.ours, 8, each)
    kernels = [getattr(launch.kernel, "__name__", "") for launch in launches(plan)]
    assert len(kernels) >= len(plan.steps) + (each > 1)
    assert all(tensor.is_meta for tensor in plan.buffers.values())


def test_refusal_has_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["k3"]
    odd = replace(config, mla=replace(config.mla, num_heads=2))
    turned = replace(odd.mla, rope_dim=7)
    old = replace(deployment(replace(odd, mla=turned)), arch="sm_80", rotation_scale=1.0)
    reasons = latency_specialized.refuse(old)
    for part in ("the same total width", "cuda is sm_80", "a head has 7 that are"):
        assert sum(part in reason for reason in reasons) == 1, reasons
    assert latency_specialized.refuse(deployment(config), 4) == []
    unknown = replace(deployment(config), arch="gfx942")
    assert "given as 'gfx942'" in latency_specialized.refuse(unknown)[0]
    monkeypatch.setattr("kdecode.decode.latency_cuda.find_spec", lambda name: None)
    (reason,) = latency_specialized.refuse(deployment(config))
    assert "pip install 'kdecode[gpu]'" in reason
