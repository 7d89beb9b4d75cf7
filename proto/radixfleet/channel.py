"""gRPC servers and channels with the options that a fleet needs. One place, so that both ends always agree.

Why each option is there:
- Message sizes: gRPC's default of 4 MiB refuses a prompt of a million tokens.
- Pings: a server that is not told otherwise ends a connection that pings more often than every 5 minutes while a
  stream is silent, and clients ping far more often. The server's key has no "recv" in it; with "recv", gRPC ignores it
  without a word.
- Keepalive of our own: a peer whose machine vanished is noticed within half a minute, and its requests are cancelled.
  A foreign server that permits a ping in five minutes counts only those since it last sent anything on the connection,
  and hangs up after a minute and a half. Engines do not hang up on a router, which asks for their state each second on
  the same channel. A client's silent stream is ended where such a server stands between it and the router; gRPC then
  doubles the time between pings until they suit.
- Who connects and says nothing, or does not finish the handshake, is hung up on in a quarter of a minute, not two.
- No SO_REUSEPORT unless processes share a port on purpose: a port that is taken is an error.
- Reconnect within two seconds: a worker that comes back is found at once (the default backs off to two minutes).
  One attempt may take longer, through a slow network and a TLS handshake; gRPC calls that the minimal backoff.
- No HTTP proxy: gRPC would send what goes to 127.0.0.1 or to the next machine to the one that `http_proxy` names.

TLS and keys: `listen` is given a certificate, `make_server` a guard, and `open_channel` an Endpoint that says what to
show there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # missing in the stubs
from grpc_reflection.v1alpha import reflection

from radixfleet.endpoint import Endpoint, as_endpoint
from radixfleet.grpc_guard import GuardInterceptor
from radixfleet.guard import Guard
from radixfleet.interceptor import ErrorInterceptor
from radixfleet.keyed_channel import KeyedChannel
from radixfleet.os_errors import why_not_bound
from radixfleet.renewed_channel import RenewedChannel
from radixfleet.tls import ServerTls

MAX_MESSAGE_BYTES = 64 * 1024**2
KEEPALIVE_S = 20.0
KEEPALIVE_TIMEOUT_S = 10.0
HANDSHAKE_S = 15.0
_RECONNECT_INITIAL_MS = 100
_RECONNECT_MAX_MS = 2000
_CONNECT_MS = 5000

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


def server_options(
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    handshake_s: float = HANDSHAKE_S,
    shared_port: bool = False,
) -> Options:
    """Options of a server. `shared_port`: other processes listen on its port too."""
    return [
        *_shared_options(max_message_bytes, KEEPALIVE_S),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", round(handshake_s * 1000)),
        ("grpc.so_reuseport", int(shared_port)),
    ]


def client_options(*, max_message_bytes: int = MAX_MESSAGE_BYTES, keepalive_s: float = KEEPALIVE_S) -> Options:
    """Options of a channel. gRPC's own retries are off: the channel's owner decides when a request may run again."""
    return [
        *_shared_options(max_message_bytes, keepalive_s),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_INITIAL_MS),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MAX_MS),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
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

    async def leave(self) -> None:
        """Say NOT_SERVING from now on, whatever is set later. May wait for one who watches and does not read."""
        await self._servicer.enter_graceful_shutdown()


async def make_server(
    service_names: Sequence[str],
    *,
    guard: Guard | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    shared_port: bool = False,
) -> tuple[grpc.aio.Server, Health]:
    """A server with health (NOT_SERVING until told otherwise), reflection and errors as statuses.

    `service_names`: full names, such as "radixfleet.v1.Inference". Without a `guard`, everybody may call
    everything. `shared_port`: see `server_options`.
    The caller adds its servicers, calls `listen`, and starts the server.
    """
    guards = [] if guard is None else [GuardInterceptor(guard)]
    server = grpc.aio.server(
        interceptors=[*guards, ErrorInterceptor()],
        options=server_options(max_message_bytes=max_message_bytes, shared_port=shared_port),
    )
    health = Health(service_names)
    await health.set(serving=False)
    health.add_to(server)
    names = (*service_names, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server, health


def listen(
    server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None = None, *, shared_port: bool = False
) -> int:
    """Bind to host and port (0: any free one) and return the port. Raises OSError when nobody can listen there.

    `shared_port`: as in `server_options`.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # Found out before gRPC tries: it would put lines of its own in front of our error.
    reason = why_not_bound(host, port, shared_port=shared_port)
    if reason is None:
        try:
            return _bind(server, address, tls)
        except RuntimeError as error:  # somebody was faster
            reason = str(error)
    raise OSError(f"cannot listen on {address} ({reason}): choose another address or port, or 0 for any")


def _bind(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> int:
    return server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.credentials())


def open_channel(target: str | Endpoint, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to host:port, or to an Endpoint; connects at the first call. Close it with `await channel.close()`.

    Raises UnusableFile when the endpoint's certificates cannot be read.
    """
    endpoint = as_endpoint(target)
    options = client_options(max_message_bytes=max_message_bytes)
    channel: grpc.aio.Channel
    if endpoint.tls is None:
        channel = grpc.aio.insecure_channel(endpoint.address, options=options)
    else:
        secured = [*options, *endpoint.tls.options()]
        channel = RenewedChannel(
            endpoint.tls.watched, lambda with_: grpc.aio.secure_channel(endpoint.address, with_, options=secured)
        )
    return channel if endpoint.key is None else KeyedChannel(channel, endpoint.shown_key)
