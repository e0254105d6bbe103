"""What the authority keeps in its store, as frozen structs.

Invariant: a record's key fixes its type (the functions below are the only spelling of keys); records are
replaced, never edited. ``*_sequence`` fields are audit sequences, the authority's logical clock: they order
memberships against generations without comparing wall clocks. Contracts: K012, K181.
"""

from __future__ import annotations

from typing import Literal

import msgspec

NamespaceState = Literal["active", "revoking"]
RevocationState = Literal["stopped", "advanced", "floored", "drained", "evidenced", "erased", "certified"]
Outcome = Literal["pending", "confirmed", "ended", "fenced"]

CLUSTER_KEY = "cluster"
TERM_KEY = "term"
TENANTS_KEY = "directory:tenants"
INCARNATIONS_KEY = "directory:incarnations"
AUDIT_POSITION_KEY = "audit:position"


def tenant_key(name: str) -> str:
    return f"tenant:{name}"


def namespace_key(name: str) -> str:
    return f"namespace:{name}"


def api_key_key(key_id: str) -> str:
    return f"key:{key_id}"


def membership_key(incarnation: str) -> str:
    return f"membership:{incarnation}"


def revocation_key(namespace: str) -> str:
    return f"revocation:{namespace}"


def certificate_key(namespace: str, generation_from: int) -> str:
    return f"certificate:{namespace}:{generation_from}"


def audit_key(sequence: int) -> str:
    return f"audit:{sequence:012d}"


class ClusterRecord(msgspec.Struct, frozen=True):
    """Who this store belongs to. ``generation_base`` is what a confirmed restore may have lost."""

    cluster_id: str
    store_epoch: str
    created_at: float
    generation_base: int = 0


class TermRecord(msgspec.Struct, frozen=True):
    """The authority in office: only the holder of this term may write."""

    term: int


class Directory(msgspec.Struct, frozen=True):
    """Names in order of creation; a name listed here whose record is missing is a damaged store."""

    names: tuple[str, ...] = ()


class TenantRecord(msgspec.Struct, frozen=True):
    """A tenant, which is the principal of its keys and namespaces."""

    name: str
    created_at: float
    default_namespace: str
    namespaces: tuple[str, ...]
    key_ids: tuple[str, ...] = ()


class NamespaceRecord(msgspec.Struct, frozen=True):
    """A namespace, its one principal and its generation, which only rises."""

    name: str
    principal: str
    generation: int
    generation_sequence: int
    created_at: float
    state: NamespaceState = "active"
    disabled: bool = False


class KeyRecord(msgspec.Struct, frozen=True):
    """An API key: a peppered digest, never the secret. ``expires_at`` None means never."""

    key_id: str
    principal: str
    digest: bytes
    pepper_version: int
    rights: tuple[str, ...]
    created_at: float
    expires_at: float | None = None
    enabled: bool = True


class IncarnationRecord(msgspec.Struct, frozen=True):
    """One life of a replica; ``rank_public_keys[rank]`` is that rank's Ed25519 key in hexadecimal."""

    incarnation: str
    replica: str
    ranks: int
    rank_public_keys: tuple[str, ...]


class MembershipRecord(msgspec.Struct, frozen=True):
    """Whether and when an incarnation could serve.

    ``fenced``: never renewed again; ``lapsed_sequence``: when its last lease and the skew had passed.
    """

    member: IncarnationRecord
    registered_sequence: int
    leased_sequence: int | None = None
    ended_sequence: int | None = None
    ended_proof: str | None = None
    fenced: bool = False
    lapsed_sequence: int | None = None


class RankEvidence(msgspec.Struct, frozen=True):
    """What one rank measured on its own device memory, signed by that rank's incarnation key.

    ``inventory_*_blocks`` count blocks that hold rows of the namespace below ``generation_new``, before the
    release and after it (so the latter is zero); ``nonzero_bytes`` comes from reading the zeroed blocks back.
    """

    nonce: str
    incarnation: str
    rank: int
    namespace: str
    generation_new: int
    log_index: int
    machine_digest: str
    inventory_before_blocks: int
    inventory_after_blocks: int
    blocks_released: int
    blocks_zeroed: int
    bytes_zeroed: int
    nonzero_bytes: int
    public_key_id: str = ""
    signature: str = ""


class MemberOutcome(msgspec.Struct, frozen=True):
    """What became of the namespace's bytes in one incarnation."""

    incarnation: str
    outcome: Outcome
    detail: str = ""
    evidence: tuple[RankEvidence, ...] = ()


class GatewayAcknowledgement(msgspec.Struct, frozen=True):
    """A gateway's word that no stream of the old generation is open."""

    gateway: str
    streams_closed: int
    acknowledged_at: float


class RevocationRecord(msgspec.Struct, frozen=True):
    """A revocation under way (or the last one done), as far as it has been persisted."""

    namespace: str
    generation_from: int
    generation_to: int
    nonce: str
    state: RevocationState
    requested_at: float
    deadline_at: float
    members: tuple[IncarnationRecord, ...] = ()
    outcomes: tuple[MemberOutcome, ...] = ()
    gateways: tuple[GatewayAcknowledgement, ...] = ()
    streams_closed_at: float | None = None


class CertificateRecord(msgspec.Struct, frozen=True):
    """A certificate exactly as it was issued."""

    namespace: str
    generation_from: int
    document: bytes
