"""The protocol and every verdict, with scripted arms on a simulated clock."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kdecode.bench.agreement import AgreementStep, NearTie
from kdecode.bench.compare import CompareSettings, Comparison, compare
from kdecode.bench.machine import Machine, read_machine
from kdecode.bench.metrics import FORMULAS, AcceptanceSource, GenerationRecord
from kdecode.bench.report import SCHEMA_VERSION, render, to_json
from kdecode.bench.verdicts import EXIT_CODES, config_differences

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
NEAR = NearTie(atol=0.1, rtol=0.0)
MACHINE = Machine("test cpu", 2, ("avx2",), "Test 1", "2025-01-01", {"python": "3"}, 2**30)


CONFIG: Mapping[str, Any] = {
    "decode_backend": "auto",
    "threads": 2,
    "isa": "avx512",
    "cache": {"dtype": "bf16"},
}


@dataclass
class ScriptedArm:
    """A clock of its own: prefill_ms, then token_ms a token, times log-normal noise of the run.

    wrong: teacher-forced position -> (token, margin). tokens: what it generates for any prompt.
    """

    name: str
    backend: str = "auto"
    token_ms: float = 10.0
    prefill_ms: float = 50.0
    noise: float = 0.0
    seed: int = 0
    coverage: float = 1.0
    config: Mapping[str, Any] = field(default_factory=lambda: CONFIG)
    wrong: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    tokens: tuple[int, ...] = tuple(range(100, 121))
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    source: AcceptanceSource = "none"

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def resolved_config(self) -> Mapping[str, Any]:
        return {**self.config, "decode_backend": self.backend}

    def run(self, prompt_ids: Sequence[int], max_tokens: int) -> GenerationRecord:
        self.prompts.append(tuple(prompt_ids))
        tokens = self.tokens[:max_tokens]
        steps = len(tokens) - 1
        specialized = round(steps * self.coverage) if self.backend != "auto" else 0
        token_ns = self.token_ms * 1e6 * self._random.lognormvariate(0, self.noise)
        first = round(self.prefill_ms * 1e6)
        reason = "prefill" if self.backend != "auto" else "decode_backend is auto"
        standard = steps - specialized
        return GenerationRecord(
            prompt_tokens=len(prompt_ids),
            token_ids=tokens,
            start_ns=0,
            token_ns=tuple(round(first + i * token_ns) for i in range(len(tokens))),
            prefill_ns=first,
            decode_steps={"specialized": specialized, "standard": standard},
            fallback_reasons={reason: standard} if standard else {},
            acceptance_source=self.source,
        )

    def agree(
        self, prompt_ids: Sequence[int], reference_token_ids: Sequence[int]
    ) -> list[AgreementStep]:
        steps = [AgreementStep(token, 0.0, 20.0) for token in reference_token_ids]
        for position, (token, margin) in self.wrong.items():
            steps[position] = AgreementStep(token, margin, 20.0)
        return steps


def settings(**changes: Any) -> CompareSettings:
    return CompareSettings(**{"max_tokens": 21, "near_tie": NEAR, **changes})


def special(**changes: Any) -> ScriptedArm:
    return ScriptedArm(**{"name": "fast", "backend": "latency_specialized", "seed": 1, **changes})


def auto(**changes: Any) -> ScriptedArm:
    return ScriptedArm(**{"name": "base", "seed": 2, **changes})


def test_known_ratio_is_found_and_covered() -> None:
    result = compare(
        auto(token_ms=13.0, noise=0.03), special(token_ms=10.0, noise=0.03), PROMPTS, settings()
    )
    assert (result.verdict, result.exit_code) == ("faster", 0)
    tpot = result.ratios["tpot"]
    assert tpot.low < 1.30 < tpot.high
    assert tpot.high - tpot.low < 0.1
    assert (tpot.num_blocks, tpot.num_pairs) == (6, 24)
    assert 1.0 < tpot.detectable < 1.1
    # Prefill took the same time in both arms, so the request latency gains less than decode.
    assert result.ratios["ttft"].ratio == pytest.approx(1.0)
    assert 1.0 < result.ratios["e2e"].ratio < tpot.ratio
    swapped = compare(special(token_ms=10.0), auto(token_ms=13.0), PROMPTS, settings())
    assert (swapped.verdict, swapped.exit_code) == ("slower", 0)


def test_null_test_sees_no_difference() -> None:
    result = compare(auto(noise=0.05, seed=3), auto(noise=0.05, seed=4), PROMPTS, settings())
    assert (result.verdict, result.exit_code) == ("no difference seen at this size", 0)
    assert result.ratios["tpot"].low < 1 < result.ratios["tpot"].high


def test_order_is_balanced_and_paired() -> None:
    result = compare(auto(), special(), PROMPTS, settings(blocks=2))
    orders = [
        "".join("AB"[run.arm] for run in result.runs if (run.block, run.prompt) == place)
        for place in [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]
    assert orders == ["ABBA", "BAAB", "BAAB", "ABBA"]
    pairs = [(run.block, run.prompt, run.pair, run.arm) for run in result.runs]
    assert len(set(pairs)) == len(pairs) == 16


def test_random_order_follows_the_seed() -> None:
    def order(seed: int) -> list[int]:
        return [
            run.arm
            for run in compare(auto(), special(), PROMPTS, settings(order="random", seed=seed)).runs
        ]

    assert order(1) == order(1) != order(2)
    assert all(sum(order(1)[i : i + 4]) == 2 for i in range(0, len(order(1)), 4))


def test_warm_up_is_discarded_counted_and_never_a_measured_prompt() -> None:
    arm = auto()
    result = compare(arm, special(), PROMPTS, settings(warmup_runs=(4, 9)))
    assert (result.warmups[0].runs, result.warmups[0].is_stable) == (4, True)
    assert arm.prompts[:4] == [(7, 6, 5, 4)] * 4
    assert set(arm.prompts[4:]) == {(1, 2, 3), (4, 5, 6, 7)}
    assert result.summaries[0].num_requests == 2 * 2 * 6
    noisy = compare(auto(noise=0.5), special(), PROMPTS, settings(warmup_runs=(3, 5)))
    assert (noisy.warmups[0].runs, noisy.warmups[0].is_stable) == (5, False)
    assert "STILL UNSTABLE" in render(noisy, MACHINE)
    none = compare(auto(), special(), PROMPTS, settings(warmup_runs=(0, 0)))
    assert none.warmups[0].runs == 0


def test_any_other_difference_is_not_comparable() -> None:
    config = {**CONFIG, "threads": 4, "cache": {"dtype": "fp8"}, "extra": True}
    result = compare(auto(token_ms=20.0), special(config=config), PROMPTS, settings())
    assert (result.verdict, result.exit_code) == ("not comparable", 3)
    assert [d.setting for d in result.differences] == ["cache.dtype", "extra", "threads"]
    assert result.ratios == {}
    assert result.agreement is None
    text = render(result, MACHINE)
    assert "cache.dtype: 'bf16' | 'fp8'" in text
    assert "extra: None | True" in text
    assert "ratios" not in text


def test_the_report_says_whose_processes_were_measured() -> None:
    text = render(compare(auto(), special(), PROMPTS, settings()), MACHINE)
    assert "base: auto, device not reported, threads 2, isa avx512, latent cache bf16\n" in text
    assert "peak resident memory of the process (both arms" in text
    config = {**CONFIG, "tensor_parallel_size": 4, "decode_context_parallel_size": 2}
    result = compare(auto(config=config), special(config=config), PROMPTS, settings())
    text = render(result, MACHINE)
    assert "latent cache bf16, tensor parallel 4, decode context parallel 2\n" in text
    assert "peak resident memory of rank 0 (both arms" in text


def test_config_must_name_the_backend() -> None:
    with pytest.raises(ValueError, match="no 'decode_backend'"):
        config_differences({"threads": 1}, {"decode_backend": "auto"})


def test_none_and_absent_are_different_settings() -> None:
    a, b = {"decode_backend": "auto", "x": None}, {"decode_backend": "auto"}
    assert [d.setting for d in config_differences(a, b)] == ["x"]


@pytest.mark.parametrize(
    ("candidate", "differ"),
    [
        ({"wrong": {3: (9, 5.0)}}, True),
        ({"wrong": {3: (9, 0.05)}}, False),
        ({"tokens": (100, 101, 9, *range(103, 121)), "wrong": {2: (9, 0.05)}}, False),
        ({"tokens": (100, 101, 9, *range(103, 121)), "wrong": {2: (9, 5.0)}}, True),
        ({"tokens": (100, 101, 9, *range(103, 121))}, True),
    ],
)
def test_outputs_decide_before_speed(candidate: dict[str, Any], differ: bool) -> None:
    result = compare(auto(token_ms=20.0), special(**candidate), PROMPTS, settings())
    assert (result.verdict == "outputs differ") == differ
    assert result.exit_code == (4 if differ else 0)
    assert bool(result.ratios) != differ
    assert ("unqualified" in render(result, MACHINE)) == differ


def test_divergence_is_reported_with_its_margin() -> None:
    arm = special(tokens=(100, 101, 9, *range(103, 121)), wrong={2: (9, 0.05)})
    result = compare(auto(), arm, PROMPTS, settings())
    assert result.agreement is not None
    assert result.agreement.identical_prompts == 0
    assert result.agreement.prompts[1].divergence == 2
    assert "prompt 1: first difference at token 2, near-tie, margin 0.05" in render(result, MACHINE)


def test_different_token_counts_keep_the_latency_ratio_back() -> None:
    arm = special(tokens=(100, 101, 9), wrong={2: (9, 0.05)})
    result = compare(auto(), arm, PROMPTS, settings())
    assert result.unequal_pairs == 24
    assert set(result.ratios) == {"tpot", "ttft"}
    assert "no ratio of request latency: in 24 pairs" in render(result, MACHINE)


@pytest.mark.parametrize(("coverage", "verdict"), [(0.85, "not exercised"), (0.9, "faster")])
def test_coverage_threshold(coverage: float, verdict: str) -> None:
    result = compare(auto(token_ms=20.0), special(coverage=coverage), PROMPTS, settings())
    assert result.verdict == verdict
    assert result.exit_code == (5 if verdict == "not exercised" else 0)
    text = render(result, MACHINE)
    assert f"coverage fast: {100 * coverage:.1f} %" in text
    assert "standard because: prefill: " in text
    assert ("ratios" in text) == (verdict == "faster")


def test_specialized_arm_without_decode_steps_is_not_exercised() -> None:
    result = compare(auto(tokens=(1,)), special(tokens=(1,)), PROMPTS, settings())
    assert (result.verdict, result.exit_code) == ("not exercised", 5)


def test_gravest_reason_wins() -> None:
    arm = special(wrong={3: (9, 5.0)}, coverage=0.0)
    assert compare(auto(), arm, PROMPTS, settings()).verdict == "outputs differ"
    other = special(wrong={3: (9, 5.0)}, coverage=0.0, config={**CONFIG, "threads": 1})
    assert compare(auto(), other, PROMPTS, settings()).verdict == "not comparable"


def test_exit_codes() -> None:
    assert sorted(EXIT_CODES.values()) == [0, 0, 0, 3, 4, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 1}, "Output tokens are 1"),
        ({"blocks": 1}, "blocks is 1"),
        ({"warmup_runs": (3, 2)}, "warmup_runs"),
        ({"order": "aabb"}, "'aabb'"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**changes)


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_empty_prompts_are_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="no prompt may be empty"):
        compare(auto(), special(), prompts, settings())


@pytest.fixture(scope="module")
def faster() -> Comparison:
    return compare(auto(token_ms=13.0), special(token_ms=10.0), PROMPTS, settings(blocks=3))


def test_report_has_separate_rows_and_a_legend(faster: Comparison) -> None:
    text = render(faster, MACHINE)
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "50.000 / 50.000 ms" in rows["prefill time P50 / P90"]
    assert "70.00 tok/s" in rows["prefill throughput"]
    assert "76.92 tok/s" in rows["DECODE THROUGHPUT, no prefill"]
    assert "100.00 tok/s" in rows["DECODE THROUGHPUT, no prefill"]
    assert "13.000 / 13.000 ms" in rows["time per token P50 / P90"]
    assert "84.00 tok/s" in rows["output throughput, with prefill"]
    assert "310.000 / 310.000 ms" in rows["request latency P50 / P90"]
    assert "decode speed (time per token): 1.300, 95 % interval [1.300, 1.300]" in text
    assert "verdict: faster (exit code 0)" in text
    assert "1024 MiB" in text
    assert "test cpu, 2 cores, avx2" in text
    assert "only 3 blocks; 6 or more" in text
    for name, formula in FORMULAS.items():
        assert name in text
        assert formula in text


def test_json_is_complete(faster: Comparison) -> None:
    data = json.loads(json.dumps(to_json(faster, MACHINE), allow_nan=False))
    assert data["schema_version"] == SCHEMA_VERSION
    assert data["comparison_id"] == faster.comparison_id
    assert data["configs"][1]["decode_backend"] == "latency_specialized"
    assert len(data["runs"]) == 2 * 2 * 2 * 3
    assert data["runs"][0]["record"]["token_ids"] == list(range(100, 121))
    assert data["runs"][0]["record"]["acceptance_source"] == "none"
    assert data["ratios"]["tpot"]["ratio"] == pytest.approx(1.3)
    assert data["summaries"][1]["coverage"] == 1.0
    assert data["machine"]["cpu"] == "test cpu"
    assert (data["verdict"], data["exit_code"]) == ("faster", 0)


def test_progress_names_every_phase() -> None:
    told: list[tuple[str, str]] = []
    compare(auto(), special(), PROMPTS, settings(blocks=2), lambda *both: told.append(both))
    phases = list(dict.fromkeys(phase for phase, _ in told))
    assert phases == [
        "warm-up base",
        "warm-up fast",
        "block 1 of 2",
        "block 2 of 2",
        "agreement",
    ]
    assert ("block 2 of 2", "prompt 2 of 2") in told


def test_machine_facts_are_read() -> None:
    machine = read_machine()
    assert machine.cores >= 1
    assert machine.peak_rss_bytes > 2**20
    assert machine.versions["numpy"] != "not installed"


def _drafting(source: AcceptanceSource) -> dict[str, Any]:
    config = {**CONFIG, "speculative": {"method": "dspark", "num_speculative_tokens": 7}}
    return {"source": source, "config": config, "wrong": {3: (1, 5.0)}}


def test_synthetic_acceptance_is_measured_and_its_outputs_are_not_compared() -> None:
    """A wrong token is no finding where tokens are accepted whatever they are."""
    found = compare(
        auto(**_drafting("synthetic")),
        special(token_ms=5.0, **_drafting("synthetic")),
        PROMPTS,
        settings(blocks=2),
    )
    assert (found.agreement, found.verdict, found.is_synthetic) == (None, "faster", True)
    text = render(found, MACHINE)
    assert "outputs: NOT VALID" in text
    assert "speculation dspark with 7 drafts, SYNTHETIC acceptance" in text
    assert to_json(found, MACHINE)["runs"][0]["record"]["acceptance_source"] == "synthetic"


def test_outputs_of_real_drafts_are_compared() -> None:
    arms = auto(**_drafting("model")), special(token_ms=5.0, **_drafting("model"))
    found = compare(*arms, PROMPTS, settings(blocks=2))
    assert found.verdict == "outputs differ"
    text = render(found, MACHINE)
    assert "speculation dspark with 7 drafts, prompts" in text
    assert "NOT VALID" not in text
