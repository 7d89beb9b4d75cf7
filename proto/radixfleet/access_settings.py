"""The settings of who may reach a process, and of what it shows to others: declared once, for router and worker.

    class RouterSettings(ProcessSettings):
        tls_cert: TlsCert = None
        ...

`radixfleet.access.Access` is made of them. This module imports no grpc, so that settings stay cheap to import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Protocol, TypeAlias

from pydantic import BeforeValidator, Field, SecretStr

from radixfleet.settings import CommaList


def secret_text(value: object) -> object:
    """Pydantic's own complaint of what is no text would show it."""
    if value is not None and not isinstance(value, str | SecretStr):
        raise ValueError("must be text (quote it)")
    return value


def some_keys(value: object) -> object:
    """An empty text is most likely a variable that is not set; taken for no keys, it would let everybody in."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list | tuple) and texts and not any(str(text).strip(", ") for text in texts):
        raise ValueError("is empty: name keys, or leave it out to let everybody in")
    return value


TlsCert: TypeAlias = Annotated[
    Path | None,
    Field(description="PEM file of this process's certificate and its chain: ports speak TLS; shown to peers too."),
]
TlsKey: TypeAlias = Annotated[Path | None, Field(description="PEM file of the private key of --tls-cert.")]
TlsCa: TypeAlias = Annotated[
    Path | None,
    Field(description="PEM file of the CAs that sign peers' certificates, or 'system': peers are dialled with TLS."),
]
TlsClientCa: TypeAlias = Annotated[
    Path | None,
    Field(description="PEM file of CAs: who calls must show a certificate that one of them signed (mutual TLS)."),
]
TlsPeerName: TypeAlias = Annotated[
    str | None,
    Field(min_length=1, description="Name that peers' certificates carry, where it is not the host that is dialled."),
]
ApiKeys: TypeAlias = Annotated[
    CommaList,
    BeforeValidator(some_keys),
    Field(description="Clients' keys: NAME:SHA256 as `radixfleet keys new` prints them, or files of such lines."),
]
AdminToken: TypeAlias = Annotated[
    SecretStr | None,
    BeforeValidator(secret_text),
    Field(description="Token of routers, workers and operators among themselves, or @FILE that holds it."),
]
IsolateClients: TypeAlias = Annotated[
    bool, Field(description="Clients (keys) share no cached prefixes, so that none learns by time what others send.")
]


class AccessSettings(Protocol):
    """Settings that have all of the above."""

    @property
    def host(self) -> str:
        """Address to listen on."""
        ...

    @property
    def tls_cert(self) -> Path | None:
        """See TlsCert; the others likewise."""
        ...

    @property
    def tls_key(self) -> Path | None:
        """See TlsKey."""
        ...

    @property
    def tls_ca(self) -> Path | None:
        """See TlsCa."""
        ...

    @property
    def tls_client_ca(self) -> Path | None:
        """See TlsClientCa."""
        ...

    @property
    def tls_peer_name(self) -> str | None:
        """See TlsPeerName."""
        ...

    @property
    def api_keys(self) -> tuple[str, ...]:
        """See ApiKeys."""
        ...

    @property
    def admin_token(self) -> SecretStr | None:
        """See AdminToken."""
        ...
