"""What clients are told of prefixes, and the fields and flags that act on them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from served_model import Served, serve

from kdecode.commands import config_file
from kdecode.commands import serve as command

PROMPT = list(range(5, 205))


@pytest.fixture(scope="module")
def caching(mini_checkpoint: Path) -> Iterator[Served]:
    with serve(
        mini_checkpoint, enable_prefix_caching=True, state_interval_tokens=64, max_step_tokens=256
    ) as running:
        yield running
        running.wait_until_idle()


def _metrics(served: Served) -> dict[str, float]:
    text = httpx.get(f"{served.url}/metrics").text
    return {
        name: float(value)
        for name, value in re.findall(
            r"^((?:vllm|kdecode):prefix_cache_\w+){.*} (\S+)$", text, re.M
        )
    }


def _cached(served: Served, prompt: list[int] | list[list[int]], **settings: object) -> int:
    reply = served.client.completions.create(
        model="mini",
        prompt=prompt,
        max_tokens=2,
        temperature=0,
        extra_body={"ignore_eos": True, **settings},
    )
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return reply.usage.prompt_tokens_details.cached_tokens or 0


def test_usage_and_metrics_count_the_same_tokens(caching: Served) -> None:
    before = _metrics(caching)
    found = [_cached(caching, PROMPT, cache_salt="usage") for _ in range(3)]
    assert found == [0, 192, 192]
    # A prompt counts once, however many choices it has.
    assert _cached(caching, [PROMPT, PROMPT[:70]], n=2, temperature=1, cache_salt="usage") == 256
    after = _metrics(caching)
    change = {name: value - before[name] for name, value in after.items()}
    assert change["vllm:prefix_cache_queries_total"] == 200 * 5 + 70 * 2
    assert change["vllm:prefix_cache_hits_total"] == 192 * 4 + 64 * 2
    assert after["kdecode:prefix_cache_min_tokens"] == 64
    assert after["kdecode:prefix_cache_can_hit"] == 1


def test_a_stream_tells_it_too(caching: Served) -> None:
    for expected in (0, 192):
        *_, last = caching.client.completions.create(
            model="mini",
            prompt=PROMPT,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"cache_salt": "stream"},
        )
        assert last.usage is not None
        assert last.usage.prompt_tokens_details is not None
        assert last.usage.prompt_tokens_details.cached_tokens == expected


def test_salts_keep_prefixes_apart_and_priorities_are_numbers(caching: Served) -> None:
    assert _cached(caching, PROMPT, cache_salt="a", priority=-3) == 0
    assert _cached(caching, PROMPT, cache_salt="b") == 0
    assert _cached(caching, PROMPT, cache_salt="a", priority=7) == 192
    for field, value in (("priority", "high"), ("cache_salt", "")):
        with pytest.raises(openai.BadRequestError, match=field):
            _cached(caching, PROMPT, **{field: value})


def test_flags_reach_the_engine() -> None:
    def config(*argv: str):  # type: ignore[no-untyped-def]
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        return command.engine_config(parser.parse_args(argv))

    assert config().enable_prefix_caching is True
    assert config("--no-enable-prefix-caching").enable_prefix_caching is False
    found = config("--mamba-block-size", "128", "--state-cache-bytes", "1000000")
    assert (found.state_interval_tokens, found.state_cache_bytes) == (128, 1_000_000)
    # What is on by default can be turned off in a file.
    assert config_file.arguments({"enable-prefix-caching": False}) == ["--no-enable-prefix-caching"]
    assert config_file.arguments({"enable_prefix_caching": True}) == ["--enable-prefix-caching"]
