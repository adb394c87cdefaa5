"""Two replicas on a Ray of this machine, its HTTP proxy, and real clients. Slow: Ray is started.

pip install -e '.[dev]' && pytest -m slow tests/replicas
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from kdecode.replicas import app
from kdecode.replicas.replica import Replica

pytestmark = pytest.mark.slow

# In the titles of the replicas' processes, so that no other run's are found.
APP = f"kdecode-{os.getpid()}"
KEY = "a key of the tests"
INTERVAL = 512
CONTEXT = 2048
BATCH = 4
ON = {"ignore_eos": True}
# What a busy machine takes to start a replica.
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Ray's HTTP proxy on a free port. As little of Ray as there can be."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray's workers import from the working directory first, and a source tree has no built kernels.
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("cluster"))
    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()
    os.chdir(before)


class Breakable(Replica):
    """A replica whose engine breaks at the next step, once it is asked to."""

    def break_engine(self) -> None:
        def step() -> None:
            raise RuntimeError("made for the test")

        self._engine.llm.loop.step = step  # type: ignore[assignment,method-assign]


# Workers of Ray cannot import a test's file.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _deploy(checkpoint: Path, num_ranks: int = 1, **options: Any) -> None:
    """The application with two replicas, anew each time: Ray takes it for another version."""
    flags, _ = app.parse(
        {
            "model": str(checkpoint),
            "served_model_name": "mini",
            "api_key": KEY,
            "decode_backend": "latency_specialized",
            "threads": 1,
            "max_model_len": CONTEXT,
            "max_num_seqs": BATCH,
            "max_num_batched_tokens": INTERVAL,
            "drain_seconds": 30,
            "tensor_parallel_size": num_ranks,
        }
    )
    serve.run(app.application(flags, num_replicas=2, replica_class=Breakable, **options), name=APP)


@pytest.fixture(scope="module")
def checkpoint(url: str, mini_checkpoint: Path) -> Path:
    """The model that two replicas serve. They are the same ones in all tests of this file."""
    _deploy(mini_checkpoint)
    return mini_checkpoint


@pytest.fixture(autouse=True)
def replicas(checkpoint: Path) -> None:
    """Both are there when a test begins, whatever the one before did to them."""
    _wait_until(lambda: _num_running() == 2)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def _num_running() -> int:
    application = serve.status().applications[APP]
    return application.deployments["Replica"].replica_states.get("RUNNING", 0)


def _processes() -> dict[int, tuple[int, str]]:
    """Parents and titles of what runs."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            found[int(path.name)] = parent, (path / "cmdline").read_text(errors="replace")
        except OSError:
            continue
    return found


def _replica_pids() -> set[int]:
    title = f"ServeReplica:{APP}:Replica"
    return {pid for pid, (_, found) in _processes().items() if title in found}


def _rank_pids() -> set[int]:
    """Ranks of replicas that are processes of their own."""
    replicas = _replica_pids()
    return {
        pid
        for pid, (parent, title) in _processes().items()
        if parent in replicas and "spawn_main" in title
    }


def _requests(url: str) -> list[float]:
    """How many requests are in the steps of each replica."""
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return [float(x.split()[-1]) for x in lines if x.startswith("vllm:num_requests_running{")]


def _wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} seconds"
        time.sleep(0.05)


def _prompt(seed: int, length: int = 40) -> list[int]:
    return random.Random(seed).choices(range(5, 200), k=length)


@dataclass
class Outcome:
    """How one stream ended for its client."""

    seed: int
    text: str = ""
    is_whole: bool = False
    error: openai.OpenAIError | httpx.HTTPError | None = None
    start_s: float = field(default_factory=time.monotonic)


def _stream(client: openai.OpenAI, seed: int, tokens: int) -> Outcome:
    outcome = Outcome(seed)
    try:
        for chunk in client.completions.create(
            model="mini",
            prompt=_prompt(seed),
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body=ON,
        ):
            outcome.text += chunk.choices[0].text
            outcome.is_whole = chunk.choices[0].finish_reason is not None
    # httpx's: a connection that breaks while a stream is read.
    except (openai.OpenAIError, httpx.HTTPError) as error:
        outcome.error = error
    return outcome


def _texts(client: openai.OpenAI, seeds: Sequence[int], tokens: int) -> dict[int, str]:
    """What the streams have to say, asked one by one before anything happens."""
    outcomes = [_stream(client, seed, tokens) for seed in seeds]
    assert all(outcome.is_whole for outcome in outcomes), outcomes
    return {outcome.seed: outcome.text for outcome in outcomes}


