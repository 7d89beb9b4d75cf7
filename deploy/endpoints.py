"""`--endpoint` and what goes with it: how commands that call a router or a worker learn where it is and what to show.

@click.command()
@endpoint_option
def workers(endpoint: Endpoint) -> None:
    ... Client(endpoint) ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from radixfleet.address import DEFAULT_PORT, is_loopback, server_address
from radixfleet.endpoint import Endpoint
from radixfleet.tls import ClientTls
from radixfleet.watched_file import read_file

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_ENDPOINT = f"127.0.0.1:{DEFAULT_PORT}"


def endpoint_option(command: Command) -> Command:
    """Adds `--endpoint`, TLS and the key; the command gets them as one argument, `endpoint: Endpoint`."""

    @functools.wraps(command)
    def with_endpoint(
        *args: Any,
        endpoint: str,
        tls_ca: str | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        tls_peer_name: str | None,
        api_key: str | None,
        **kwargs: Any,
    ) -> Any:
        tls = _tls(tls_ca, tls_cert, tls_key, tls_peer_name)
        key = _key(api_key)
        if key is not None and tls is None and not is_loopback(_host(endpoint)):
            click.echo(f"warning: the key goes to {endpoint} unencrypted; use --tls-ca", err=True)
        return command(*args, endpoint=Endpoint(endpoint, tls, key), **kwargs)

    decorated: Any = with_endpoint
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]  # click's decorators keep the type, and the stubs do not


def _host(address: str) -> str:
    return (
        "localhost" if address.startswith("unix:") else address.removeprefix("dns:///").rpartition(":")[0].strip("[]")
    )


def _check_endpoint(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    try:
        return server_address(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


_FILE = click.Path(dir_okay=False, path_type=Path)
_OPTIONS = (
    click.option(
        "--endpoint",
        metavar="HOST:PORT",
        envvar="RADIXFLEET_ENDPOINT",
        default=DEFAULT_ENDPOINT,
        show_default=True,
        show_envvar=True,
        callback=_check_endpoint,
        help="Router, or worker, to call.",
    ),
    click.option(
        "--tls-ca",
        metavar="FILE",
        envvar="RADIXFLEET_TLS_CA",
        show_envvar=True,
        help="PEM file of the CA of the server's certificate, or 'system': call with TLS.",
    ),
    click.option(
        "--tls-cert",
        type=_FILE,
        metavar="FILE",
        envvar="RADIXFLEET_TLS_CERT",
        show_envvar=True,
        help="PEM file of your certificate, for servers that ask for one.",
    ),
    click.option(
        "--tls-key",
        type=_FILE,
        metavar="FILE",
        envvar="RADIXFLEET_TLS_KEY",
        show_envvar=True,
        help="PEM file of its private key.",
    ),
    click.option(
        "--tls-peer-name",
        metavar="NAME",
        envvar="RADIXFLEET_TLS_PEER_NAME",
        show_envvar=True,
        help="Name that the server's certificate carries, where it is not the endpoint's host.",
    ),
    click.option(
        "--api-key",
        metavar="KEY",
        envvar="RADIXFLEET_API_KEY",
        show_envvar=True,
        help="Key, or admin token, or @FILE that holds it. Others see the command line: prefer the variable or a file.",
    ),
)


def _tls(ca: str | None, cert: Path | None, key: Path | None, peer_name: str | None) -> ClientTls | None:
    if ca is None:
        if cert is not None or key is not None or peer_name is not None:
            raise click.UsageError("--tls-cert, --tls-key and --tls-peer-name need --tls-ca, which switches TLS on")
        return None
    return ClientTls(ca, cert, key, peer_name)


def _key(given: str | None) -> str | None:
    if given is None or not given.startswith("@"):
        return given or None
    return read_file(Path(given[1:])).decode("utf-8", "replace").partition("\n")[0].strip() or None
