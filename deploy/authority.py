"""A certificate authority of the fleet's own, and the certificates it signs."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_DAYS = 3650
_DNS_NAME = re.compile(r"(?=.{1,253}$)(\*\.)?[\w-]+(\.[\w-]+)*", re.ASCII)
_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pem:
    """A certificate and its private key, as PEM."""

    cert: bytes
    key: bytes


def new_authority(name: str) -> Pem:
    """An authority, good for CA_DAYS, that signs certificates and no other authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _builder(name, key, CA_DAYS)
        .issuer_name(_name(name))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return _signed(builder, key, key)


def issue(authority: Pem, name: str, hosts: Sequence[str], *, days: int) -> Pem:
    """A certificate of `name`, good for `days`, signed by `authority`.

    `hosts`, addresses or DNS names, make it one of a server that may dial others, too; without them it is a client's,
    which nobody takes for a server. Raises ValueError of names and authorities that cannot be used.
    """
    signer = serialization.load_pem_private_key(authority.key, None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ValueError("the key of the authority is none of an elliptic curve")  # noqa: TRY004  it was read
    ca = x509.load_pem_x509_certificate(authority.cert)
    key = ec.generate_private_key(ec.SECP256R1())
    roles = [ExtendedKeyUsageOID.SERVER_AUTH] if hosts else []
    builder = (
        _builder(name, key, days)
        .issuer_name(ca.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(x509.ExtendedKeyUsage([*roles, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return _signed(builder, key, signer)


def _builder(name: str, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    """Good from a day ago on: clocks differ."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + days * _DAY)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> Pem:
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Pem(builder.sign(signer, hashes.SHA256()).public_bytes(pem), private)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if _DNS_NAME.fullmatch(host):
            return x509.DNSName(host)
        raise ValueError(f"a host is an IP address or a DNS name, without a port; got {host!r}") from None
