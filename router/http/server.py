"""An HTTP server inside the router's event loop, so that a request reaches the dispatcher without a hop.

start   bind -> serve
end     `stop_accepting`: the port is closed, running answers go on -> `close`: what is left is cut

uvicorn speaks HTTP here and nothing else: signals, logging and the event loop stay the router's.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from radixfleet.os_errors import reason_of
from router.http.protocol import CarefulProtocol

_KEEP_ALIVE_S = 75
"""Longer than the 60 s after which load balancers drop an idle connection: the side that asks shall be the one that
hangs up, or a request meets a connection that is just being closed."""
_DATE_PERIOD_S = 1.0
_BACKLOG = 2048


class HttpServer:
    """One listening port. On the event loop only."""

    def __init__(
        self, app: ASGIApp, host: str, port: int, *, tls: ssl.SSLContext | None = None, shared_port: bool = False
    ) -> None:
        """Binds at once; port 0 takes a free one. Raises OSError when the port is taken.

        `shared_port`: other processes listen on it too.
        """
        self._socket = _bound(host, port, shared_port=shared_port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=CarefulProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            reset_contextvars=True,  # else a long body leaves its trace and session to the next request
            ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serve from now on."""
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http")

    def stop_accepting(self) -> None:
        """Take no new connections and no new requests on old ones; running answers go on."""
        self._server.stop()

    async def close(self) -> None:
        """End everything that is left, and wait for it."""
        self._server.stop()
        self._server.force_exit = True
        for connection in tuple(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        if self._task is not None:
            await self._task
        self._socket.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: they are the router's."""
        yield

    async def main_loop(self) -> None:
        """Keep the Date header right; end at once when told so."""
        while not self.should_exit:
            await self.on_tick(0)
            with suppress(TimeoutError):
                async with asyncio.timeout(_DATE_PERIOD_S):
                    await self._stopping.wait()


def _bound(host: str, port: int, *, shared_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, reuse_port=shared_port, dualstack_ipv6=both
        )
    except OSError as error:
        reason = f"cannot serve HTTP at {host}:{port} ({reason_of(error)}): choose another --http-port, or 0 for any"
        raise OSError(error.errno, reason) from error
