"""Engines of the smallest model with and without a draft, and what tests compare of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kdecode.config_draft import DraftKind
from kdecode.config_speculative import SpeculativeConfig
from kdecode.engine.engine import LLM
from kdecode.engine.request import Output, SamplingParams
from kdecode.model.draft_synthesis import make_draft
from kdecode.testing.compare import near_tie
from kdecode.testing.poison import poison_

BACKENDS = ("auto", "latency_specialized")
# Two correct runs may choose apart where logits are so close: 5 % of a large one, as in `compare`.
NEAR_TIE = 0.5


def draft_directory(checkpoint: Path, kind: DraftKind = "inferact") -> str:
    """A random draft beside the checkpoint of the smallest model; made on first use."""
    directory = checkpoint.parent / f"mini-{kind}"
    if not directory.exists():
        make_draft(directory, "mini", kind, seed=0)
    return str(directory)


def speculative(checkpoint: Path, num_drafts: int = 3, **settings: object) -> SpeculativeConfig:
    return SpeculativeConfig(draft_directory(checkpoint), num_drafts, **settings)  # type: ignore[arg-type]


def build(
    checkpoint: Path, backend: str, config: SpeculativeConfig | None, **settings: object
) -> LLM:
    """An engine over memory of NaN."""
    defaults = {
        "num_threads": 1,
        "page_tokens": 16,
        "max_context_tokens": 96,
        "max_requests": 3,
        # A prompt of 45 tokens is two chunks of 24 and 21.
        "max_step_tokens": 24,
    }
    llm = LLM(checkpoint, decode_backend=backend, speculative=config, **{**defaults, **settings})
    caches = llm._worker.caches
    for part in (caches.conv, caches.recurrent, caches.pages, caches.draft):
        for pool in part.values():
            poison_(pool)
    return llm


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@dataclass(frozen=True)
class Plain:
    """Plain decoding of a backend: the engine, and its replies to some prompts."""

    llm: LLM
    outputs: list[Output]

    @property
    def replies(self) -> dict[int, tuple[int, ...]]:
        return {number: output.token_ids for number, output in enumerate(self.outputs)}

    def near_ties(self, outputs: Sequence[Output]) -> int:
        """How many tokens are not what plain decoding says there; each must be at a near-tie."""
        count = 0
        for output in outputs:
            logits = self.llm.teacher_forced(output.prompt_ids, output.token_ids)
            for row, token in zip(logits, output.token_ids, strict=True):
                count += near_tie(row, token, NEAR_TIE) > 0
        return count
