"""The session store: keyed by generation, expiring, without token ids, deletable for good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from copyhold.namespace import errors
from copyhold.namespace.sessions import RecordName, SessionStore

SECRET = b"s" * 32
NAME = RecordName("acme", 1, "receipt", "rcpt-1")


class Kept(msgspec.Struct, frozen=True):
    receipt_id: str
    cached_tokens: int
    notes: tuple[object, ...] = ()


VALUE = Kept("canary-of-a-receipt", 48)


@pytest.fixture
def sessions(server: Any) -> SessionStore:
    return SessionStore.connect(server.socket)


def test_a_record_is_found_under_its_whole_name_only(sessions: SessionStore) -> None:
    sessions.put(SECRET, NAME, VALUE, 60.0)
    assert sessions.get(SECRET, NAME, Kept) == VALUE
    for other in (
        RecordName("other", 1, "receipt", "rcpt-1"),
        RecordName("acme", 2, "receipt", "rcpt-1"),
        RecordName("acme", 1, "session", "rcpt-1"),
        RecordName("acme", 1, "receipt", "rcpt-2"),
        RecordName("acme", 1, "receipt", "*"),
        RecordName("acme:1", 1, "receipt", "rcpt-1"),
    ):
        assert sessions.get(SECRET, other, Kept) is None


def test_another_secret_or_an_edited_or_moved_record_is_refused(sessions: SessionStore, server: Any) -> None:
    sessions.put(SECRET, NAME, VALUE, 60.0)
    with pytest.raises(errors.SessionTampered):
        sessions.get(b"x" * 32, NAME, Kept)
    client = server.client()
    key = "chs:r:acme:1:receipt:rcpt-1"
    raw = client.get(key)
    client.set("chs:r:acme:1:receipt:rcpt-2", raw)
    with pytest.raises(errors.SessionTampered):
        sessions.get(SECRET, RecordName("acme", 1, "receipt", "rcpt-2"), Kept)
    client.set(key, raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(errors.SessionTampered):
        sessions.get(SECRET, NAME, Kept)


def test_records_expire(sessions: SessionStore, server: Any) -> None:
    sessions.put(SECRET, NAME, VALUE, 60.0)
    assert 0 < server.client().pttl("chs:r:acme:1:receipt:rcpt-1") <= 60_000


def test_token_ids_and_bad_names_are_refused(sessions: SessionStore, server: Any) -> None:
    for notes in ((1, 2, 3), ("x", (4,)), ({"deep": [5]},)):
        with pytest.raises(errors.TokenIdsRefused):
            sessions.put(SECRET, NAME, Kept("x", 1, notes), 60.0)
    for name in (
        RecordName("acme", 1, "receipt", "a:b"),
        RecordName("*", 1, "receipt", "a"),
        RecordName("a", 1, "", "a"),
    ):
        with pytest.raises(errors.RecordNameRefused):
            sessions.put(SECRET, name, VALUE, 60.0)
    assert server.client().keys("*") == []


def test_a_deleted_generation_is_gone_from_the_file_and_stays_gone(start_server: Any) -> None:
    server = start_server("--appendonly", "yes", "--appendfsync", "always")
    sessions = SessionStore.connect(server.socket)
    newer = RecordName("acme", 2, "receipt", "rcpt-1")
    foreign = RecordName("acme-2", 1, "receipt", "rcpt-1")
    for number in range(600):
        sessions.put(SECRET, RecordName("acme", 1, "receipt", f"rcpt-{number}"), VALUE, 600.0)
    sessions.put(SECRET, newer, Kept("a-later-receipt", 1), 600.0)
    sessions.put(SECRET, foreign, Kept("a-foreign-receipt", 1), 600.0)
    receipt = sessions.delete_generation("acme", 1)
    assert (receipt.records_deleted, receipt.file_rewritten) == (600, True)
    assert sessions.get(SECRET, NAME, Kept) is None
    assert sessions.get(SECRET, newer, Kept) is not None
    assert sessions.get(SECRET, foreign, Kept) is not None
    files = [path for path in Path(server.directory).rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in files)
    assert b"canary-of-a-receipt" not in content and b"a-foreign-receipt" in content
    with pytest.raises(errors.SessionBelowFloor) as caught:
        sessions.put(SECRET, NAME, VALUE, 60.0)
    assert caught.value.floor == 2
    assert sessions.delete_generation("acme", 1).records_deleted == 0


def test_a_server_without_a_file_says_so(start_server: Any) -> None:
    sessions = SessionStore.connect(start_server("--appendonly", "no").socket)
    sessions.put(SECRET, NAME, VALUE, 60.0)
    receipt = sessions.delete_generation("acme", 1)
    assert (receipt.records_deleted, receipt.file_rewritten) == (1, False)


def test_an_absent_server_is_a_typed_error(tmp_path: Path) -> None:
    sessions = SessionStore.connect(str(tmp_path / "absent.sock"))
    with pytest.raises(errors.StoreUnavailable):
        sessions.get(SECRET, NAME, Kept)
