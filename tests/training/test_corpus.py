"""Corpus, vocabulary, batches and the n-gram baseline."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from k3train import corpus, pretrain
from k3train.ngram import NgramModel, bits_per_byte
from k3train.vocabulary import train_vocabulary
from kdecode.model.tokenizer import NUM_SPECIALS, Tokenizer, save_tokens

VOCAB = 256 + 64 + NUM_SPECIALS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Learnt from this repository's own words."""
    directory = tmp_path_factory.mktemp("vocabulary")
    texts = [Path(__file__).read_text(encoding="utf-8"), "naïve café ∑ 東京\n" * 20]
    save_tokens(directory, train_vocabulary(texts, VOCAB))
    return Tokenizer.from_directory(directory, VOCAB)


def test_the_corpus_is_split_by_file() -> None:
    whole = corpus.Corpus.read()
    assert len(whole.held_out) < len(whole.train)
    assert 10 * len(whole.held_out) > len(whole.train) / corpus.HELD_OUT_EVERY
    assert set(whole.held_out).isdisjoint(text for text in whole.train if len(text) > 1000)
    assert whole.digest == corpus.Corpus.read().digest


def test_the_vocabulary_shortens_text_and_gives_it_back(tokenizer: Tokenizer) -> None:
    text = "def naïve(self):\n    return café  # 東京 ∑ \x00\n"
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode()) * 0.8
    assert sorted({len(tokenizer.token_bytes(i)) for i in range(256)}) == [1]


def test_too_little_text_for_a_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match="65280 are needed"):
        train_vocabulary(["abab"], 65536)


@pytest.fixture
def batches(tokenizer: Tokenizer) -> pretrain.Batches:
    text = Path(__file__).read_text(encoding="utf-8") * 10
    return pretrain.Batches(tokenizer, corpus.token_stream(tokenizer, (text,), 400), seed=1)


def test_a_batch_depends_on_its_step_only(batches: pretrain.Batches) -> None:
    later = batches.at(5)
    assert later.shape == (pretrain.STEP_TOKENS // pretrain.SHORT_TOKENS, pretrain.SHORT_TOKENS + 1)
    batches.at(6)
    assert batches.at(5).equal(later)
    assert not batches.at(6).equal(later)
    longer = batches.at(pretrain.LONG_EVERY - 1)
    assert longer.shape[1] == pretrain.LONG_TOKENS + 1


def test_needle_items_end_with_the_key_that_they_begin_with(
    batches: pretrain.Batches, tokenizer: Tokenizer
) -> None:
    def items() -> Iterator[str]:
        for step in itertools.count():
            for row in batches.at(step).tolist():
                text = tokenizer.decode(row)
                if "# The same key once more." in text.split("\n")[-3:]:
                    yield text

    for text in itertools.islice(items(), 5):
        last = text.rstrip("\n").split("\n")[-1]
        assert text.count(last) == 2
        assert last.startswith("SECRET_")


def test_ngram_probabilities_are_a_distribution() -> None:
    rng = np.random.default_rng(0)
    stream = rng.integers(0, 6, 400).astype(np.uint16)
    model = NgramModel(stream, vocab_size=6)
    for start in (0, 50, 200):
        context = stream[start : start + 4]
        nexts = [np.append(context, np.uint16(token)) for token in range(6)]
        total = sum(float(np.exp(model.log_probabilities(text)[0])) for text in nexts)
        assert total == pytest.approx(1.0, abs=1e-9)


def test_ngrams_learn_what_repeats() -> None:
    cycle = np.tile(np.arange(7, dtype=np.uint16), 200)
    noise = np.random.default_rng(1).integers(0, 7, 1400).astype(np.uint16)
    model = NgramModel(cycle, vocab_size=7)
    assert bits_per_byte(model.log_probabilities(cycle), 1400) < 0.2
    assert bits_per_byte(model.log_probabilities(noise), 1400) > 2.0