class _Load:
    """Clients that ask for one stream after the other until they are told to stop."""

    def __init__(self, client: openai.OpenAI, seeds: Sequence[int], tokens: int) -> None:
        self.outcomes: list[Outcome] = []
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(client, seed, tokens)) for seed in seeds
        ]

    def __enter__(self) -> _Load:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """No client begins another stream."""
        self._is_over.set()

    def __exit__(self, *error: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()

    def _run(self, client: openai.OpenAI, seed: int, tokens: int) -> None:
        while not self._is_over.is_set():
            self.outcomes.append(_stream(client, seed, tokens))

    def wait_for_whole_streams(self, number: int) -> None:
        """Until so many that begin after this are there."""
        now = time.monotonic()
        _wait_until(lambda: sum(o.is_whole and o.start_s > now for o in self.outcomes) >= number)

    def served_since(self, moment_s: float) -> set[int]:
        """Clients with a whole stream that began after this."""
        return {o.seed for o in self.outcomes if o.is_whole and o.start_s > moment_s}

    def check(self, texts: dict[int, str]) -> list[Outcome]:
        """Every stream was whole and right, or its client was told; returns the latter."""
        failed = [outcome for outcome in self.outcomes if outcome.error is not None]
        for outcome in self.outcomes:
            assert outcome.is_whole or outcome.error is not None, outcome
            if outcome.is_whole and outcome.error is None:
                assert outcome.text == texts[outcome.seed]
            assert texts[outcome.seed].startswith(outcome.text)
        return failed


def test_clients_find_the_server_that_they_know(client: openai.OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == ["mini"]
    whole = client.completions.create(
        model="mini",
        prompt=_prompt(1),
        max_tokens=30,
        temperature=0,
        extra_body=ON,
    )
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 30
    streamed = _stream(client, 1, 30)
    assert (streamed.text, streamed.is_whole) == (whole.choices[0].text, True)
    chat = {"model": "mini", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
    reply = client.chat.completions.create(**chat, seed=1)  # type: ignore[call-overload]
    assert reply.usage.completion_tokens > 0
    with pytest.raises(openai.BadRequestError, match="surely_not"):
        client.chat.completions.create(**chat, extra_body={"surely_not": 1})  # type: ignore[call-overload]
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()
    assert httpx.get(f"{url}/health").status_code == 200
    text = httpx.get(f"{url}/metrics").text
    for rank in range(2):
        assert f'vllm:num_requests_running{{engine="{rank}",model_name="mini"}} 0.0' in text


def test_a_client_that_leaves_frees_its_place(client: openai.OpenAI, url: str) -> None:

    stream = client.completions.create(
        model="mini",
        prompt=_prompt(1),
        max_tokens=1900,
        stream=True,
        extra_body=ON,
    )
    next(iter(stream))
    assert sum(_requests(url)) == 1
    stream.close()
    # Far less than the rest of the reply takes.
    _wait_until(lambda: sum(_requests(url)) == 0, 1.0)


def _hit_rate(client: openai.OpenAI, groups: int, rounds: int) -> float:
    """Share of prompt tokens that were found, of groups that share a prefix.

    In each round every group asks once, four at a time, in an order of its own.
    """
    rng = random.Random(3)
    found = asked = 0
    with ThreadPoolExecutor(BATCH) as pool:
        for turn in range(rounds):
            order = rng.sample(range(groups), groups)
            prompts = [
                [*_prompt(group, INTERVAL), *_prompt(1000 * turn + group, 32)] for group in order
            ]
            for usage in pool.map(lambda prompt: _usage(client, prompt), prompts):
                asked += usage.prompt_tokens
                found += usage.prompt_tokens_details.cached_tokens
    return found / asked


def _usage(client: openai.OpenAI, prompt: list[int]) -> Any:
    return client.completions.create(model="mini", prompt=prompt, max_tokens=2).usage


def test_a_replica_that_is_killed_under_load(client: openai.OpenAI, url: str) -> None:
    seeds = range(2 * BATCH)
    texts = _texts(client, seeds, 900)
    before = _replica_pids()
    with _Load(client, seeds, 900) as load:
        load.wait_for_whole_streams(len(seeds))
        _wait_until(lambda: min(_requests(url)) >= 2)
        killed_s = time.monotonic()
        os.kill(min(before), signal.SIGKILL)
        # Traffic goes on at the other one, and then at both.
        load.wait_for_whole_streams(2 * len(seeds))
        moved_s = time.monotonic()
        _wait_until(lambda: len(_replica_pids() - before) == 1 and _num_running() == 2)
        replaced_s = time.monotonic()
        load.wait_for_whole_streams(2 * len(seeds))
    failed = load.check(texts)
    print(
        f"{len(load.outcomes)} streams, {len(failed)} were told that their replica had ended; "
        f"{2 * len(seeds)} whole ones {moved_s - killed_s:.1f} s later, another replica after "
        f"{replaced_s - killed_s:.1f} s"
    )
    # Those that ran there, and none that came later.
    assert 1 <= len(failed) <= len(seeds)
    assert len({outcome.seed for outcome in failed}) == len(failed)
    assert all("replica" in str(outcome.error) for outcome in failed), failed


def test_an_engine_that_breaks_is_replaced(client: openai.OpenAI, url: str) -> None:
    seeds = range(2 * BATCH)
    texts = _texts(client, seeds, 900)
    before = _replica_pids()
    with _Load(client, seeds, 900) as load:
        load.wait_for_whole_streams(len(seeds))
        _wait_until(lambda: min(_requests(url)) >= 2)
        serve.get_deployment_handle("Replica", APP).break_engine.remote().result()
        load.wait_for_whole_streams(len(seeds))
        _wait_until(lambda: len(_replica_pids() - before) == 1 and _num_running() == 2)
        load.wait_for_whole_streams(2 * len(seeds))
    failed = load.check(texts)
    # Those that ran there. What came while it was broken went to the other one, but for what came
    # at the moment when the process ended.
    assert 1 <= len(failed) <= 2 * len(seeds)
    assert len(_replica_pids() & before) == 1
    assert any("broke" in str(outcome.error) for outcome in failed), failed


def test_a_replica_that_hangs_is_replaced(client: openai.OpenAI) -> None:
    seeds = range(2 * BATCH)
    texts = _texts(client, seeds, 300)
    before = _replica_pids()
    with _Load(client, seeds, 300) as load:
        load.wait_for_whole_streams(len(seeds))
        stopped_s = time.monotonic()
        os.kill(min(before), signal.SIGSTOP)
        try:
            _wait_until(lambda: len(_replica_pids() - before) == 1 and _num_running() == 2)
            replaced_s = time.monotonic()
            # No client waits for the one that hangs any more.
            _wait_until(lambda: load.served_since(replaced_s) == set(seeds))
        finally:
            # Ray gives it up, but cannot end a process that is stopped.
            os.kill(min(before), signal.SIGKILL)
    failed = load.check(texts)
    print(
        f"{len(load.outcomes)} streams, {len(failed)} were told; another replica after "
        f"{replaced_s - stopped_s:.1f} s"
    )
    assert len(failed) <= len(seeds)


def test_prefixes_are_found_more_often_than_by_chance(
    client: openai.OpenAI, checkpoint: Path
) -> None:
    """And another version of the application takes over while the first one has requests."""
    groups, rounds = 12, 4
    by_prefix = _hit_rate(client, groups, rounds)
    seeds = range(2 * BATCH)
    texts = _texts(client, seeds, 300)
    with _Load(client, seeds, 300) as load:
        load.wait_for_whole_streams(len(seeds))
        # Ray's own router, and replicas whose caches are empty.
        _deploy(checkpoint, router=RequestRouterConfig())
        load.wait_for_whole_streams(len(seeds))
    assert not load.check(texts)
    by_chance = _hit_rate(client, groups, rounds)
    print(f"prompt tokens found: {by_prefix:.1%} by prefix, {by_chance:.1%} by Ray's default")
    # All that can be: nothing in the first round, and then everything up to the last 32 tokens.
    possible = (rounds - 1) / rounds * INTERVAL / (INTERVAL + 32)
    assert by_prefix > 0.95 * possible
    assert by_chance < 0.85 * possible


def test_a_replica_that_loses_a_rank(client: openai.OpenAI, url: str, checkpoint: Path) -> None:
    _deploy(checkpoint, num_ranks=2)
    _wait_until(lambda: _num_running() == 2)
    seeds = range(2 * BATCH)
    texts = _texts(client, seeds, 300)
    before, ranks = _replica_pids(), _rank_pids()
    assert (len(before), len(ranks)) == (2, 2)
    with _Load(client, seeds, 300) as load:
        load.wait_for_whole_streams(len(seeds))
        _wait_until(lambda: min(_requests(url)) >= 2)
        os.kill(min(ranks), signal.SIGKILL)
        _wait_until(lambda: len(_replica_pids() - before) == 1 and _num_running() == 2)
        load.wait_for_whole_streams(len(seeds))
    failed = load.check(texts)
    assert any("Rank 1 of 2" in str(outcome.error) for outcome in failed), failed
    assert len(_replica_pids() & before) == 1
    assert len(_rank_pids() & ranks) == 1


def test_replicas_that_go_end_their_requests(client: openai.OpenAI) -> None:
    """The last test: afterwards nothing runs."""
    seeds = range(2 * BATCH)
    texts = _texts(client, seeds, 800)
    ranks = _rank_pids()
    with _Load(client, seeds, 800) as load:
        time.sleep(0.5)
        load.stop()
        serve.delete(APP)
    assert len(load.outcomes) == len(seeds)
    assert not load.check(texts)
    assert not _replica_pids() | ranks & _processes().keys()
