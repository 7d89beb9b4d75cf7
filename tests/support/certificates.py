"""Certificates for tests, made when they are needed and signed by a CA of the test's own.

ca = Authority("fleet")
server = ca.issue("router", tmp_path)            # for 127.0.0.1, ::1 and localhost
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_LOCAL = ("127.0.0.1", "::1", "localhost")
_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority."""

    def __init__(self, name: str = "test-ca") -> None:
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._cert = _built(self._name, self._name, self._key, self._key, is_ca=True)

    def write(self, directory: Path, name: str = "ca") -> Path:
        """The PEM file of the authority's own certificate."""
        path = directory / f"{name}.pem"
        path.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))
        return path

    def issue(self, name: str, directory: Path, hosts: Sequence[str] = _LOCAL, *, days: int = 1) -> Pair:
        """Write NAME.pem and NAME.key: a certificate for `hosts`, for servers and clients alike."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert = _built(_name(name), self._name, key, self._key, hosts=hosts, days=days)
        pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
        pair.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(private_pem(key))
        return pair


def private_pem(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    """The key as PEM, encrypted when there is a password."""
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _built(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    *,
    is_ca: bool = False,
    hosts: Sequence[str] = (),
    days: int = 1,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + days * _DAY)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), False)
    return builder.sign(signer, hashes.SHA256())


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
