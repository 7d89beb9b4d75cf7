"""Addresses at which a router reaches workers: host:port of those that speak gRPC, and URLs of engines with OpenAI's
HTTP: http://host:port or https://host/path/v1, perhaps #MODEL.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from radixfleet.address import is_host_port

_DEFAULT_PATH = "/v1"
_MAX_LENGTH = 512
_FORM = "http://host:port or https://host:port, perhaps with #MODEL, for an engine with OpenAI's API"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine is."""

    base: str
    """What the paths of OpenAI's API are appended to; without a slash at its end."""
    host: str
    """host:port, for names and logs."""
    model: str
    """Which of the engine's models is meant; empty: the only one."""

    @property
    def root(self) -> str:
        """What /health is appended to."""
        return self.base.removesuffix(_DEFAULT_PATH)

    @property
    def name(self) -> str:
        """The worker's id."""
        return f"openai@{self.host}#{self.model}" if self.model else f"openai@{self.host}"


def is_url(address: str) -> bool:
    """Whether this is meant to be such an address, and not host:port of a worker that speaks gRPC."""
    return "://" in address


def check_worker_address(address: str) -> None:
    """Raises ValueError that says what to write for what is neither of the two."""
    if len(address) > _MAX_LENGTH:
        raise ValueError(f"must be at most {_MAX_LENGTH} characters long; has {len(address)}")
    if is_url(address):
        engine_address(address)
    elif not is_host_port(address):
        raise ValueError(f"must be host:port, or http://host:port of an engine with OpenAI's API; got {address!r}")


def engine_address(address: str) -> EngineAddress:
    """Read it. Raises ValueError that says what to write."""
    try:
        url = urlsplit(address)
        port = url.port
    except ValueError as error:
        raise ValueError(f"must be {_FORM}; got {address!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.hostname or port == 0 or address.endswith("#"):
        raise ValueError(f"must be {_FORM}; got {address!r}")
    if url.username is not None or url.password is not None or url.query:
        raise ValueError("must have no user, key or query in an engine's address: its key is --engine-api-key")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    if not is_host_port(f"{host}:{port or 443}"):
        raise ValueError(f"must be {_FORM}; got {address!r}")
    authority = host if port is None else f"{host}:{port}"
    path = url.path.rstrip("/") or _DEFAULT_PATH
    return EngineAddress(f"{url.scheme}://{authority}{path}", authority, unquote(url.fragment))
