"""Certificates and node keys of a federation.

`make_keys` writes the keys of a trial: an authority, a server certificate and a key pair for each
node. In a real federation every party makes its own keys and sends only public keys.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from privot.errors import SettingError
from privot.federated.flower.certificates import encode_certificate, sign_certificate

NODE_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CA_FILE = "ca.crt"
SERVER_CERTIFICATE_FILE = "server.crt"
SERVER_KEY_FILE = "server.key"
NODE_KEYS_FILE = "nodes"


def make_keys(folder: Path, node_names: list[str], hosts: list[str]) -> dict[str, Path]:
    """Write the certificates and keys of a trial.

    The private key of the authority is not stored, so a new trial needs new keys.

    Args:
        folder: The new folder for the files.
        node_names: A name for each node.
        hosts: Host names and addresses of the server.

    Returns:
        File name -> path: ``ca.crt``, ``server.crt``, ``server.key``, ``nodes`` (a line for each
        public key) and ``NAME.key`` for each node.

    Raises:
        SettingError: The folder exists, or a name or host is invalid.
    """
    if os.path.lexists(folder):
        raise SettingError(
            f"{folder} already exists, and keys are never overwritten. Choose another folder."
        )
    _check_node_names(node_names)
    authority_key = ec.generate_private_key(ec.SECP384R1())
    server_key = ec.generate_private_key(ec.SECP384R1())
    root = sign_certificate("privot trial authority", authority_key, None, authority_key, [])
    leaf = sign_certificate("privot trial server", server_key, root, authority_key, hosts)
    node_keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in node_names}
    node_lines = [f"{_encode_public_key(key)} {name}\n" for name, key in node_keys.items()]
    contents = {
        CA_FILE: encode_certificate(root),
        SERVER_CERTIFICATE_FILE: encode_certificate(leaf),
        NODE_KEYS_FILE: "".join(node_lines).encode(),
        SERVER_KEY_FILE: _encode_private_key(server_key, serialization.PrivateFormat.PKCS8),
    }
    for name, key in node_keys.items():
        contents[f"{name}.key"] = _encode_private_key(key, serialization.PrivateFormat.OpenSSH)
    folder.mkdir(parents=True, mode=0o700)
    for file_name, content in contents.items():
        with open(
            folder / file_name, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)
        ) as file:
            file.write(content)
    return {file_name: folder / file_name for file_name in contents}


def _check_node_names(node_names: list[str]) -> None:
    for name in node_names:
        if not NODE_NAME_PATTERN.fullmatch(name) or name == "server":
            raise SettingError(
                f"Node name {name!r} is invalid. Use at most 64 letters, digits, '.', '_' and '-'; "
                "'server' is reserved."
            )
    if len(set(node_names)) < len(node_names) or not node_names:
        raise SettingError("At least one node name is needed, and all names must differ.")


def read_node_keys(file: Path) -> dict[str, bytes]:
    """Read the public keys of the nodes that may take part.

    Args:
        file: Lines as ``ssh-keygen -t ecdsa -b 384 -C NAME`` writes them: type, key, name.

    Returns:
        Name -> public key in PEM format.

    Raises:
        SettingError: The file cannot be read, or a line is invalid or repeated.
    """
    try:
        lines = [
            line.split()
            for line in file.read_text().splitlines()
            if line.strip() and not line.startswith("#")
        ]
    except (OSError, UnicodeDecodeError):
        raise SettingError(
            f"{file} is no readable list of nodes. Each line needs a type, a public key and a name."
        ) from None
    node_keys: dict[str, bytes] = {}
    for words in lines:
        name = words[2] if len(words) == 3 else ""
        try:
            key = serialization.load_ssh_public_key(" ".join(words[:2]).encode())
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not NODE_NAME_PATTERN.fullmatch(name) or not isinstance(key, ec.EllipticCurvePublicKey):
            raise SettingError(
                f"{file}: each line needs a type, a public key on an elliptic curve "
                "(such as ecdsa-sha2-nistp384) and a name."
            )
        pem = key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        if name in node_keys or pem in node_keys.values():
            raise SettingError(f"{file}: the name or the key of {name} is listed twice.")
        node_keys[name] = pem
    if not node_keys:
        raise SettingError(f"{file} lists no node.")
    return node_keys


def _encode_public_key(key: ec.EllipticCurvePrivateKey) -> str:
    public_key = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return public_key.decode()


def _encode_private_key(
    key: ec.EllipticCurvePrivateKey, private_format: serialization.PrivateFormat
) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, private_format, serialization.NoEncryption()
    )
