"""The authority's store on a real server: authentic records, all-or-nothing commits, durability, restarts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from copyhold.namespace.errors import (
    CommitNotDurable,
    StoreConflict,
    StoreNotDurable,
    StoreTampered,
    StoreUnavailable,
)
from copyhold.namespace.records import Directory, TermRecord
from copyhold.namespace.store import Store

MAC_KEY = b"k" * 32


@pytest.fixture
def store(server: Any) -> Store:
    return Store.connect(server.socket, MAC_KEY)


def test_a_record_is_read_back_with_its_term(store: Store) -> None:
    store.commit(7, {}, {"a": Directory(("x", "y"))})
    stored = store.read("a", Directory)
    assert stored is not None
    assert (stored.value, stored.term) == (Directory(("x", "y")), 7)
    assert store.read("b", Directory) is None


def test_a_commit_with_a_stale_expectation_writes_nothing(store: Store) -> None:
    store.commit(1, {"a": None}, {"a": TermRecord(1)})
    first = store.read_raw("a")
    store.commit(1, {"a": first}, {"a": TermRecord(2)})
    with pytest.raises(StoreConflict) as caught:
        store.commit(1, {"a": first}, {"a": TermRecord(3), "b": TermRecord(3)}, deletes=["a"])
    assert caught.value.key == "a"
    current = store.read("a", TermRecord)
    assert current is not None and current.value == TermRecord(2)
    assert store.read("b", TermRecord) is None


def test_a_commit_deletes_and_writes_in_one_step(store: Store) -> None:
    store.commit(1, {}, {"a": TermRecord(1)})
    store.commit(1, {}, {"b": TermRecord(2)}, deletes=["a"])
    assert store.read("a", TermRecord) is None
    assert store.read("b", TermRecord) is not None


@pytest.mark.parametrize("position", [0, 31, 32, 33, -1])
def test_an_edited_record_is_refused_by_name(store: Store, server: Any, position: int) -> None:
    store.commit(1, {}, {"a": TermRecord(5)})
    client: redis.Redis = server.client()
    value: Any = client.get("ch:a")
    raw = bytearray(value)
    raw[position] ^= 1
    client.set("ch:a", bytes(raw))
    with pytest.raises(StoreTampered) as caught:
        store.read("a", TermRecord)
    assert caught.value.key == "a"


def test_a_record_moved_to_another_key_is_refused(store: Store, server: Any) -> None:
    store.commit(1, {}, {"a": TermRecord(5), "b": TermRecord(6)})
    client: redis.Redis = server.client()
    values: Any = client.mget("ch:a", "ch:b")
    first, second = values
    client.mset({"ch:a": second, "ch:b": first})
    for key in ("a", "b"):
        with pytest.raises(StoreTampered):
            store.read(key, TermRecord)


@pytest.mark.parametrize("raw", [b"", b"x", bytes(32), bytes(64)])
def test_an_invented_record_is_refused(store: Store, server: Any, raw: bytes) -> None:
    server.client().set("ch:a", raw)
    with pytest.raises(StoreTampered):
        store.read("a", TermRecord)


def test_another_mac_key_reads_nothing(store: Store, server: Any) -> None:
    store.commit(1, {}, {"a": TermRecord(5)})
    with pytest.raises(StoreTampered):
        Store.connect(server.socket, b"x" * 32).read("a", TermRecord)


def test_a_server_without_append_only_file_is_refused(start_server: Callable[..., Any]) -> None:
    server = start_server("--appendonly", "no")
    with pytest.raises(StoreNotDurable, match="appendonly"):
        Store.connect(server.socket, MAC_KEY)
    accepted = Store.connect(server.socket, MAC_KEY, accept_generation_loss=True)
    assert accepted.generation_loss_accepted
    accepted.commit(1, {}, {"a": TermRecord(1)})


def test_a_server_that_evicts_is_refused(start_server: Callable[..., Any]) -> None:
    server = start_server("--appendonly", "yes", "--maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreNotDurable, match="noeviction"):
        Store.connect(server.socket, MAC_KEY)


def test_a_commit_on_a_server_that_syncs_every_second_survives_a_kill(
    start_server: Callable[..., Any],
) -> None:
    server = start_server("--appendonly", "yes", "--appendfsync", "everysec")
    Store.connect(server.socket, MAC_KEY).commit(3, {}, {"a": TermRecord(9)})
    server.stop(signal.SIGKILL)
    server.start()
    stored = Store.connect(server.socket, MAC_KEY).read("a", TermRecord)
    assert stored is not None and stored.value == TermRecord(9)


def test_a_commit_that_is_not_synced_in_time_says_so(start_server: Callable[..., Any]) -> None:
    server = start_server("--appendonly", "yes", "--appendfsync", "no")
    store = Store(server.client(), MAC_KEY, durability_timeout_ms=20)
    with pytest.raises(CommitNotDurable):
        store.commit(1, {}, {"a": TermRecord(1)})


def test_a_store_that_is_gone_is_unavailable_and_back_after_a_restart(
    start_server: Callable[..., Any],
) -> None:
    server = start_server("--appendonly", "yes", "--appendfsync", "always")
    store = Store.connect(server.socket, MAC_KEY)
    store.commit(1, {}, {"a": TermRecord(1)})
    server.stop()
    with pytest.raises(StoreUnavailable):
        store.read("a", TermRecord)
    with pytest.raises(StoreUnavailable):
        store.commit(1, {}, {"a": TermRecord(2)})
    server.start()
    stored = store.read("a", TermRecord)
    assert stored is not None and stored.value == TermRecord(1)


def test_an_absent_socket_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        Store.connect(str(tmp_path / "absent.sock"), MAC_KEY)
    with pytest.raises(StoreUnavailable):
        Store.connect(f"unix://{tmp_path}/absent.sock", MAC_KEY)
