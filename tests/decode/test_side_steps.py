"""CUDA plans with steps beside their own stream: values, orders, refusals and how they are told.

Without a GPU the kernels run in Triton's interpreter, and streams are `pretend_streams`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cuda_cases import CONFIGS, Twins, build, decode_batch, deployment, poison, verify_batch
from native_cases import Loaded
from pretend_streams import Pool, install, on_device
from released import kimi_k3
from torch import Tensor
from triton_cases import make_case

from kdecode.cache.batch import StepBatch
from kdecode.cache.caches import Caches
from kdecode.cli import main
from kdecode.commands import bench_layer
from kdecode.commands.bench_shape import shape_config
from kdecode.config import ConfigError, EngineConfig
from kdecode.decode import latency_specialized
from kdecode.decode.graph import capture
from kdecode.decode.inspect import PlanCost, StepCost
from kdecode.decode.launches import launch_lines
from kdecode.decode.plan import DecodePlan, PlanError
from kdecode.decode.runner import load_inputs
from kdecode.decode.streams import MAIN
from kdecode.decode.verify import check_steps, copy_caches
from kdecode.model.outline import outline_model
from kdecode.parallel.ranks import Ranks
from kdecode.testing.compare import bit_equal

SHARED = {"shared_experts": "stream"}
PREFETCH = {"weight_prefetch": "l2"}
SETTINGS: dict[str, dict[str, Any]] = {
    "shared": SHARED,
    "prefetch": PREFETCH,
    "both": {**SHARED, **PREFETCH},
}
# Of the launches beside a plan's stream.
SIDE_OPS = {"shared_up", "shared_down", "prefetch"}


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> Loaded:
    case = make_case(CONFIGS[request.param])
    return Loaded(case.packed, case.parameters)


def described(rows: int = 1, **settings: Any) -> DecodePlan:
    config = CONFIGS["k3"]
    where = replace(deployment(config), tensors="meta", **settings)
    return latency_specialized.describe(where, outline_model(config, "rows", "mxfp4_rows"), rows)


@pytest.mark.parametrize(
    ("loaded", "batch", "each", "settings"),
    [
        ("k3", decode_batch([70]), 1, "both"),
        ("k3", verify_batch([62], 3), 3, "both"),
        ("linear", decode_batch([5, 64]), 1, "both"),
    ],
    indirect=["loaded"],
)
def test_every_step_against_the_oracle(
    loaded: Loaded, batch: StepBatch, each: int, settings: str
) -> None:
    """In the plan's order, as any plan is checked."""
    twins = Twins.of(loaded)
    twins.fill(batch, seed=1)
    plan = build(loaded, twins.ours, batch.num_rows, each, **SETTINGS[settings])
    poison(plan)
    checks = list(check_steps(plan, loaded.oracle(twins.theirs), batch, loaded.parameters))
    assert [str(check) for check in checks if not check.is_within] == []
    # What the launches beside it have made is compared where the stage ends.
    found = Counter(check.buffer for check in checks if check.op == "moe_join")
    assert found["shared"] == plan.config.mlp_kinds.count("moe")


def values(plan: DecodePlan, caches: Caches, slots: list[int]) -> dict[str, Tensor]:
    """What a run leaves, on the host."""
    names = ("logits", "prefix", "mlp_delta", "shared")
    kept = {name: plan.buffers[name].to("cpu", copy=True) for name in names}
    states = {f"state {n}": state[slots].cpu() for n, state in caches.recurrent.items()}
    return {**kept, **states}


