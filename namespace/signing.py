"""Canonical bytes and Ed25519 signatures over structs.

Invariant: what is signed is ``domain || 0x00 || canonical JSON of the struct with its signature blank``; two
kinds of document never share a domain, so a signature of one is none of the other. Keys and signatures are
lower-case hexadecimal, one spelling per value.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from .errors import PublicKeyRefused

_T = TypeVar("_T", bound=msgspec.Struct)

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64


def canonical_json(value: Any) -> bytes:
    """One spelling per value: sorted keys, no spaces."""
    return msgspec.json.encode(value, order="sorted")


def sign_struct(private_key: Ed25519PrivateKey, domain: bytes, value: _T) -> _T:
    """Return ``value`` with its ``signature`` field filled."""
    return msgspec.structs.replace(value, signature=private_key.sign(_signed_bytes(domain, value)).hex())


def verify_struct(public_key: bytes, domain: bytes, value: msgspec.Struct) -> bool:
    """Whether ``value.signature`` is ``public_key``'s over its other fields."""
    signature = parse_hex(getattr(value, "signature", ""), SIGNATURE_BYTES)
    if signature is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _signed_bytes(domain, value))
    except (InvalidSignature, ValueError):
        return False
    return True


def parse_hex(text: str, num_bytes: int) -> bytes | None:
    """The bytes of a lower-case hexadecimal string of that length; None when it is anything else."""
    if len(text) != 2 * num_bytes:
        return None
    try:
        value = bytes.fromhex(text)
    except ValueError:
        return None
    return value if value.hex() == text else None


def public_bytes(private_key: Ed25519PrivateKey) -> bytes:
    """The 32 raw bytes of the public half."""
    return private_key.public_key().public_bytes_raw()


def public_key_id(public_key: bytes) -> str:
    """A short name for a public key: 16 hexadecimal digits of its SHA-256."""
    return sha256(b"copyhold.public-key\0" + public_key).hexdigest()[:16]


def read_public_key(path: Path) -> bytes:
    """Read a public key file (one line of hexadecimal). Raises: PublicKeyRefused."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PublicKeyRefused(str(path), str(error)) from error
    key = parse_hex(text, PUBLIC_KEY_BYTES)
    if key is None:
        raise PublicKeyRefused(str(path), "expected 64 lower-case hexadecimal digits")
    return key


def _signed_bytes(domain: bytes, value: msgspec.Struct) -> bytes:
    return domain + b"\0" + canonical_json(msgspec.structs.replace(value, signature=""))
