"""Servers that a comparison starts itself, and recipes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from kdecode import cli
from kdecode.bench.serving.launch import Launch, LaunchError, free_ports, launched
from kdecode.commands.common import InputError
from kdecode.commands.compare_design import launches_of
from kdecode.commands.launches import recipe_servers
from kdecode.commands.process import EndingSignals, Terminated, until_signal

RECIPES = Path(__file__).parents[2] / "recipes"
# Answers everything with 200 and what the environment variable KD says; writes its process id.
SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(os.environ["KD"].encode())
open(sys.argv[2], "w").write(str(os.getpid()))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# Somebody has the port when this one, which wanted it, ends.
LATE = """
import socket, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[3], *sys.argv[1:3]])
while socket.socket().connect_ex(("127.0.0.1", int(sys.argv[1]))):
    time.sleep(0.01)
raise SystemExit(1)
"""


def server(file: Path, **changes: Any) -> Launch:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", SERVER, str(port), str(file)]
    url = f"http://127.0.0.1:{port}"
    return Launch(
        **{"name": "a", "command": command, "url": url, "environment": {"KD": "1"}, **changes}
    )


def test_a_server_runs_until_the_block_is_left(tmp_path: Path) -> None:
    async def main() -> int:
        async with launched(server(tmp_path / "pid")):
            pid = int((tmp_path / "pid").read_text())
            os.kill(pid, 0)
        return pid

    pid = asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": ["/no/such/program"], "environment": {}}, "cannot be started"),
        (
            {"command": [sys.executable, "-c", "raise SystemExit('why it ended')"]},
            "exit code 1 before it answered:\nwhy it ended",
        ),
        ({"command": ["sleep", "60"], "ready_s": 0.5}, "within 0.5 s"),
    ],
)
def test_a_server_that_does_not_come_up(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    async def main() -> None:
        async with launched(server(tmp_path / "pid", **changes)):
            raise AssertionError("it came up")

    with pytest.raises(LaunchError, match=message):
        asyncio.run(main())


def test_a_server_that_is_not_ours_is_not_measured(tmp_path: Path) -> None:
    """Neither one that was there before, nor one that took the port in the meantime."""
    first = server(tmp_path / "pid")

    async def start(second: Launch) -> None:
        async with launched(first), launched(second):
            raise AssertionError("both came up at one address")

    with pytest.raises(LaunchError, match="another server answers at"):
        asyncio.run(start(server(tmp_path / "other", name="b", url=first.url)))

    async def race() -> None:
        command = [sys.executable, "-c", LATE, *first.command[3:], SERVER]
        async with launched(Launch("b", command, first.url, {"KD": "1"})):
            raise AssertionError("somebody else's server was taken for ours")

    with pytest.raises(LaunchError, match="exit code 1 before it answered"):
        asyncio.run(race())


def test_free_ports_differ() -> None:
    assert len(set(free_ports(50))) == 50


def test_two_backends_as_servers(mini_checkpoint: Path, tmp_path: Path) -> None:
    """Whatever the machine's load makes of the times, a busy one may have no ratio."""
    found = tmp_path / "found.json"
    flags = ["--serve", "--threads", "1", "--blocks", "2", "--prompts", "2", "--no-null"]
    flags += ["--prompt-tokens", "12", "--output-tokens", "24", "--json", str(found)]
    code = cli.main(["compare", str(mini_checkpoint), *flags])
    document = json.loads(found.read_text())
    assert document["exit_code"] == code
    assert document["differences"] == []
    assert [facts["config"]["decode_backend"] for facts in document["facts"]] == [
        "auto",
        "latency_specialized",
    ]
    for summary in document["summaries"]:
        assert (summary["completed"], summary["output_tokens"]) == (8, 192)
        assert summary["token_sources"] == ["usage per chunk"]
        assert summary["hit_rate"] == 0
    assert [summary["counts"]["coverage"] for summary in document["summaries"]] == [0.0, 1.0]
    assert document["verdict"] != "outputs differ"


@pytest.mark.parametrize(
    ("flags", "least"),
    [
        (["--prompt-tokens", "9000", "--output-tokens", "50"], 9050),
        (["--agentic"], 3000),
        (["--task", "mrcr", "--task-max-tokens", "5000"], 6000),
    ],
)
def test_own_servers_hold_the_longest_request(tmp_path: Path, flags: list[str], least: int) -> None:
    args = cli.build_parser().parse_args(["compare", str(tmp_path), "--serve", *flags])
    for launch in launches_of(args):
        place = list(launch.command).index("--max-model-len") + 1
        assert least <= int(launch.command[place]) <= 3 * least
    assert args.url_a != args.url_b


def test_no_flag_of_a_recipe_is_unknown_to_the_command(tmp_path: Path) -> None:
    known = vars(cli.build_parser().parse_args(["compare"]))
    for recipe in RECIPES.glob("*.yaml"):
        args, _ = parse(recipe)
        assert set(vars(args)) <= set(known)


