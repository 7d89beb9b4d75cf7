"""`radixfleet keys certificates`: an authority of the fleet's own, and certificates for its machines and clients."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import click

from deploy.authority import CA_DAYS, Pem, issue, new_authority
from radixfleet.os_errors import reason_of
from radixfleet.tls import check_pair

_LOCAL = ("localhost", "127.0.0.1", "::1")
_OURS = ("ca", "fleet")


@click.command()
@click.option("--host", "hosts", multiple=True, help="Address or name by which a machine of the fleet is dialled.")
@click.option("--client", "clients", multiple=True, metavar="NAME", help="A client that gets a certificate.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Where to write; default: here.",
)
@click.option("--days", type=click.IntRange(1, CA_DAYS), default=365, show_default=True, help="How long they are good.")
def certificates(hosts: tuple[str, ...], clients: tuple[str, ...], directory: Path, days: int) -> None:
    """Make a certificate for router and workers, fleet.pem, and one for each client, all signed by ca.pem.

    \b
    radixfleet keys certificates --host 10.0.0.1 --host 10.0.0.2 --client me    # ca, fleet and me: .pem and .key
    radixfleet keys certificates --client bob                                   # later: signed by the same ca.pem

    fleet.pem is for the hosts given and for localhost. Nothing is overwritten: to renew one, move its two files away.
    ca.key signs whatever you ask for: keep it off the fleet's machines.
    """
    if not hosts and not clients:
        raise click.UsageError("for whom? --host names a machine of the fleet, --client a client")
    for name in clients:
        if name in _OURS or Path(name).name != name:
            raise click.UsageError(f"--client {name!r} cannot be the name of a client's files: choose another")
    wanted = {"fleet": (*hosts, *_LOCAL)} if hosts else {}
    wanted |= dict.fromkeys(clients, ())
    try:
        _refuse_present(directory, wanted)
        authority, made = _present_authority(directory), {}
        if authority is None:
            authority = made["ca"] = new_authority("radixfleet")
        made |= {name: issue(authority, name, names, days=days) for name, names in wanted.items()}
        directory.mkdir(parents=True, exist_ok=True)
        for name, pem in made.items():
            _write(directory, name, pem)
    except OSError as error:
        raise click.ClickException(reason_of(error)) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _refuse_present(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        for path in _paths(directory, name):
            if path.exists():
                raise click.ClickException(f"{path} is there already: move it away, or choose another --directory")


def _present_authority(directory: Path) -> Pem | None:
    """None where neither of its files is there. Raises UnusableFile of two that do not belong together."""
    cert, key = _paths(directory, "ca")
    if not cert.exists() and not key.exists():
        return None
    check_pair(cert, key)
    return Pem(cert.read_bytes(), key.read_bytes())


def _write(directory: Path, name: str, pem: Pem) -> None:
    """The key is for its owner alone."""
    for path, content, mode in zip(_paths(directory, name), (pem.cert, pem.key), (0o644, 0o600), strict=True):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        click.echo(path)


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.pem", directory / f"{name}.key"
