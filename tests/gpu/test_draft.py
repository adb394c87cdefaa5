"""On a GPU: a draft's plans against its reference, their graphs, and an engine that speculates."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from draft_cuda_cases import cuda_rounds
from draft_rounds import NUM_DRAFTS, requests_of

from kdecode.config import EngineConfig
from kdecode.config_draft import DraftKind
from kdecode.config_speculative import SpeculativeConfig
from kdecode.decode.draft_standard import first_choices
from kdecode.decode.graph import GraphPool
from kdecode.engine.engine import LLM
from kdecode.engine.request import SamplingParams
from kdecode.model.draft_synthesis import make_draft

pytestmark = pytest.mark.gpu

KINDS: tuple[DraftKind, ...] = get_args(DraftKind)


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_blocks_against_the_reference(
    mini_checkpoint: Path, tmp_path: Path, kind: DraftKind, has_graphs: bool
) -> None:
    pool = GraphPool() if has_graphs else None
    cuda_rounds(mini_checkpoint, tmp_path / "draft", kind, pool).check()


def test_greedy_rounds_do_not_wait_for_the_device(mini_checkpoint: Path, tmp_path: Path) -> None:
    """Replays give the drafts that the host would choose; nothing but the last read waits."""
    case = cuda_rounds(mini_checkpoint, tmp_path / "draft", "inferact", GraphPool())
    requests = requests_of(case.fill()[0])
    chosen = case.draft.block(
        requests, NUM_DRAFTS, lambda place, logits: first_choices(place, logits)
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [case.draft._first_choices(requests[:count]) for count in (3, 2, 1)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [tuple(row) for row in found[0].tokens.tolist()] == chosen.tokens
    for _ in range(2):
        assert case.draft.block(requests, NUM_DRAFTS, first_choices) == chosen


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_an_engine_with_a_draft_replies_as_one_without(
    mini_checkpoint: Path, tmp_path: Path, method: str
) -> None:
    """Greedy replies part at a near-tie at most: a verify step has other rows than a plain one."""
    make_draft(tmp_path / "draft", "mini", "inferact", seed=0)
    prompts = [[3, 7, 11, 200, 5], [9, 8, 7]]
    greedy = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=2)
    drawn = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, seed=3)
    replies = []
    for count in (None, 4):
        speculative = None
        if count is not None:
            speculative = SpeculativeConfig(
                str(tmp_path / "draft"),
                count,
                draft_sample_method=method,  # type: ignore[arg-type]
            )
        engine = EngineConfig(
            device="cuda",
            decode_backend="latency_specialized",
            max_context_tokens=256,
            max_requests=2,
            speculative=speculative,
        )
        llm = LLM(mini_checkpoint, engine)
        replies.append(llm.generate(prompts, greedy))
        assert [len(output.token_ids) for output in llm.generate(prompts, drawn)] == [16, 16]
    for theirs, ours in zip(*replies, strict=True):
        for place, (token, other) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
            if token != other:
                (_, first), (_, second) = theirs.logprobs[place].top[:2]
                assert first - second < 0.1, f"token {place} is {token}, not {other}"
                break


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_a_round_is_timed(mini_checkpoint: Path, tmp_path: Path, backend: str) -> None:
    make_draft(tmp_path / "draft", "mini", "redhat", seed=0)
    engine = EngineConfig(
        device="cuda",
        decode_backend=backend,  # type: ignore[arg-type]
        max_context_tokens=256,
        max_requests=1,
        speculative=SpeculativeConfig(str(tmp_path / "draft"), 4),
    )
    cost = LLM(mini_checkpoint, engine).inspect_draft(200, 3)
    assert cost is not None
    assert min(cost.block_microseconds, cost.append_microseconds) > 0
    if backend == "auto":
        assert cost.plan is None
        return
    assert cost.plan is not None
    assert cost.plan.timed_as == "timed as replays of a CUDA graph"
    assert {step.launches for step in cost.plan.steps} == {1}
    assert cost.markov_microseconds > 0
