"""The Prometheus endpoint of a process, on a port and threads of its own.

It keeps answering while the event loop is busy, which is when it is needed most. Where keys are set, a scrape needs one
(Prometheus: `authorization: {credentials_file: ...}`); with a certificate, the port speaks TLS. A client that is slow
to ask, or to take, holds a thread for a while and no more; there are so many threads and no more.
"""

from __future__ import annotations

import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from socketserver import ThreadingMixIn
from types import MappingProxyType, TracebackType
from typing import Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import prometheus_client
import structlog

from radixfleet.access import Access
from radixfleet.errors import RadixfleetError
from radixfleet.guard import Door, Guard, key_of

Page: TypeAlias = Callable[[str], bytes | None]
"""JSON for whoever asked for this host:port; None: not now. Called on threads of the server."""

_App: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_POLL_S = 0.05
_SLOW_S = 10.0
"""Longest time in which a client sends nothing, or takes nothing, before it is cut off."""
_LONGEST_S = 60.0
"""Longest time that a scrape may take in all, also by a client that sends a little now and then."""
_MAX_SCRAPES = 32
"""Scrapes at a time; more are refused."""

_log = structlog.get_logger("radixfleet.metrics")


def _with_pages(app: _App, pages: Mapping[str, Page]) -> _App:
    """`app`, with `pages` served at their paths."""

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        page = pages.get(environ.get("PATH_INFO", ""))
        if page is None:
            return app(environ, start_response)
        body = page(environ.get("HTTP_HOST", ""))
        if body is None:
            start_response("503 Service Unavailable", [("Content-Length", "0")])
            return []
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    return serve


def _guarded(app: _App, guard: Guard) -> _App:
    """`app`, for callers that `guard` admits."""

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            guard.admit(Door.CLIENT, key_of(environ.get("HTTP_AUTHORIZATION")))
        except RadixfleetError as error:
            body = f"{error}\n".encode()
            headers = [
                ("Content-Type", "text/plain; charset=utf-8"),
                ("Content-Length", str(len(body))),
                ("WWW-Authenticate", "Bearer"),
            ]
            start_response("401 Unauthorized", headers)
            return [body]
        return app(environ, start_response)

    return serve


class _Server(ThreadingMixIn, WSGIServer):
    """Serves each scrape on a thread of its own, so that a slow reader does not delay the next."""

    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._places = threading.BoundedSemaphore(_MAX_SCRAPES)
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # there is no thread for it; who called logs it, and hangs up
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(_LONGEST_S, _hang_up, (request,))
        end.daemon = True
        end.start()
        try:
            super().finish_request(request, client_address)
        finally:
            end.cancel()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing of clients that hang up, are slow or do not speak TLS."""
        error = sys.exception()
        if not isinstance(error, OSError):
            _log.error("a scrape failed by a fault of ours", exc_info=error)


def _hang_up(request: socket.socket) -> None:
    """Shut the socket down, which ends every read and write that waits on it."""
    with suppress(OSError):
        socket.socket.shutdown(request, socket.SHUT_RDWR)  # that of TLS would first make the connection a plain one


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    """Handles a scrape, and logs none: there is one every few seconds."""

    timeout = _SLOW_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is the base class's
        """Log nothing."""


class MetricsServer:
    """One registry at http://host:port/metrics, and `pages` by path, served from a daemon thread until `close`.

    A context manager, too. With an `access` that has a certificate it is https, and where it has keys each scrape needs
    one.
    """

    def __init__(
        self,
        registry: prometheus_client.CollectorRegistry,
        host: str,
        port: int,
        pages: Mapping[str, Page] = MappingProxyType({}),
        access: Access | None = None,
    ) -> None:
        """Listens at once; port 0 takes a free one, and `port` says which. Raises OSError when the port is taken."""
        access = access or Access()
        app = _guarded(_with_pages(prometheus_client.make_wsgi_app(registry), pages), access.guard)
        kind = _IPv6Server if ":" in host else _Server
        try:
            self._server = make_server(host, port, app, kind, handler_class=_SilentHandler)
        except OSError as error:
            reason = (
                f"cannot serve metrics at {host}:{port} ({error.strerror}): choose another --metrics-port, or 0 for "
                "any (the router's under `radixfleet up`: --router-metrics-port)"
            )
            raise OSError(error.errno, reason) from error
        self.port: int = self._server.server_port
        context = access.ssl_context()
        if context is not None:
            self._server.socket = _secure(self._server.socket, context)
        # prometheus_client's own start_http_server takes half a second to notice that it shall end.
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _POLL_S}, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _secure(listener: socket.socket, context: ssl.SSLContext) -> socket.socket:
    """Each connection shakes hands on its own thread, so that a slow one does not hold up the listener."""
    return context.wrap_socket(listener, server_side=True, do_handshake_on_connect=False)
