"""Grants: the authority's short-lived, signed permission to look up and publish in one namespace.

Invariant: every field is under the signature; a verifier holds only the public key. Signature checks are
cached by signature *and* content; time, floors and disabled keys are checked on every use. A grant lives 60 s
with 5 s of skew and may be used many times. Contracts: K013, K016; source: docs/isolation.md.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from .errors import (
    GrantBelowFloor,
    GrantExpired,
    GrantForged,
    GrantKeyDisabled,
    GrantNamespaceDisabled,
    GrantNotYetValid,
    GrantWrongAudience,
    GrantWrongCluster,
    GrantWrongEpoch,
)
from .floors import Floors

GRANT_LIFETIME_S = 60.0
GRANT_SKEW_S = 5.0
RIGHTS = ("reuse", "publish")
_DOMAIN = b"copyhold.grant.v1\0"


class Grant(msgspec.Struct, frozen=True):
    """One permission. Times are seconds since the epoch; ``signature`` covers every other field."""

    grant_id: str
    key_id: str
    principal: str
    namespace: str
    generation: int
    rights: tuple[str, ...]
    cluster_id: str
    store_epoch: str
    audience: str
    term: int
    issued_at: float
    expires_at: float
    signature: bytes = b""

    def allows(self, right: str) -> bool:
        """Whether the grant carries that right."""
        return right in self.rights


def sign_grant(private_key: Ed25519PrivateKey, grant: Grant) -> Grant:
    """The grant with its signature."""
    return msgspec.structs.replace(grant, signature=private_key.sign(_signed_bytes(grant)))


def encode_grant(grant: Grant) -> bytes:
    """Bytes for a wire or a header."""
    return msgspec.msgpack.encode(grant)


def decode_grant(encoded: bytes) -> Grant:
    """The grant in ``encoded``. Raises: GrantForged when it is none."""
    try:
        return msgspec.msgpack.decode(encoded, type=Grant)
    except msgspec.MsgspecError as error:
        raise GrantForged() from error


class GrantVerifier:
    """Verifies grants of one cluster, store epoch and audience with the authority's public key."""

    def __init__(
        self, public_key: bytes, cluster_id: str, store_epoch: str, audience: str, capacity: int = 4096
    ):
        self._public_key = Ed25519PublicKey.from_public_bytes(public_key)
        self._cluster_id = cluster_id
        self._store_epoch = store_epoch
        self._audience = audience
        self._capacity = capacity
        self._verified: OrderedDict[bytes, Grant] = OrderedDict()

    @property
    def cached_grants(self) -> int:
        """How many verified signatures are remembered."""
        return len(self._verified)

    def verify(self, grant: Grant, now_s: float, floors: Floors) -> Grant:
        """Return the grant if it may be used now.

        Raises: a GrantRefused subclass; nothing was looked up and a forged grant is never cached.
        """
        self._check_signature(grant)
        if grant.cluster_id != self._cluster_id:
            raise GrantWrongCluster()
        if grant.store_epoch != self._store_epoch:
            raise GrantWrongEpoch()
        if grant.audience != self._audience:
            raise GrantWrongAudience(grant.audience)
        if now_s >= grant.expires_at + GRANT_SKEW_S:
            raise GrantExpired(grant.expires_at)
        if now_s < grant.issued_at - GRANT_SKEW_S:
            raise GrantNotYetValid(grant.issued_at)
        floor = floors.generation(grant.namespace)
        if grant.generation < floor:
            raise GrantBelowFloor(grant.namespace, grant.generation, floor)
        if grant.namespace in floors.disabled_namespaces:
            raise GrantNamespaceDisabled()
        if grant.key_id in floors.disabled_keys:
            raise GrantKeyDisabled()
        return grant

    def _check_signature(self, grant: Grant) -> None:
        if self._verified.get(grant.signature) == grant:
            self._verified.move_to_end(grant.signature)
            return
        try:
            self._public_key.verify(grant.signature, _signed_bytes(grant))
        except InvalidSignature as error:
            raise GrantForged() from error
        self._verified[grant.signature] = grant
        while len(self._verified) > self._capacity:
            self._verified.popitem(last=False)


def _signed_bytes(grant: Grant) -> bytes:
    return _DOMAIN + msgspec.msgpack.encode(msgspec.structs.replace(grant, signature=b""))
