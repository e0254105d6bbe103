"""Certificates: they verify offline, and no changed byte, missing rank or wrong measurement does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from copyhold.namespace.certificate import (
    NOT_COVERED,
    RESIDUAL,
    Certificate,
    RankSigner,
    issue_certificate,
    parse_certificate,
    verify_certificate,
    verify_certificate_file,
)
from copyhold.namespace.errors import PublicKeyRefused
from copyhold.namespace.records import GatewayAcknowledgement, IncarnationRecord, MemberOutcome, RankEvidence

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
SIGNERS = [RankSigner(bytes([rank + 1]) * 32) for rank in range(2)]
MEMBER = IncarnationRecord("r1", "replica-0", 2, tuple(signer.public_key.hex() for signer in SIGNERS))


def evidence(rank: int, signer: RankSigner | None = None, **change: object) -> RankEvidence:
    base = RankEvidence(
        nonce="ab" * 32,
        incarnation="r1",
        rank=rank,
        namespace="acme",
        generation_new=2,
        log_index=40,
        machine_digest="cd" * 16,
        inventory_before_blocks=5,
        inventory_after_blocks=0,
        blocks_released=5,
        blocks_zeroed=6,
        bytes_zeroed=4096,
        nonzero_bytes=0,
    )
    return (signer or SIGNERS[rank]).sign(msgspec.structs.replace(base, **change))


def certificate(**change: object) -> Certificate:
    base = Certificate(
        schema_version=1,
        cluster_id="cluster",
        store_epoch="epoch",
        namespace="acme",
        generation_from=1,
        generation_to=2,
        nonce="ab" * 32,
        audit_sequence=12,
        audit_digest="ef" * 32,
        term=1,
        requested_at=100.0,
        streams_closed_at=101.25,
        issued_at=102.5,
        outcome="complete",
        members=(MEMBER,),
        outcomes=(MemberOutcome("r1", "confirmed", "", (evidence(0), evidence(1))),),
        gateways=(GatewayAcknowledgement("gateway-0", 1, 101.0),),
        not_covered=NOT_COVERED,
        residual=RESIDUAL,
    )
    return msgspec.structs.replace(base, **change)


DOCUMENT = issue_certificate(KEY, certificate())


def failed(document: bytes, public_key: bytes = PUBLIC) -> set[str]:
    report = verify_certificate(document, public_key)
    assert report.ok == all(check.ok for check in report.checks)
    return {check.name for check in report.checks if not check.ok}


def test_a_certificate_verifies_with_the_public_key_alone(tmp_path: Path) -> None:
    report = verify_certificate(DOCUMENT, PUBLIC)
    assert report.ok and report.outcome == "complete"
    assert parse_certificate(DOCUMENT).not_covered == NOT_COVERED
    (tmp_path / "c.json").write_bytes(DOCUMENT)
    (tmp_path / "c.pub").write_text(PUBLIC.hex() + "\n")
    assert verify_certificate_file(tmp_path / "c.json", tmp_path / "c.pub") == report
    (tmp_path / "c.pub").write_text("no key")
    with pytest.raises(PublicKeyRefused):
        verify_certificate_file(tmp_path / "c.json", tmp_path / "c.pub")


def test_another_key_does_not_verify_it() -> None:
    assert failed(DOCUMENT, bytes(32)) == {"signature"}
    assert failed(DOCUMENT, SIGNERS[0].public_key) == {"signature"}
    assert failed(DOCUMENT, b"short") == {"signature"}


@given(st.integers(0, len(DOCUMENT) - 1), st.integers(1, 255))
def test_changing_any_one_byte_fails(position: int, flip: int) -> None:
    document = bytearray(DOCUMENT)
    document[position] ^= flip
    assert failed(bytes(document))


def test_flipping_one_bit_of_every_byte_fails() -> None:
    for position in range(len(DOCUMENT)):
        document = bytearray(DOCUMENT)
        document[position] ^= 1 << (position % 8)
        assert failed(bytes(document)), f"byte {position} does not matter"


@given(st.binary(max_size=300))
def test_any_bytes_give_a_report(document: bytes) -> None:
    assert not verify_certificate(document, PUBLIC).ok


@given(st.integers(0, len(DOCUMENT)), st.sampled_from([b"", b" ", b"\n", b"0"]))
def test_a_cut_or_padded_document_fails(length: int, tail: bytes) -> None:
    document = DOCUMENT[:length] + tail
    assert document == DOCUMENT or not verify_certificate(document, PUBLIC).ok


def test_deep_nesting_is_reported_and_not_raised() -> None:
    assert failed(b"[" * 100_000) == {"document"}
    assert failed(b'{"members":' + b"[" * 100_000) == {"document"}


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"generation_to": 3}, "generation_step"),
        ({"generation_from": 0, "generation_to": 1}, "generation_step"),
        ({"issued_at": 100.5}, "times"),
        ({"outcome": "fenced-incomplete"}, "outcome"),
        ({"members": ()}, "members"),
        ({"outcomes": ()}, "members"),
        ({"members": (MEMBER, MEMBER)}, "members"),
        ({"members": (msgspec.structs.replace(MEMBER, ranks=3),)}, "members"),
        ({"nonce": "00" * 32}, "evidence"),
        ({"namespace": "other"}, "evidence"),
        ({"outcomes": (MemberOutcome("r1", "fenced"),)}, "outcome"),
        ({"outcomes": (MemberOutcome("r1", "pending"),), "outcome": "fenced-incomplete"}, "outcome"),
    ],
)
def test_a_signed_document_that_contradicts_itself_fails(change: dict[str, object], check: str) -> None:
    assert check in failed(issue_certificate(KEY, certificate(**change)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: (evidence(0),),
        lambda: (evidence(0), evidence(0)),
        lambda: (evidence(0), evidence(1), evidence(1)),
        lambda: (evidence(0), evidence(1, SIGNERS[0])),
        lambda: (evidence(0), msgspec.structs.replace(evidence(1), blocks_zeroed=7)),
        lambda: (evidence(0), evidence(1, nonzero_bytes=1)),
        lambda: (evidence(0), evidence(1, blocks_zeroed=4)),
        lambda: (evidence(0), evidence(1, bytes_zeroed=0)),
        lambda: (evidence(0), evidence(1, inventory_after_blocks=1)),
        lambda: (evidence(0), evidence(1, nonce="00" * 32)),
        lambda: (evidence(0), evidence(1, generation_new=3)),
        lambda: (evidence(0), evidence(1, namespace="other")),
        lambda: (evidence(0), evidence(1, incarnation="r2")),
        lambda: (evidence(0), evidence(1, machine_digest="00" * 16)),
        lambda: (evidence(0), evidence(1), evidence(7, SIGNERS[0])),
        lambda: (),
    ],
)
def test_evidence_that_does_not_confirm_every_rank_fails(
    make: Callable[[], tuple[RankEvidence, ...]],
) -> None:
    outcomes = (MemberOutcome("r1", "confirmed", "", make()),)
    assert "evidence" in failed(issue_certificate(KEY, certificate(outcomes=outcomes)))


def test_a_fenced_member_makes_an_honest_incomplete_certificate() -> None:
    outcomes = (MemberOutcome("r1", "fenced", "no answer"),)
    report = verify_certificate(
        issue_certificate(KEY, certificate(outcomes=outcomes, outcome="fenced-incomplete")), PUBLIC
    )
    assert report.ok and report.outcome == "fenced-incomplete"


def test_a_certificate_never_says_purged() -> None:
    assert b"purged" not in DOCUMENT
