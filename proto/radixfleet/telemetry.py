"""Logging and the Prometheus endpoint, the same for every process of the fleet."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from types import MappingProxyType, TracebackType
from typing import Any, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import prometheus_client
import structlog

Page: TypeAlias = Callable[[str], bytes | None]
"""JSON for whoever asked for this host:port; None: not now. Called on threads of the server."""

_App: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_POLL_S = 0.05

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100)
"""Time to first token: from a full cache hit on a small model to a long prompt behind a queue."""
INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 1, 2.5)
QUEUE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
STEP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2.5)
GAP_BUCKETS_S = (0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 1.5, 2.5, 5, 10)
"""Between two reports of a worker: 0.1 s while something changes, 1 s when idle."""
LENGTH_BUCKETS_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
DECISION_BUCKETS_S = (1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3)
"""A router's choice: microseconds."""


def setup_logging(level: str = "info", *, json: bool = False) -> None:
    """Log to stderr: lines for people, or one JSON object a line. Foreign loggers (grpc, asyncio) come out alike."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    last: list[structlog.typing.Processor]
    if json:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Plain tracebacks: the default shows local variables, and with them what users wrote.
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _with_pages(app: _App, pages: Mapping[str, Page]) -> _App:
    """`app`, but for the paths that have a page."""

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


class _Server(ThreadingMixIn, WSGIServer):
    """A thread a scrape, so that one slow reader does not hold up the next."""

    daemon_threads = True


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    """A scrape every few seconds is not worth a log line."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is the base class's
        """Log nothing."""


class MetricsServer:
    """The /metrics endpoint of one registry, served from a daemon thread. Use as a context manager, or call `close`."""

    def __init__(
        self,
        registry: prometheus_client.CollectorRegistry,
        host: str,
        port: int,
        pages: Mapping[str, Page] = MappingProxyType({}),
    ) -> None:
        """Listens at once; port 0 takes a free one. Raises OSError when the port is taken."""
        app = _with_pages(prometheus_client.make_wsgi_app(registry), pages)
        kind = _IPv6Server if ":" in host else _Server
        try:
            self._server = make_server(host, port, app, kind, handler_class=_SilentHandler)
        except OSError as error:
            reason = f"cannot serve metrics at {host}:{port} ({error.strerror}): choose another port, or 0 for any"
            raise OSError(error.errno, reason) from error
        self.port: int = self._server.server_port
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


def serve_metrics(
    registry: prometheus_client.CollectorRegistry,
    host: str,
    port: int,
    pages: Mapping[str, Page] = MappingProxyType({}),
) -> MetricsServer:
    """Serve `registry` at http://host:port/metrics, and `pages` by path; the server's `port` says which it got."""
    return MetricsServer(registry, host, port, pages)
