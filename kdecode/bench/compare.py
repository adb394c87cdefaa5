"""The paired comparison of two arms in one process: its protocol.

Owns: warm-up, the order of the runs, which runs are pairs, what is refused first. Formulas are in
`metrics`, intervals in `statistics`, the gate and the verdicts in `verdicts`, the judgement of
outputs in `agreement`, printing in `report`; two servers are compared in `serving.protocol`. Does
not know engines, tensors or kernels: an arm is anything with the four members of `Arm`.

The first arm is the baseline and the reference of the outputs; a ratio above 1 means that the
second arm is faster.
"""

from __future__ import annotations

import hashlib
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kdecode.bench.agreement import Agreement, AgreementStep, NearTie, judge_prompt
from kdecode.bench.metrics import ArmSummary, GenerationRecord, RequestMetrics, summarize
from kdecode.bench.statistics import RatioEstimate
from kdecode.bench.verdicts import (
    EXIT_CODES,
    Difference,
    Verdict,
    config_differences,
    is_not_exercised,
    ratios,
    speed_verdict,
    unequal_pairs,
)

# Told of a phase and of how far it is.
Progress = Callable[[str, str], None]


class Arm(Protocol):
    """One side of a comparison: an engine with one configuration, one request at a time, greedy."""

    name: str

    def resolved_config(self) -> Mapping[str, Any]:
        """What the running engine decided, read from the engine; must have `decode_backend`."""

    def run(self, prompt_ids: Sequence[int], max_tokens: int) -> GenerationRecord:
        """Generates greedily, with nothing cached from an earlier run."""

    def agree(
        self, prompt_ids: Sequence[int], reference_token_ids: Sequence[int]
    ) -> Sequence[AgreementStep]:
        """Teacher-forced: the choice at each reference token, on the arm's own decode path."""


@dataclass(frozen=True)
class CompareSettings:
    """The design of a comparison.

    A block runs every prompt twice in each arm. warmup_runs: least and most discarded runs of an
    arm; between them warm-up ends when the last three token times are within warmup_tolerance.
    order: "abba" alternates ABBA and BAAB from prompt to prompt and block to block, "random"
    shuffles the four runs by the seed.
    """

    max_tokens: int
    near_tie: NearTie
    blocks: int = 6
    warmup_runs: tuple[int, int] = (3, 10)
    warmup_tolerance: float = 0.05
    order: Literal["abba", "random"] = "abba"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(f"Output tokens are {self.max_tokens}; decode speed needs at least 2.")
        if self.blocks < 2:
            raise ValueError(f"blocks is {self.blocks}; an interval needs at least 2.")
        if not 0 <= self.warmup_runs[0] <= self.warmup_runs[1]:
            raise ValueError(f"warmup_runs is {self.warmup_runs}; it is (least, most).")
        if self.order not in ("abba", "random"):
            raise ValueError(f"order is {self.order!r}; it must be 'abba' or 'random'.")


@dataclass(frozen=True)
class MeasuredRun:
    """One run that counts. arm: 0 or 1. A pair shares its block, prompt and pair number."""

    block: int
    prompt: int
    pair: int
    arm: int
    record: GenerationRecord


@dataclass(frozen=True)
class Warmup:
    """Discarded runs of one arm."""

    runs: int
    is_stable: bool


@dataclass(frozen=True)
class Comparison:
    """Everything that a comparison found. ratios is empty unless the verdict is about speed."""

    comparison_id: str
    settings: CompareSettings
    arm_names: tuple[str, str]
    configs: tuple[Mapping[str, Any], Mapping[str, Any]]
    differences: tuple[Difference, ...]
    prompts_sha256: str
    warmups: tuple[Warmup, Warmup]
    runs: tuple[MeasuredRun, ...]
    summaries: tuple[ArmSummary, ArmSummary]
    agreement: Agreement | None
    unequal_pairs: int
    ratios: Mapping[str, RatioEstimate]
    verdict: Verdict

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def is_synthetic(self) -> bool:
        """Drafts were accepted at stated rates: the texts are no answers of the model."""
        return any(run.record.acceptance_source == "synthetic" for run in self.runs)


