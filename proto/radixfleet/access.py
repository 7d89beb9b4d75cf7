"""Who may reach a process, and what it shows where it calls: made once from its settings, given to what needs it.

access = Access.from_settings(settings)
server, health = await make_server(SERVICES, guard=access.guard)
listen(server, settings.host, settings.port, access.tls)
open_channel(access.endpoint("10.0.0.2:7080"))
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from radixfleet.access_settings import AccessSettings
from radixfleet.address import is_loopback
from radixfleet.clock import Clock
from radixfleet.endpoint import Endpoint
from radixfleet.errors import RadixfleetError
from radixfleet.guard import Guard
from radixfleet.keys import watch_keys, watch_token
from radixfleet.limits import ClientLimits
from radixfleet.tls import ClientTls, ServerTls
from radixfleet.watched_file import UnusableFile


@dataclass(frozen=True, slots=True)
class Access:
    """The default is a process that is open to whoever reaches its ports."""

    guard: Guard = field(default_factory=Guard)
    tls: ServerTls | None = None
    """TLS of the ports that this process serves; None: they are plain."""
    peer_tls: ClientTls | None = None
    """TLS towards the peers that this process dials; None: they are dialled without."""
    tokens: Callable[[], Sequence[str]] | None = None
    """Admin tokens: the first is shown to peers."""

    @classmethod
    def from_settings(
        cls,
        settings: AccessSettings,
        *,
        token_closes_client_doors: bool = False,
        limits: ClientLimits | None = None,
        on_refusal: Callable[[RadixfleetError], None] | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """Raises UnusableFile, which says what to do, when files or settings are missing or wrong."""
        token = settings.admin_token
        tokens = None if token is None else watch_token(token.get_secret_value(), clock)
        keys = watch_keys(settings.api_keys, clock) if settings.api_keys else None
        if keys is not None and tokens is None:
            raise UnusableFile(
                "api_keys needs admin_token, with which workers register and operators drain: "
                "`radixfleet keys new --token` makes one"
            )
        guard = Guard(
            keys,
            tokens,
            token_closes_client_doors=token_closes_client_doors,
            limits=limits,
            on_refusal=on_refusal,
        )
        return cls(guard, _server_tls(settings, clock), _peer_tls(settings), tokens)

    def endpoint(self, address: str) -> Endpoint:
        """A peer of the fleet at host:port, with our certificate and the admin token."""
        tokens = self.tokens
        return Endpoint(address, self.peer_tls, None if tokens is None else lambda: tokens()[0])

    def ssl_context(self) -> ssl.SSLContext | None:
        """The context for an HTTP port, which follows changes of the files; None: no TLS."""
        return None if self.tls is None else self.tls.ssl_context()

    def warnings(self, host: str) -> list[str]:
        """Warnings for an operator who listens on `host`; empty when there is nothing to warn of."""
        if is_loopback(host):
            return []
        if self.guard.is_open and not (self.tls is not None and self.tls.asks_for_certificates):
            return [
                f"whoever reaches {host} may use this process, and drain or remove workers: set --api-keys and "
                "--admin-token (`radixfleet keys new` makes both) or --tls-client-ca, or listen on 127.0.0.1"
            ]
        if not self.guard.is_open and self.tls is None:
            return [f"keys and prompts reach {host} unencrypted: set --tls-cert and --tls-key"]
        return []


def _server_tls(settings: AccessSettings, clock: Clock | None) -> ServerTls | None:
    cert, key = settings.tls_cert, settings.tls_key
    if (cert is None) != (key is None):
        raise UnusableFile("tls_cert and tls_key go together: set both, or neither")
    if cert is None or key is None:
        if settings.tls_client_ca is not None:
            raise UnusableFile("tls_client_ca asks clients for certificates, so it needs tls_cert and tls_key")
        return None
    return ServerTls(cert, key, settings.tls_client_ca, clock)


def _peer_tls(settings: AccessSettings) -> ClientTls | None:
    if settings.tls_ca is None:
        if settings.tls_peer_name is not None:
            raise UnusableFile("tls_peer_name needs tls_ca, without which peers are dialled without TLS")
        return None
    tls = ClientTls(settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_peer_name)
    _ = tls.watched, tls.watched_context  # a wrong file is an error at start, not at the first call
    return tls
