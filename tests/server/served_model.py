"""A server with a small model on a port of the loopback, and a look into its engine."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import uvicorn

from kdecode.engine.async_engine import AsyncEngine
from kdecode.engine.engine import LLM
from kdecode.server.api import ServerConfig, create_app
from kdecode.server.guard import Limits

KEY = "a key of the tests"
CONTEXT = 2048


@dataclass(frozen=True)
class Served:
    """A running server; `llm` only to look into."""

    url: str
    llm: LLM
    client: openai.OpenAI

    def wait_until_idle(self) -> None:
        """Until nothing is held; fails when something stays."""
        names = ("waiting", "running", "pages_used", "slots_used")
        deadline = time.monotonic() + 60
        while any(self.llm.stats()[name] for name in names):
            assert time.monotonic() < deadline, self.llm.stats()
            time.sleep(0.005)

    def num_aborted(self) -> float:
        """Choices of requests that a client has left, since the server began."""
        text = httpx.get(f"{self.url}/metrics").text
        aborted = r'^vllm:request_success_total{.*finished_reason="abort".*} (.+)$'
        return sum(map(float, re.findall(aborted, text, re.MULTILINE)))

    def wait_for_aborted(self, number: float) -> None:
        """Until so many are counted; fails where they end in another way."""
        self.wait_until_idle()
        deadline = time.monotonic() + 60
        while self.num_aborted() < number:
            assert time.monotonic() < deadline, f"{self.num_aborted()} of {number}"
            time.sleep(0.005)


@contextmanager
def serve(checkpoint: Path, **settings: object) -> Iterator[Served]:
    llm = LLM(
        checkpoint,
        decode_backend="latency_specialized",
        num_threads=1,
        max_context_tokens=CONTEXT,
        max_requests=4,
        **settings,
    )
    config = ServerConfig(("mini", "alias"), (KEY,), Limits(max_body_bytes=100_000, body_s=1.0))
    app = create_app(AsyncEngine(llm), config)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield Served(url, llm, client)
    server.should_exit = True
    thread.join()
