"""gRPC servers and channels with the options that a fleet needs. One place, so that both ends always agree.

Why each option is there:
- Message sizes: gRPC's default of 4 MiB refuses a prompt of a million tokens.
- Pings: a server that is not told otherwise ends a connection that pings more often than every 5 minutes while a
  stream is silent, and clients ping far more often. The server's key has no "recv" in it; with "recv", gRPC ignores it
  without a word.
- Keepalive of our own: a peer whose machine vanished is noticed within half a minute, and its requests are cancelled.
- No SO_REUSEPORT: a port that is taken is an error, not a port shared between two processes.
- Reconnect within two seconds: a worker that comes back is found at once (the default backs off to two minutes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # missing in the stubs
from grpc_reflection.v1alpha import reflection

from radixfleet.interceptor import ErrorInterceptor

MAX_MESSAGE_BYTES = 64 * 1024**2
KEEPALIVE_S = 20.0
KEEPALIVE_TIMEOUT_S = 10.0
_RECONNECT_INITIAL_MS = 100
_RECONNECT_MAX_MS = 2000

Options: TypeAlias = list[tuple[str, int]]


def _shared_options(max_message_bytes: int, keepalive_s: float) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(*, max_message_bytes: int = MAX_MESSAGE_BYTES, keepalive_s: float = KEEPALIVE_S) -> Options:
    """Options of a server."""
    return [
        *_shared_options(max_message_bytes, keepalive_s),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


def client_options(*, max_message_bytes: int = MAX_MESSAGE_BYTES, keepalive_s: float = KEEPALIVE_S) -> Options:
    """Options of a channel. gRPC's own retries are off: the channel's owner decides when a request may run again."""
    return [
        *_shared_options(max_message_bytes, keepalive_s),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_INITIAL_MS),
        ("grpc.min_reconnect_backoff_ms", _RECONNECT_INITIAL_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MAX_MS),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]


class Health:
    """The server's grpc.health.v1 answers: one status for the whole server ("") and each of its services."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self._servicer = health_aio.HealthServicer()
        self._names = ("", *service_names)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, *, serving: bool) -> None:
        """Say SERVING or NOT_SERVING from now on; those who watch hear of it."""
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if serving else statuses.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)


async def make_server(
    service_names: Sequence[str],
    *,
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> tuple[grpc.aio.Server, Health]:
    """A server with health (NOT_SERVING until told otherwise), reflection and errors as statuses.

    `service_names`: full names, such as "radixfleet.v1.Inference". `interceptors` run outside the mapping of errors.
    The caller adds its servicers, calls `listen`, and starts the server.
    """
    server = grpc.aio.server(
        interceptors=[*interceptors, ErrorInterceptor()], options=server_options(max_message_bytes=max_message_bytes)
    )
    health = Health(service_names)
    await health.set(serving=False)
    health.add_to(server)
    names = (*service_names, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server, health


def listen(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind to host and port (0: any free one) and return the port. Raises OSError when the port is taken."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(
            f"cannot listen on {address}: is another process using the port? Choose another, or 0 for any"
        ) from error
    if bound == 0:
        raise OSError(f"cannot listen on {address}")
    return bound


def open_channel(address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to host:port; connects at the first call. Close it with `await channel.close()`."""
    return grpc.aio.insecure_channel(address, options=client_options(max_message_bytes=max_message_bytes))
