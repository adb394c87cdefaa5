"""Engines of several ranks, and what tests compare of them with one rank's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kdecode.config_speculative import SpeculativeConfig
from kdecode.engine.engine import LLM
from kdecode.engine.request import Output, SamplingParams
from kdecode.model.draft_synthesis import make_draft
from kdecode.testing.compare import near_tie

# Two correct runs may choose apart where logits are so close: 5 % of a large one, as in `compare`.
NEAR_TIE = 0.5
# Of logits, RMS of the differences against RMS of the values. Sums of parts are rounded otherwise
# than whole ones: found are 0.007 to 0.010, and up to 0.035 where an expert changes place.
MAX_DISTANCE = 0.05
PROMPTS = (tuple(range(5, 45)), tuple(range(100, 117)), tuple(range(300, 370)))
SETTINGS = {
    "num_threads": 1,
    "page_tokens": 16,
    "max_context_tokens": 128,
    "max_requests": 3,
    # A prompt of 70 tokens is more than one chunk, and has a prefix of 64.
    "max_step_tokens": 64,
}


def draft_directory(checkpoint: Path, preset: str = "mini-16") -> str:
    """A random draft beside the checkpoint; made on first use."""
    directory = checkpoint.parent / f"{preset}-draft"
    if not directory.exists():
        make_draft(directory, preset, "inferact", seed=0)
    return str(directory)


def build(checkpoint: Path, backend: str, size: int = 1, **settings: object) -> LLM:
    ranks: dict[str, object] = {"tensor_parallel_size": size, "check_ranks": size > 1}
    return LLM(checkpoint, decode_backend=backend, **{**SETTINGS, **ranks, **settings})


def sharing(size: int, interleave: int) -> dict[str, object]:
    """Settings of ranks that share the positions of the latent cache."""
    return {"decode_context_parallel_size": size, "context_interleave_tokens": interleave}


def with_draft(checkpoint: Path, num_drafts: int = 3, **settings: object) -> SpeculativeConfig:
    return SpeculativeConfig(draft_directory(checkpoint), num_drafts, **settings)  # type: ignore[arg-type]


def greedy(max_tokens: int = 10) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@dataclass
class Single:
    """One rank: its engine, its replies to PROMPTS and the logits that they were chosen from."""

    llm: LLM
    replies: list[tuple[int, ...]]
    logits: list[Tensor]

    @staticmethod
    def of(checkpoint: Path, backend: str, **settings: object) -> Single:
        llm = build(checkpoint, backend, **settings)
        replies = [output.token_ids for output in llm.generate(PROMPTS, greedy())]
        pairs = zip(PROMPTS, replies, strict=True)
        return Single(llm, replies, [llm.teacher_forced(*pair) for pair in pairs])

    def near_ties(self, outputs: Sequence[Output]) -> int:
        """How many of these replies part from this rank's; each does at a near-tie of its logits,
        and says behind it what this rank would say, up to further ones."""
        parted = 0
        for output in outputs:
            assert output.error is None, output.error
            rows = self.llm.teacher_forced(output.prompt_ids, output.token_ids)
            margins = [
                near_tie(row, token, NEAR_TIE)
                for row, token in zip(rows, output.token_ids, strict=True)
            ]
            parted += any(margin > 0 for margin in margins)
        return parted


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float(torch.linalg.norm(ours - theirs) / torch.linalg.norm(theirs))


def names_left(processes: Iterable[int]) -> list[str]:
    """Shared memory of these processes that still has a name; other programs have theirs there."""
    marks = ["kdecode", *(f"torch_{process}_" for process in processes)]
    return [path.name for path in Path("/dev/shm").iterdir() if any(m in path.name for m in marks)]
