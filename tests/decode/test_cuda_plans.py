"""CUDA plans of Kimi K3 on one of 8 and of 16 ranks: their launches, and their machine code.

`tests/plans/cuda` has the launches and, in `resources.txt`, registers, spilled bytes and shared
memory of every kernel. ``--update-plans`` writes the launches; with ``-m slow`` the resources.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest
from compiled_plans import share_plan
from released import kimi_k3
from resource_table import ResourceTable

from kdecode.cli import main
from kdecode.commands.plan_device import text_of
from kdecode.config import ConfigError
from kdecode.decode.latency_specialized import BackendRefusedError
from kdecode.decode.launches import LaunchGroup, group_lines, launch_lines
from kdecode.decode.plan import DecodePlan, PlanError
from kdecode.kernels.common.triton_compile import SHARED_LIMITS

PLANS = Path(__file__).parents[1] / "plans" / "cuda"
RESOURCES = PLANS / "resources.txt"
SIZES = (8, 16)
# Rows, and how many of them are one request's.
ROWS = {"1": (1, 1), "verify": (8, 8), "64": (64, 1)}
# A layer of the published path has 13, at 8 rows and with its exchanges.
MAX_LAUNCHES = {1: 12, 2: 12, 3: 13, 8: 13, 64: 13}
# Of one of several ranks, exchanges included: through symmetric memory they are inside of launches.
RANKED_LAUNCHES = {"KDA + dense": 7, "KDA + MoE": 10, "MLA + MoE": 13}
# Through NCCL they are steps of their own, and so is the choice of experts behind one of them.
EXCHANGES = {"KDA + dense": 2, "KDA + MoE": 4, "MLA + MoE": 4}
# The quick part of what is compiled; the slow part has every size, architecture and number of rows.
QUICK = ("sm_103/16/1/1", "sm_103/16/8/8")
RANKED = ("sm_103/16/1/1/ranks", "sm_103/16/8/8/ranks", "sm_103/16/1/1/ranks/nccl")
ALL = tuple(
    f"{arch}/{size}/{rows}/{each}{ranks}"
    for arch in SHARED_LIMITS
    for size in SIZES
    for rows, each in ((1, 1), (2, 1), (4, 1), (8, 8), (64, 1))
    for ranks in ("", "/ranks", "/ranks/nccl")
)
# Why a kernel spills registers, by name; without a reason none may.
SPILLS = {
    "projection_part projection": "8 bytes a thread at 64 rows of 16 ranks that exchange through "
    "NCCL, on sm_100 and sm_103, where two programs share a block; no other tile was tried.",
    "rank_join join_sums": "8 bytes a thread at 64 rows of 16 ranks on sm_90, with three or four "
    "snapshots and 93 of its 128 registers in use; no other tile was tried.",
}
UPDATE = "pytest tests/decode/test_cuda_plans.py --update-plans"
CUDA = ("--device", "cuda", "--arch")
TABLE = ResourceTable(
    RESOURCES, "compiled_plans.py", "arch/ranks/rows/of a request", SPILLS, f"{UPDATE} -m slow"
)


@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_launches_are_the_committed_ones(
    request: pytest.FixtureRequest, size: int, case: str
) -> None:
    plan = share_plan("sm_103", size, *ROWS[case], exchanges=True)
    text = text_of(plan, launch_lines(plan), "sm_103", size) + "\n"
    _check(request, text, PLANS / f"kimi-k3.tp{size}.{case}.txt", UPDATE)


def _check(request: pytest.FixtureRequest, text: str, path: Path, update: str) -> None:
    if request.config.getoption("--update-plans"):
        path.write_text(text, encoding="utf-8")
    committed = path.read_text(encoding="utf-8")
    lines = difflib.unified_diff(committed.splitlines(), text.splitlines(), "committed", "now")
    assert text == committed, "\n".join([*lines, f"If it is meant: {update}"])


def test_every_file_belongs_to_a_case() -> None:
    expected = {f"kimi-k3.tp{size}.{case}.txt" for size in SIZES for case in ROWS}
    assert {path.name for path in PLANS.iterdir()} == {*expected, RESOURCES.name}


@pytest.mark.parametrize("rows", MAX_LAUNCHES)
@pytest.mark.parametrize("size", SIZES)
def test_a_layer_of_a_rank_that_is_alone_has_at_most_so_many_launches(size: int, rows: int) -> None:
    for group in layer_groups(share_plan("sm_103", size, rows, 1)):
        assert len(group.columns) <= MAX_LAUNCHES[rows], group.name


@pytest.mark.parametrize(("rows", "each"), [*((rows, 1) for rows in MAX_LAUNCHES), (8, 8)])
@pytest.mark.parametrize("size", SIZES)
def test_a_layer_of_one_of_several_ranks_has_so_many_launches(
    size: int, rows: int, each: int
) -> None:
    """With its exchanges no more than a layer of the published path."""
    assert max(RANKED_LAUNCHES.values()) <= MAX_LAUNCHES[8]
    plan = share_plan("sm_103", size, rows, each, exchanges=True)
    by_nccl = share_plan("sm_103", size, rows, each, exchanges=True, gpu_exchange="nccl")
    for group, other in zip(layer_groups(plan), layer_groups(by_nccl), strict=True):
        assert other.name == group.name
        assert all(column[0].is_launch for column in group.columns)
        assert len(group.columns) == RANKED_LAUNCHES[group.name]
        assert sum(bool(column[0].moves) for column in group.columns) == EXCHANGES[group.name]
        launches = sum(column[0].is_launch for column in other.columns)
        assert launches == RANKED_LAUNCHES[group.name] + ("MoE" in group.name)
        assert len(other.columns) - launches == EXCHANGES[group.name]


def layer_groups(plan: DecodePlan) -> list[LaunchGroup]:
    """The kinds of layers, which are all of them together."""
    groups = [group for group in group_lines(plan.config, launch_lines(plan)) if group.layers]
    assert sorted(layer for group in groups for layer in group.layers) == list(range(93))
    return groups


def test_a_plan_without_memory_cannot_run() -> None:
    plan = share_plan("sm_90", 16, 1, 1)
    with pytest.raises(PlanError, match="has no weights and cannot run"):
        plan.run()


def test_what_has_no_cuda_plan_is_refused() -> None:
    with pytest.raises(BackendRefusedError, match=r"made for sm_90 .* and later; cuda is sm_80"):
        share_plan("sm_80", 16, 1, 1)
    with pytest.raises(ConfigError, match="96 KDA heads cannot be divided among 7 ranks"):
        share_plan("sm_90", 7, 1, 1)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(kimi_k3()))
    return path


def test_the_command_prints_the_plan_that_is_committed(
    capsys: pytest.CaptureFixture[str], config_file: Path
) -> None:
    arguments = ["plan", "--config", str(config_file), "--device", "cuda", "--arch", "sm_103"]
    arguments += ["--tensor-parallel-size", "16", "--context-tokens", "131072"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == (PLANS / "kimi-k3.tp16.1.txt").read_text()
    assert main([*arguments, "--gpu-exchange", "nccl"]) == 0
    printed = capsys.readouterr().out
    assert "one rank of 16, through NCCL\n" in printed
    assert main([*arguments, "--gpu-exchange", "symmetric"]) == 0
    assert "one rank of 16, through symmetric memory\n" in capsys.readouterr().out
    assert "1,095 launches and 372 exchanges between ranks, " in printed
    assert main([*arguments, "--drafts", "7", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["rows"], document["rows_per_request"]) == (8, 8)
    assert (document["gpu_exchange"], document["gpu_exchange_is_assumed"]) == ("symmetric", True)
    assert document["launches"][-1]["op"] == "kda_commit"
    assert {launch["compiled"] for launch in document["launches"]} == {None}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--arch", "sm_90"), 2, "--arch is of a GPU; --device is cpu, and has to be cuda"),
        (("--compile",), 2, "--compile needs an --arch"),
        (("--tensor-parallel-size", "7"), 2, "96 KDA heads cannot be divided among 7 ranks"),
        ((*CUDA, "sm_90", "--decode-backend", "auto"), 2, "auto has no plan"),
        ((*CUDA, "sm_90", "--tensor-parallel-size", "7"), 2, "cannot be divided among 7 ranks"),
        ((*CUDA, "sm_80"), 1, "made for sm_90 (Hopper) and later; cuda is sm_80"),
        ((*CUDA, "hopper"), 1, "The architecture of cuda is not known; it is given as 'hopper'"),
        ((*CUDA, "sm_90", "--rows", "65"), 2, "65 rows; a CUDA plan has from 1 to 64"),
    ],
)
def test_what_the_command_cannot_print_is_said(
    capsys: pytest.CaptureFixture[str],
    config_file: Path,
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    assert main(["plan", "--config", str(config_file), *arguments]) == code
    printed = capsys.readouterr()
    assert words in printed.out + printed.err


def test_the_kernels_of_the_main_plans_compile_and_do_not_spill() -> None:
    TABLE.check(TABLE.compile(QUICK + RANKED), QUICK + RANKED)


@pytest.mark.slow
def test_every_kernel_compiles_for_every_architecture(request: pytest.FixtureRequest) -> None:
    found = TABLE.compile(ALL)
    if request.config.getoption("--update-plans"):
        TABLE.write(found)
    TABLE.check(found, ALL)
