"""CUDA plans with scaled products of experts: values, refusals, how they are told, machine code.

`tests/plans/scaled` has registers, spilled bytes and shared memory of their kernels at the sizes of
Kimi K3 on one of 8 and of 16 ranks; ``-m slow --update-plans`` writes them.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuda_cases import CONFIGS, Twins, build, decode_batch, deployment, poison, verify_batch
from native_cases import Loaded
from released import kimi_k3
from resource_table import ResourceTable
from triton_cases import make_case

from kdecode.cache.batch import StepBatch
from kdecode.cli import main
from kdecode.config import ConfigError, EngineConfig, ModelConfig
from kdecode.decode import latency_specialized
from kdecode.decode.verify import check_steps
from kdecode.kernels.common.expert_products import SCALED_ARCHS

SCALED: dict[str, Any] = {"arch": "sm_103", "expert_products": "scaled"}
RESOURCES = Path(__file__).parents[1] / "plans" / "scaled" / "resources.txt"
KERNELS = {"expert_up_grouped", "expert_down_grouped"}
INSTRUCTION = "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X"
# The quick part of what is compiled.
QUICK = ("sm_103/16/8/8/scaled",)
ALL = tuple(
    f"{arch}/{size}/{rows}/{each}{ranks}/scaled"
    for arch in SCALED_ARCHS
    for size in (8, 16)
    for rows, each in ((8, 8), (64, 1))
    for ranks in ("", "/ranks")
)
# Why a kernel spills registers, by name; without a reason none may.
SPILLS = {
    "expert_down_grouped": "8 bytes a thread at 8 rows on one of 8 ranks, where ptxas stops at 96 "
    "registers; with another copy ahead the plan of one GPU has them, and rounds of half the width "
    "or twice the warps have none and half as many instructions more."
}
UPDATE = "pytest tests/decode/test_scaled_products.py -m slow --update-plans"
TABLE = ResourceTable(
    RESOURCES, "compiled_scaled.py", "arch/ranks/rows/of a request", SPILLS, UPDATE
)


def _wider(width: int) -> ModelConfig:
    """The smallest model with experts of so many columns."""
    config = CONFIGS["k3"]
    return replace(config, moe=replace(config.moe, expert_width=width))


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    case = make_case(_wider(96))
    return Loaded(case.packed, case.parameters)


@pytest.mark.parametrize(
    ("batch", "each"), [(decode_batch([9, 0, 63, 5, 70]), 1), (verify_batch([5, 62], 3), 3)]
)
def test_every_step_against_the_oracle(loaded: Loaded, batch: StepBatch, each: int) -> None:
    twins = Twins.of(loaded)
    twins.fill(batch, seed=1)
    plan = build(loaded, twins.ours, batch.num_rows, each, **SCALED)
    assert "products of experts are scaled" in plan.explain()
    poison(plan)
    checks = list(check_steps(plan, loaded.oracle(twins.theirs), batch, loaded.parameters))
    assert [str(check) for check in checks if not check.is_within] == []
    assert "expert_sum" in {check.buffer for check in checks}


def test_deployments_that_cannot_have_them() -> None:
    where = replace(deployment(_wider(64)), **SCALED)
    assert latency_specialized.refuse(where) == []
    for arch in ("sm_90", "sm_120"):
        (reason,) = latency_specialized.refuse(replace(where, arch=arch))
        assert (
            f"'scaled', of which sm_100 and sm_103 have the instruction, and not {arch}" in reason
        )
    (reason,) = latency_specialized.refuse(replace(where, config=CONFIGS["linear"]))
    assert "the model has no experts in MXFP4: set expert_products to 'exact'" in reason
    (reason,) = latency_specialized.refuse(replace(where, config=_wider(32)))
    assert "have products of 32 columns; the kernels take 64 at least" in reason


def test_configurations_that_cannot_have_them() -> None:
    asked: dict[str, Any] = {"expert_products": "scaled"}
    with pytest.raises(ConfigError, match="'scaled' and device 'cpu'; only a GPU has scaled"):
        EngineConfig(decode_backend="latency_specialized", **asked)
    with pytest.raises(ConfigError, match="'scaled' and decode_backend 'auto'; only plans of"):
        EngineConfig(device="cuda", **asked)
    with pytest.raises(ConfigError, match="expert_products is 'x'"):
        EngineConfig(device="cuda", expert_products="x")  # type: ignore[arg-type]
    EngineConfig(device="cuda", decode_backend="latency_specialized", **asked)


def test_the_command_says_which_steps_have_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(kimi_k3()))
    arguments = ["plan", "--config", str(path), "--device", "cuda", "--expert-products", "scaled"]
    on = [*arguments, "--arch", "sm_103", "--tensor-parallel-size", "16"]
    assert main([*on, "--rows", "8"]) == 0
    assert "products of experts are scaled: codes as they are" in capsys.readouterr().out
    assert main([*on, "--rows", "4"]) == 0
    assert "products of experts are exact up to 4 rows" in capsys.readouterr().out
    assert main([*arguments, "--arch", "sm_90"]) == 1
    assert "have the instruction, and not sm_90" in capsys.readouterr().out
    assert main([*arguments[:3], "--expert-products", "scaled"]) == 2
    assert "expert_products is 'scaled' and device 'cpu'" in capsys.readouterr().err


def test_they_are_one_instruction_and_do_not_spill() -> None:
    _check(TABLE.compile(QUICK), QUICK)


@pytest.mark.slow
def test_on_every_architecture(request: pytest.FixtureRequest) -> None:
    found = TABLE.compile(ALL)
    if request.config.getoption("--update-plans"):
        TABLE.write(found)
    _check(found, ALL)


def _check(found: dict[str, Any], cases: tuple[str, ...]) -> None:
    """Experts are multiplied by it; of other products are only those of the shared experts, which
    on several ranks are in expert_down's launch."""
    assert {line["kernel"] for line in found["lines"]} == KERNELS
    TABLE.check(found, cases)
    for kernel, counts in found["instructions"].items():
        assert counts.pop(INSTRUCTION) >= 4, kernel
        assert not any("tcgen05" in name for name in counts), (kernel, counts)
        assert not counts or re.search("'SHARED_LINES': [1-9]", kernel), (kernel, counts)