def parse(recipe: Path) -> tuple[argparse.Namespace, tuple[Launch, Launch]]:
    args = argparse.Namespace(recipe=str(recipe))
    return args, recipe_servers(args)


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_can_be_read_and_differ_in_the_backend_alone(recipe: Path) -> None:
    args, (a, b) = parse(recipe)
    assert vars(args).get("output_tokens", 64) >= 64
    words = [
        word
        for pair in zip(a.command, b.command, strict=True)
        if len(set(pair)) > 1
        for word in pair
    ]
    changed = {word for word in words if "810" not in word}
    assert len(changed) == 2
    assert any("latency_specialized" in word for word in changed)
    assert a.environment == b.environment
    assert f"`{recipe.name}`" in (RECIPES / "README.md").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "no mapping"),
        ("arms: {a: {command: [x], url: y}}", "must have `arms` with `a` and `b`"),
        ("arms: {a: {command: x, url: y}, b: {command: [x], url: y}}", "arms.a needs `command`"),
        (
            "arms: {a: {command: [x], url: y}, b: {command: [x], url: y}}\ncompare: {json: z}",
            "compare.json is no flag",
        ),
        ("{", "cannot be read"),
        ("arms: [a, b]", "must have `arms`"),
        ("arms: {a: 5, b: 6}", "arms.a needs `command`"),
        ("arms: {a: {command: [], url: y}, b: 1}", "arms.a needs `command`"),
        ("arms: {a: {command: [x], url: y, ready_s: x}, b: 1}", "a number of seconds"),
        ("arms: {a: {command: [x], url: y, environment: [1]}, b: 1}", "a mapping"),
        ("arms: {a: {command: [x], url: y}, b: 1}\ncompare: [1]", "must have `arms`"),
        *(
            (f"arms: {{a: {{command: [x], url: y}}, b: 1}}\ncompare: {{{flag}}}", message)
            for flag, message in (
                ("prompts: many", "compare.prompts: .*'many' is not a whole number"),
                ("blocks: -1", "compare.blocks: .*-1 is below 1"),
                ("blocks: [2, 3]", r"compare.blocks: it is \[2, 3\]; --blocks takes a value"),
                ("cache: maybe", "compare.cache: .*'maybe'"),
                ("seed: {a: 1}", "compare.seed: it is {'a': 1}; --seed takes a value"),
                ("rate: null", "compare.rate: it is None; --rate takes a value"),
                ("concurrency: true", "compare.concurrency: it is True; .* takes a value"),
                ("agentic: 3", "compare.agentic: it is 3; --agentic takes true or false"),
                ("sweep-concurrency: [1, x]", "compare.sweep-concurrency: .*'x'"),
                ("timeout: soon", "compare.timeout: .*'soon'"),
            )
        ),
    ],
)
def test_bad_recipes(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        parse(tmp_path / "r.yaml")


def test_flags_of_a_recipe_are_what_the_command_line_would_make_of_them(tmp_path: Path) -> None:
    text = "arms: {a: {command: [x], url: y}, b: {command: [x], url: y}}\ncompare:\n"
    text += "  {prompts: 2, prompt-tokens: '7', rate: 2, agentic: true, own-times: false,\n"
    text += "  sweep-concurrency: [1, 4], sweep-prompt-tokens: 9, token-ids: 5-90, cache: as is}"
    (tmp_path / "r.yaml").write_text(text)
    found = vars(parse(tmp_path / "r.yaml")[0])
    del found["recipe"]
    assert found == {
        "prompts": 2,
        "prompt_tokens": 7,
        "rate": 2.0,
        "agentic": True,
        "own_times": False,
        "sweep_concurrency": [1, 4],
        "sweep_prompt_tokens": [9],
        "token_ids": "5-90",
        "cache": "as is",
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url-a", "http://x"], "both --url-a and --url-b"),
        (["--url-a", "x", "--url-b", "y", "--serve"], "exclude each other"),
        (["model", "--url-a", "x", "--url-b", "y"], "leave them out"),
        (["--url-a", "ftp://x", "--url-b", "y"], "no address of a server"),
        (["--url-a", "x", "--url-b", "y", "--concurrency", "2", "--rate", "1"], "exclude each"),
        (["--url-a", "x", "--url-b", "y", "--own-times", "--rate", "1"], "exclude each other"),
        (["--url-a", "x", "--url-b", "y", "--rate", "nan"], "rate is nan"),
        (["--url-a", "x", "--url-b", "y", "--near-tie-nats", "nan"], "near-tie-nats is nan"),
        (["--url-a", "x", "--url-b", "y", "--max-pause", "-1"], "max-pause is -1"),
        (["--url-a", "x", "--url-b", "y", "--timeout", "0"], "timeout is 0"),
        (["--url-a", "x", "--url-b", "y", "--api-key", "ä"], "no HTTP header"),
        (["--url-a", "x", "--url-b", "y", "--preflight", "--json", "z"], "measures nothing"),
        (["--url-a", "x", "--url-b", "y", "--task", "mrcr", "--out", "z"], "report of speed"),
        (["--agentic", "--out", "x"], "--agentic, --out: only a comparison of servers"),
        (["--url-a", "x", "--url-b", "y", "--blocks", "1"], "at least 2"),
    ],
)
def test_flags_that_mean_nothing_together(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_a_callback_of_the_loop_ends_the_servers(
    tmp_path: Path, number: signal.Signals
) -> None:
    """An exception that is raised there would be reported by the loop, and end nothing."""
    pid = tmp_path / "pid"

    async def main() -> None:
        async with launched(server(pid)):
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
            await asyncio.sleep(60)

    with EndingSignals():
        with pytest.raises(Terminated) as ended:
            asyncio.run(until_signal(main()))
        assert signal.getsignal(number) is not signal.SIG_DFL
    assert ended.value.exit_code == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
