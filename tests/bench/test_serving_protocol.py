"""The comparison of servers on scripted ones: one case for each fault that tools have had."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from mock_server import CONFIG, MockServer, play
from simulated import simulate

from kdecode.bench.machine import Machine
from kdecode.bench.serving.client import Client
from kdecode.bench.serving.counters import add_up, growth, read_counters
from kdecode.bench.serving.design import Design, pairs_of
from kdecode.bench.serving.facts import ServerFacts, read_facts
from kdecode.bench.serving.gate import facts_differences, run_problems
from kdecode.bench.serving.http import HttpError, Target
from kdecode.bench.serving.load import Load, PassResult
from kdecode.bench.serving.protocol import ServedComparison, compare_servers
from kdecode.bench.serving.report import render, tables
from kdecode.bench.serving.stored import (
    RefusedRatioError,
    StoredError,
    document_of,
    ratio_of,
    read_document,
)
from kdecode.bench.serving.summary import Limits, summarize_passes
from kdecode.bench.verdicts import ratios
from kdecode.bench.workloads.synthetic import TokenRange, fixed
from kdecode.bench.workloads.types import Request, Workload

MACHINE = Machine("test cpu", 2, ("avx2",), "Test 1", "2025-01-01", {"python": "3"}, 2**30)
SPECIALIZED = {**CONFIG, "decode_backend": "latency_specialized"}
WORKLOAD = fixed(2, 8, 9, TokenRange(0, 100), seed=0)


def auto(**changes: Any) -> MockServer:
    return MockServer(**{"name": "auto", "chunk_ms": 13.0, **changes})


def special(**changes: Any) -> MockServer:
    return MockServer(**{"name": "special", "config": SPECIALIZED, "coverage": 1.0, **changes})


def design(**changes: Any) -> Design:
    return Design(**{"load": Load(concurrency=1), "blocks": 2, "has_null": False, **changes})


def measure(
    folder: Path,
    a: MockServer,
    b: MockServer,
    workload: Workload = WORKLOAD,
    **changes: Any,
) -> ServedComparison:
    async def main() -> ServedComparison:
        async with a.running() as url_a, b.running() as url_b:
            clients = [
                Client(name, Target.from_url(url)) for name, url in (("a", url_a), ("b", url_b))
            ]
            return await compare_servers(clients[0], clients[1], workload, design(**changes))

    found: ServedComparison = simulate(folder, main())
    return found


def facts_of(folder: Path, server: MockServer) -> ServerFacts:
    async def main() -> ServerFacts:
        async with server.running() as url:
            return await read_facts(Client("a", Target.from_url(url)))

    found: ServerFacts = simulate(folder, main())
    return found


def rows(comparison: ServedComparison) -> dict[str, tuple[str, ...]]:
    (table,) = tables(comparison)
    return {row[0]: row[1:] for row in table.rows}


def test_known_ratio_and_what_is_beside_it(tmp_path: Path) -> None:
    found = measure(tmp_path, auto(), special(), has_null=True)
    assert (found.verdict, found.problems) == ("faster", ())
    assert found.ratios["tpot"].ratio == pytest.approx(1.3)
    assert found.ratios["ttft"].ratio == pytest.approx(1.0)
    assert found.ratios["e2e"].ratio == pytest.approx((200 + 8 * 13) / (200 + 8 * 10))
    assert found.null is not None
    assert found.null.ratio == pytest.approx(1)
    assert [(one.block, one.arm, one.pair) for one in found.passes] == [
        *((0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 0, 1)),
        *((1, 1, 0), (1, 0, 0), (1, 0, 1), (1, 1, 1)),
    ]
    assert rows(found)["decode step, mean"][:2] == ("13.000 ms", "10.000 ms")


def test_peak_is_never_below_the_mean(tmp_path: Path) -> None:
    """F1: tokens are counted by chunk, whatever the chunks are."""
    for tokens, chunk_ms in ((4, 10.0), (1, 10.0), (8, 700.0)):
        server = auto(tokens_per_chunk=tokens, chunk_ms=chunk_ms)
        one = play(tmp_path, server, fixed(3, 5, 40, TokenRange(0, 9), 0), Load(concurrency=1))
        summary = summarize_passes([one], add_up([]), Limits(), 1)
        assert summary.peak_tps is not None
        assert summary.output_tps is not None
        assert summary.peak_tps >= summary.output_tps


def test_a_warm_cache_in_one_arm_is_found(tmp_path: Path) -> None:
    """F5."""
    found = measure(tmp_path, auto(), special(cached_tokens=4))
    assert found.verdict == "not comparable"
    assert "0.0 % and 50.0 % of the prompt tokens" in found.problems[0]
    (problem,) = measure(tmp_path, auto(), special(cached_tokens=None)).problems
    assert problem == "One arm tells its cached prompt tokens and the other does not."


def test_passes_find_nothing_of_each_other(tmp_path: Path) -> None:
    server, other = auto(), special()
    measure(tmp_path, server, other)
    salts = [body["cache_salt"] for body in server.log if body["max_tokens"] == 9]
    # Two requests a pass; warm-up, blocks and the agreement.
    assert len(set(salts[: 2 * 7])) == 7
    assert not set(salts) & {body["cache_salt"] for body in other.log} - set(salts[:6])
    resets = auto()
    measure(tmp_path, resets, special(), cache="reset")
    assert "cache_salt" not in resets.log[0]
    assert resets.paths.count("/reset_prefix_cache") == 3 + 4


def test_decode_and_output_throughput_are_two_numbers(tmp_path: Path) -> None:
    """F7: nine tenths of the time is prefill."""
    long = {"prefill_ms": 900.0, "chunk_ms": 12.5}
    found = measure(tmp_path, auto(**long), special(**long))
    table = rows(found)
    decode, output = (
        float(table[name][0].split()[0])
        for name in ("DECODE THROUGHPUT, no prefill", "output throughput, with prefill")
    )
    assert decode == pytest.approx(80)
    assert output == pytest.approx(9)


def test_losses_are_counted_and_have_no_ratio(tmp_path: Path) -> None:
    """F8."""
    found = measure(tmp_path, auto(), special(fail_every=5))
    assert (found.verdict, found.ratios) == ("not comparable", {})
    assert "8 requests were planned, 8 sent and 7 completed" in found.problems[0]
    assert found.summaries[1].errors
    assert rows(found)["requests completed / planned"][:2] == ("8 / 8", "7 / 8")


def synthetic(config: Any, **changes: Any) -> dict[str, Any]:
    speculative = {"method": "dspark", "synthetic_acceptance_rates": [1.0, 1.0]}
    return {"config": {**config, "speculative": speculative, "outputs_valid": False}, **changes}


def test_synthetic_acceptance_is_checked_against_what_was_asked_for(tmp_path: Path) -> None:
    """F9, F15: a value that is missing is no value, and another one stops."""
    good = measure(
        tmp_path,
        auto(**synthetic(CONFIG, acceptance=3.0)),
        special(**synthetic(SPECIALIZED, acceptance=3.0)),
    )
    assert (good.verdict, good.outputs, good.outputs_valid) == ("faster", None, False)
    # A round of 3 tokens takes 13 ms by the server's clock.
    assert rows(good)["DERIVED time per token"] == ("4.333 ms", "3.333 ms", "derived_tpot")
    for acceptance, said in ((5.0, "5.00 were found"), (None, "counters are not available")):
        bad = measure(
            tmp_path,
            auto(**synthetic(CONFIG, acceptance=3.0)),
            special(**synthetic(SPECIALIZED, acceptance=acceptance)),
        )
        assert bad.verdict == "not comparable"
        assert said in bad.problems[0]


def test_missing_counters_are_not_zero(tmp_path: Path) -> None:
    """F15, F16: absent, and the coverage that is not known is not enough."""
    drafts = {"method": "dspark", "synthetic_acceptance_rates": None}
    configs = [{**config, "speculative": drafts} for config in (CONFIG, SPECIALIZED)]
    found = measure(tmp_path, auto(config=configs[0]), special(config=configs[1], coverage=None))
    assert found.verdict == "not exercised"
    text = render(found, MACHINE)
    assert "coverage b: not available" in text
    assert "an unknown share of the decode steps of b" in text
    assert rows(found)["tokens a round"][:2] == ("not available", "not available")
    assert found.summaries[0].counts.acceptance_length is None


def test_outputs_that_are_made_up_are_never_valid(tmp_path: Path) -> None:
    """F17: the replies say so, whatever the configuration says."""
    found = measure(tmp_path, auto(outputs_valid=False), special())
    assert found.outputs_valid is False
    assert document_of(found, MACHINE)["outputs_valid"] is False
    assert measure(tmp_path, auto(), special()).outputs_valid is True


def test_cold_requests_are_discarded_and_counted(tmp_path: Path) -> None:
    """F12: and the prompt tokens are the server's."""
    server = auto(prompt_tokens=11)
    found = measure(tmp_path, server, special(prompt_tokens=11))
    assert found.warmups[0].runs == 3
    assert found.summaries[0].prompt_tokens == 2 * 4 * 11
    measured = WORKLOAD.requests[0].prompt_ids
    assert measured is not None
    assert [body["prompt"] for body in server.log[:6]].count(list(measured)) == 0
    (problem,) = measure(tmp_path, auto(), special(prompt_tokens=12)).problems
    assert problem == "The same requests had 64 and 96 prompt tokens."


