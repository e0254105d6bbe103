"""The audit trail: append-only, hash-chained records and signed heads.

Invariant: record n names the hash of record n-1, so a head (sequence, hash) fixes everything before it; an
edit, a rewrite or a cut tail contradicts a head that was signed and written elsewhere. Records say who did
what to which name; never credentials, secrets, prompts or token ids. Source: docs/isolation.md; K183.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from .errors import TrailBroken
from .signing import canonical_json, sign_struct, verify_struct

TRAIL_START = "0" * 64
HEAD_EVERY_RECORDS = 100
HEAD_EVERY_S = 60.0
_RECORD_DOMAIN = b"copyhold.audit-record.v1\0"
_HEAD_DOMAIN = b"copyhold.audit-head.v1"

AuditDetail = dict[str, str | int | list[str]]


class AuditRecord(msgspec.Struct, frozen=True):
    """One act. ``digest`` covers every other field, ``previous`` the record before."""

    sequence: int
    previous: str
    at: float
    term: int
    actor: str
    action: str
    subject: str
    detail: AuditDetail
    digest: str = ""


class AuditPosition(msgspec.Struct, frozen=True):
    """The last record's sequence and digest; sequence 0 is the empty trail."""

    sequence: int = 0
    digest: str = TRAIL_START


class AuditHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A signed position, kept outside the store."""

    cluster_id: str
    store_epoch: str
    sequence: int
    digest: str
    signed_at: float
    signature: str = ""


class TrailState(msgspec.Struct):
    """What the trail alone says about namespaces and keys; compared with the records at start."""

    generations: dict[str, int] = {}
    disabled_namespaces: set[str] = set()
    enabled_keys: set[str] = set()


def chained(position: AuditPosition, record: AuditRecord) -> AuditRecord:
    """``record`` placed after ``position`` and sealed with its digest."""
    placed = msgspec.structs.replace(record, sequence=position.sequence + 1, previous=position.digest)
    return msgspec.structs.replace(placed, digest=_digest(placed))


def sign_head(private_key: Ed25519PrivateKey, head: AuditHead) -> AuditHead:
    return sign_struct(private_key, _HEAD_DOMAIN, head)


def encode_head(head: AuditHead) -> bytes:
    """The head as a file's content."""
    return canonical_json(head) + b"\n"


def decode_head(document: bytes) -> AuditHead:
    """The head in a file's content. Raises: TrailBroken."""
    try:
        head = msgspec.json.decode(document, type=AuditHead)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TrailBroken(0, f"the head is unreadable ({error})") from error
    if encode_head(head) != document:
        raise TrailBroken(head.sequence, "the head is not in its canonical form")
    return head


def verify_trail(records: Iterable[AuditRecord], head: AuditHead, public_key: bytes) -> int:
    """Check the chain from the first record and that it contains ``head``; returns how many records hold.

    Raises: TrailBroken with the first sequence that does not.
    """
    if not verify_struct(public_key, _HEAD_DOMAIN, head):
        raise TrailBroken(head.sequence, "the head's signature does not verify")
    position = AuditPosition()
    seen_head = head.sequence == 0
    for record in records:
        position = checked_step(position, record)
        if position.sequence == head.sequence:
            if position.digest != head.digest:
                raise TrailBroken(position.sequence, "the trail differs from the signed head")
            seen_head = True
    if not seen_head:
        raise TrailBroken(
            position.sequence + 1, f"the trail ends here, the signed head knows {head.sequence} records"
        )
    return position.sequence


def checked_step(position: AuditPosition, record: AuditRecord) -> AuditPosition:
    """The position after ``record``. Raises: TrailBroken when it does not follow."""
    if record.sequence != position.sequence + 1:
        raise TrailBroken(position.sequence + 1, f"found sequence {record.sequence}")
    if record.previous != position.digest:
        raise TrailBroken(record.sequence, "it does not follow the record before")
    if record.digest != _digest(record):
        raise TrailBroken(record.sequence, "its content was edited")
    return AuditPosition(record.sequence, record.digest)


def replay(state: TrailState, record: AuditRecord) -> None:
    """Fold one record into ``state``."""
    detail = record.detail
    match record.action:
        case "tenant_created" | "namespaces_added":
            generation = _integer(record, "generation")
            for name in _names(record, "namespaces"):
                state.generations[name] = generation
        case "revocation_advanced":
            state.generations[record.subject] = _integer(record, "generation_to")
        case "namespace_disabled":
            state.disabled_namespaces.add(record.subject)
        case "namespace_enabled":
            state.disabled_namespaces.discard(record.subject)
        case "key_created" | "key_enabled":
            state.enabled_keys.add(record.subject)
        case "key_disabled":
            state.enabled_keys.discard(record.subject)
        case "restore_confirmed":
            for name in state.generations:
                state.generations[name] += _integer(record, "generations_added")
            if detail.get("keys") == "suspended":
                state.enabled_keys.clear()
        case _:
            return


def _integer(record: AuditRecord, field: str) -> int:
    value = record.detail.get(field)
    if not isinstance(value, int):
        raise TrailBroken(record.sequence, f"{field} is missing")
    return value


def _names(record: AuditRecord, field: str) -> list[str]:
    value = record.detail.get(field)
    if not isinstance(value, list):
        raise TrailBroken(record.sequence, f"{field} is missing")
    return value


def _digest(record: AuditRecord) -> str:
    blank = msgspec.structs.replace(record, digest="")
    return sha256(_RECORD_DOMAIN + canonical_json(blank)).hexdigest()
