"""TLS and mutual TLS from PEM files, for gRPC and for HTTP servers.

A server reads its files again when they change, for each connection that is opened from then on: gRPC asks before each
handshake, and an `ssl.SSLContext` is exchanged in its SNI callback, which runs at the beginning of each. gRPC in Python
cannot exchange the certificate of a channel, so one who dials opens another one (`renewed_channel`).

Files are judged by Python's ssl first: gRPC says of a wrong key only that handshakes fail.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import grpc

from radixfleet.certificates import expiry_s
from radixfleet.clock import Clock
from radixfleet.watched_file import UnusableFile, Watched, read_file

SYSTEM_CAS = "system"
"""In the place of a file of CAs: those that the machine trusts."""


@dataclass(frozen=True)
class ClientTls:
    """A client's side of TLS: by which CAs it checks the server, and which certificate it shows."""

    ca: Path | str = SYSTEM_CAS
    """PEM file of the CAs that sign servers' certificates, or SYSTEM_CAS."""
    cert: Path | str | None = None
    """For servers that ask for one: PEM file of our certificate and its chain."""
    key: Path | str | None = None
    """PEM file of its private key."""
    peer_name: str | None = None
    """The name that the server's certificate must carry; None: the host that is dialled."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a channel, from the files as they are now. Raises UnusableFile."""
        cert, key = _pair(self.cert, self.key)
        roots = self._roots()
        if cert is None or key is None:
            return grpc.ssl_channel_credentials(roots)
        check_pair(cert, key)
        return grpc.ssl_channel_credentials(roots, read_file(key), read_file(cert))

    @cached_property
    def watched(self) -> Watched[grpc.ChannelCredentials]:
        """The credentials, made again when the files change: the same for all channels. Raises UnusableFile."""
        files = (self.ca, self.cert, self.key)
        paths = [Path(file) for file in files if file is not None and str(file) != SYSTEM_CAS]
        return Watched(paths, self.credentials)

    @cached_property
    def watched_context(self) -> Watched[ssl.SSLContext]:
        """For HTTPS to others: our CAs beside the machine's, and our certificate. Raises UnusableFile."""
        files = (self.ca, self.cert, self.key)
        return Watched([Path(file) for file in files if file is not None and str(file) != SYSTEM_CAS], self._context)

    def options(self) -> list[tuple[str, str]]:
        """Options of the channel."""
        return [] if self.peer_name is None else [("grpc.ssl_target_name_override", self.peer_name)]

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if str(self.ca) != SYSTEM_CAS:
            _load_cas(context, Path(self.ca))
        cert, key = _pair(self.cert, self.key)
        if cert is not None and key is not None:
            _load_pair(context, cert, key)
        return context

    def _roots(self) -> bytes:
        if str(self.ca) != SYSTEM_CAS:
            check_cas(Path(self.ca))
            return read_file(Path(self.ca))
        bundle = ssl.get_default_verify_paths().cafile
        if bundle is None:
            raise UnusableFile("this machine has no file of trusted CAs: name one with --tls-ca")
        return read_file(Path(bundle))


@dataclass(frozen=True, slots=True)
class _Pem:
    """The contents of a server's files, which fit together."""

    cert: bytes
    key: bytes
    client_ca: bytes | None
    expires_s: float


class ServerTls:
    """The certificate of a server, and the CA of its clients where they must show theirs."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None, clock: Clock | None = None) -> None:
        """PEM files. With `client_ca`, nobody gets in without a certificate that it signed. Raises UnusableFile."""
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        files = [cert, key] if client_ca is None else [cert, key, client_ca]
        self._pem = Watched(files, self._read, clock)
        self._context = Watched(files, self._load_context, clock)

    @property
    def asks_for_certificates(self) -> bool:
        """Whether clients must show one."""
        return self._client_ca is not None

    @property
    def cert_file(self) -> Path:
        """The file of the certificate."""
        return self._cert

    @property
    def expires_s(self) -> float:
        """Unix time at which the certificate, as the file is now, or one of its chain expires. From any thread."""
        return self._pem.current().expires_s

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for a gRPC server. They follow changes of the files."""
        given = self._pem.current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC, on a thread of its own, before each handshake."""
            nonlocal given
            pem = self._pem.current()
            if pem is given:
                return None
            given = pem
            return _configuration(pem)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(given),
            changed,  # type: ignore[arg-type]  # None, for no change, is missing in the stubs
            require_client_authentication=self.asks_for_certificates,
        )

    def ssl_context(self) -> ssl.SSLContext:
        """The context for an HTTP server, which follows changes of the files."""
        front = self._load_context()

        def exchange(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._context.current()

        front.sni_callback = exchange
        return front

    def _read(self) -> _Pem:
        check_pair(self._cert, self._key)
        if self._client_ca is not None:
            check_cas(self._client_ca)
        cert = read_file(self._cert)
        client_ca = read_file(self._client_ca) if self._client_ca is not None else None
        return _Pem(cert, read_file(self._key), client_ca, expiry_s(cert))

    def _load_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        _load_pair(context, self._cert, self._key)
        if self._client_ca is not None:
            _load_cas(context, self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def check_pair(cert: Path, key: Path) -> None:
    """Raises UnusableFile unless `cert` is a certificate and `key` its private key."""
    _load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert, key)


def check_cas(ca: Path) -> None:
    """Raises UnusableFile unless `ca` holds certificates."""
    _load_cas(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ca)


def _configuration(pem: _Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.client_ca)


def _pair(cert: Path | str | None, key: Path | str | None) -> tuple[Path | None, Path | None]:
    if (cert is None) != (key is None):
        raise UnusableFile("a certificate and its key go together: --tls-cert needs --tls-key, and the other way round")
    return (None if cert is None else Path(cert)), (None if key is None else Path(key))


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    # A missing file would be named by neither exception of ssl, nor would a file that is the wrong one of the two.
    if b"-----BEGIN CERTIFICATE-----" not in read_file(cert):
        raise UnusableFile(f"{cert} holds no certificate in PEM form (-----BEGIN CERTIFICATE-----)")
    if b"PRIVATE KEY-----" not in read_file(key):
        raise UnusableFile(f"{key} holds no private key in PEM form (-----BEGIN PRIVATE KEY-----)")
    try:
        context.load_cert_chain(cert, key, password=lambda: _refuse_encrypted(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UnusableFile(f"the private key {key} does not belong to the certificate {cert}") from error
        raise UnusableFile(f"cannot use the certificate {cert} with the key {key}: {error.reason or error}") from error


def _refuse_encrypted(key: Path) -> NoReturn:
    raise UnusableFile(f"the private key {key} is encrypted: take the passphrase off, and guard the file instead")


def _load_cas(context: ssl.SSLContext, ca: Path) -> None:
    if b"-----BEGIN CERTIFICATE-----" not in read_file(ca):
        raise UnusableFile(f"{ca} holds no CA certificate in PEM form (-----BEGIN CERTIFICATE-----)")
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise UnusableFile(f"cannot use the CA certificates in {ca}: {error.reason or error}") from error
