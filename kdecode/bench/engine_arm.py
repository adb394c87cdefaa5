"""An engine as one arm of a comparison, and an engine's output as a measured record.

Owns the translation between the engine's words and the measurement's. Measures nothing itself: all
times are the engine's own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kdecode.bench.agreement import AgreementStep
from kdecode.bench.metrics import AcceptanceSource, GenerationRecord, MetricError
from kdecode.engine.engine import LLM
from kdecode.engine.request import Output, SamplingParams


class EngineArm:
    """One request at a time, greedily, to exactly as many tokens as asked for."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self.llm = llm

    def resolved_config(self) -> Mapping[str, Any]:
        return self.llm.resolved_config()

    def run(self, prompt_ids: Sequence[int], max_tokens: int) -> GenerationRecord:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return record_of(self.llm.generate([prompt_ids], params)[0])

    def agree(
        self, prompt_ids: Sequence[int], reference_token_ids: Sequence[int]
    ) -> Sequence[AgreementStep]:
        steps = []
        rows = self.llm.follow_reply(prompt_ids, reference_token_ids)
        for logits, reference in zip(rows, reference_token_ids, strict=True):
            best = int(logits.argmax())
            largest = float(logits[best])
            steps.append(AgreementStep(best, largest - float(logits[reference]), largest))
        return steps


def random_arrivals(
    llm: LLM, rows: int, context_tokens: int, output_tokens: int
) -> list[list[int]]:
    """When the tokens of ``rows`` requests with random prompts, decoded together, arrived."""
    source = random.Random(0)
    num_base = llm.tokenizer.num_base
    prompts = [[source.randrange(num_base) for _ in range(context_tokens)] for _ in range(rows)]
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    return [output.timing.token_ns for output in llm.generate(prompts, params)]


def record_of(output: Output) -> GenerationRecord:
    """Raises MetricError for a reply that broke: half a reply is not a measurement."""
    if output.error is not None:
        raise MetricError(f"The request ended with an error: {output.error}")
    steps: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for (path, reason), count in output.decode_steps.items():
        steps[path] += count
        if reason:
            reasons[reason] += count
    return GenerationRecord(
        prompt_tokens=len(output.prompt_ids),
        token_ids=output.token_ids,
        start_ns=output.timing.start_ns,
        token_ns=tuple(output.timing.token_ns),
        prefill_ns=output.timing.prefill_ns,
        decode_steps=dict(steps),
        fallback_reasons=dict(reasons),
        acceptance_source=acceptance_source(output),
    )


def acceptance_source(output: Output) -> AcceptanceSource:
    """Whether drafts were accepted, and by whose judgement."""
    if not output.rounds.rounds:
        return "none"
    return "synthetic" if output.rounds.is_synthetic else "model"
