"""The session store: receipts and session state of tenants, apart from the authority's store.

Owns its connection. Invariant: a record is found only by (namespace, generation, kind, id) and only with that generation's
secret, which keys its MAC, so a record of another name, generation or tenant is refused; it carries no token ids; once a
generation's records are deleted, none can be added. Safe for threads. Contracts: K166, K181; source: docs/isolation.md.
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any, TypeVar

import msgspec
import redis
from redis.exceptions import ResponseError

from .errors import RecordNameRefused, SessionBelowFloor, SessionTampered, StoreUnavailable, TokenIdsRefused
from .secrets import derive_key
from .store import open_client
from .store_target import StoreTarget

_R = TypeVar("_R")
Pause = Callable[[float], None]

REWRITE_TIMEOUT_S = 60.0
TIMEOUT_S = 3.0
"""Short, since an answer waits for its receipt: a store that hangs may cost the receipt, not the answer."""

_POLL_S = 0.02
_MAC_BYTES = 32
_PURPOSE = "session-store.v1"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PUT = """
local floor = tonumber(redis.call('GET', KEYS[2]) or '1')
if tonumber(ARGV[1]) < floor then return floor end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 0
"""
_RAISE = """
local floor = tonumber(redis.call('GET', KEYS[1]) or '1')
if tonumber(ARGV[1]) > floor then redis.call('SET', KEYS[1], ARGV[1]) end
return 0
"""


class RecordName(msgspec.Struct, frozen=True):
    """Where a record stands. ``kind`` is a word such as ``receipt``; ``record_id`` is opaque."""

    namespace: str
    generation: int
    kind: str
    record_id: str


class DeletionReceipt(msgspec.Struct, frozen=True):
    """What a deletion removed; ``file_rewritten`` is false where the server keeps no append-only file."""

    records_deleted: int
    file_rewritten: bool


class SessionStore:
    """Authenticated, expiring records per namespace generation."""

    def __init__(self, client: redis.Redis, prefix: str = "chs:"):
        self._client = client
        self._prefix = prefix
        self._put_script = client.register_script(_PUT)
        self._raise_script = client.register_script(_RAISE)

    @classmethod
    def connect(cls, target: StoreTarget | str) -> SessionStore:
        """Open ``target`` (a string is a socket path or a URL without password); connects at the first use."""
        return cls(open_client(target, TIMEOUT_S))

    def close(self) -> None:
        self._client.close()

    def put(self, secret: bytes, name: RecordName, value: msgspec.Struct, ttl_s: float) -> None:
        """Store ``value`` under ``name`` for ``ttl_s`` seconds; ``secret`` is K(ns, g) of the name's generation.

        Raises: RecordNameRefused, TokenIdsRefused, SessionBelowFloor, StoreUnavailable (unknown whether stored).
        """
        key = self._key(name)
        if key is None:
            raise RecordNameRefused(name.kind, name.record_id)
        _refuse_token_ids("value", msgspec.to_builtins(value))
        payload = msgspec.msgpack.encode(value)
        sealed = _mac(secret, key, payload) + payload
        arguments = [name.generation, sealed, max(1, int(ttl_s * 1000))]
        floor = self._call(
            lambda: self._put_script(keys=[key, self._floor_key(name.namespace)], args=arguments)
        )
        if floor:
            raise SessionBelowFloor(name.namespace, name.generation, int(floor))

    def get(self, secret: bytes, name: RecordName, record_type: type[_R]) -> _R | None:
        """The record under ``name``, None when there is none. Raises: SessionTampered, StoreUnavailable."""
        key = self._key(name)
        sealed: Any = None if key is None else self._call(lambda: self._client.get(key))
        if key is None or sealed is None:
            return None
        payload = sealed[_MAC_BYTES:]
        if not hmac.compare_digest(sealed[:_MAC_BYTES], _mac(secret, key, payload)):
            raise SessionTampered(name.record_id)
        try:
            return msgspec.msgpack.decode(payload, type=record_type)
        except msgspec.MsgspecError as error:
            raise SessionTampered(name.record_id) from error

    def delete_generation(
        self, namespace: str, generation: int, pause: Pause = time.sleep
    ) -> DeletionReceipt:
        """Delete every record of ``generation`` and older, refuse new ones, rewrite the append-only file.

        May be repeated. Raises: StoreUnavailable; what was deleted stays deleted.
        """
        floor_key = self._floor_key(namespace)
        self._call(lambda: self._raise_script(keys=[floor_key], args=[generation + 1]))
        deleted = self._call(lambda: self._delete_records(namespace, generation))
        return DeletionReceipt(deleted, self._call(lambda: self._rewrite_file(pause)))

    def _delete_records(self, namespace: str, generation: int) -> int:
        prefix = f"{self._prefix}r:{namespace}:".encode()
        deleted = 0
        batch: list[bytes] = []
        for key in self._client.scan_iter(match=prefix + b"*", count=1000):
            if int(key[len(prefix) :].split(b":", 1)[0]) <= generation:
                batch.append(key)
            if len(batch) >= 500:
                deleted += self._unlink(batch)
                batch = []
        return deleted + (self._unlink(batch) if batch else 0)

    def _unlink(self, keys: list[bytes]) -> int:
        answer: Any = self._client.unlink(*keys)
        return int(answer)

    def _rewrite_file(self, pause: Pause) -> bool:
        """Rewrite the append-only file so that deleted records are not in it; whether there is one."""
        if not self._persistence()["aof_enabled"]:
            return False
        self._await_rewrite(pause)
        try:
            self._client.bgrewriteaof()
        except ResponseError:
            self._await_rewrite(pause)
            self._client.bgrewriteaof()
        status = self._await_rewrite(pause)
        if status != "ok":
            raise StoreUnavailable(f"rewriting the append-only file ended with {status}")
        return True

    def _await_rewrite(self, pause: Pause) -> str:
        for _ in range(int(REWRITE_TIMEOUT_S / _POLL_S)):
            facts = self._persistence()
            if not facts["aof_rewrite_in_progress"] and not facts["aof_rewrite_scheduled"]:
                return str(facts["aof_last_bgrewrite_status"])
            pause(_POLL_S)
        raise StoreUnavailable(f"the append-only file was not rewritten within {REWRITE_TIMEOUT_S:.0f} s")

    def _persistence(self) -> dict[str, Any]:
        facts: Any = self._client.info("persistence")
        return facts

    def _key(self, name: RecordName) -> str | None:
        spelled = (
            _NAME.fullmatch(name.namespace) and _NAME.fullmatch(name.kind) and _ID.fullmatch(name.record_id)
        )
        if not spelled:
            return None
        return f"{self._prefix}r:{name.namespace}:{name.generation}:{name.kind}:{name.record_id}"

    def _floor_key(self, namespace: str) -> str:
        return f"{self._prefix}floor:{namespace}"

    def _call(self, command: Callable[[], Any]) -> Any:
        try:
            return command()
        except redis.RedisError as error:
            raise StoreUnavailable(str(error)) from error


def _mac(secret: bytes, key: str, payload: bytes) -> bytes:
    message = key.encode() + b"\0" + payload
    return hmac.new(derive_key(secret, _PURPOSE), message, sha256).digest()


def _refuse_token_ids(field: str, value: object) -> None:
    """Raises: TokenIdsRefused when any list in ``value`` holds an integer."""
    if isinstance(value, dict):
        for key, entry in value.items():
            _refuse_token_ids(f"{field}.{key}", entry)
    elif isinstance(value, list | tuple):
        if any(isinstance(entry, int) for entry in value):
            raise TokenIdsRefused(field)
        for entry in value:
            _refuse_token_ids(field, entry)
