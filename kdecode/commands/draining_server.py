"""uvicorn as `kdecode serve` runs it: limits of connections, and an end that clients are told of.

Owns the settings of the HTTP server and the drain time: at its end, requests that still run are
ended by the engine, so that their clients read an error and not a broken connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn
from fastapi import FastAPI

from kdecode.engine.async_engine import AsyncEngine

# Behind the drain time, for clients to read how their requests ended. Then connections are cut.
GRACE_SECONDS = 5
MAX_HEADER_BYTES = 64 * 1024

log = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    def __init__(
        self,
        app: FastAPI,
        engine: AsyncEngine,
        *,
        host: str,
        port: int,
        drain_seconds: int,
        has_access_log: bool,
    ) -> None:
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="info",
            access_log=has_access_log,
            # h11 bounds what a header may be; httptools does not.
            http="h11",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=drain_seconds + GRACE_SECONDS,
            server_header=False,
        )
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        log.warning("requests still run after %d seconds and are ended", self._drain_seconds)
        await self._engine.stop()
