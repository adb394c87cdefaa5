"""Speculation in the engine: tokens and state of plain decoding, whatever drafts there are.

A verify step of several rows rounds in another order than steps of one, so that a token may differ
where two logits are as good as equal. Every token of a run is therefore held against the logits of
plain decoding along that run's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from proposers import Scripted, SelfDraft, inner, use, without_drafts
from speculation_cases import BACKENDS, Plain, build, draft_directory, greedy
from torch import Tensor

from kdecode.config_draft import DraftKind
from kdecode.config_speculative import SpeculativeConfig
from kdecode.engine.engine import LLM
from kdecode.engine.request import Output, Request
from kdecode.kernels.contract import Tolerance
from kdecode.testing.compare import state_close

# As in tests/speculative/test_loop.py: a window off by one token has 0.66, a state 0.076 and more.
STATE = {
    "window": Tolerance(rtol=0.5, atol=0.5, rms_ratio=0.1),
    "recurrent": Tolerance(rtol=0.5, atol=0.3, rms_ratio=0.05),
    "rows": Tolerance(rtol=0.5, atol=0.5, rms_ratio=0.05),
    "draft": Tolerance(rtol=0.5, atol=0.8, rms_ratio=0.1),
}
# One page and a bit, several chunks, and a single token.
PROMPTS = ([5, 9, 3, 7, 1] * 4, [11 + i for i in range(45)], [17])
NEW_TOKENS = 24
# Of 72 tokens; the smallest model has many near-ties, its logits being bf16.
MAX_NEAR_TIES = 4


@pytest.fixture(scope="module", params=BACKENDS)
def plain(request: pytest.FixtureRequest, mini_checkpoint: Path) -> Plain:
    llm = build(mini_checkpoint, request.param, None)
    return Plain(llm, llm.generate(PROMPTS, greedy(NEW_TOKENS)))


def _snapshot(llm: LLM, request: Request) -> dict[str, Tensor]:
    """Everything that the caches hold of a request."""
    caches, slot, count = llm._worker.caches, request.slot, request.num_cached
    assert slot is not None
    found = {f"window.{n}": x[slot].clone() for n, x in caches.conv.items()}
    found |= {f"recurrent.{n}": x[slot].clone() for n, x in caches.recurrent.items()}
    for name, part in (("rows", caches.pages), ("draft", caches.draft)):
        for layer, pool in part.items():
            found[f"{name}.{layer}"] = pool[request.pages].flatten(0, 1)[:count].clone()
    return found


def _watched(
    llm: LLM, prompts: Sequence[Sequence[int]], forced: Sequence[tuple[int, ...]] | None = None
) -> tuple[list[Output], list[dict[int, dict[str, Tensor]]]]:
    """Replies, and for each request its state by the number of cached tokens, after every step."""
    numbers = []
    for index, prompt in enumerate(prompts):
        ids = None if forced is None else forced[index]
        numbers.append(llm.add_request(prompt, greedy(NEW_TOKENS), forced_ids=ids))
    requests = [llm.loop._requests[number] for number in numbers]
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in prompts]
    while llm.loop.scheduler.has_work:
        llm.loop.step()
        for request, seen in zip(requests, states, strict=True):
            if request.state == "decode":
                seen[request.num_cached] = _snapshot(llm, request)
    return [llm.loop.collect(number) for number in numbers], states


def _make_proposer(kind: str, llm: LLM, plain: Plain, order: Sequence[int]) -> None:
    """order: which of plain decoding's prompts the requests have."""
    if kind == "scripted":
        replies = {number: plain.replies[which] for number, which in enumerate(order)}
        lengths = {number: len(PROMPTS[which]) for number, which in enumerate(order)}
        use(llm, Scripted(inner(llm), replies=replies, prompts=lengths))
    elif kind == "self":
        use(llm, SelfDraft(inner(llm), llm._worker.runner, llm._worker.caches))


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("scripted", (0, 1, 2)),
        ("scripted", (1,)),
        ("self", (0, 1, 2)),
        ("inferact", (0, 1, 2)),
        ("redhat", (1,)),
    ],
)
def test_tokens_and_state_of_plain_decoding(
    plain: Plain,
    mini_checkpoint: Path,
    kind: str,
    order: tuple[int, ...],
) -> None:
    """State after every step, too: windows, recurrent states, cache rows, the draft's own rows."""
    published: DraftKind = "redhat" if kind == "redhat" else "inferact"
    config = SpeculativeConfig(draft_directory(mini_checkpoint, published), 3)
    backend = plain.llm.engine_config.decode_backend
    llm = build(mini_checkpoint, backend, config)
    _make_proposer(kind, llm, plain, order)
    prompts = [PROMPTS[which] for which in order]
    outputs, states = _watched(llm, prompts)
    assert [output.error for output in outputs] == [None] * len(order)
    # A native verify step of one request has the very sums of single steps.
    is_exact = backend == "latency_specialized" and len(order) == 1
    assert plain.near_ties(outputs) <= (0 if is_exact else MAX_NEAR_TIES)
    reference = build(mini_checkpoint, backend, config)
    without_drafts(reference)
    for output, seen in zip(outputs, states, strict=True):
        # Plain decoding along the same tokens, one request at a time.
        _, (expected,) = _watched(reference, [output.prompt_ids], [output.token_ids])
        assert len(expected) == NEW_TOKENS - 1
        for count, state in seen.items():
            state_close(state, expected[count], STATE, f"{kind}, after {count} tokens")
    stats = llm.stats()
    assert (stats["pages_used"], stats["slots_used"]) == (0, 0)
    assert stats["speculation"]["rounds"] > 0