def test_a_warm_up_that_never_settles_says_so(tmp_path: Path) -> None:
    found = measure(tmp_path, auto(noise=0.5), special(), warmup_passes=(3, 4))
    assert (found.warmups[0].runs, found.warmups[0].is_stable) == (4, False)
    assert "STILL UNSTABLE" in render(found, MACHINE)


def test_configuration_is_the_running_servers(tmp_path: Path) -> None:
    """F18: nothing but what the server resolved, and all of it."""
    facts = facts_of(tmp_path, auto())
    assert (facts.kind, facts.study, facts.accelerators) == ("kdecode", "non-speculative", 8)
    assert facts.config["cache.page_tokens"] == 64
    assert facts.config["hardware.name"] == "test accelerator"
    assert facts_of(tmp_path, auto(hardware={})).unread == ("hardware model and count",)


VLLM = {
    "vllm_config": {
        "instance_id": "ab",
        "additional_config": {"decode_backend": "latency_specialized"},
        "cache_config": {"block_size": 64, "num_gpu_blocks": 1000},
        "parallel_config": {"world_size": 16, "data_parallel_size": 1, "master_port": 1234},
        # Names that only look like addresses.
        "kernel_config": {"support": True, "flops_path": "x"},
        "speculative_config": {"method": "dspark", "synthetic_acceptance_length": 6.0},
    },
    "vllm_env": {"VLLM_X": 1, "VLLM_CACHE_ROOT": "/a"},
    "system_env": {"nvidia_gpu_models": "GPU 0: X", "torch_version": "2"},
}