def compare(
    arm_a: Arm,
    arm_b: Arm,
    prompts: Sequence[Sequence[int]],
    settings: CompareSettings,
    progress: Progress = lambda phase, detail: None,
) -> Comparison:
    """Measures both arms on the same prompts, checks that they agree, and judges."""
    if not prompts or not all(prompts):
        raise ValueError("A comparison needs at least one prompt, and no prompt may be empty.")
    arms = (arm_a, arm_b)
    configs = (dict(arm_a.resolved_config()), dict(arm_b.resolved_config()))
    differences = config_differences(*configs)
    warmups = (
        _warm_up(arm_a, prompts, settings, progress),
        _warm_up(arm_b, prompts, settings, progress),
    )
    runs = tuple(_measure(arms, prompts, settings, progress))
    summaries = (
        summarize([run.record for run in runs if run.arm == 0]),
        summarize([run.record for run in runs if run.arm == 1]),
    )
    agreement = None
    # Where drafts are accepted at stated rates, there are no answers to compare.
    has_answers = all(run.record.acceptance_source != "synthetic" for run in runs)
    if not differences and has_answers:
        agreement = _check_outputs(arm_b, prompts, runs, settings.near_tie, progress)
    pairs = _pairs(runs)
    found: dict[str, RatioEstimate] = {}
    verdict = _refusal(configs, differences, agreement, summaries)
    if verdict is None:
        found = ratios(pairs, settings.seed)
        verdict = speed_verdict(found["tpot"])
    return Comparison(
        comparison_id=uuid.uuid4().hex[:12],
        settings=settings,
        arm_names=(arm_a.name, arm_b.name),
        configs=configs,
        differences=differences,
        prompts_sha256=hashlib.sha256(repr([list(ids) for ids in prompts]).encode()).hexdigest(),
        warmups=warmups,
        runs=runs,
        summaries=summaries,
        agreement=agreement,
        unequal_pairs=unequal_pairs(pairs),
        ratios=found,
        verdict=verdict,
    )


def _warm_up(
    arm: Arm,
    prompts: Sequence[Sequence[int]],
    settings: CompareSettings,
    progress: Progress,
) -> Warmup:
    # The longest prompt backwards: the same shapes, but never the measured text.
    prompt = list(reversed(max(prompts, key=len)))
    least, most = settings.warmup_runs
    times: list[float] = []
    while len(times) < most:
        progress(f"warm-up {arm.name}", f"run {len(times) + 1} of {least} to {most}")
        metrics = arm.run(prompt, settings.max_tokens).metrics()
        times.append(metrics.tpot_s if metrics.tpot_s is not None else metrics.e2e_s)
        if len(times) >= least and _is_stable(times[-3:], settings.warmup_tolerance):
            return Warmup(len(times), is_stable=True)
    return Warmup(len(times), is_stable=False)


def _is_stable(times: Sequence[float], tolerance: float) -> bool:
    return len(times) == 3 and max(times) <= min(times) * (1 + tolerance)


def _measure(
    arms: tuple[Arm, Arm],
    prompts: Sequence[Sequence[int]],
    settings: CompareSettings,
    progress: Progress,
) -> Iterator[MeasuredRun]:
    shuffler = random.Random(settings.seed)
    for block in range(settings.blocks):
        for number, prompt in enumerate(prompts):
            progress(
                f"block {block + 1} of {settings.blocks}", f"prompt {number + 1} of {len(prompts)}"
            )
            order = [0, 1, 1, 0] if (block + number) % 2 == 0 else [1, 0, 0, 1]
            if settings.order == "random":
                shuffler.shuffle(order)
            done = [0, 0]
            for arm in order:
                record = arms[arm].run(prompt, settings.max_tokens)
                yield MeasuredRun(block, number, done[arm], arm, record)
                done[arm] += 1


def _check_outputs(
    candidate: Arm,
    prompts: Sequence[Sequence[int]],
    runs: Sequence[MeasuredRun],
    near_tie: NearTie,
    progress: Progress,
) -> Agreement:
    judged = []
    for number, prompt in enumerate(prompts):
        progress("agreement", f"prompt {number + 1} of {len(prompts)}")
        texts: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
        for run in runs:
            if run.prompt == number:
                texts[run.arm].append(run.record.token_ids)
        steps = candidate.agree(prompt, texts[0][0])
        judged.append(judge_prompt(number, texts[0], texts[1], steps, near_tie))
    return Agreement(tuple(judged))


def _pairs(runs: Sequence[MeasuredRun]) -> list[list[tuple[RequestMetrics, RequestMetrics]]]:
    """(baseline, candidate) of every pair, block by block."""
    halves: dict[tuple[int, int, int], dict[int, RequestMetrics]] = {}
    for run in runs:
        key = (run.block, run.prompt, run.pair)
        halves.setdefault(key, {})[run.arm] = run.record.metrics()
    blocks: list[list[tuple[RequestMetrics, RequestMetrics]]] = []
    for (block, _, _), half in sorted(halves.items()):
        while len(blocks) <= block:
            blocks.append([])
        blocks[block].append((half[0], half[1]))
    return blocks


def _refusal(
    configs: tuple[Mapping[str, Any], Mapping[str, Any]],
    differences: Sequence[Difference],
    agreement: Agreement | None,
    summaries: tuple[ArmSummary, ArmSummary],
) -> Verdict | None:
    """Why no statement about speed is made, the gravest reason first."""
    if differences:
        return "not comparable"
    if agreement is not None and not agreement.agrees:
        return "outputs differ"
    coverages = [summary.coverage for summary in summaries]
    if any(map(is_not_exercised, configs, coverages)):
        return "not exercised"
    return None
