"""API keys: ``ch_<key id>_<256 random bits>``, stored only as a peppered digest.

Invariant: the secret half exists in the credential string alone; the store holds HMAC-SHA-256 of it under a
versioned pepper, bound to the key id. A digest is always computed and compared in constant time, also for a
key that does not exist. Source: docs/isolation.md; K180.
"""

from __future__ import annotations

import hmac
import re
from hashlib import sha256

import msgspec

from .secrets import TokenSource

_CREDENTIAL = re.compile(r"ch_([0-9a-f]{16})_([0-9a-f]{64})")
_ABSENT_KEY_ID = "0" * 16


class ParsedCredential(msgspec.Struct, frozen=True):
    """A credential taken apart; when it is none, ``well_formed`` is false and the fields are dummies."""

    key_id: str
    secret: bytes
    well_formed: bool

    def __repr__(self) -> str:
        return f"ParsedCredential(key_id={self.key_id!r}, ...)"


def new_credential(token_source: TokenSource) -> ParsedCredential:
    """Draw a key id (64 bits) and a secret (256 bits)."""
    return ParsedCredential(token_source(8).hex(), token_source(32), True)


def spell_credential(credential: ParsedCredential) -> str:
    """The string that the tenant keeps."""
    return f"ch_{credential.key_id}_{credential.secret.hex()}"


def parse_credential(text: str) -> ParsedCredential:
    """Take a credential apart; what is not one gives a dummy so that callers do the same work."""
    match = _CREDENTIAL.fullmatch(text) if len(text) <= 128 else None
    if match is None:
        return ParsedCredential(_ABSENT_KEY_ID, bytes(32), False)
    return ParsedCredential(match.group(1), bytes.fromhex(match.group(2)), True)


def credential_digest(pepper: bytes, credential: ParsedCredential) -> bytes:
    """HMAC-SHA-256 of key id and secret under one pepper."""
    message = b"copyhold.api-key.v1\0" + credential.key_id.encode() + b"\0" + credential.secret
    return hmac.new(pepper, message, sha256).digest()


def digests_equal(left: bytes, right: bytes) -> bool:
    """Constant-time comparison."""
    return hmac.compare_digest(left, right)