def test_a_vllm_in_development_mode_tells_everything(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, MockServer(config=None, server_info=VLLM))
    assert (facts.kind, facts.unread) == ("vllm", ())
    assert facts.config["decode_backend"] == "latency_specialized"
    assert facts.config["cache_config.block_size"] == 64
    assert facts.config["env.VLLM_X"] == 1
    assert "env.VLLM_CACHE_ROOT" not in facts.config
    assert facts.config["kernel_config.support"] is True
    assert facts.config["kernel_config.flops_path"] == "x"
    assert set(facts.recorded) == {
        "instance_id",
        "cache_config.num_gpu_blocks",
        "parallel_config.master_port",
    }
    assert (facts.accelerators, facts.requested_length) == (16, 6.0)
    assert facts.study == "synthetic acceptance"


REAL_VLLM = json.loads((Path(__file__).parent / "vllm_server_info.json").read_text())


def test_two_real_vllms_that_were_started_alike_do_not_differ(tmp_path: Path) -> None:
    """What a process makes up for itself, and paths, are no settings."""
    first, second = REAL_VLLM["first"], json.loads(json.dumps(REAL_VLLM["first"]))
    for path, value in REAL_VLLM["second"]:
        *parents, last = path
        place = second
        for parent in parents:
            place = place[parent]
        assert place[last] != value
        place[last] = value
    a, b = (
        facts_of(tmp_path, MockServer(config=None, server_info=info)) for info in (first, second)
    )
    assert facts_differences(a, b) == ()
    assert (a.kind, a.unread, a.study, a.accelerators) == ("vllm", (), "non-speculative", 1)
    assert a.config["hardware.name"] == "Model name AMD EPYC, CPU(s) 2, Socket(s) 1"
    assert a.config["versions.driver"] is None
    for setting, changed in (("block_size", 64), ("cache_dtype", "fp8")):
        other = json.loads(json.dumps(first))
        other["vllm_config"]["cache_config"][setting] = changed
        b = facts_of(tmp_path, MockServer(config=None, server_info=other))
        (difference,) = facts_differences(a, b)
        assert difference.setting == f"cache_config.{setting}"
    other = json.loads(json.dumps(first))
    other["vllm_env"]["VLLM_BATCH_INVARIANT"] = True
    b = facts_of(tmp_path, MockServer(config=None, server_info=other))
    assert [d.setting for d in facts_differences(a, b)] == ["env.VLLM_BATCH_INVARIANT"]


