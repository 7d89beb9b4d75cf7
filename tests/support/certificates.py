"""Certificates for tests, made when they are needed and signed by a CA of the test's own.

ca = Authority("fleet")
server = ca.issue("router", tmp_path)            # for 127.0.0.1, ::1 and localhost
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from deploy.authority import issue, new_authority

_LOCAL = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Pair:
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority."""

    def __init__(self, name: str = "test-ca") -> None:
        self._pem = new_authority(name)

    def write(self, directory: Path, name: str = "ca") -> Path:
        """The PEM file of the authority's own certificate."""
        path = directory / f"{name}.pem"
        path.write_bytes(self._pem.cert)
        return path

    def issue(self, name: str, directory: Path, hosts: Sequence[str] = _LOCAL, *, days: int = 1) -> Pair:
        """Write NAME.pem and NAME.key: a certificate for `hosts`, for servers and clients alike."""
        made = issue(self._pem, name, hosts, days=days)
        pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
        pair.cert.write_bytes(made.cert)
        pair.key.write_bytes(made.key)
        return pair


def private_pem(key: ec.EllipticCurvePrivateKey, password: bytes) -> bytes:
    """The key as PEM, encrypted."""
    encryption = serialization.BestAvailableEncryption(password)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
