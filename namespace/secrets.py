"""The authority's long-lived secrets, one 0600 file each.

Owns: root, versioned pepper, grant and certificate signing keys, store MAC key. Invariant: a secret is read
only from a regular file of our own that neither group nor others can open; ``store-mac.key`` is created
last, so a folder without it has never protected a record and may be completed, and a folder with it must be
complete. Randomness comes in as a token source. Source: docs/isolation.md.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from secrets import token_bytes

import msgspec
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .errors import SecretFileDamaged, SecretFileExposed, SecretsIncomplete
from .signing import public_bytes

TokenSource = Callable[[int], bytes]

SECRET_BYTES = 32
_PEPPER = "pepper-{version}.key"
_ROOT = "root.key"
_GRANT = "grant-signing.key"
_CERTIFICATE = "certificate-signing.key"
_STORE_MAC = "store-mac.key"
_CREATION_ORDER = (_ROOT, _PEPPER.format(version=1), _GRANT, _CERTIFICATE, _STORE_MAC)


class Secrets:
    """All secrets of one authority; its fields never leave the authority's process."""

    def __init__(
        self, root: bytes, peppers: dict[int, bytes], signing_keys: tuple[bytes, bytes], store_mac: bytes
    ):
        self._root = root
        self._peppers = peppers
        self.grant_key = Ed25519PrivateKey.from_private_bytes(signing_keys[0])
        self.certificate_key = Ed25519PrivateKey.from_private_bytes(signing_keys[1])
        self.store_mac_key = store_mac

    def __repr__(self) -> str:
        return "Secrets(...)"

    @classmethod
    def load_or_create(cls, directory: Path, token_source: TokenSource = token_bytes) -> Secrets:
        """Read the secrets, creating them on the first start.

        Raises: SecretFileExposed, SecretFileDamaged, SecretsIncomplete; existing files are as before.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        in_use = os.path.lexists(directory / _STORE_MAC)
        for name in _CREATION_ORDER:
            path = directory / name
            if os.path.lexists(path):
                continue
            if in_use:
                raise SecretsIncomplete(str(path))
            _create(path, token_source(SECRET_BYTES))
        _sync_directory(directory)
        secrets = cls._load(directory)
        secrets.export_public_keys(directory)
        return secrets

    @classmethod
    def _load(cls, directory: Path) -> Secrets:
        peppers: dict[int, bytes] = {}
        while os.path.lexists(path := directory / _PEPPER.format(version=len(peppers) + 1)):
            peppers[len(peppers) + 1] = _read(path)
        return cls(
            _read(directory / _ROOT),
            peppers,
            (_read(directory / _GRANT), _read(directory / _CERTIFICATE)),
            _read(directory / _STORE_MAC),
        )

    @property
    def pepper_version(self) -> int:
        """The version new keys are made under."""
        return len(self._peppers)

    @property
    def grant_public_key(self) -> bytes:
        return public_bytes(self.grant_key)

    @property
    def certificate_public_key(self) -> bytes:
        return public_bytes(self.certificate_key)

    def pepper(self, version: int) -> bytes:
        """The pepper of that version; an unknown one gives the current pepper, so the digest differs."""
        return self._peppers.get(version, self._peppers[self.pepper_version])

    def rotate_pepper(self, directory: Path, token_source: TokenSource = token_bytes) -> int:
        """Add a pepper; keys made before keep the one they were made under."""
        version = self.pepper_version + 1
        path = directory / _PEPPER.format(version=version)
        _create(path, token_source(SECRET_BYTES))
        _sync_directory(directory)
        self._peppers[version] = _read(path)
        return version

    def namespace_secret(self, cluster_id: str, store_epoch: str, namespace: str, generation: int) -> bytes:
        """K(ns, g): 32 bytes bound to cluster, store epoch, namespace and generation."""
        info = msgspec.msgpack.encode(
            ("copyhold.namespace-secret.v1", cluster_id, store_epoch, namespace, generation)
        )
        return HKDF(hashes.SHA256(), SECRET_BYTES, salt=None, info=info).derive(self._root)

    def export_public_keys(self, directory: Path) -> None:
        """Write ``grant.pub`` and ``certificate.pub`` (hexadecimal, world readable) beside the secrets."""
        for name, key in (
            ("grant.pub", self.grant_public_key),
            ("certificate.pub", self.certificate_public_key),
        ):
            write_atomically(directory / name, key.hex().encode() + b"\n", mode=0o644)


def derive_key(secret: bytes, purpose: str) -> bytes:
    """A 32-byte subkey for one purpose."""
    return HKDF(hashes.SHA256(), SECRET_BYTES, salt=None, info=b"copyhold." + purpose.encode()).derive(secret)


def write_atomically(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace ``path`` so that a crash leaves the old or the new content, and the new one is on disk."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.new")
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        os.fchmod(descriptor, mode)
        _write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    staging.replace(path)
    _sync_directory(path.parent)


def _create(path: Path, secret: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        _write_all(descriptor, secret)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise SecretsIncomplete(str(path)) from error
    except OSError as error:
        raise SecretFileExposed(
            str(path), f"it cannot be opened as a regular file ({error.strerror})"
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SecretFileExposed(str(path), "it is not a regular file")
        if status.st_mode & 0o077:
            raise SecretFileExposed(
                str(path), f"its mode is {stat.S_IMODE(status.st_mode):04o}, expected 0600"
            )
        if status.st_uid != os.geteuid():
            raise SecretFileExposed(str(path), f"its owner is user {status.st_uid}")
        content = os.read(descriptor, SECRET_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) != SECRET_BYTES:
        raise SecretFileDamaged(str(path), f"it holds {len(content)} bytes, expected {SECRET_BYTES}")
    return content


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
