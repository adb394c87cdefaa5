"""CUDA plans of Kimi K3 with steps in CuTe DSL: which ones those are, and their machine code.

`tests/plans/cute/resources.txt` has registers, spilled bytes and shared memory of every such
kernel; ``--update-plans`` with ``-m slow`` writes it. The other launches are those of
`test_cuda_plans.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import cute_twin
import pytest
from compiled_plans import share_plan
from cuda_cases import CONFIGS, Twins, build, decode_batch, deployment, poison
from native_cases import Loaded
from released import kimi_k3
from triton_cases import make_case

from kdecode.cli import main
from kdecode.commands.common import table
from kdecode.config import ConfigError, EngineConfig, environment
from kdecode.decode import latency_specialized
from kdecode.decode.latency_cuda import launches
from kdecode.decode.launches import LaunchLine, launch_lines, tile_text
from kdecode.decode.plan import DecodePlan
from kdecode.decode.verify import check_steps
from kdecode.kernels.common.compiled_launches import resources_of
from kdecode.kernels.common.cute_launch import CuteLaunch
from kdecode.kernels.common.cute_tiles import ARCHS
from kdecode.kernels.common.triton_compile import SHARED_LIMITS

RESOURCES = Path(__file__).parents[1] / "plans" / "cute" / "resources.txt"
SIZES = (8, 16)
QUICK = ("sm_103/16",)
ALL = tuple(f"{arch}/{size}" for arch in ARCHS for size in SIZES)
UPDATE = "pytest tests/decode/test_cute_plans.py -m slow --update-plans"
COLUMNS = ("kernel", "matrix", "tile", "arch/ranks", "registers", "spilled", "shared")
OPS = {"projection", "attn_join"}


def cute_plan(arch: str, size: int, rows: int, each: int = 1) -> DecodePlan:
    return share_plan(arch, size, rows, each, gpu_kernels="cute")


@pytest.mark.parametrize(("rows", "each"), [(1, 1), (8, 1), (8, 8)])
@pytest.mark.parametrize("size", SIZES)
def test_steps_of_up_to_eight_rows(size: int, rows: int, each: int) -> None:
    """Every step that CuTe DSL has a kernel for is its, and the others are as they were."""
    ours, others = cute_plan("sm_103", size, rows, each), share_plan("sm_103", size, rows, each)
    assert Counter(step.impl for step in ours.steps if step.op in OPS) == {"cute": 93 + 93 + 1}
    assert ours.notes == others.notes
    for line, other in zip(launch_lines(ours), launch_lines(others), strict=True):
        if line.op in OPS:
            assert (line.impl, line.covers) == ("cute", other.covers)
            assert line.begins_early
        else:
            assert line == other


@pytest.mark.parametrize("rows", [9, 64])
def test_steps_of_more_rows_are_tritons_and_say_so(rows: int) -> None:
    ours, others = cute_plan("sm_90", 16, rows), share_plan("sm_90", 16, rows, 1)
    assert launch_lines(ours) == launch_lines(others)
    reason = f"take 1 to 8 rows, as many as one instruction; this has {rows}."
    said = {f"{op} is Triton's: The kernels in CuTe DSL {reason}" for op in OPS}
    assert set(ours.notes) - set(others.notes) == said


def test_every_step_against_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole plan with both kinds of kernels, in the two ways that a CPU can run them."""
    cute_twin.install(monkeypatch)
    case = make_case(CONFIGS["k3"])
    loaded = Loaded(case.packed, case.parameters)
    twins, batch = Twins.of(loaded), decode_batch([70])
    twins.fill(batch, seed=1)
    plan = build(loaded, twins.ours, 1, gpu_kernels="cute")
    poison(plan)
    checks = list(check_steps(plan, loaded.oracle(twins.theirs), batch, loaded.parameters))
    assert [str(check) for check in checks if not check.is_within] == []
    assert Counter(step.impl for step in plan.steps)["cute"] == 3 + 3 + 1


def test_kernels_are_the_same_for_all_rows() -> None:
    from kdecode.kernels.common.cute_compile import compile_job

    jobs = [
        {compile_job(launch, "sm_100") for launch in _cute_launches(cute_plan("sm_100", 8, rows))}
        for rows in (1, 5, 8)
    ]
    assert jobs[0] == jobs[1] == jobs[2]
    # Both kinds of input projection, the head, and joins with and without a snapshot.
    assert len(jobs[0]) == 5


