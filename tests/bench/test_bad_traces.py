"""Entries of traces and logs that others wrote: each fault is named, and none is a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdecode.bench.workloads.access_log import import_log
from kdecode.bench.workloads.files import ReadSettings, read_workload
from kdecode.bench.workloads.synthetic import TokenRange
from kdecode.bench.workloads.types import Workload, WorkloadError

MOONCAKE = '{"input_length": 4, "output_length": 2, '
WEKA = '{"id": "a", "block_size": 64, "requests": '
CHAT = '{"messages": [{"role": "user", "content": "x"}], '
LOG = '{"prompt_tokens": 3, "completion_tokens": 3, '


def read(folder: Path, text: str) -> Workload:
    path = folder / "trace.jsonl"
    path.write_text(text, encoding="utf-8")
    return read_workload(path, ReadSettings(TokenRange(0, 100)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MOONCAKE + '"timestamp": NaN}', "NaN is no number of JSON"),
        (MOONCAKE + '"timestamp": 1e400}', "timestamp is inf; a number from 0"),
        (MOONCAKE + f'"timestamp": {"9" * 400}}}', r"timestamp is 999.*\(400 characters\)"),
        (MOONCAKE + '"hash_ids": 7}', "Entry 1: hash_ids is 7, no list"),
        (MOONCAKE + '"hash_ids": "ab"}', "hash_ids is 'ab', no list"),
        (MOONCAKE + '"messages": "ab"}', "messages is 'ab', no list"),
        ('{"input_length": 4000000000000, "output_length": 2}', "input_length is 4000000000000"),
        (WEKA + "5}", "Trace a: requests is 5, no list"),
        (WEKA + "[1]}", "Trace a: requests has 1, which is no object"),
        (WEKA + '[{"t": "x", "in": 3, "out": 1}]}', "Trace a: t is 'x'"),
        (WEKA + '[{"t": 0, "in": 3, "out": 1, "hash_ids": 4}]}', "request 1: hash_ids is 4"),
        (WEKA + '[{"type": "subagent", "requests": 4}]}', "Trace a, subagent: requests is 4"),
        (WEKA.replace("64", "0") + "[]}", "block_size is 0; a whole number from 1"),
        ('{"messages": ["a"]}', "messages has 'a', which is no object"),
        (CHAT + '"max_tokens": "many"}', "max_tokens is 'many'"),
        (CHAT + '"max_tokens": 1.9}', "max_tokens is 1.9; a whole number"),
        (CHAT + '"tools": 3}', "tools is 3, no list"),
        ("[" * 100_000, "it nests too deep"),
    ],
)
def test_bad_entries(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        read(tmp_path, text)


def test_texts_may_have_other_ends_of_lines_and_files_a_mark(tmp_path: Path) -> None:
    """JSON takes U+2028 inside of a text as it is; some editors begin a file with U+FEFF."""
    contents = ["a\u2028b", "c\u0085d"]
    chats = [{"messages": [{"role": "user", "content": content}]} for content in contents]
    lines = "\n".join(json.dumps(chat, ensure_ascii=False) for chat in chats)
    found = read(tmp_path, "\ufeff" + lines)
    texts = [message["content"] for r in found.requests for message in r.messages or ()]
    assert texts == contents


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (LOG + '"time": NaN}', "Line 1 is not JSON: NaN"),
        (LOG + '"time": 1e400}', "time is inf, no time"),
        (LOG + '"time": -1}', "time is -1, no time"),
        (LOG + '"time": 1, "prompt_token_ids": [-1]}', "prompt_token_ids has a value"),
        (LOG + '"time": 1, "prompt_token_ids": ["a"]}', "prompt_token_ids has a value"),
        ('{"time": 1, "prompt_tokens": 3e9, "completion_tokens": 3}', "no length"),
        (
            '{"time": 1, "prompt_tokens": 3000000000, "completion_tokens": 3}',
            "from 0 to 16,777,216",
        ),
        ("[" * 100_000, "it nests too deep"),
    ],
)
def test_bad_log_entries(line: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        list(import_log(iter([line])))


def test_half_a_surrogate_pair_in_a_log_is_hashed_as_any_text() -> None:
    (entry,) = import_log(iter([LOG + '"time": 1, "prompt": "\\ud800"}']))
    assert entry["hash_ids"] == [0]
