"""Workloads: the same bytes everywhere, the formats, and logs without their texts."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kdecode import cli
from kdecode.bench.workloads.access_log import BLOCK_CHARACTERS, import_log
from kdecode.bench.workloads.files import ReadSettings, read_workload
from kdecode.bench.workloads.synthetic import (
    AgentShape,
    TokenRange,
    agentic,
    block_tokens,
    fixed,
    prompt_of_blocks,
)
from kdecode.bench.workloads.types import Request, Workload, WorkloadError

TOKENS = TokenRange(100, 1100)
SETTINGS = ReadSettings(TOKENS)


def test_content_is_the_same_in_every_process() -> None:
    """Against a value that was written down, and in a process with another hash seed."""
    assert block_tokens(7, "a/1", TOKENS, 5) == [1079, 368, 721, 1033, 262]
    assert agentic(AgentShape(), TOKENS, 0).digest == "dddd402271460ef6"
    code = (
        "from kdecode.bench.workloads.synthetic import *;"
        "print(agentic(AgentShape(), TokenRange(100, 1100), 0).digest)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == agentic(AgentShape(), TOKENS, 0).digest


def test_prompts_of_blocks_share_what_their_blocks_share() -> None:
    one = prompt_of_blocks(0, ["x", "y"], TOKENS, 20, 8)
    two = prompt_of_blocks(0, ["x", "z"], TOKENS, 20, 8)
    assert (len(one), one[:8] == two[:8], one[8:16] == two[8:16]) == (20, True, False)
    assert prompt_of_blocks(0, ["x"], TOKENS, 5, 8) == one[:5]
    assert all(100 <= token < 1100 for token in one)


def test_fixed_lengths() -> None:
    workload = fixed(3, 10, 5, TOKENS, 1)
    assert {len(request.prompt_ids or ()) for request in workload.requests} == {10}
    assert len({request.prompt_ids for request in workload.requests}) == 3
    assert workload.digest != fixed(3, 10, 5, TOKENS, 2).digest


def test_agents_grow_from_a_common_beginning() -> None:
    sessions = agentic(AgentShape(sessions=3, turns=4), TOKENS, 0).sessions()
    assert [len(turns) for turns in sessions] == [4, 4, 4]
    prompts = [turn.prompt_ids or () for turns in sessions for turn in turns]
    assert len({prompt[: 4 * 64] for prompt in prompts}) == 1
    for turns in sessions:
        for before, after in itertools.pairwise(turns):
            assert before.prompt_ids is not None
            assert after.prompt_ids is not None
            assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
            assert len(after.prompt_ids) > len(before.prompt_ids)
            assert 0 <= after.delay_s <= 2
    assert [turns[0].at_s for turns in sessions] == [0, 0.5, 1.0]


def read(path: Path, entries: list[Any], **changes: Any) -> Workload:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return read_workload(path, ReadSettings(**{"tokens": TOKENS, **changes}))


def test_mooncake(tmp_path: Path) -> None:
    entries = [
        {"timestamp": 5000, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 5500, "input_length": 700, "output_length": 4, "hash_ids": [0, 2]},
        {"timestamp": 6000, "input_length": 9, "output_length": 1, "session_id": "s"},
        {"input_length": 12, "output_length": 1, "session_id": "s", "delay": 250},
        {"timestamp": 5000, "text_input": "hello", "output_length": 2},
        {"timestamp": 5000, "messages": [{"role": "user", "content": "x"}], "output_length": 2},
    ]
    # The second turn has no time of its own; the first entry's is the beginning.
    entries[3]["timestamp"] = 9000
    found = read(tmp_path / "t.jsonl", entries).requests
    assert [request.at_s for request in found] == [0, 0.5, 1.0, None, 0, 0]
    assert [len(request.prompt_ids or ()) for request in found] == [600, 700, 9, 12, 0, 0]
    assert found[0].prompt_ids is not None
    assert found[1].prompt_ids is not None
    assert found[0].prompt_ids[:512] == found[1].prompt_ids[:512]
    assert found[0].prompt_ids[512:] != found[1].prompt_ids[512:600]
    assert (found[3].session, found[3].turn, found[3].delay_s) == ("s", 1, 0.25)
    assert (found[4].prompt, found[5].messages) == ("hello", ({"role": "user", "content": "x"},))


WEKA = {
    "id": "trace",
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2], "api_time": 1.0},
        {
            "t": 2.0,
            "type": "subagent",
            "agent_id": "a",
            "requests": [
                {"t": 3.0, "type": "s", "in": 64, "out": 0, "hash_ids": [9], "api_time": 4}
            ],
        },
        {"t": 60.0, "type": "s", "in": 192, "out": 7, "hash_ids": [1, 2, 3]},
    ],
}


def test_weka(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(WEKA))
    (tmp_path / "b.json").write_text(json.dumps({**WEKA, "id": "other"}))
    workload = read_workload(tmp_path, ReadSettings(TOKENS, max_pause_s=10))
    first, second = workload.sessions()
    assert [request.delay_s for request in first] == [0, 2, 10]
    assert [request.max_tokens for request in first] == [5, 1, 7]
    assert [len(request.prompt_ids or ()) for request in first] == [130, 64, 192]
    assert first[0].prompt_ids is not None
    assert first[2].prompt_ids is not None
    assert first[0].prompt_ids[:128] == first[2].prompt_ids[:128]
    # Hashes are a trace's own, unless it says that they are global.
    assert second[0].prompt_ids != first[0].prompt_ids
    for name in ("a", "b"):
        trace = {**WEKA, "id": name, "hash_id_scope": "global"}
        (tmp_path / f"{name}.json").write_text(json.dumps(trace))
    shared = read_workload(tmp_path, SETTINGS).sessions()
    assert shared[0][2].prompt_ids == shared[1][2].prompt_ids
    assert len(read_workload(tmp_path, ReadSettings(TOKENS, sessions=1)).sessions()) == 1


def test_chats(tmp_path: Path) -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    workload = read(tmp_path / "c.jsonl", [{"messages": messages, "max_tokens": 9}], max_tokens=3)
    assert [len(request.messages or ()) for request in workload.requests] == [2, 4]
    assert [request.max_tokens for request in workload.requests] == [9, 9]
    ended = read(tmp_path / "c.jsonl", [{"messages": messages[:3]}], max_tokens=3)
    assert [request.max_tokens for request in ended.requests] == [3]
    assert (
        read(tmp_path / "c.jsonl", [{"messages": messages}], reply_mode="live").reply_mode == "live"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no entries"),
        ("[1]", "entry 1: it is no object"),
        ('{"a": 1}\n{', "line 2 is not JSON"),
        ('{"a": 1}', "none of the formats"),
        ('{"input_length": -1, "output_length": 2}', "input_length is -1"),
        ('{"input_length": 1, "output_length": -1}', "output_length is -1"),
        ('{"hash_ids": [1], "payload": {}}', "has a payload"),
        ('{"messages": []}', "no messages"),
        ('{"requests": [], "block_size": 64}', "has no requests"),
        ('{"requests": [], "block_size": 64, "hash_id_scope": "x"}', "hash_id_scope is 'x'"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_workload(path, SETTINGS)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "a", "prompt_ids": (1,)},
        {"prompt": ""},
        {"prompt": "a", "delay_s": -1.0},
    ],
)
def test_bad_requests(fields: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError):
        Request("r", 1, **fields)


def test_bad_workloads() -> None:
    request = Request("r", 1, prompt="a")
    with pytest.raises(WorkloadError, match="no requests"):
        Workload("w", ())
    with pytest.raises(WorkloadError, match="two requests of one id"):
        Workload("w", (request, request))
    with pytest.raises(WorkloadError, match="only follow messages"):
        Workload("w", (request,), "live")


def log_lines() -> list[str]:
    secret = "secret text " * (BLOCK_CHARACTERS // 12 + 1)
    shared = {"prompt": secret + "one", "user": "alice"}
    return [
        json.dumps(entry)
        for entry in (
            {"time": "2025-01-01T00:00:00+00:00", "request": shared}
            | {"usage": {"prompt_tokens": 900, "completion_tokens": 7}},
            {
                "time": 1735689601.5,
                "prompt": secret + "two",
                "input_tokens": 900,
                "output_tokens": 8,
            },
            {"timestamp": 1735689602000, "prompt_tokens": 5, "completion_tokens": 1}
            | {"prompt_token_ids": [1, 2, 3]},
            {"timestamp": 1735689603000, "prompt_tokens": 5, "completion_tokens": 1},
        )
    ]


def test_a_log_keeps_times_lengths_and_what_is_shared(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(log_lines()) + "\n\n")
    assert cli.main(["bench", "import-log", str(tmp_path / "log"), str(tmp_path / "trace")]) == 0
    text = (tmp_path / "trace").read_text()
    assert "secret" not in text
    assert "alice" not in text
    found = [json.loads(line) for line in text.splitlines()]
    assert found == [
        {
            "timestamp": 0,
            "input_length": 900,
            "output_length": 7,
            "hash_ids": [0, 1],
            "session_id": "s0",
        },
        {"timestamp": 1500, "input_length": 900, "output_length": 8, "hash_ids": [0, 2]},
        {"timestamp": 2000, "input_length": 5, "output_length": 1, "hash_ids": [3]},
        {"timestamp": 3000, "input_length": 5, "output_length": 1},
    ]
    assert len(read_workload(tmp_path / "trace", SETTINGS).requests) == 4


def test_a_log_with_requests_that_had_no_reply_or_no_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [(5, 3), (0, 0), (6, 0), (0, 4)]
    lines = [
        json.dumps({"time": t, "prompt_tokens": prompt, "completion_tokens": reply})
        for t, (prompt, reply) in enumerate(lengths)
    ]
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    log, trace = str(tmp_path / "log"), tmp_path / "trace"
    assert cli.main(["bench", "import-log", log, str(trace), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    counts = [document[name] for name in ("requests", "without_prompt", "without_reply")]
    assert counts == [2, 2, 1]
    assert [json.loads(line)["output_length"] for line in trace.read_text().splitlines()] == [3, 0]
    # The prompt is part of the load, and a server makes a token at least.
    requests = read_workload(trace, SETTINGS).requests
    assert [(len(r.prompt_ids or ()), r.max_tokens) for r in requests] == [(5, 3), (6, 1)]
    assert cli.main(["bench", "import-log", log, str(trace)]) == 0
    assert "2 without a prompt; 1 without a reply" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no object"),
        ('{"prompt_tokens": 1, "completion_tokens": 1}', "no time"),
        ('{"time": "soon", "prompt_tokens": 1, "completion_tokens": 1}', "no time"),
        ('{"time": 1, "completion_tokens": 1}', "no length"),
    ],
)
def test_bad_logs(line: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        list(import_log(iter([line])))
    early = [json.dumps({"time": t, "prompt_tokens": 1, "completion_tokens": 1}) for t in (5, 4)]
    with pytest.raises(WorkloadError, match="older than the first"):
        list(import_log(iter(early)))
