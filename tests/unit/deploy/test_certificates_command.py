"""`radixfleet keys certificates`: what it writes opens our own ports, and nothing is lost."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deploy.commands.keys import keys
from radixfleet.tls import ServerTls


def run(directory: Path, *arguments: str) -> Result:
    return CliRunner().invoke(keys, ["certificates", "--directory", str(directory), *arguments])


def handshake(directory: Path, client: str, server: str = "fleet", host: str = "10.0.0.1") -> None:
    """A client with a certificate calls a server that asks for one. Raises ssl.SSLError where either refuses."""
    context = ssl.create_default_context(cafile=directory / "ca.pem")
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # as from Python 3.13 on
    context.load_cert_chain(directory / f"{client}.pem", directory / f"{client}.key")
    tls = ServerTls(directory / f"{server}.pem", directory / f"{server}.key", directory / "ca.pem")
    ours, theirs = socket.socketpair()
    refusals: list[ssl.SSLError] = []

    def serve() -> None:
        try:
            with tls.ssl_context().wrap_socket(theirs, server_side=True) as end:
                end.sendall(b"in")
        except ssl.SSLError as error:
            refusals.append(error)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        with context.wrap_socket(ours, server_hostname=host) as end:
            end.recv(2)
    finally:
        ours.close()
        serving.join()
    assert not refusals


def test_a_client_and_the_fleet_know_each_other_by_every_name(tmp_path: Path) -> None:
    made = run(tmp_path / "new", "--host", "10.0.0.1", "--host", "gpu-2.example.com", "--client", "me")
    assert (made.exit_code, len(made.stdout.splitlines())) == (0, 6)
    for host in ("10.0.0.1", "gpu-2.example.com", "localhost", "127.0.0.1"):
        handshake(tmp_path / "new", "me", host=host)
    handshake(tmp_path / "new", "fleet")  # router and worker, which dial each other


def test_a_certificate_is_for_its_hosts_and_no_clients_stands_for_the_fleet(tmp_path: Path) -> None:
    run(tmp_path, "--host", "10.0.0.1", "--client", "me")
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        handshake(tmp_path, "me", host="10.0.0.2")
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        handshake(tmp_path, "me", server="me")


def test_private_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    run(tmp_path, "--host", "10.0.0.1", "--client", "me")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*.key")}
    assert modes == {"ca.key": 0o600, "fleet.key": 0o600, "me.key": 0o600}


def test_a_later_client_is_signed_by_the_same_authority(tmp_path: Path) -> None:
    run(tmp_path, "--host", "10.0.0.1")
    authority = (tmp_path / "ca.pem").read_bytes()
    assert run(tmp_path, "--client", "bob").exit_code == 0
    assert (tmp_path / "ca.pem").read_bytes() == authority
    handshake(tmp_path, "bob")


@pytest.mark.parametrize("lost", ["me.pem", "me.key"])
def test_what_is_there_is_not_overwritten(tmp_path: Path, lost: str) -> None:
    run(tmp_path, "--host", "10.0.0.1", "--client", "me")
    (tmp_path / lost).unlink()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    refused = run(tmp_path, "--client", "new", "--client", "me")
    assert refused.exit_code == 1
    assert "is there already: move it away" in refused.output
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_authority_without_its_key_signs_nothing(tmp_path: Path) -> None:
    run(tmp_path, "--client", "me")
    (tmp_path / "ca.key").unlink()
    refused = run(tmp_path, "--client", "bob")
    assert (refused.exit_code, "ca.key" in refused.output) == (1, True)
    assert not (tmp_path / "bob.pem").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "for whom?"),
        (("--host", "10.0.0.1:7070"), "without a port"),
        (("--host", ""), "without a port"),
        (("--client", "ca"), "choose another"),
        (("--client", "../me"), "choose another"),
        (("--client", ""), "length"),
        (("--client", "a" * 65), "length"),
    ],
)
def test_names_that_can_be_none_are_refused_before_anything_is_written(
    tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    refused = run(tmp_path, *arguments)
    assert refused.exit_code == 2
    assert why in refused.output
    assert list(tmp_path.iterdir()) == []