def test_another_server_is_measured_without_a_ratio(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, MockServer(config=None))
    assert facts.kind == "vllm"
    assert "decode backend" in facts.unread
    found = measure(tmp_path, auto(config=None), special(config=None))
    assert (found.verdict, found.ratios) == ("not comparable", {})
    assert "VLLM_SERVER_DEV_MODE=1" in found.problems[0]
    assert rows(found)["time per token P50 / P90"][0] == "13.000 / 13.000 ms"


def test_near_ties_are_told_from_real_differences(tmp_path: Path) -> None:
    other = {"words": {4: "x "}, "margins": {4: ("t4 ", 0.25)}}
    found = measure(tmp_path, auto(), special(**other))
    assert found.outputs is not None
    (first, _) = found.outputs.agreement.prompts
    assert (first.divergence, first.divergence_class) == (4, "near-tie")
    assert first.divergence_margin == pytest.approx(0.25)
    assert found.verdict == "faster"
    wide = {"words": {4: "x "}, "margins": {4: ("t4 ", 0.75)}}
    assert measure(tmp_path, auto(), special(**wide)).verdict == "outputs differ"
    # Without the runner-up's probability there is no excuse.
    blind = measure(tmp_path, auto(), special(**other, has_logprobs=False))
    assert blind.verdict == "outputs differ"
    shorter = measure(tmp_path, auto(), special(max_output=8))
    assert shorter.verdict == "outputs differ"
    assert shorter.unequal_pairs == 8


@pytest.mark.parametrize("form", ["prompt_logprobs", "echo"])
def test_replies_are_scored_by_the_prompts_paths(tmp_path: Path, form: str) -> None:
    """The baseline's own roundings calibrate the near-tie; the candidate is teacher-forced."""
    fields: dict[str, Any] = {"score_form": form}
    a = auto(scores={}, rounding=0.02, **fields)
    b = special(scores={2: (5, 0.03), 6: (7, 0.9)}, **fields)
    found = measure(tmp_path, a, b)
    assert found.outputs is not None
    calibration, forced = found.outputs.calibration, found.outputs.forced
    assert calibration is not None
    assert (calibration.positions, calibration.largest) == (18, pytest.approx(0.02))
    assert forced is not None
    # Two requests; one place is a near-tie of 0.5, and neither decides anything.
    assert (forced.positions, forced.other, forced.beyond) == (18, 4, 2)
    assert forced.widest == pytest.approx(0.9)
    assert found.verdict == "faster"
    text = render(found, MACHINE)
    assert "so a margin by up to 0.04; a near-tie is 0.5 here" in text
    assert "prefers another token at 4 of 18 positions, 2 beyond a near-tie" in text
    assert document_of(found, MACHINE)["outputs"]["forced"]["beyond"] == 2