@pytest.mark.parametrize(
    ("loaded", "contexts", "settings"),
    [("k3", [9], "both"), ("k3", [0, 63, 130], "both"), ("linear", [5, 64], "shared")],
    indirect=["loaded"],
)
def test_the_bits_of_the_plan_without_them_in_any_order(
    monkeypatch: pytest.MonkeyPatch, loaded: Loaded, contexts: list[int], settings: str
) -> None:
    """Whatever the launches of a stream overtake that they need not wait for; of the whole plan,
    and of graphs that part it between the launches of the shared experts and where they join."""
    batch = decode_batch(contexts)
    slots = [request.slot for request in batch.requests]
    twins = Twins.of(loaded)
    plain = build(loaded, twins.ours, len(contexts))
    twins.fill(batch, seed=3)
    load_inputs(plain, batch)
    plain.run()
    wanted = values(plain, twins.ours, slots)
    assert wanted["logits"].isfinite().all()
    device = install(monkeypatch)
    plan = on_device(build(loaded, twins.ours, len(contexts), **SETTINGS[settings]), device)
    ops = [step.op for step in plan.steps]
    cuts = [0, ops.index("shared_down"), ops.index("moe_join"), len(ops)]
    parts, pool = list(pairwise(cuts)), Pool(device)
    recorded = capture(plan, pool, parts)  # type: ignore[arg-type]
    assert len(pool.recorded) == 1 + len(parts)
    for pool.order, ranges in (("sides early", [(0, len(ops))]), ("sides late", parts)):
        poison(plan)
        copy_caches(twins.theirs, twins.ours)
        load_inputs(recorded, batch)
        for span in ranges:
            recorded.run_range(*span)
        for name, found in values(recorded, twins.ours, slots).items():
            bit_equal(found, wanted[name], f"{name}, {pool.order}")


def test_where_they_are_and_what_they_wait_for() -> None:
    """Each beside the launches that wait for one another; a plan without them is as it was."""
    plan, plain = described(**SETTINGS["both"]), described()
    assert [s.op for s in plan.steps if s.op not in SIDE_OPS] == [s.op for s in plain.steps]
    found = [(s.op, s.layers[0], s.stream, s.waits_for) for s in plan.steps if s.layers[0] == 1]
    ahead, main = ("prefetch", 1, "prefetch", (MAIN,)), (1, MAIN, ())
    assert found == [
        ahead,
        ("mix_norm", *main),
        ("projection", *main),
        ahead,
        ("kda_core", *main),
        ("attn_join", *main),
        ahead,
        ("mix_norm", *main),
        ahead,
        ("shared_up", 1, "shared", (MAIN,)),
        ("shared_down", 1, "shared", ()),
        ("moe_gate", *main),
        ("expert_up", *main),
        ("expert_down", *main),
        ("moe_join", 1, MAIN, ("shared",)),
    ]
    assert {(s.stream, s.waits_for) for s in plain.steps} == {(MAIN, ())}
    # No weight is counted twice, and none is left out.
    assert sum(s.weight_bytes or 0 for s in plan.steps) == sum(
        s.weight_bytes or 0 for s in plain.steps
    )
    text = plan.explain()
    assert " shared after main\n" in text
    assert " main after shared " in text
    assert " ask for " in text
    assert "stream" not in plain.explain()


@pytest.mark.parametrize("op", ["shared_up", "moe_join"])
def test_a_plan_that_does_not_wait_is_refused(op: str) -> None:
    plan = described(**SHARED)
    steps = tuple(replace(s, waits_for=()) if s.op == op else s for s in plan.steps)
    with pytest.raises(PlanError, match=f"{op}.* without waiting for step"):
        replace(plan, steps=steps)


@pytest.mark.parametrize("rows", [1, 64])
def test_what_runs_beside_others_begins_when_all_is_over_before_it(rows: int) -> None:
    """And every other launch begins as early as it does without them."""
    config = CONFIGS["k3"]
    case, packed = make_case(config), outline_model(config, "rows", "mxfp4_rows")
    caches = Twins.of(Loaded(case.packed, case.parameters)).ours
    plans = []
    for settings in ({}, SETTINGS["both"]):
        where = replace(deployment(config), tensors="meta", **settings)
        plans.append(launch_lines(latency_specialized.build(where, packed, caches, rows)))
    plain = {(line.layer, line.op, line.kernel): line.begins_early for line in plans[0]}
    for line in plans[1]:
        if line.stream != MAIN or line.waits_for:
            assert not line.begins_early, line
        else:
            assert line.begins_early is plain[line.layer, line.op, line.kernel], line
    assert plain[1, "moe_join", "moe_join"]


