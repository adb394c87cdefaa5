"""The tokenizer: files, text -> ids -> text, long inputs, the incremental detokeniser."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdecode.model import tokenizer as module
from kdecode.model.tokenizer import (
    CHUNK_CHARS,
    CONFIG_FILE,
    MODEL_FILE,
    RUN_CHARS,
    IncrementalDetokenizer,
    Tokenizer,
    TokenizerError,
    write_tokenizer,
)

VOCAB = 2048


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, VOCAB, seed=0)
    return Tokenizer.from_directory(directory, VOCAB)


def read_tokens(directory: Path) -> list[bytes]:
    lines = (directory / MODEL_FILE).read_bytes().splitlines()
    return [base64.b64decode(line.split()[0]) for line in lines]


@pytest.mark.parametrize("vocab_size", [1024, 5000, 163840])
def test_written_vocabulary_is_a_valid_bpe(tmp_path: Path, vocab_size: int) -> None:
    write_tokenizer(tmp_path, vocab_size, seed=3)
    tokens = read_tokens(tmp_path)
    assert len(tokens) == vocab_size - 256 == len(set(tokens))
    assert tokens[:256] == [bytes([byte]) for byte in range(256)]
    earlier = set(tokens[:256])
    for token in tokens[256:]:
        assert any(token[:k] in earlier and token[k:] in earlier for k in range(1, len(token)))
        earlier.add(token)
    assert Tokenizer.from_directory(tmp_path, vocab_size).vocab_size == vocab_size


def test_written_files_are_the_same_on_every_machine(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB, seed=0)
    digest = hashlib.sha256((tmp_path / MODEL_FILE).read_bytes()).hexdigest()
    assert digest == DIGEST_2048_SEED_0
    write_tokenizer(tmp_path, VOCAB, seed=1)
    assert hashlib.sha256((tmp_path / MODEL_FILE).read_bytes()).hexdigest() != digest


DIGEST_2048_SEED_0 = "f1113c4842ede82100655c8503171cf07ce777430dc51f11a208a356b88999bf"


def test_vocabulary_size_limits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1023.*at least 1024"):
        write_tokenizer(tmp_path, 1023, seed=0)
    with pytest.raises(ValueError, match="at most"):
        write_tokenizer(tmp_path, 10_000_000, seed=0)


def test_special_names_and_offsets(tokenizer: Tokenizer) -> None:
    first = VOCAB - 256
    expected = {
        "[BOS]": 0,
        "[EOS]": 1,
        "<|end_of_msg|>": 2,
        "<|open|>": 3,
        "<|close|>": 4,
        "<|sep|>": 5,
        "<|media_pad|>": 21,
        "[UNK]": 254,
        "[PAD]": 255,
        f"<|reserved_token_{first + 8}|>": 8,
    }
    for name, offset in expected.items():
        assert tokenizer.special_id(name) == first + offset
        assert tokenizer.token_bytes(first + offset) == name.encode()
    assert tokenizer.is_special(first)
    assert not tokenizer.is_special(first - 1)
    with pytest.raises(TokenizerError, match="no special token named"):
        tokenizer.special_id("<|im_end|>")
    with pytest.raises(TokenizerError, match=f"{VOCAB} is outside"):
        tokenizer.decode([VOCAB])


def test_text_never_becomes_a_special(tokenizer: Tokenizer) -> None:
    text = "a<|open|>message[EOS]<|end_of_msg|>[PAD]"
    ids = tokenizer.encode_text(text)
    assert not any(tokenizer.is_special(token_id) for token_id in ids)
    assert tokenizer.decode(ids) == text


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_surrogates(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_text("a\ud83d\ude00b")) == "a\U0001f600b"
    assert tokenizer.decode(tokenizer.encode_text("a\ud83db\ude00")) == "a�b�"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello WORLD's x", ["Hello", " WORLD's", " x"]),
        ("getHTTPResponse", ["get", "HTTPResponse"]),
        ("aBc", ["a", "Bc"]),
        ("你好abc世界", ["你好", "abc", "世界"]),
        ("x12345", ["x", "123", "45"]),
        ("a  b", ["a", " ", " b"]),
        ("a !?\n\nb", ["a", " !?\n\n", "b"]),
        ("  \n x", ["  \n", " x"]),
        ("end   ", ["end", "   "]),
        ("i'LL go", ["i'LL", " go"]),
        ("été ÉTÉ", ["été", " ÉTÉ"]),
    ],
)
def test_pre_split(text: str, pieces: list[str]) -> None:
    # A vocabulary in which every expected piece is one token, and so is every wrong merge of two.
    whole = {piece.encode() for piece in pieces} | {
        (a + b).encode() for a, b in itertools.pairwise(pieces)
    }
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += sorted(token for token in whole if len(token) > 1)
    encoder = Tokenizer(tokens, [f"special {i}" for i in range(256)])
    assert [encoder.decode([i]) for i in encoder.encode_text(text)] == pieces


def test_long_inputs_are_cut_as_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_CHARS", 10)
    monkeypatch.setattr(module, "RUN_CHARS", 4)
    split = module._split_long_text
    assert list(split("")) == []
    assert list(split("abcd")) == ["abcd"]
    assert list(split("abcdefghi")) == ["abcd", "efgh", "i"]
    assert list(split("ab cdefg  ")) == ["ab cdef", "g  "]
    assert list(split("abc def ghi jkl")) == ["abc def gh", "i jkl"]
    assert list(split("a     b")) == ["a    ", " b"]


def test_no_token_crosses_a_cut() -> None:
    """The lengths of the release, through `encode_text`: at a cut two letters stay two tokens."""
    assert (CHUNK_CHARS, RUN_CHARS) == (400_000, 25_000)
    pair = 256
    encoder = Tokenizer([*(bytes([i]) for i in range(256)), b"ab"], [f"s{i}" for i in range(256)])
    assert encoder.encode_text("ab") == [pair]
    words = "x " * (CHUNK_CHARS // 2)
    for before, is_cut in (
        ("a" * (RUN_CHARS - 2), False),
        ("a" * (RUN_CHARS - 1), True),
        ("a" * RUN_CHARS, False),
        ("b" * (2 * RUN_CHARS - 1), True),
        ("." + " " * (RUN_CHARS - 1), False),
        (words[: CHUNK_CHARS - 2], False),
        (words[: CHUNK_CHARS - 1], True),
        (words[:CHUNK_CHARS], False),
    ):
        ids = encoder.encode_text(before + "ab")
        assert (ids[-1] == pair) is not is_cut, len(before)
        assert encoder.decode(ids) == before + "ab"


@pytest.mark.parametrize("unit", ["a", "Ab", " ", "\n", "!", "你", "ก", "ban", "\u0301", "🙂"])
def test_long_runs_stay_fast(tokenizer: Tokenizer, unit: str) -> None:
    text = unit * (150_000 // len(unit))
    start = time.perf_counter()
    ids = tokenizer.encode_text(text)
    # 150,000 characters take about 20 ms; a quadratic merge loop would take minutes.
    assert time.perf_counter() - start < 60.0
    assert tokenizer.decode(ids) == text


@settings(max_examples=80, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=30))
def test_deltas_add_up_to_the_whole_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    for skip in (False, True):
        stream = IncrementalDetokenizer(tokenizer, skip_special=skip)
        deltas = [stream.push(token_id) for token_id in ids]
        assert "".join(deltas) + stream.flush() == tokenizer.decode(ids, skip_special=skip)


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="aé你🙂ü ", max_size=20))
def test_no_delta_splits_a_character(tokenizer: Tokenizer, text: str) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    for byte in text.encode():
        # One token a byte is the worst split there is.
        assert "�" not in stream.push(byte)
    assert stream.flush() == ""


def test_incomplete_character_is_held_and_then_flushed(tokenizer: Tokenizer) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.push(byte) for byte in "🙂".encode()] == ["", "", "", "🙂"]
    assert [stream.push(byte) for byte in (0xE4, 0xBD)] == ["", ""]
    assert stream.flush() == "�"
    assert stream.push(ord("a")) == "a"


def test_invalid_bytes_do_not_freeze_the_stream(tokenizer: Tokenizer) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    start = time.perf_counter()
    texts = [stream.push(0x80) for _ in range(20_000)]
    assert time.perf_counter() - start < 60.0
    assert texts == ["�"] * 20_000


def write_lines(directory: Path, lines: list[str]) -> None:
    (directory / MODEL_FILE).write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("YWI=", "line 257: 1 fields"),
        ("YWI= 256 1", "line 257: 3 fields"),
        ("@@@@ 256", "line 257: not base64"),
        ("YWI= 255", "line 257: rank 255 where 256"),
        ("YWI= x", "line 257: rank b'x'"),
        ("YWI= " + "9" * 5000, r"line 257: rank .*5,003 characters\) .* at most 40 digits"),
        ("Y" * 70_000 + " 256", "line 257: a file may have .* lines of 65,536 bytes"),
        ("YQ== 256", "line 257: token b'a' occurs twice"),
    ],
)
def test_malformed_rank_file(tmp_path: Path, line: str, message: str) -> None:
    good = [f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256)]
    write_lines(tmp_path, [*good, line])
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_directory(tmp_path, 513)
    assert str(tmp_path / MODEL_FILE) in str(caught.value)


def test_missing_bytes_and_wrong_vocab_size(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=f"{MODEL_FILE} does not exist"):
        Tokenizer.from_directory(tmp_path, 512)
    good = [f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256)]
    write_lines(tmp_path, good[:-1])
    with pytest.raises(TokenizerError, match=r"1 of the 256 single bytes .*0xff"):
        Tokenizer.from_directory(tmp_path, 511)
    write_lines(tmp_path, good)
    with pytest.raises(TokenizerError, match="makes 512, but the model's vocab_size is 600"):
        Tokenizer.from_directory(tmp_path, 600)
    with pytest.raises(TokenizerError, match=f"{CONFIG_FILE} does not exist"):
        Tokenizer.from_directory(tmp_path, 512)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not valid"),
        ("[]", "a list, not an object"),
        ("{}", "no object 'added_tokens_decoder'"),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "a"}}}, r"\(5,002 characters\)"),
        ({"added_tokens_decoder": {"٣٠٠": {"content": "a"}}}, "outside the special ids"),
        ({"added_tokens_decoder": {"256": {"content": "\ud800"}}}, r"surrogate pair, \\ud800"),
        ({"added_tokens_decoder": {"256": {"content": 3}}}, "has no text 'content'"),
        ({"added_tokens_decoder": {"255": {"content": "a"}}}, "outside the special ids"),
        ({"added_tokens_decoder": {"512": {"content": "a"}}}, "outside the special ids"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "outside the special ids"),
        (
            {"added_tokens_decoder": {"256": {"content": "a"}, "300": {"content": "a"}}},
            "two special ids the name 'a'",
        ),
    ],
)
def test_malformed_config(tmp_path: Path, config: object, message: str) -> None:
    write_lines(tmp_path, [f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256)])
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_directory(tmp_path, 512)