def test_a_near_tie_is_calibrated(tmp_path: Path) -> None:
    """A margin of 0.03 is one where ln p moves by 0.02, and none where it moves by 0.01."""
    other = {"margins": {4: ("token_id:1004", 0.03)}, "scores": {}}
    for rounding, verdict in ((0.02, "faster"), (0.01, "outputs differ")):
        b = special(**other)
        b.words = {4: "x "}
        b.ids = {4: 7}
        found = measure(tmp_path, auto(scores={}, rounding=rounding), b, near_tie=None)
        assert found.outputs is not None
        assert found.outputs.near_tie == pytest.approx(2 * rounding)
        assert found.outputs.agreement.prompts[0].divergence_margin == pytest.approx(0.03)
        assert found.verdict == verdict


def test_a_near_tie_cannot_be_calibrated_without_the_servers_help(tmp_path: Path) -> None:
    found = measure(tmp_path, auto(), special(), near_tie=None)
    assert found.verdict == "not comparable"
    assert "a near-tie cannot be calibrated" in found.problems[0]
    blind = measure(tmp_path, auto(scores={}, score_form="none"), special(scores={}))
    assert blind.outputs is not None
    assert (blind.outputs.calibration, blind.verdict) == (None, "faster")
    assert "near-tie not calibrated" in render(blind, MACHINE)


def test_texts_may_change_where_requests_share_a_step(tmp_path: Path) -> None:
    """Alone they may not; together, a neighbour may decide a near-tie."""
    changing = {"changes_texts": True}
    alone = measure(tmp_path, auto(), special(**changing))
    assert alone.verdict == "outputs differ"
    assert alone.outputs is not None
    assert alone.outputs.agreement.unstable_runs > 0
    together = measure(tmp_path, auto(), special(**changing), load=Load(concurrency=2))
    assert together.verdict == "faster"
    assert together.outputs is not None
    same, compared = together.outputs.judged.identical[1], together.outputs.judged.compared[1]
    assert 0 <= same < compared == 8


def test_time_per_token_needs_tokens_of_chunks(tmp_path: Path) -> None:
    quiet = {"usage": "end", "tokens_per_chunk": 2}
    found = measure(tmp_path, auto(**quiet), special(**quiet))
    assert found.verdict == "not comparable"
    assert "time per token is not defined" in found.problems[0]


def test_replies_that_arrive_all_at_once_are_no_traceback(tmp_path: Path) -> None:
    """As of a fast arm on a busy machine: what is left is one block, which has no interval."""
    found = measure(tmp_path, auto(), special())
    kept, lost = pairs_of(found.passes)
    lost = [(a, dataclasses.replace(b, tpot_s=None)) for a, b in lost]
    with pytest.raises(ValueError, match="at least 2 blocks"):
        ratios([kept, lost], 0)
    (problem,) = run_problems(("a", "b"), found.facts, found.summaries, [kept, lost])
    assert "4 of 8 pairs, in 1 of 2 blocks, have a time per token on both sides" in problem


def test_live_replies_are_no_pairs(tmp_path: Path) -> None:
    request = Request("r", 3, messages=({"role": "user", "content": "hi"},))
    found = measure(tmp_path, auto(), special(), Workload("chat", (request,), "live"))
    assert found.problems == ("Live replies make other prompts in each arm, which are no pairs.",)


