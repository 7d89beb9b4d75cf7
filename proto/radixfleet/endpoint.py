"""A server's address, and the TLS and key with which it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from radixfleet.tls import ClientTls

KeySource: TypeAlias = "str | Callable[[], str]"
"""A key, or who knows the one that holds now."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A gRPC server that may ask for TLS, a certificate or a key. Its text is its address."""

    address: str
    """host:port."""
    tls: ClientTls | None = None
    """None: no TLS."""
    key: KeySource | None = field(default=None, repr=False)
    """Sent with every call as `authorization: Bearer KEY`."""

    def __str__(self) -> str:
        return self.address

    def shown_key(self) -> str | None:
        """The key to send now."""
        return self.key() if callable(self.key) else self.key


def as_endpoint(target: str | Endpoint) -> Endpoint:
    """An address alone means no TLS and no key."""
    return Endpoint(target) if isinstance(target, str) else target