def test_deployments_that_cannot_have_them() -> None:
    where = replace(deployment(CONFIGS["k3"]), arch="sm_90", **SETTINGS["both"])
    assert latency_specialized.refuse(where) == []
    reasons = " ".join(latency_specialized.refuse(replace(where, ranks=Ranks(0, 2))))
    assert "shared_experts is 'stream' and tensor_parallel_size 2" in reasons
    assert "weight_prefetch is 'l2' and tensor_parallel_size 2" in reasons
    (reason,) = latency_specialized.refuse(replace(where, arch="sm_120"))
    assert "and not of sm_120: set weight_prefetch to 'off'" in reason
    config = CONFIGS["linear"]
    lone = replace(config, moe=replace(config.moe, num_shared=0))
    (reason,) = latency_specialized.refuse(replace(where, config=lone))
    assert "the model has no shared experts" in reason


@pytest.mark.parametrize("settings", [SHARED, PREFETCH])
def test_configurations_that_cannot_have_them(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=f"{name} is '{value}' and device 'cpu'; only a GPU"):
        EngineConfig(decode_backend="latency_specialized", **settings)
    with pytest.raises(ConfigError, match=f"{name} is '{value}' and decode_backend 'auto'"):
        EngineConfig(device="cuda", **settings)
    with pytest.raises(ConfigError, match=f"{name} is 'x'"):
        EngineConfig(device="cuda", decode_backend="latency_specialized", **{name: "x"})
    EngineConfig(device="cuda", decode_backend="latency_specialized", **settings)


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(kimi_k3()))
    arguments = ["plan", "--config", str(path), "--device", "cuda", "--arch", "sm_103"]
    asked = ["--shared-experts", "stream", "--weight-prefetch", "l2"]
    assert main([*arguments, *asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    streams = Counter((line["op"], line["stream"]) for line in document["launches"])
    assert streams["shared_up", "shared"] == streams["shared_down", "shared"] == 92
    assert streams["prefetch", "prefetch"] > 3 * 92
    assert main([*arguments, *asked, "--tensor-parallel-size", "8"]) == 1
    assert "a plan of several ranks has one stream" in capsys.readouterr().out
    assert main([*arguments[:3], *asked]) == 2
    assert "shared_experts is 'stream' and device 'cpu'" in capsys.readouterr().err


def _bench_arguments(*more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_layer.add_arguments(parser)
    return parser.parse_args(["--shape", "kimi-k3", "--device", "cuda", *more])


def test_the_bench_tells_each_backend_what_it_can_be_told() -> None:
    args = _bench_arguments("--weight-prefetch", "l2", "--shared-experts", "stream")
    plain = shape_config(args, "auto", 2)
    assert (plain.weight_prefetch, plain.shared_experts) == ("off", "inside")
    ours = shape_config(args, "latency_specialized", 2)
    assert (ours.weight_prefetch, ours.shared_experts) == ("l2", "stream")
    with pytest.raises(ConfigError, match="decode_backend 'auto'"):
        shape_config(args, "auto", 1)
    # A step that is over while others run adds nothing to the graph of those before it.
    step = StepCost(1, "prefetch", "triton", (), 0.0, 0.0, 0, None, 1)
    assert bench_layer._step_row(step, 1e12)[4:6] == ("-", "-")
    cost = PlanCost("latency_specialized", 1, 64, (step,), 1.0)
    assert bench_layer.title(cost, ours).endswith(
        "1 launches a step, shared experts stream, weight prefetch l2"
    )
    assert bench_layer.title(cost, plain).endswith("1 launches a step")
