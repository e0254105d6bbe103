"""The authority's store: authenticated records over the Redis protocol, changed all at once or not at all.

Owns the connection and the record envelope. Invariant: a value is ``MAC || (term, record)`` with the MAC over
the record's own key, so a record moved, edited or invented is refused by name; a commit compares every
expected record and writes every new one in one step on the server, and counts only after the append-only
file is on disk (WAITAOF, or a server that syncs before each answer). Source: docs/isolation.md.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Generic, TypeVar

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .errors import CommitNotDurable, StoreConflict, StoreNotDurable, StoreTampered, StoreUnavailable
from .store_target import StoreTarget

R = TypeVar("R")

_MAC_BYTES = 32
_DOMAIN = b"copyhold.store.v1\0"
_FIRST_WAITAOF = (7, 2)
CONNECT_TIMEOUT_S = 2.0
_COMMIT = """
local expected = tonumber(ARGV[1])
for i = 1, expected do
  local value = redis.call('GET', KEYS[i])
  if (value or '') ~= ARGV[i + 1] then return i end
end
for i = expected + 1, #KEYS do
  if ARGV[i + 1] == '' then redis.call('DEL', KEYS[i]) else redis.call('SET', KEYS[i], ARGV[i + 1]) end
end
return 0
"""


@dataclass(frozen=True)
class Stored(Generic[R]):
    """A record as read: ``raw`` is what a commit compares, ``term`` who wrote it."""

    value: R
    term: int
    raw: bytes


class Store:
    """Authenticated records by key. One instance per authority; not for threads to share."""

    def __init__(
        self, client: redis.Redis, mac_key: bytes, prefix: str = "ch:", durability_timeout_ms: int = 5000
    ):
        self._client = client
        self._mac_key = mac_key
        self._prefix = prefix
        self._durability_timeout_ms = durability_timeout_ms
        self._script = client.register_script(_COMMIT)
        self.generation_loss_accepted = False
        self._syncs_before_answers = False

    @classmethod
    def connect(
        cls, target: StoreTarget | str, mac_key: bytes, *, accept_generation_loss: bool = False
    ) -> Store:
        """Open ``target`` (a string is a socket path or a URL without password) and check its durability.

        Raises: StoreUnavailable; StoreNotDurable unless generation loss is accepted; as ``open_client``.
        """
        store = cls(open_client(target), mac_key)
        store.check_durability(accept_generation_loss=accept_generation_loss)
        return store

    def close(self) -> None:
        self._client.close()

    def check_durability(self, *, accept_generation_loss: bool = False) -> None:
        """Refuse a server that could forget a generation. Raises: StoreNotDurable, StoreUnavailable."""
        faults = [] if self._info("persistence").get("aof_enabled") == 1 else ["appendonly is off"]
        policy = self._info("memory").get("maxmemory_policy")
        if policy != "noeviction":
            faults.append(f"maxmemory-policy is {policy}, expected noeviction")
        version = str(self._info("server").get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < _FIRST_WAITAOF:
            self._syncs_before_answers = self._appendfsync() == "always"
            if not self._syncs_before_answers:
                faults.append(f"version {version} knows no WAITAOF and appendfsync is not always")
        if faults and not accept_generation_loss:
            raise StoreNotDurable("; ".join(faults))
        self.generation_loss_accepted = bool(faults)

    def read(self, key: str, record_type: type[R]) -> Stored[R] | None:
        """The record at ``key``, None when there is none. Raises: StoreTampered, StoreUnavailable."""
        return self.read_many([key], record_type)[0]

    def read_many(self, keys: Sequence[str], record_type: type[R]) -> list[Stored[R] | None]:
        """The records at ``keys``, in order. Raises: StoreTampered, StoreUnavailable."""
        if not keys:
            return []
        names = [self._prefix + key for key in keys]
        values: list[Any] = self._call(lambda: self._client.mget(names), retry=True)
        return [
            None if raw is None else self._open(key, raw, record_type)
            for key, raw in zip(keys, values, strict=True)
        ]

    def read_raw(self, key: str) -> bytes | None:
        """The sealed bytes at ``key``, for comparison only. Raises: StoreUnavailable."""
        name = self._prefix + key
        return self._call(lambda: self._client.get(name), retry=True)

    def commit(
        self,
        term: int,
        expect: Mapping[str, bytes | None],
        puts: Mapping[str, msgspec.Struct],
        deletes: Sequence[str] = (),
    ) -> None:
        """Write ``puts`` and ``deletes`` if every record of ``expect`` is byte-for-byte what it was.

        Raises: StoreConflict (nothing written), StoreUnavailable (unknown whether written), CommitNotDurable
        (written, not confirmed on disk).
        """
        keys = [*expect, *puts, *deletes]
        values: list[bytes] = [raw or b"" for raw in expect.values()]
        values += [self._seal(key, term, record) for key, record in puts.items()]
        values += [b""] * len(deletes)
        names = [self._prefix + key for key in keys]
        refused = self._call(lambda: self._script(keys=names, args=[len(expect), *values]), retry=False)
        if refused:
            raise StoreConflict(keys[int(refused) - 1])
        if not self.generation_loss_accepted and not self._syncs_before_answers:
            self._wait_durable()

    def _wait_durable(self) -> None:
        timeout_ms = self._durability_timeout_ms
        try:
            answer: Any = self._client.waitaof(1, 0, timeout_ms)
        except redis.RedisError as error:
            raise CommitNotDurable(str(error)) from error
        if int(answer[0]) < 1:
            raise CommitNotDurable(f"no fsync within {timeout_ms} ms")

    def _appendfsync(self) -> str:
        """The server's own word; a server that does not tell counts as not syncing."""
        try:
            answer: Any = self._client.config_get("appendfsync")
        except redis.ResponseError:
            return "unknown"
        except redis.RedisError as error:
            raise StoreUnavailable(str(error)) from error
        return str(answer.get("appendfsync"))

    def _info(self, section: str) -> dict[str, Any]:
        return self._call(lambda: self._client.info(section), retry=True)

    def _call(self, command: Callable[[], Any], *, retry: bool) -> Any:
        try:
            return command()
        except redis.ConnectionError as error:
            if not retry:
                raise StoreUnavailable(str(error)) from error
        except redis.RedisError as error:
            raise StoreUnavailable(str(error)) from error
        return self._call(command, retry=False)

    def _seal(self, key: str, term: int, record: msgspec.Struct) -> bytes:
        payload = msgspec.msgpack.encode((term, record))
        return self._mac(key, payload) + payload

    def _open(self, key: str, raw: bytes, record_type: type[R]) -> Stored[R]:
        payload = raw[_MAC_BYTES:]
        if not hmac.compare_digest(raw[:_MAC_BYTES], self._mac(key, payload)):
            raise StoreTampered(key, "its MAC does not match")
        try:
            term, body = msgspec.msgpack.decode(payload, type=tuple[int, msgspec.Raw])
            value = msgspec.msgpack.decode(body, type=record_type)
        except msgspec.MsgspecError as error:
            raise StoreTampered(key, f"it does not decode ({error})") from error
        return Stored(value, term, raw)

    def _mac(self, key: str, payload: bytes) -> bytes:
        name = key.encode()
        message = _DOMAIN + len(name).to_bytes(4, "little") + name + payload
        return hmac.new(self._mac_key, message, sha256).digest()


def open_client(target: StoreTarget | str, timeout_s: float = 6.0) -> redis.Redis:
    """A client that never repeats a command by itself: no commit runs twice. It connects at the first use.

    Raises: SecretFileExposed, SecretFileDamaged when the target's password file is not fit.
    """
    limits: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
    }
    if isinstance(target, str):
        target = StoreTarget(target)
    if target.url.startswith("/"):
        return redis.Redis(unix_socket_path=target.url, **limits, **target.client_options())
    return redis.Redis.from_url(target.url, **limits, **target.client_options())
