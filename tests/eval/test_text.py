"""The score of a text against the same sum over a teacher-forced run, and its windows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kdecode.engine.engine import LLM
from kdecode.eval.text import TextScore, score_text, windows


def test_windows_score_every_token_but_the_first_once() -> None:
    ids = list(range(11))
    parts = windows(ids, 4)
    assert [token for part in parts for token in part[1:]] == ids[1:]
    assert all(2 <= len(part) <= 4 for part in parts)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        windows(ids, 1)


@pytest.mark.parametrize("backend", ["auto", "latency_specialized"])
def test_a_score_is_what_the_decode_path_gives(mini_checkpoint: Path, backend: str) -> None:
    llm = LLM(mini_checkpoint, decode_backend=backend)
    ids = llm.tokenizer.encode_text("def f(x):\n    return x + 1  # naïve\n")
    eos = llm.model_config.eos_id
    score = score_text(llm, [*ids, eos], window_tokens=len(ids) + 1)
    rows = llm.teacher_forced(ids[:1], [*ids[1:], eos]).double().log_softmax(-1)
    wanted = -sum(float(row[token]) for row, token in zip(rows, [*ids[1:], eos], strict=True))
    assert score.nats == pytest.approx(wanted, rel=1e-9)
    assert score.num_tokens == len(ids)
    # A special token stands for no bytes of the text.
    assert score.num_bytes == sum(len(llm.tokenizer.token_bytes(token)) for token in ids[1:])
    coverage = llm.stats()["coverage"]
    assert coverage == (1.0 if backend == "latency_specialized" else 0.0)


def test_figures() -> None:
    score = TextScore(nats=math.log(2) * 12, num_tokens=6, num_bytes=24)
    assert score.bits_per_byte == pytest.approx(0.5)
    assert score.perplexity == pytest.approx(4.0)
    assert score + score == TextScore(2 * score.nats, 12, 48)


def test_a_text_of_one_token_is_refused(mini_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        score_text(LLM(mini_checkpoint), [1], 8)