def test_what_cannot_act_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    where = replace(deployment(CONFIGS["k3"]), gpu_kernels="cute")
    assert latency_specialized.refuse(where) == []
    (reason,) = latency_specialized.refuse(replace(where, arch="sm_120"))
    assert "compiled for sm_90, sm_100, sm_103; cuda is sm_120: set gpu_kernels to" in reason

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    (reason,) = latency_specialized.refuse(where)
    assert "nvidia-cutlass-dsl is not installed here" in reason
    assert latency_specialized.refuse(deployment(CONFIGS["k3"])) == []
    with pytest.raises(ConfigError, match="gpu_kernels is 'cute' and device 'cpu'"):
        EngineConfig(gpu_kernels="cute")
    with pytest.raises(ConfigError, match="gpu_kernels is 'cuda'"):
        EngineConfig(device="cuda", gpu_kernels="cuda")  # type: ignore[arg-type]


def test_the_command_shows_whose_each_launch_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(kimi_k3()))
    arguments = ["plan", "--config", str(path), "--device", "cuda", "--arch", "sm_90"]
    arguments += ["--gpu-kernels", "cute"]
    assert main([*arguments, "--rows", "2"]) == 0
    printed = capsys.readouterr().out
    assert " projection    cute    projection " in printed
    assert " attn_join     cute    attn_join " in printed
    assert " mix_norm      triton  mix_norm " in printed
    assert main([*arguments, "--rows", "16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {launch["impl"] for launch in document["launches"]} == {"triton"}
    # Parts of sums are not rounded, and are Triton's.
    assert main([*arguments, "--tensor-parallel-size", "16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {(launch["op"], launch["impl"]) for launch in document["launches"]}
    assert {("projection", "cute"), ("projection_part", "triton"), ("rank_join", "triton")} <= found
    assert main([*arguments[:3], "--gpu-kernels", "cute"]) == 2
    assert "gpu_kernels is 'cute' and device 'cpu'" in capsys.readouterr().err


def test_kernels_of_the_main_plans_compile_and_do_not_spill() -> None:
    _check_resources(_found(QUICK))


@pytest.mark.slow
def test_every_kernel_compiles_for_every_architecture(request: pytest.FixtureRequest) -> None:
    found = _found(ALL)
    if request.config.getoption("--update-plans"):
        RESOURCES.write_text(f"{_title()}\n{table([COLUMNS, *found])}\n", encoding="utf-8")
    _check_resources(found)
    assert {row[3] for row in _committed()} == set(ALL)


def _cute_launches(plan: DecodePlan) -> list[CuteLaunch]:
    return [launch for launch in launches(plan) if isinstance(launch, CuteLaunch)]


def _found(cases: tuple[str, ...]) -> list[tuple[str, ...]]:
    """A row for each kernel of a case; results are kept in kdecode's cache folder."""
    rows = set()
    for case in cases:
        arch, size = case.split("/")
        plan = cute_plan(arch, int(size), 8)
        ours = _cute_launches(plan)
        taken = resources_of(ours, arch, environment().cache_dir / "compiled")
        lines = [line for line in launch_lines(plan) if line.impl == "cute"]
        for line, launch, each in zip(lines, ours, taken, strict=True):
            sizes = launch.sizes
            figures = (each.registers, each.stack_bytes, each.shared_bytes)
            matrix = f"{sizes.columns} x {sizes.inner}"
            rows.add((_name(line, launch), matrix, _tile(line), case, *map(str, figures)))
    return sorted(rows)


def _name(line: LaunchLine, launch: CuteLaunch) -> str:
    return " ".join([line.op, *(name for name, is_on in launch.options.items() if is_on)])


def _tile(line: LaunchLine) -> str:
    return tile_text({**line.tile, "warps": line.warps})


def _check_resources(found: list[tuple[str, ...]]) -> None:
    """Nothing spills or takes more than there is; figures are the table's of the same compiler."""
    for row in found:
        *_, case, _, spilled, shared = row
        assert spilled == "0", row
        assert int(shared) <= SHARED_LIMITS[case.split("/")[0]], row
    if _title() == RESOURCES.read_text(encoding="utf-8").splitlines()[0]:
        assert set(found) <= set(_committed()), f"If it is meant: {UPDATE}"


def _title() -> str:
    version = metadata.version("nvidia-cutlass-dsl")
    return (
        f"nvidia-cutlass-dsl {version}, 1 to 8 rows; registers and spilled bytes a thread, shared "
        "bytes a program"
    )


def _committed() -> list[tuple[str, ...]]:
    lines = RESOURCES.read_text(encoding="utf-8").splitlines()[2:]
    return [tuple(cell.strip() for cell in line.split("  ") if cell.strip()) for line in lines]
