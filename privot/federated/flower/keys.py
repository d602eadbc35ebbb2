"""Certificates and keys for a trial: an authority, a server that it vouches for, a key pair for each node. For a real federation each
party makes its own, and only public halves travel."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from privot.errors import SettingError

DAYS = 365
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CA = "ca.crt"
CERTIFICATE = "server.crt"
KEY = "server.key"
NODES = "nodes"


def make_keys(folder: Path, names: list[str], hosts: list[str]) -> dict[str, Path]:
    """Write ``ca.crt``, ``server.crt``, ``server.key``, ``nodes`` (public keys, a line each) and ``NAME.key`` for each node.

    The authority's own key is not kept: a new trial makes a new one.
    """
    if os.path.lexists(folder):
        raise SettingError(
            f"{folder} is there already: keys are never written over; name another folder"
        )
    if bad := [name for name in names if not NAME.fullmatch(name) or name == "server"]:
        raise SettingError(
            f"node {bad[0]!r}: letters, digits, '.', '_' and '-', at most 64, and not 'server'"
        )
    if len(set(names)) < len(names) or not names:
        raise SettingError("nodes: one name for each, and at least one")
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root = _certificate("privot trial authority", authority, None, authority, [])
    leaf = _certificate("privot trial server", server, root, authority, hosts)
    folder.mkdir(parents=True, mode=0o700)
    made = {CA: _pem(root), CERTIFICATE: _pem(leaf)}
    secret = {KEY: _private(server, serialization.PrivateFormat.PKCS8)}
    lines = []
    for name in names:
        pair = ec.generate_private_key(ec.SECP384R1())
        secret[f"{name}.key"] = _private(pair, serialization.PrivateFormat.OpenSSH)
        public = pair.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        lines.append(f"{public.decode()} {name}\n")
    made[NODES] = "".join(lines).encode()
    for each, data in (made | secret).items():
        with open(
            folder / each, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)
        ) as file:
            file.write(data)
    return {each: folder / each for each in made | secret}


def read_nodes(file: Path) -> dict[str, bytes]:
    """Name and public key (PEM) of each node that may take part, from lines as ``ssh-keygen -t ecdsa -b 384 -C NAME`` writes them."""
    try:
        lines = [
            line.split()
            for line in file.read_text().splitlines()
            if line.strip() and not line.startswith("#")
        ]
    except (OSError, UnicodeDecodeError):
        raise SettingError(
            f"{file}: no readable list of nodes; it has a line for each: type, public key, name"
        ) from None
    found: dict[str, bytes] = {}
    for line in lines:
        name = line[2] if len(line) == 3 else ""
        try:
            key = serialization.load_ssh_public_key(" ".join(line[:2]).encode())
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not NAME.fullmatch(name) or not isinstance(key, ec.EllipticCurvePublicKey):
            raise SettingError(
                f"{file}: each line has a type, a public key (ecdsa-sha2-nistp384 or another of these curves) and a name"
            )
        pem = key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        if name in found or pem in found.values():
            raise SettingError(f"{file}: {name} is there twice, by its name or by its key")
        found[name] = pem
    if not found:
        raise SettingError(f"{file}: no node is listed")
    return found


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    hosts: list[str],
) -> x509.Certificate:
    called = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(called)
        .issuer_name(issuer.subject if issuer else called)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(
            x509.BasicConstraints(ca=issuer is None, path_length=0 if issuer is None else None),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if issuer:
        made = made.add_extension(
            x509.SubjectAlternativeName([_host(each) for each in hosts]), critical=False
        )
        made = made.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
    else:
        no = dict.fromkeys(
            (
                "digital_signature",
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "encipher_only",
                "decipher_only",
            ),
            False,
        )
        made = made.add_extension(
            x509.KeyUsage(**no, key_cert_sign=True, crl_sign=True), critical=True
        )
    return made.sign(signer, hashes.SHA384())


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9.-]{1,253}", text):
            raise SettingError(f"host {text!r}: a name or an address, without a port") from None
        return x509.DNSName(text)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