def test_many_at_a_time(tmp_path: Path) -> None:
    workload = fixed(8, 5, 9, TokenRange(0, 9), 0)
    found = measure(tmp_path, auto(), special(), workload, load=Load(concurrency=4))
    assert found.verdict == "faster"
    table = rows(found)
    # Four at a time: four times the tokens of one in the same time, while nobody prefills.
    assert table["DECODE THROUGHPUT, no prefill"][0] == "76.92 tok/s"
    assert float(table["output throughput, with prefill"][0].split()[0]) == pytest.approx(
        4 * 9 / 0.304, rel=1e-3
    )


def test_an_open_loop_that_the_client_cannot_keep_is_refused(tmp_path: Path) -> None:
    found = measure(tmp_path, auto(), special(), load=Load(rate=2.0))
    assert found.verdict == "faster"
    summary = found.summaries[0]
    assert summary.queue_s is not None
    late = play(tmp_path, auto(), WORKLOAD, Load(rate=2.0))
    lagging = PassResult(late.records, 2, late.begin_ns, late.end_ns, (0.5, 0.5))
    slow = summarize_passes([lagging], add_up([]), Limits(), 1)
    problems = [*run_problems(("a", "b"), found.facts, (slow, summary), pairs_of(found.passes))]
    assert "a: the client was the limit: it woke up 500.0 ms late" in problems[0]


def test_goodput_counts_what_was_planned() -> None:
    limits = Limits(ttft_s=0.25, tpot_s=0.011)
    assert str(limits) == "ttft <= 250 ms, tpot <= 11 ms"
    assert not Limits().is_set


def test_goodput_of_an_arm(tmp_path: Path) -> None:
    found = measure(tmp_path, auto(), special(), limits=Limits(tpot_s=0.011))
    assert rows(found)["goodput"][:2] == ("0.0 %", "100.0 %")


def test_a_server_that_answers_nothing_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(HttpError, match="answers no request of the warm-up: status 500"):
        measure(tmp_path, auto(fail_every=1), special())


def test_stored_comparisons_keep_their_ratios_to_themselves(tmp_path: Path) -> None:
    one, two = (measure(tmp_path, auto(), special()) for _ in range(2))
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path, found in zip(paths, (one, two), strict=True):
        path.write_text(json.dumps(document_of(found, MACHINE), allow_nan=False))
    documents = [read_document(path) for path in paths]
    assert ratio_of(documents[0], documents[0]).ratio == pytest.approx(1.3)
    with pytest.raises(RefusedRatioError, match="a ratio belongs to one comparison"):
        ratio_of(*documents)
    lost = document_of(measure(tmp_path, auto(), special(fail_every=5)), MACHINE)
    with pytest.raises(RefusedRatioError, match="has no ratio"):
        ratio_of(lost, lost)
    assert documents[0]["workload"]["digest"] == WORKLOAD.digest
    paths[0].write_text("{}")
    with pytest.raises(StoredError, match="no comparison of servers"):
        read_document(paths[0])


EXPOSITION = """
# HELP a b
kdecode:decode_steps_total{path="specialized",reason=""} 5
kdecode:decode_steps_total{path="standard",reason="a \\"quoted\\" one"} 2.0 1700000000
vllm:spec_decode_num_drafts_total{engine="0"} 4
vllm:spec_decode_num_drafts_total{engine="1"} 6
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 15
nonsense
broken{x="1"} abc
"""


def test_counters() -> None:
    after = read_counters(EXPOSITION)
    before = {key: 1.0 for key in after if key[0].startswith("kdecode")}
    counts = add_up([growth(before, after), {}])
    assert counts.steps == {"specialized": 4, "standard": 1}
    assert counts.fallback_reasons == {'a \\"quoted\\" one': 1}
    assert counts.coverage == 0.8
    assert counts.acceptance_length == 2.5
    assert (counts.drafted, counts.acceptance_rate) == (None, None)
    assert add_up([]).coverage is None
