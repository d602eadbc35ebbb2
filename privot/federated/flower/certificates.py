"""X.509 certificates for a trial of a federation."""

from __future__ import annotations

import datetime
import ipaddress
import re

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from privot.errors import SettingError

VALIDITY_DAYS = 365
UNUSED_KEY_USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "encipher_only",
    "decipher_only",
)


def sign_certificate(
    common_name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    signing_key: ec.EllipticCurvePrivateKey,
    hosts: list[str],
) -> x509.Certificate:
    """Sign the certificate of an authority or of a server.

    Args:
        common_name: Name of the certificate's subject.
        key: Key of the subject.
        issuer: Certificate of the authority; None to sign the authority's own certificate.
        signing_key: Key of the authority.
        hosts: Host names and addresses of the server; not used for an authority.

    Returns:
        The certificate.
    """
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.datetime.now(datetime.UTC)
    is_authority = issuer is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=VALIDITY_DAYS))
        .add_extension(
            x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()),
            critical=False,
        )
    )
    if is_authority:
        key_usage = x509.KeyUsage(
            **dict.fromkeys(UNUSED_KEY_USES, False), key_cert_sign=True, crl_sign=True
        )
        builder = builder.add_extension(key_usage, critical=True)
    else:
        host_names = x509.SubjectAlternativeName([_parse_host(host) for host in hosts])
        server_auth = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(host_names, critical=False)
        builder = builder.add_extension(server_auth, critical=False)
    return builder.sign(signing_key, hashes.SHA384())


def _parse_host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9.-]{1,253}", text):
            raise SettingError(
                f"Host {text!r} is invalid. Give a host name or an address without a port."
            ) from None
        return x509.DNSName(text)


def encode_certificate(certificate: x509.Certificate) -> bytes:
    """Encode a certificate in PEM format."""
    return certificate.public_bytes(serialization.Encoding.PEM)
