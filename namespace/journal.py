"""The authority's one write path: state and its audit record in one durable commit.

Owns the term, the trail's position, the signed head file and the high-water mark. Invariant: a commit
compares the term and the trail position, so two authorities can never both write; after any failed commit
the position is read again before the next; the mark and the head file follow the store, never lead it.
Source: docs/isolation.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from . import records as rec
from .audit_trail import (
    HEAD_EVERY_RECORDS,
    HEAD_EVERY_S,
    AuditDetail,
    AuditHead,
    AuditPosition,
    AuditRecord,
    chained,
    encode_head,
    sign_head,
)
from .clock import Clock
from .errors import StoreConflict, StoreTampered, TermSuperseded
from .high_water import HighWaterFile, HighWaterMark
from .secrets import write_atomically
from .store import Store, Stored

R = TypeVar("R")

_READ_CHUNK = 512
KEY_ACTIONS = ("key_created", "key_enabled", "key_disabled", "restore_confirmed")


class JournalFiles(msgspec.Struct, frozen=True):
    """Where the signed head and the high-water mark are written; neither belongs beside the store."""

    audit_head: Path
    high_water: Path


class Journal:
    """Commits of one term."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        certificate_key: Ed25519PrivateKey,
        files: JournalFiles,
        cluster: rec.ClusterRecord,
    ):
        self.store = store
        self.clock = clock
        self.cluster = cluster
        self._certificate_key = certificate_key
        self._files = files
        self._mark = HighWaterFile(files.high_water, certificate_key)
        self._term = 0
        self._term_raw: bytes | None = None
        self._position: Stored[AuditPosition] | None = None
        self._position_known = False
        self._confirmed = True
        self._key_change_sequence = 0
        self._highest_generation = 0
        self._head_sequence = 0
        self._head_written_s = clock.monotonic_s()

    @property
    def term(self) -> int:
        return self._term

    @property
    def position(self) -> AuditPosition:
        """The last durable audit record."""
        if not self._position_known:
            self._position = self.store.read(rec.AUDIT_POSITION_KEY, AuditPosition)
            self._position_known = True
        return self._position.value if self._position is not None else AuditPosition()

    @property
    def next_sequence(self) -> int:
        """The audit sequence the next commit will get."""
        return self.position.sequence + 1

    def take_term(
        self,
        key_change_sequence: int,
        highest_generation: int,
        action: str,
        detail: AuditDetail,
        puts: Mapping[str, msgspec.Struct],
    ) -> None:
        """Enter office: raise the term and commit ``puts`` under it. Raises: as commit."""
        stored = self.store.read(rec.TERM_KEY, rec.TermRecord)
        self._term = 1 if stored is None else stored.value.term + 1
        self._term_raw = None if stored is None else stored.raw
        self._key_change_sequence = key_change_sequence
        self._highest_generation = highest_generation
        self.commit(
            "authority", action, "cluster", detail, {**puts, rec.TERM_KEY: rec.TermRecord(self._term)}
        )
        stored = self.store.read(rec.TERM_KEY, rec.TermRecord)
        if stored is None or stored.value.term != self._term:
            raise TermSuperseded(self._term)
        self._term_raw = stored.raw
        self.write_head()

    def commit(
        self,
        actor: str,
        action: str,
        subject: str,
        detail: AuditDetail,
        puts: Mapping[str, msgspec.Struct],
        expect: Sequence[tuple[str, Stored[Any] | None]] = (),
    ) -> int:
        """Write ``puts`` and an audit record in one step, durably; returns the record's sequence.

        ``expect`` names records that must still be as they were read. Raises: TermSuperseded, StoreConflict
        (nothing written), StoreUnavailable, CommitNotDurable.
        """
        position = self.position
        record = AuditRecord(0, "", self.clock.now_s(), self._term, actor, action, subject, detail)
        record = chained(position, record)
        position_raw = None if self._position is None else self._position.raw
        expected: dict[str, bytes | None] = {
            rec.TERM_KEY: self._term_raw,
            rec.AUDIT_POSITION_KEY: position_raw,
        }
        expected |= {key: None if stored is None else stored.raw for key, stored in expect}
        after = AuditPosition(record.sequence, record.digest)
        written = {**puts, rec.audit_key(record.sequence): record, rec.AUDIT_POSITION_KEY: after}
        if action in KEY_ACTIONS:
            self._key_change_sequence = record.sequence
        generations = [entry.generation for entry in puts.values() if isinstance(entry, rec.NamespaceRecord)]
        self._highest_generation = max(self._highest_generation, *generations, 0)
        self._position_known = self._confirmed = False
        try:
            self.store.commit(self._term, expected, written)
        except StoreConflict as conflict:
            if conflict.key in (rec.TERM_KEY, rec.AUDIT_POSITION_KEY):
                raise TermSuperseded(self._term) from conflict
            self._confirmed = True
            raise
        self._write_mark(after)
        self._confirmed = True
        self.write_head_if_due()
        return record.sequence

    def ensure_durable(self) -> None:
        """Before acting on what was read: confirm a commit whose answer was lost. Raises: as commit."""
        if not self._confirmed:
            self.commit("authority", "commit_confirmed", "cluster", {}, {})

    def check_term(self) -> None:
        """Raises: TermSuperseded when a newer authority is in office; StoreUnavailable."""
        if self.store.read_raw(rec.TERM_KEY) != self._term_raw:
            raise TermSuperseded(self._term)

    def records(self, first: int = 1) -> Iterator[AuditRecord]:
        """The trail from ``first`` to the present. Raises: StoreTampered when a record is missing."""
        last = self.position.sequence
        for start in range(first, last + 1, _READ_CHUNK):
            keys = [rec.audit_key(sequence) for sequence in range(start, min(start + _READ_CHUNK, last + 1))]
            for key, stored in zip(keys, self.store.read_many(keys, AuditRecord), strict=True):
                if stored is None:
                    raise StoreTampered(key, "it is missing")
                yield stored.value

    def write_head_if_due(self) -> bool:
        """Sign and write the head 100 records or 60 s after the last; whether it was written."""
        position = self.position
        due_records = position.sequence - self._head_sequence >= HEAD_EVERY_RECORDS
        due_time = self.clock.monotonic_s() - self._head_written_s >= HEAD_EVERY_S
        if not due_records and not (due_time and position.sequence > self._head_sequence):
            return False
        self.write_head()
        return True

    def write_head(self) -> AuditHead:
        """Sign the present position and write it out."""
        position, cluster = self.position, self.cluster
        unsigned = AuditHead(
            cluster.cluster_id, cluster.store_epoch, position.sequence, position.digest, self.clock.now_s()
        )
        head = sign_head(self._certificate_key, unsigned)
        write_atomically(self._files.audit_head, encode_head(head), mode=0o644)
        self._head_sequence = position.sequence
        self._head_written_s = self.clock.monotonic_s()
        return head

    def _write_mark(self, position: AuditPosition) -> None:
        cluster = self.cluster
        mark = HighWaterMark(
            cluster_id=cluster.cluster_id,
            store_epoch=cluster.store_epoch,
            sequence=position.sequence,
            digest=position.digest,
            key_change_sequence=self._key_change_sequence,
            highest_generation=self._highest_generation,
        )
        self._mark.write(mark)


def must_exist(key: str, stored: Stored[R] | None) -> Stored[R]:
    """``stored``, which another record says exists. Raises: StoreTampered."""
    if stored is None:
        raise StoreTampered(key, "it is missing")
    return stored
