"""One engine behind Ray Serve: the application of `kdecode serve`, called by handle.

Owns an engine's life in a Ray actor: how it is built, what makes it healthy, and that a broken one
goes. Routes, replies and limits are `kdecode.server`'s; which requests come here is the router's.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from ray import serve
from starlette.types import Message

import kdecode.commands.serve as command
from kdecode.commands.common import model_directory, open_model
from kdecode.engine.async_engine import AsyncEngine, EngineStoppedError
from kdecode.replicas.asgi import Call, document, messages
from kdecode.server.api import create_app

# For the last answers, which say that the engine broke, to leave the process.
FAREWELL_SECONDS = 1.0
EXIT_BROKEN = 1

log = logging.getLogger(__name__)


class Replica:
    """A deployment; Ray calls its methods. args: what `kdecode serve` was given."""

    def __init__(self, args: argparse.Namespace) -> None:
        directory = model_directory(args)
        command.check_parsers(args, directory)
        self._engine = AsyncEngine(
            open_model(directory, command.engine_config(args)), on_death=_leave
        )
        # Keys were checked where the request came in.
        config = replace(command.server_config(args, directory), api_keys=(), engine=_rank())
        self._app = create_app(self._engine, config)

    async def answer(self, call: Call) -> AsyncIterator[list[Message]]:
        """Raises EngineStoppedError for a request that was not begun."""
        self._require_engine()
        async for batch in messages(self._app, call):
            yield batch

    async def document(self, call: Call) -> tuple[int, bytes]:
        """A whole answer, for what is asked of every replica."""
        return await document(self._app, call)

    async def check_health(self) -> None:
        """Called by Ray from time to time. Raises EngineStoppedError."""
        self._require_engine()

    def _require_engine(self) -> None:
        if not self._engine.is_running:
            raise EngineStoppedError("The engine of this replica runs no more.")

    async def __del__(self) -> None:
        """Called by Ray when requests have ended, or have had their time."""
        # There is none where the constructor failed.
        if hasattr(self, "_engine"):
            await self._engine.stop()
            self._engine.llm.close()


def _rank() -> str:
    return str(serve.get_replica_context().rank.rank)


def _leave() -> None:
    """Ends the process of an engine that broke; called from the engine's thread.

    Health checks would find it as well, but in some seconds, in which a replica that refuses
    everything at once looks like the least loaded one.
    """
    log.critical("the engine broke, and this replica ends; Ray starts another one")
    time.sleep(FAREWELL_SECONDS)
    os._exit(EXIT_BROKEN)
