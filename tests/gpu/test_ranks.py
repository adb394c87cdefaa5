"""Two ranks, a GPU each: what they exchange, what they say, and who is named when one is lost."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import rank_follow
import torch
from engine_faults import Fault, follow_until
from ranked_engines import MAX_DISTANCE, PROMPTS, Single, build, distance, greedy, sharing

from kdecode.parallel import launch

pytestmark = pytest.mark.gpu(2)

WORDS = {"kill": "died with signal 9", "stop": "is stopped and has given no sign of life for"}
LIMIT_S = 10.0


def test_sums_are_added_in_the_order_of_the_ranks() -> None:
    """In one hop and in two: the bits that they have on the host."""
    group = launch.start(2, rank_follow.follow)
    try:
        group.send(("use the GPU",))
        rank_follow.carry_out(group, "use the GPU")
        for shape in ((1, 1), (3, 5), (16, 7168), (99, 7001)):
            group.send(("reduce on the GPU", *shape))
            found = rank_follow.carry_out(group, "reduce on the GPU", *shape)
            expected = rank_follow.part_of(0, *shape) + rank_follow.part_of(1, *shape)
            assert found is not None
            assert torch.equal(found, expected.to(torch.bfloat16))
    finally:
        group.close()


@pytest.mark.parametrize(
    ("backend", "shared"), [("auto", {}), ("auto", sharing(2, 1)), ("latency_specialized", {})]
)
def test_ranks_on_gpus_say_what_one_rank_says(
    mini_16_checkpoint: Path, backend: str, shared: dict[str, object]
) -> None:
    single = Single.of(mini_16_checkpoint, "auto")
    with build(mini_16_checkpoint, backend, 2, device="cuda", **shared) as llm:
        outputs = llm.generate(PROMPTS, greedy())
        logits = [llm.teacher_forced(*p) for p in zip(PROMPTS, single.replies, strict=True)]
    assert single.near_ties(outputs) <= len(PROMPTS)
    for ours, theirs in zip(logits, single.logits, strict=True):
        assert distance(ours.cpu(), theirs) < MAX_DISTANCE


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_rank_that_is_lost_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mini_16_checkpoint: Path,
    kind: str,
    phase: str,
    backend: str,
) -> None:
    stamp = tmp_path / "stamp"
    fault = Fault(1, kind, phase, str(stamp))
    monkeypatch.setattr("kdecode.engine.leader.follow", partial(follow_until, fault))
    with build(mini_16_checkpoint, backend, 2, device="cuda") as llm:
        outputs = llm.generate(PROMPTS, greedy())
        assert time.monotonic() - float(stamp.read_text()) < LIMIT_S
    for output in outputs:
        assert output.error is not None
        assert output.error.startswith("RankError: Rank 1 of 2 (process ")
        assert WORDS[kind] in output.error
