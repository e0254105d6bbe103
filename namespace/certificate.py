"""Revocation certificates: the authority's signed record of what each rank reported and measured.

Invariant: a certificate is one canonical JSON document; every byte of it is under the signature or is the
signature, so any change shows. It detects faults, omissions and later edits; it does not defend against a
malicious rank, host or job submitter, and says so. Verification needs the document and the public key alone.
Contracts: K181; source: docs/isolation.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from .records import GatewayAcknowledgement, IncarnationRecord, MemberOutcome, RankEvidence
from .signing import (
    PUBLIC_KEY_BYTES,
    canonical_json,
    parse_hex,
    public_bytes,
    public_key_id,
    read_public_key,
    sign_struct,
    verify_struct,
)

SCHEMA_VERSION = 1
RESIDUAL = (
    "This records what each rank reported and measured. It detects faults, omissions and later edits; "
    "it does not defend against a malicious rank, host or job submitter."
)
NOT_COVERED = (
    "host memory tier: this deployment has none",
    "session K/V tiers: this deployment has none",
    "backups of the stores and of the host, by whatever name",
    "swap space and core dumps of the host",
    "logs and copies kept by clients",
    "copies of recorded ledger logs, and such logs on hosts where no replica records any more",
)
GENERATION_LOSS = (
    "store durability: the configuration accepts that a crash of the store may lose a generation"
)
_CERTIFICATE_DOMAIN = b"copyhold.certificate.v1"
_EVIDENCE_DOMAIN = b"copyhold.rank-evidence.v1"

CertificateOutcome = Literal["complete", "fenced-incomplete"]


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One revocation of one generation; ``members`` are exactly the incarnations that held a lease in it."""

    schema_version: int
    cluster_id: str
    store_epoch: str
    namespace: str
    generation_from: int
    generation_to: int
    nonce: str
    audit_sequence: int
    audit_digest: str
    term: int
    requested_at: float
    streams_closed_at: float
    issued_at: float
    outcome: CertificateOutcome
    members: tuple[IncarnationRecord, ...]
    outcomes: tuple[MemberOutcome, ...]
    gateways: tuple[GatewayAcknowledgement, ...]
    not_covered: tuple[str, ...]
    residual: str
    signature: str = ""


class CertificateCheck(msgspec.Struct, frozen=True):
    """One computed check."""

    name: str
    ok: bool
    detail: str


class CertificateReport(msgspec.Struct, frozen=True):
    """All checks of one document; ``outcome`` is the document's own word, empty when it cannot be read."""

    ok: bool
    outcome: str
    checks: tuple[CertificateCheck, ...]


class RankSigner:
    """A rank's incarnation key: made at start, registered with the authority, never written down."""

    def __init__(self, seed: bytes):
        self._private_key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = public_bytes(self._private_key)

    def sign(self, evidence: RankEvidence) -> RankEvidence:
        """The evidence with key id and signature."""
        named = msgspec.structs.replace(evidence, public_key_id=public_key_id(self.public_key))
        return sign_struct(self._private_key, _EVIDENCE_DOMAIN, named)


def issue_certificate(private_key: Ed25519PrivateKey, certificate: Certificate) -> bytes:
    """Sign and spell a certificate."""
    return canonical_json(sign_struct(private_key, _CERTIFICATE_DOMAIN, certificate))


def parse_certificate(document: bytes) -> Certificate:
    """The certificate in ``document``, unverified. Raises: msgspec.MsgspecError."""
    return msgspec.json.decode(document, type=Certificate)


def overall_outcome(outcomes: Iterable[MemberOutcome]) -> CertificateOutcome:
    """``complete`` only when every member is confirmed or ended."""
    return (
        "complete"
        if all(entry.outcome in ("confirmed", "ended") for entry in outcomes)
        else "fenced-incomplete"
    )


class EvidenceQuestion(msgspec.Struct, frozen=True):
    """What evidence must answer: the fresh nonce, the namespace and its new generation."""

    nonce: str
    namespace: str
    generation_new: int


def member_faults(
    evidence: Iterable[RankEvidence], member: IncarnationRecord, question: EvidenceQuestion
) -> list[str]:
    """Everything that keeps ``evidence`` from confirming all ranks of ``member``; empty when it confirms."""
    faults: list[str] = []
    digests: dict[int, str] = {}
    ranks: list[int] = []
    for entry in evidence:
        ranks.append(entry.rank)
        faults += [
            f"{member.incarnation} rank {entry.rank} {fault}"
            for fault in _rank_faults(entry, member, question)
        ]
        if digests.setdefault(entry.log_index, entry.machine_digest) != entry.machine_digest:
            faults.append(f"{member.incarnation} ranks differ at log index {entry.log_index}")
    if sorted(ranks) != list(range(member.ranks)):
        faults.append(
            f"{member.incarnation} gave evidence of ranks {sorted(ranks)}, expected {member.ranks} ranks"
        )
    return faults


