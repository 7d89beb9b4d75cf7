"""Addresses of servers: how others on this machine reach one, and how scripts learn of it."""

from __future__ import annotations

import ipaddress
import os
import re
from contextlib import suppress
from pathlib import Path

_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104  recognised, not bound to

DEFAULT_PORT = 7070
"""The router's, for gRPC."""

_HOST_PORT = re.compile(r"(\[[\w.:%-]{2,253}\]|[\w.-]{1,253}):(\d{1,5})", re.ASCII)
"""A name in the DNS has at most 253 characters (RFC 1035)."""
_DNS_PREFIX = re.compile(r"^dns:(//[^/]*/)?", re.IGNORECASE)
"""Of a name that gRPC looks up, perhaps at a server of its own."""
_OTHER_NAME = re.compile(r"(ipv4|ipv6|unix|unix-abstract|vsock|xds):.+", re.IGNORECASE)


def is_host_port(text: str) -> bool:
    """Whether this is an address to call: host:port, with IPv6 in brackets, and a port from 1 to 65535."""
    match = _HOST_PORT.fullmatch(text)
    return match is not None and 1 <= int(match.group(2)) <= 65535


def server_address(text: str) -> str:
    """What gRPC dials for `text`, as people write it: host:port, or a host alone, which means the router's port.

    Names in gRPC's own notation (`dns:///host:port`, `ipv4:`, `unix:PATH`, `xds:///`) are taken too.
    Raises ValueError, which says what to write.
    """
    text = text.strip()
    if _OTHER_NAME.match(text):
        return text
    place = _DNS_PREFIX.sub("", text)
    if "://" in place:
        raise ValueError(
            f"write host:port, with the router's gRPC port ({DEFAULT_PORT}), not a URL "
            f"({DEFAULT_PORT + 2} is its port for HTTP); got {text!r}"
        )
    if is_host_port(place):
        return text
    if not place.isdecimal() and is_host_port(f"{place}:{DEFAULT_PORT}"):
        return f"{text}:{DEFAULT_PORT}"
    raise ValueError(f"write host:port (IPv6: [host]:port), with a port from 1 to 65535; got {text!r}")


def is_wildcard(host: str) -> bool:
    """Whether a server that listens on `host` does so on every interface: such a host is no address to call."""
    return host in _WILDCARDS


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def local_address(host: str, port: int) -> str:
    """host:port at which a process of this machine calls a server that listens on `host`."""
    if is_wildcard(host):
        host = "127.0.0.1"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def publish(path: Path, address: str) -> None:
    """Write an address to a file: whoever reads it finds the whole address or no file. Raises OSError. Blocks."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(address + "\n")
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, f"cannot write the address file {path}: {error.strerror}") from error


def withdraw(path: Path, address: str) -> None:
    """Remove an address file, unless it tells of somebody else by now. Blocks."""
    with suppress(OSError):
        if path.read_text() == address + "\n":
            path.unlink()
