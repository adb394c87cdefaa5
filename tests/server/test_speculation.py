"""A server that speculates: replies of several tokens a step, its metrics, and synthetic marks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served_model import Served, serve

from kdecode.cli import build_parser
from kdecode.commands.serve import engine_config
from kdecode.config_speculative import SpeculativeConfig
from kdecode.model.draft_synthesis import make_draft


@pytest.fixture(scope="module", params=["standard", "synthetic"])
def speculating(
    request: pytest.FixtureRequest, mini_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("draft") / "inferact"
    make_draft(directory, "mini", "inferact", seed=0)
    length = 3.0 if request.param == "synthetic" else None
    config = SpeculativeConfig(
        str(directory),
        4,
        rejection_sample_method=request.param,
        synthetic_acceptance_length=length,
    )
    with serve(mini_checkpoint, speculative=config) as served:
        yield served


def _metrics(served: Served) -> dict[str, float]:
    """Every sample by its name and its labels besides the model and the engine."""
    found = {}
    for line in httpx.get(f"{served.url}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[re.sub(r'(model_name="mini"|engine="0"),?', "", name).replace(",}", "}")] = float(
                value
            )
    return found


def test_usage_metrics_and_marks_tell_one_story(speculating: Served) -> None:
    before = _metrics(speculating)
    reply = speculating.client.completions.create(
        model="mini", prompt="the cat", max_tokens=20, extra_body={"ignore_eos": True}
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 20
    after = _metrics(speculating)

    def gained(name: str) -> float:
        return after[f"{name}_total{{}}"] - before[f"{name}_total{{}}"]

    rounds = gained("vllm:spec_decode_num_drafts")
    accepted = gained("vllm:spec_decode_num_accepted_tokens")
    emitted = gained("kdecode:spec_decode_num_emitted_tokens")
    assert rounds == gained("kdecode:spec_decode_steps") > 0
    # All but the last round's drafts have room; the last token of a reply is never a draft's.
    assert gained("vllm:spec_decode_num_draft_tokens") == 4 * rounds
    assert emitted <= rounds + accepted
    # The first token is the prompt's, and a plain step gives the last one where it is left alone.
    assert 20 - 1 - emitted in (0, 1)
    places = [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{n}"}}' for n in range(4)
    ]
    assert sum(after[place] - before.get(place, 0) for place in places) == accepted
    for phase in ("draft", "verify", "commit"):
        assert after[f'kdecode:spec_decode_seconds_total{{phase="{phase}"}}'] > 0
    # One event a step, however many tokens it has.
    gaps = after["vllm:inter_token_latency_seconds_count{}"]
    assert gaps - before["vllm:inter_token_latency_seconds_count{}"] < 20 - 1 or accepted == 0
    is_synthetic = speculating.llm.resolved_config()["outputs_valid"] is False
    assert after["kdecode:outputs_valid{}"] == (0 if is_synthetic else 1)
    assert ("outputs_valid" in reply.model_dump()) == is_synthetic
    if is_synthetic:
        assert accepted / rounds == 2.0


def test_the_command_has_the_flag() -> None:
    text = '{"model": "somewhere", "num_speculative_tokens": 5}'
    args = build_parser().parse_args(["serve", "model", "--speculative-config", text])
    assert engine_config(args).speculative == SpeculativeConfig("somewhere", 5)


def test_streaming_equals_not_streaming(speculating: Served) -> None:
    settings = {"model": "mini", "prompt": "a", "max_tokens": 17, "seed": 3, "temperature": 0.8}
    whole = speculating.client.completions.create(**settings)  # type: ignore[call-overload]
    stream = speculating.client.completions.create(**settings, stream=True)  # type: ignore[call-overload]
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    speculating.wait_until_idle()
