"""The audit trail and the high-water mark: edits, rewrites, cut tails and restored backups are found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from copyhold.namespace import errors
from copyhold.namespace.audit_trail import (
    HEAD_EVERY_RECORDS,
    AuditHead,
    AuditPosition,
    AuditRecord,
    chained,
    decode_head,
    encode_head,
    sign_head,
    verify_trail,
)
from copyhold.namespace.recovery import confirm_restore

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()


def trail(length: int) -> list[AuditRecord]:
    records: list[AuditRecord] = []
    position = AuditPosition()
    for number in range(length):
        record = AuditRecord(0, "", float(number), 1, "operator", "act", f"subject-{number}", {"n": number})
        records.append(chained(position, record))
        position = AuditPosition(records[-1].sequence, records[-1].digest)
    return records


def head_of(records: list[AuditRecord]) -> AuditHead:
    last = records[-1]
    return sign_head(KEY, AuditHead("cluster", "epoch", last.sequence, last.digest, 1.0))


def test_a_whole_trail_holds_and_may_go_on_after_its_head() -> None:
    records = trail(9)
    assert verify_trail(records, head_of(records), PUBLIC) == 9
    assert verify_trail(records, head_of(records[:4]), PUBLIC) == 9


@given(
    st.integers(0, 8),
    st.sampled_from(["at", "term", "actor", "action", "subject", "detail", "digest", "previous"]),
)
def test_an_edit_anywhere_is_found(index: int, field: str) -> None:
    records = trail(9)
    head = head_of(records)
    value = {"at": 99.0, "term": 9, "detail": {"n": 99}}.get(field, "1" * 64)
    records[index] = msgspec.structs.replace(records[index], **{field: value})
    with pytest.raises(errors.TrailBroken) as caught:
        verify_trail(records, head, PUBLIC)
    assert caught.value.sequence in (index + 1, index + 2)


@given(st.integers(0, 8))
def test_a_missing_record_and_a_cut_tail_are_found(index: int) -> None:
    records = trail(9)
    head = head_of(records)
    for damaged in (records[:index] + records[index + 1 :], records[:index]):
        with pytest.raises(errors.TrailBroken):
            verify_trail(damaged, head, PUBLIC)


def test_a_consistent_rewrite_is_found_by_the_head() -> None:
    records = trail(9)
    head = head_of(records)
    rewritten = trail(4)
    position = AuditPosition(4, rewritten[-1].digest)
    for _ in range(5):
        rewritten.append(chained(position, AuditRecord(0, "", 7.0, 1, "x", "y", "z", {})))
        position = AuditPosition(rewritten[-1].sequence, rewritten[-1].digest)
    with pytest.raises(errors.TrailBroken, match="differs from the signed head"):
        verify_trail(rewritten, head, PUBLIC)


def test_a_forged_head_is_refused() -> None:
    records = trail(3)
    forged = msgspec.structs.replace(head_of(records), sequence=2, digest=records[1].digest)
    with pytest.raises(errors.TrailBroken, match="signature"):
        verify_trail(records, forged, PUBLIC)
    document = encode_head(head_of(records))
    assert decode_head(document) == head_of(records)
    for spoiled in (b"", b"{}", document[:-1], document.replace(b":", b": ", 1), b"\xff"):
        with pytest.raises(errors.TrailBroken):
            decode_head(spoiled)


def test_every_act_of_the_operator_is_in_the_trail(house: Any) -> None:
    authority = house.open()
    authority.create_tenant("acme")
    key_id = authority.create_key("acme").split("_")[1]
    authority.disable_key(key_id, actor="alice")
    authority.disable_namespace("acme")
    authority.record_call("auditor", "status", "cluster", {})
    authority.close()
    head = decode_head(house.files.audit_head.read_bytes())
    reopened = house.open()
    records = reopened.audit_records()
    assert [record.action for record in records] == [
        "authority_opened",
        "tenant_created",
        "key_created",
        "key_disabled",
        "namespace_disabled",
        "call:status",
        "authority_opened",
    ]
    assert (records[3].actor, records[3].subject) == ("alice", key_id)
    assert verify_trail(records, head, house.secrets.certificate_public_key) == 7
    assert head.sequence == 6


def test_the_head_is_signed_after_a_hundred_records_or_a_minute(house: Any) -> None:
    authority = house.open()

    def written() -> int:
        return decode_head(house.files.audit_head.read_bytes()).sequence

    assert written() == 1
    for _ in range(HEAD_EVERY_RECORDS - 1):
        authority.record_call("operator", "status", "cluster", {})
    assert written() == 1
    authority.record_call("operator", "status", "cluster", {})
    assert written() == 1 + HEAD_EVERY_RECORDS
    authority.record_call("operator", "status", "cluster", {})
    house.clock.advance(61.0)
    assert authority.journal.write_head_if_due() and written() == 2 + HEAD_EVERY_RECORDS
    house.clock.advance(61.0)
    assert not authority.journal.write_head_if_due()


# --- high-water mark -----------------------------------------------------------------------------------------


def snapshot(house: Any) -> dict[bytes, bytes]:
    client = house.server.client()
    return {key: client.get(key) for key in client.keys("*")}


def restore(house: Any, content: dict[bytes, bytes]) -> None:
    client = house.server.client()
    client.flushall()
    if content:
        client.mset(content)


def test_a_restored_backup_is_refused_until_confirmed(house: Any, fleet: Any) -> None:
    authority = house.open()
    authority.create_tenant("acme")
    kept = authority.create_key("acme")
    fleet.add(authority, "r1")
    backup = snapshot(house)
    old_identity, old_secret = authority.identity, authority.namespace_secret("acme", 1)
    authority.create_tenant("later")
    restore(house, backup)
    with pytest.raises(errors.StoreBehindHighWater) as caught:
        house.open()
    assert caught.value.mark_sequence == caught.value.store_sequence + 1
    receipt = confirm_restore(
        house.store(), house.secrets, house.clock, house.files, token_source=house.tokens
    )
    assert receipt.suspended_keys == () and receipt.fenced_incarnations == ("r1",)
    reopened = house.open()
    assert reopened.identity.store_epoch == receipt.store_epoch != old_identity.store_epoch
    assert reopened.identity.cluster_id == old_identity.cluster_id
    authorization = reopened.authorize(kept, None, "r")
    assert authorization.grant.generation == 2
    assert authorization.secret != old_secret
    with pytest.raises(errors.GrantWrongEpoch):
        old_identity.verifier().verify(authorization.grant, house.clock.now_s(), reopened.floors)
    assert reopened.create_tenant("later").namespaces == ("later",)
    assert reopened.registry.known_namespace("later").value.generation == 2


def test_keys_that_may_have_changed_since_the_backup_are_suspended(house: Any) -> None:
    authority = house.open()
    authority.create_tenant("acme")
    credential = authority.create_key("acme")
    key_id = credential.split("_")[1]
    backup = snapshot(house)
    authority.disable_key(key_id)
    restore(house, backup)
    receipt = confirm_restore(house.store(), house.secrets, house.clock, house.files)
    assert receipt.suspended_keys == (key_id,)
    reopened = house.open()
    with pytest.raises(errors.Unauthenticated):
        reopened.authorize(credential, None, "r")
    reopened.enable_key(key_id)
    reopened.authorize(credential, None, "r")


def test_an_emptied_store_is_refused_and_starts_above_every_old_generation(house: Any) -> None:
    authority = house.open()
    authority.create_tenant("acme")
    cluster_id = authority.identity.cluster_id
    restore(house, {})
    with pytest.raises(errors.StoreBehindHighWater):
        house.open()
    confirm_restore(house.store(), house.secrets, house.clock, house.files)
    reopened = house.open()
    assert reopened.identity.cluster_id == cluster_id
    reopened.create_tenant("acme")
    assert reopened.registry.known_namespace("acme").value.generation == 2
    assert reopened.floors.generation("acme") == 2


def test_a_backup_from_before_a_confirmed_restore_is_refused(house: Any) -> None:
    house.open().create_tenant("acme")
    backup = snapshot(house)
    house.open().create_tenant("other")
    restore(house, backup)
    confirm_restore(house.store(), house.secrets, house.clock, house.files)
    house.open()
    restore(house, backup)
    with pytest.raises(errors.StoreBehindHighWater, match="epoch"):
        house.open()
    confirm_restore(house.store(), house.secrets, house.clock, house.files)
    assert house.open().registry.known_namespace("acme").value.generation == 3


def test_another_history_of_the_same_length_is_refused(house: Any) -> None:
    house.open()
    backup = snapshot(house)
    mark = house.files.high_water.read_bytes()
    house.open().create_tenant("acme")
    later_mark = house.files.high_water.read_bytes()
    restore(house, backup)
    house.files.high_water.write_bytes(mark)
    house.open().create_tenant("other")
    house.files.high_water.write_bytes(later_mark)
    with pytest.raises(errors.StoreBehindHighWater, match="another history"):
        house.open()


def test_a_missing_or_forged_mark_is_refused(house: Any) -> None:
    house.open().create_tenant("acme")
    mark = house.files.high_water.read_bytes()
    house.files.high_water.unlink()
    with pytest.raises(errors.HighWaterRefused):
        house.open()
    for spoiled in (b"", b"{}", mark.replace(b'"sequence":2', b'"sequence":1'), b"\xff\xfe"):
        house.files.high_water.write_bytes(spoiled)
        with pytest.raises(errors.HighWaterRefused):
            house.open()
    house.files.high_water.write_bytes(mark)
    house.open()


def test_a_crash_between_the_first_commit_and_its_mark_is_no_restore(house: Any) -> None:
    house.open()
    house.files.high_water.unlink()
    house.open()
