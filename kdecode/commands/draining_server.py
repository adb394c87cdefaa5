"""uvicorn as `kdecode serve` runs it: limits of connections, and an end that clients are told of.

Owns the settings of the HTTP server and the drain time: at its end, requests that still run are
ended by the engine, so that their clients read an error and not a broken connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from kdecode.engine.async_engine import AsyncEngine

# Behind the drain time, for clients to read how their requests ended. Then connections are cut.
GRACE_SECONDS = 5
MAX_HEADER_BYTES = 64 * 1024
# In which a connection's next header has to be complete, from its first byte or the connection on.
HEADER_SECONDS = 30

log = logging.getLogger(__name__)


class TimedProtocol(H11Protocol):
    """Closes a connection whose header does not come; uvicorn itself would wait for ever."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(HEADER_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)

    def _end_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


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
            http=TimedProtocol,
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
