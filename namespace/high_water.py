"""The high-water mark: a signed memory of the store's position, on a path the store cannot reach.

Invariant: the mark is written after a commit is durable, so an honest store is never behind it; a store that
is behind, or that has another history at the mark's position, is a restored or rolled-back one. Source:
docs/isolation.md.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from .errors import HighWaterRefused
from .secrets import write_atomically
from .signing import canonical_json, sign_struct, verify_struct

_DOMAIN = b"copyhold.high-water.v1"


class HighWaterMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Audit position and store epoch.

    ``key_change_sequence`` is the last record that changed an API key, ``highest_generation`` the highest any
    namespace has had: what a restore must not fall back behind.
    """

    cluster_id: str
    store_epoch: str
    sequence: int
    digest: str
    key_change_sequence: int
    highest_generation: int
    signature: str = ""


class HighWaterFile:
    """The mark's file."""

    def __init__(self, path: Path, private_key: Ed25519PrivateKey):
        self._path = path
        self._private_key = private_key
        self._public_key = private_key.public_key().public_bytes_raw()

    @property
    def path(self) -> Path:
        return self._path

    def write(self, mark: HighWaterMark) -> None:
        """Sign and replace the mark."""
        write_atomically(self._path, canonical_json(sign_struct(self._private_key, _DOMAIN, mark)) + b"\n")

    def read(self) -> HighWaterMark | None:
        """The mark, None when there is no file. Raises: HighWaterRefused."""
        try:
            document = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise HighWaterRefused(str(self._path), str(error)) from error
        try:
            mark = msgspec.json.decode(document, type=HighWaterMark)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise HighWaterRefused(str(self._path), f"it is unreadable ({error})") from error
        if not verify_struct(self._public_key, _DOMAIN, mark):
            raise HighWaterRefused(str(self._path), "its signature does not verify")
        return mark
