"""The paired comparison of two servers: from what they resolved to the verdict.

Owns the order of null run, warm-up, blocks and outputs, and what keeps them from having a ratio.
The passes are `runner`'s, formulas are in `bench.metrics` and `summary`, intervals in
`bench.statistics`, rules in `gate` and `bench.verdicts`. The first arm is the baseline and the
reference of the outputs; a ratio above 1 means that the second is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kdecode.bench.compare import Progress, Warmup
from kdecode.bench.serving import gate
from kdecode.bench.serving.client import Client
from kdecode.bench.serving.design import Design, MeasuredPass, Outputs, pairs_of
from kdecode.bench.serving.facts import ServerFacts
from kdecode.bench.serving.hosting import Hosts, Standing
from kdecode.bench.serving.runner import Runner
from kdecode.bench.serving.summary import ServedSummary
from kdecode.bench.statistics import RatioEstimate
from kdecode.bench.verdicts import (
    EXIT_CODES,
    Difference,
    Pairs,
    Verdict,
    is_not_exercised,
    ratios,
    speed_verdict,
    unequal_pairs,
)
from kdecode.bench.workloads.types import Workload


@dataclass(frozen=True)
class ServedComparison:
    """Everything that a comparison found. ratios is empty unless the verdict is about speed."""

    comparison_id: str
    design: Design
    workload: Workload
    arm_names: tuple[str, str]
    urls: tuple[str, str]
    facts: tuple[ServerFacts, ServerFacts]
    differences: tuple[Difference, ...]
    problems: tuple[str, ...]
    warmups: tuple[Warmup, Warmup]
    null: RatioEstimate | None
    passes: tuple[MeasuredPass, ...]
    summaries: tuple[ServedSummary, ServedSummary]
    outputs: Outputs | None
    unequal_pairs: int
    ratios: Mapping[str, RatioEstimate]
    verdict: Verdict

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def is_synthetic(self) -> bool:
        return any(facts.study == "synthetic acceptance" for facts in self.facts)

    @property
    def outputs_valid(self) -> bool:
        """Whether replies are answers of the model, which evaluations of quality need."""
        return not self.is_synthetic and all(
            reply.outputs_valid
            for one in self.passes
            for record in one.result.records
            if (reply := record.reply) is not None
        )


async def compare_servers(
    client_a: Client,
    client_b: Client,
    workload: Workload,
    design: Design,
    progress: Progress = lambda phase, detail: None,
    hosts: Hosts | None = None,
) -> ServedComparison:
    """Measures both servers. hosts: None where they run already.

    Raises HttpError when one of them cannot be asked at all, LaunchError when one does not start.
    """
    hosts = hosts or Standing()
    names = (client_a.name, client_b.name)
    runner = Runner(workload, design, progress, hosts)
    clients, facts, warmups = await runner.begin((client_a, client_b))
    problems = [*gate.configuration_problems(names, facts)]
    if workload.reply_mode == "live":
        problems.append("Live replies make other prompts in each arm, which are no pairs.")
    null = None
    if design.has_null:
        null = await runner.null(clients[0])
        if null is not None and (problem := gate.null_problem(names[0], null)):
            problems.append(problem)
    passes, growths = await runner.blocks(clients, "block")
    summaries = (
        runner.summary(passes, growths, 0),
        runner.summary(passes, growths, 1),
    )
    pairs = pairs_of(passes)
    problems += gate.run_problems(names, facts, summaries, pairs)
    differences = gate.facts_differences(*facts)
    # Where drafts are accepted at stated rates, there are no answers to compare.
    outputs = None
    has_answers = all(one.study != "synthetic acceptance" for one in facts)
    if not differences and not problems and has_answers:
        outputs, problem = await runner.outputs(clients, passes)
        problems += [problem] if problem else []
    verdict, found = _judge(facts, differences, problems, outputs, summaries, pairs, design.seed)
    return ServedComparison(
        comparison_id=runner.comparison_id,
        design=design,
        workload=workload,
        arm_names=names,
        urls=(_url(client_a), _url(client_b)),
        facts=facts,
        differences=differences,
        problems=tuple(problems),
        warmups=warmups,
        null=null,
        passes=tuple(passes),
        summaries=summaries,
        outputs=outputs,
        unequal_pairs=unequal_pairs(pairs),
        ratios=found,
        verdict=verdict,
    )


def _url(client: Client) -> str:
    return f"{client.target.scheme}://{client.target.authority}{client.target.base}"


def _judge(
    facts: Sequence[ServerFacts],
    differences: Sequence[Difference],
    problems: Sequence[str],
    outputs: Outputs | None,
    summaries: Sequence[ServedSummary],
    pairs: Pairs,
    seed: int,
) -> tuple[Verdict, dict[str, RatioEstimate]]:
    """The gravest reason first."""
    if differences or problems:
        return "not comparable", {}
    if outputs is not None and not outputs.agreement.agrees:
        return "outputs differ", {}
    coverages = [summary.counts.coverage for summary in summaries]
    if any(is_not_exercised(f.config, c) for f, c in zip(facts, coverages, strict=True)):
        return "not exercised", {}
    found = ratios(pairs, seed)
    return speed_verdict(found["tpot"]), found
