"""CUDA plans of Kimi K3's drafts: their launches, and their machine code.

`tests/plans/draft` has the launches and, in `resources.txt`, registers, spilled bytes and shared
memory of every kernel. ``--update-plans`` writes the launches; with ``-m slow`` the resources.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from compiled_drafts import NUM_DRAFTS, WIDE, draft_launches
from released import kimi_k3
from resource_table import ResourceTable

from kdecode.cli import main
from kdecode.commands.plan_device import draft_text_of
from kdecode.config import ModelConfig
from kdecode.decode import draft_specialized
from kdecode.decode.launches import launch_lines, step_lines
from kdecode.decode.plan import PlanError
from kdecode.kernels.common.triton_compile import SHARED_LIMITS, Resources
from kdecode.model.draft_synthesis import draft_document

PLANS = Path(__file__).parents[1] / "plans" / "draft"
RESOURCES = PLANS / "resources.txt"
# Kinds of drafts, and requests of a block.
CASES = (
    ("inferact", 1),
    ("inferact", 9),
    ("lightseek", 1),
    ("radixark", 1),
    ("redhat", 1),
    ("redhat", 9),
)
# The quick part of what is compiled; the slow part has every architecture and more requests.
QUICK = ("sm_103/lightseek/1", "sm_103/redhat/1")
ALL = tuple(
    f"{arch}/{kind}/{requests}"
    for arch in SHARED_LIMITS
    for kind, requests in (*CASES, ("inferact", 2), ("radixark", 2), (WIDE, 1), (WIDE, 9))
)
# Why a kernel spills registers, by name; without a reason none may.
SPILLS = {
    "draft_context projection": "8 bytes a thread at 64 rows on sm_100 and sm_103, where two "
    "programs share a block; no other tile was tried.",
    "gqa_attend attend_groups": "8 bytes a thread at 32 lanes and 8 splits on sm_100 and sm_103, "
    "where the assembler takes 80 registers; at 16 splits it takes 96 and spills nothing.",
}
UPDATE = "pytest tests/decode/test_cuda_draft_plans.py --update-plans"
TABLE = ResourceTable(
    RESOURCES, "compiled_drafts.py", "arch/draft/requests", SPILLS, f"{UPDATE} -m slow"
)


def _text(kind: str, requests: int) -> str:
    found = draft_launches("sm_103", kind, requests)
    block, context = launch_lines(found.block), step_lines(found.context)
    return draft_text_of(found, block, context, "sm_103") + "\n"


@pytest.mark.parametrize(("kind", "requests"), CASES)
def test_launches_are_the_committed_ones(
    request: pytest.FixtureRequest, kind: str, requests: int
) -> None:
    text, path = _text(kind, requests), PLANS / f"kimi-k3.{kind}.{requests}.txt"
    if request.config.getoption("--update-plans"):
        path.write_text(text, encoding="utf-8")
    committed = path.read_text(encoding="utf-8")
    lines = difflib.unified_diff(committed.splitlines(), text.splitlines(), "committed", "now")
    assert text == committed, "\n".join([*lines, f"If it is meant: {UPDATE}"])


def test_every_file_belongs_to_a_case() -> None:
    expected = {f"kimi-k3.{kind}.{requests}.txt" for kind, requests in CASES}
    assert {path.name for path in PLANS.iterdir()} == {*expected, RESOURCES.name}


@pytest.mark.parametrize(
    ("kind", "each"), [("inferact", 10), ("lightseek", 10), ("radixark", 8), ("redhat", 8)]
)
def test_launches_of_a_round(kind: str, each: int) -> None:
    """Of a layer so many, but for the first norm, which is embed_norm's. Behind the head one a
    draft, and the confidence; 5 layers' committed tokens are one program of two launches each."""
    found = draft_launches("sm_90", kind, 1)
    with pytest.raises(PlanError, match="has no weights and cannot run"):
        found.block.run()
    lines = Counter(line.layer for line in launch_lines(found.block))
    assert [lines[layer] for layer in range(5)] == [each - 1, *[each] * 4]
    behind = [line.op for line in launch_lines(found.block)][-NUM_DRAFTS - 2 :]
    assert behind == ["projection", *["draft_choice"] * NUM_DRAFTS, "draft_confidence"]
    context = [line.kernel for line in step_lines(found.context)]
    norms = ["norm_rows"] if kind == "lightseek" else []
    insert = "insert_rows" if each == 10 else "insert_grouped_rows"
    assert context == [*norms, "projection", "norm_rows", *["projection", insert] * 5]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Of `kdecode plan` for the whole model and a draft, whose folder has a configuration only."""
    target = kimi_k3()
    (tmp_path / "config.json").write_text(json.dumps(target))
    for kind in ("inferact", "radixark"):
        (tmp_path / kind).mkdir()
        document = draft_document(kind, ModelConfig.from_checkpoint(target))
        (tmp_path / kind / "config.json").write_text(json.dumps(document))
    source = ["plan", "--config", str(tmp_path / "config.json"), "--context-tokens", "131072"]
    return [*source, "--device", "cuda", "--arch", "sm_103", "--tensor-parallel-size", "16"]


def _speculative(arguments: list[str], kind: str) -> str:
    folder = Path(arguments[2]).parent / kind
    return json.dumps({"model": str(folder), "num_speculative_tokens": NUM_DRAFTS})


def test_the_command_prints_the_plans_that_are_committed(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """Behind the verify step's, of one rank; a draft is whole."""
    arguments += ["--speculative-config", _speculative(arguments, "inferact")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("backend latency_specialized on sm_103, 8 rows, 8 a request, one rank")
    # Room for the block is behind the target's longest context, in pages, of which no text tells.
    assert out.endswith(f"\n\n{(PLANS / 'kimi-k3.inferact.1.txt').read_text()}")
    assert main([*arguments, "--json"]) == 0
    draft = json.loads(capsys.readouterr().out)["draft"]
    assert (draft["rows"], draft["rows_per_request"], draft["context_rows"]) == (7, 7, 8)
    assert draft["launches"][-1]["op"] == "draft_confidence"
    assert draft["context_launches"][0]["op"] == "draft_context"
    assert main([*arguments, "--rows", "8"]) == 0
    assert "the draft: backend latency_specialized on sm_103, 56 rows" in capsys.readouterr().out


def test_a_draft_without_plans_is_said_to_run_in_torch(
    capsys: pytest.CaptureFixture[str], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that are published have plans; here one has a reason not to."""
    reason = "This draft is of another kind."
    monkeypatch.setattr(draft_specialized, "refuse_layout", lambda config, is_cuda: [reason])
    arguments += ["--speculative-config", _speculative(arguments, "radixark")]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"the draft runs in torch: {reason}"
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft"]["refusals"] == [reason]


def test_heads_that_are_too_wide_have_a_draft_in_torch(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    folder = Path(arguments[2]).parent / "radixark"
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "head_dim": 512}))
    arguments += ["--speculative-config", _speculative(arguments, "radixark")]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "the draft runs in torch: Heads of grouped queries have at most 256 channels in Triton; "
        "this model's have 512."
    )


@pytest.mark.parametrize(
    ("op", "kernel", "of_draft"),
    [
        ("gqa_attend", "attend_groups", True),
        ("draft_insert", "insert_grouped_rows", True),
        ("kda_core", "_core", False),
    ],
)
def test_a_kernel_that_takes_more_than_there_is_cannot_launch(
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    kernel: str,
    of_draft: bool,
) -> None:
    limit = SHARED_LIMITS["sm_103"]

    def resources_of(launches: list[Any], arch: str, *rest: Any) -> list[Resources]:
        names = [getattr(each.kernel, "fn", each.kernel).__name__ for each in launches]
        return [Resources(64, 0, limit + (name == kernel)) for name in names]

    path = "kdecode.kernels.common.compiled_launches.resources_of"
    monkeypatch.setattr(path, resources_of)
    arguments += ["--compile", "--speculative-config", _speculative(arguments, "radixark")]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    reason = (
        f"{op} {kernel} cannot launch on sm_103: it takes {limit + 1:,} bytes of shared memory, "
        f"and a program has at most {limit:,}."
    )
    assert reason in out.splitlines()
    marked = [line for line in out.splitlines() if f"{limit + 1:,} (too large)" in line]
    assert marked
    assert all(kernel in line for line in marked)
    assert main([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    own, of_target = found["draft"]["cannot_launch"], found["cannot_launch"]
    assert (own, of_target) == (([reason], []) if of_draft else ([], [reason]))
    kernel = "none of them"
    assert main(arguments) == 0
    assert "too large" not in capsys.readouterr().out


def test_the_kernels_of_a_round_compile_and_do_not_spill() -> None:
    TABLE.check(TABLE.compile(QUICK), QUICK)


@pytest.mark.slow
def test_every_kernel_compiles_for_every_architecture(request: pytest.FixtureRequest) -> None:
    found = TABLE.compile(ALL)
    if request.config.getoption("--update-plans"):
        TABLE.write(found)
    TABLE.check(found, ALL)