def _rank_faults(evidence: RankEvidence, member: IncarnationRecord, question: EvidenceQuestion) -> list[str]:
    if evidence.incarnation != member.incarnation or not 0 <= evidence.rank < len(member.rank_public_keys):
        return ["is not of a registered rank"]
    faults = []
    key = parse_hex(member.rank_public_keys[evidence.rank], PUBLIC_KEY_BYTES)
    if key is None or evidence.public_key_id != public_key_id(key):
        faults.append("names another key")
    elif not verify_struct(key, _EVIDENCE_DOMAIN, evidence):
        faults.append("signature does not verify")
    if evidence.nonce != question.nonce:
        faults.append("answers another nonce")
    if evidence.namespace != question.namespace or evidence.generation_new != question.generation_new:
        faults.append(f"is about generation {evidence.generation_new} of {evidence.namespace!r}")
    if evidence.nonzero_bytes != 0:
        faults.append(f"found {evidence.nonzero_bytes} nonzero bytes")
    if evidence.blocks_zeroed < evidence.blocks_released:
        faults.append(f"zeroed {evidence.blocks_zeroed} of {evidence.blocks_released} released blocks")
    if evidence.inventory_after_blocks != 0:
        faults.append(f"still holds {evidence.inventory_after_blocks} blocks")
    if evidence.blocks_zeroed > 0 and evidence.bytes_zeroed <= 0:
        faults.append("zeroed blocks but no bytes")
    return faults


def verify_certificate(document: bytes, public_key: bytes) -> CertificateReport:
    """Check a certificate offline. Never raises for a bad document: the report says what does not hold."""
    try:
        certificate = parse_certificate(document)
        canonical = canonical_json(certificate) == document
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return CertificateReport(False, "", (CertificateCheck("document", False, f"unreadable: {error}"),))
    checks = [_check("document", [] if canonical else ["is not in its canonical form"])]
    signed = verify_struct(public_key, _CERTIFICATE_DOMAIN, certificate)
    checks.append(_check("signature", [] if signed else ["is not the authority's"]))
    version = certificate.schema_version
    checks.append(_check("schema_version", [] if version == SCHEMA_VERSION else [f"is {version}"]))
    checks += [
        _check("generation_step", _generation_faults(certificate)),
        _check("times", _time_faults(certificate)),
        _check("members", _member_faults(certificate)),
        _check("evidence", _all_evidence_faults(certificate)),
        _check("outcome", _outcome_faults(certificate)),
    ]
    return CertificateReport(all(check.ok for check in checks), certificate.outcome, tuple(checks))


def verify_certificate_file(document_path: Path, public_key_path: Path) -> CertificateReport:
    """Check a certificate file with a public key file. Raises: PublicKeyRefused, OSError (the document)."""
    public_key = read_public_key(public_key_path)
    return verify_certificate(document_path.read_bytes(), public_key)


def _check(name: str, faults: list[str]) -> CertificateCheck:
    return CertificateCheck(name, not faults, "; ".join(faults) if faults else "holds")


def _generation_faults(certificate: Certificate) -> list[str]:
    before, after = certificate.generation_from, certificate.generation_to
    return [] if before >= 1 and after == before + 1 else [f"{before} -> {after} is not one step"]


def _time_faults(certificate: Certificate) -> list[str]:
    last = max([certificate.streams_closed_at, *(ack.acknowledged_at for ack in certificate.gateways)])
    return [] if certificate.issued_at >= last else ["issued before the last gateway acknowledged"]


def _member_faults(certificate: Certificate) -> list[str]:
    members = sorted(member.incarnation for member in certificate.members)
    reported = sorted(entry.incarnation for entry in certificate.outcomes)
    faults = []
    if len(set(members)) != len(members) or len(set(reported)) != len(reported):
        faults.append("an incarnation is listed twice")
    if members != reported:
        faults.append(f"members {members} and reported outcomes {reported} differ")
    faults += [
        f"{member.incarnation} lists {len(member.rank_public_keys)} keys for {member.ranks} ranks"
        for member in certificate.members
        if len(member.rank_public_keys) != member.ranks
    ]
    return faults


def _all_evidence_faults(certificate: Certificate) -> list[str]:
    members = {member.incarnation: member for member in certificate.members}
    question = EvidenceQuestion(certificate.nonce, certificate.namespace, certificate.generation_to)
    faults = []
    for entry in certificate.outcomes:
        member = members.get(entry.incarnation)
        if member is not None and entry.outcome == "confirmed":
            faults += member_faults(entry.evidence, member, question)
    return faults


def _outcome_faults(certificate: Certificate) -> list[str]:
    expected = overall_outcome(certificate.outcomes)
    faults = (
        []
        if certificate.outcome == expected
        else [f"says {certificate.outcome}, the evidence says {expected}"]
    )
    faults += [
        f"{entry.incarnation} is pending" for entry in certificate.outcomes if entry.outcome == "pending"
    ]
    return faults
