"""Names of prefixes: equal for a common beginning, and for nothing else."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kdecode.replicas.prefixes import prefix_ends, prefix_names

FIRST = 64


def _names(document: Any, *headers: tuple[bytes, bytes]) -> tuple[str, ...]:
    return prefix_names(json.dumps(document).encode(), headers, FIRST)


def _common(one: Any, other: Any) -> int:
    """How many names two requests share; those are their first ones."""
    names = _names(one), _names(other)
    shared = len(set(names[0]) & set(names[1]))
    assert names[0][:shared] == names[1][:shared]
    return shared


@given(st.binary(max_size=3000), st.binary(max_size=300), st.binary(max_size=300))
def test_names_are_those_of_the_common_beginning(common: bytes, one: bytes, other: bytes) -> None:
    prompts = [(common + rest).decode("latin-1") for rest in (one, other)]
    sizes = [len(prompt.encode()) for prompt in prompts]
    encoded = [prompt.encode() for prompt in prompts]
    length = next((i for i, (a, b) in enumerate(zip(*encoded, strict=False)) if a != b), min(sizes))
    assert _common(*({"prompt": prompt} for prompt in prompts)) == len(
        list(prefix_ends(FIRST, length))
    )


def test_tokens_and_texts_have_names_by_their_length() -> None:
    assert len(_names({"prompt": [7] * 15})) == 0
    assert len(_names({"prompt": [7] * 16})) == 1
    assert len(_names({"prompt": "x" * 63})) == 0
    assert len(_names({"prompt": "x" * 128})) == 2
    # Some dozens at most, and no end further behind the one before than an eighth of it.
    ends = list(prefix_ends(2048, 32 * 2**20))
    assert len(ends) < 80
    assert all(b - a <= max(2048, a // 8) for a, b in pairwise(ends))


def test_several_prompts_go_the_way_of_the_first() -> None:
    assert _names({"prompt": ["x" * 100, "y" * 100]}) == _names({"prompt": "x" * 100})
    assert _names({"prompt": [[5] * 40, [6] * 40]}) == _names({"prompt": [5] * 40})


def test_a_conversation_goes_on_where_it_was() -> None:
    turns = [{"role": role, "content": role * 60} for role in ("user", "assistant", "user")]
    first, later = {"messages": turns[:1]}, {"messages": turns}
    assert _common(first, later) == len(_names(first)) > 2
    # What stands before the conversation in a prompt parts them.
    assert _common(first, {**later, "tools": [{"type": "function"}]}) == 0
    assert _common(first, {**later, "reasoning_effort": "low"}) == 0
    # What does not change the prompt does not.
    assert _common(first, {**later, "temperature": 0.5, "seed": 3}) == len(_names(first))


def test_salts_keep_names_apart() -> None:
    prompt = {"prompt": "x" * 200}
    assert _common(prompt, {**prompt, "cache_salt": "a"}) == 0
    assert _common({**prompt, "cache_salt": "b"}, {**prompt, "cache_salt": "a"}) == 0


def test_a_session_is_the_last_name() -> None:
    document = {"prompt": "x" * 200}
    plain = _names(document)
    by_key = _names({**document, "prompt_cache_key": "k"})
    assert by_key[:-1] == plain
    assert by_key[-1] == _names({"prompt": "other", "prompt_cache_key": "k"})[-1]
    assert by_key == _names({**document, "session_id": "k"})
    assert by_key == _names(document, (b"X-Session-Id", b"k"))
    assert by_key[-1] != _names({**document, "prompt_cache_key": "k", "cache_salt": "s"})[-1]
    # One value for a whole application would bring all of it to one replica.
    assert _names({**document, "user": "k"}) == plain


def test_what_is_no_request_has_no_names() -> None:
    for body in (b"", b"{", b"[1]", b"\xff", b'{"prompt": 5}', b"[" * 100_000):
        assert prefix_names(body, (), FIRST) == ()
    # Replicas refuse these; here they only must not fail.
    odd = [{"prompt": [-1, 2**40, None, "x"] * 30}, {"messages": [3, None]}, {"prompt": "\ud800"}]
    for document in (*odd, {"prompt": "x", "prompt_cache_key": "\ud800"}):
        _names(document)
