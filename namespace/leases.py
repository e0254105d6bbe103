"""Serving leases: who may serve, until when, and under which floors.

Invariant: an incarnation's membership is durable before its first lease; the replica counts a lease from
before it asked, the authority from after it answered, so the replica's always ends first; a lease is never
given to an incarnation that ended or was fenced. Source: docs/isolation.md.
"""

from __future__ import annotations

import re

import msgspec

from . import records as rec
from .errors import (
    IncarnationEnded,
    IncarnationFenced,
    IncarnationRefused,
    IncarnationUnknown,
    RenewalUnexpected,
    StoreBehindHighWater,
)
from .floors import Floors
from .journal import Journal, must_exist
from .signing import PUBLIC_KEY_BYTES, parse_hex
from .store import Stored

LEASE_S = 10.0
LEASE_SKEW_S = 5.0
_MAX_OUTSTANDING = 16
_INCARNATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class LeaseRenewal(msgspec.Struct, frozen=True):
    """The authority's answer to renewal ``sequence`` of one incarnation."""

    incarnation: str
    sequence: int
    expires_in_s: float
    floors: Floors
    term: int
    store_epoch: str


class LeaseHolder:
    """The replica's side: knows whether it may serve now, and the floors it must serve under."""

    def __init__(self, incarnation: str):
        self._incarnation = incarnation
        self._next_sequence = 1
        self._asked_at: dict[int, float] = {}
        self._expires_at = float("-inf")
        self._floors = Floors()

    @property
    def floors(self) -> Floors:
        """The highest floors seen."""
        return self._floors

    def begin_renewal(self, now_monotonic_s: float) -> int:
        """Note the time before asking; returns the sequence to send."""
        sequence = self._next_sequence
        self._next_sequence += 1
        self._asked_at[sequence] = now_monotonic_s
        while len(self._asked_at) > _MAX_OUTSTANDING:
            del self._asked_at[min(self._asked_at)]
        return sequence

    def accept(self, renewal: LeaseRenewal) -> Floors:
        """Take an answer; returns the floors in force. Raises: RenewalUnexpected, the lease is as before."""
        asked_at = self._asked_at.get(renewal.sequence)
        if asked_at is None or renewal.incarnation != self._incarnation:
            raise RenewalUnexpected(renewal.sequence)
        del self._asked_at[renewal.sequence]
        self._expires_at = max(self._expires_at, asked_at + renewal.expires_in_s)
        self._floors = self._floors.merged(renewal.floors)
        return self._floors

    def raise_floor(self, namespace: str, generation: int) -> Floors:
        """Take a floor that came between renewals."""
        self._floors = self._floors.raised(namespace, generation)
        return self._floors

    def remaining_s(self, now_monotonic_s: float) -> float:
        """Seconds of lease left, never below zero."""
        return max(0.0, self._expires_at - now_monotonic_s)

    def holds(self, now_monotonic_s: float) -> bool:
        """Whether this incarnation may serve at this moment."""
        return now_monotonic_s < self._expires_at


class Membership:
    """The authority's side: which incarnations are registered, leased, ended, fenced."""

    def __init__(self, journal: Journal, lease_s: float = LEASE_S):
        self._journal = journal
        self._lease_s = lease_s
        self._opened_at = journal.clock.monotonic_s()
        self._lease_ends: dict[str, float] = {}

    def register(self, member: rec.IncarnationRecord) -> rec.MembershipRecord:
        """Make a new incarnation's membership durable; the same record again changes nothing.

        Raises: IncarnationRefused for a malformed record or a name that was used before.
        """
        _check(member)
        self._journal.ensure_durable()
        key = rec.membership_key(member.incarnation)
        stored = self._read(member.incarnation)
        if stored is not None:
            if (
                stored.value.member == member
                and stored.value.ended_sequence is None
                and not stored.value.fenced
            ):
                return stored.value
            raise IncarnationRefused(member.incarnation, "the name was used before")
        journal = self._journal
        record = rec.MembershipRecord(member, journal.next_sequence)
        directory = self._directory()
        puts: dict[str, msgspec.Struct] = {
            key: record,
            rec.INCARNATIONS_KEY: rec.Directory((*directory.names, member.incarnation)),
        }
        detail = {"replica": member.replica, "ranks": member.ranks}
        journal.commit(
            "authority", "incarnation_registered", member.incarnation, detail, puts, ((key, None),)
        )
        return record

    def begin_lease(self, incarnation: str, seen_floor_sequence: int = 0) -> None:
        """Check that a lease may be given and, before the first, make that durable.

        ``seen_floor_sequence`` is the highest sequence the replica has seen: a store behind it lost history.
        Raises: IncarnationUnknown, IncarnationEnded, IncarnationFenced, StoreBehindHighWater, TermSuperseded.
        """
        journal = self._journal
        journal.check_term()
        stored = self._leasable(incarnation)
        if seen_floor_sequence > journal.position.sequence:
            detail = f"{incarnation} has seen more"
            raise StoreBehindHighWater(seen_floor_sequence, journal.position.sequence, detail)
        if stored.value.leased_sequence is None:
            record = msgspec.structs.replace(stored.value, leased_sequence=journal.next_sequence)
            self._replace(stored, record, "incarnation_leased")

    def renew(self, incarnation: str, sequence: int, floors: Floors) -> LeaseRenewal:
        """Extend the lease that ``begin_lease`` allowed in this same call."""
        journal = self._journal
        self._lease_ends[incarnation] = journal.clock.monotonic_s() + self._lease_s
        return LeaseRenewal(
            incarnation, sequence, self._lease_s, floors, journal.term, journal.cluster.store_epoch
        )

    def end(self, incarnation: str, proof: str) -> rec.MembershipRecord:
        """Record that an incarnation is proven gone; again, nothing changes. Raises: IncarnationUnknown."""
        stored = self._known(incarnation)
        if stored.value.ended_sequence is not None:
            return stored.value
        sequence = self._journal.next_sequence
        record = msgspec.structs.replace(stored.value, ended_sequence=sequence, ended_proof=proof)
        self._replace(stored, record, "incarnation_ended")
        return record

    def fence(self, incarnation: str) -> rec.MembershipRecord:
        """Never renew this incarnation again; again, nothing changes. Raises: IncarnationUnknown."""
        stored = self._known(incarnation)
        if stored.value.fenced:
            return stored.value
        record = msgspec.structs.replace(stored.value, fenced=True)
        self._replace(stored, record, "incarnation_fenced")
        return record

    def lapse(self, incarnation: str) -> rec.MembershipRecord:
        """Record that a fenced incarnation's lease and the skew have passed. Raises: IncarnationUnknown."""
        stored = self._known(incarnation)
        if stored.value.lapsed_sequence is not None:
            return stored.value
        record = msgspec.structs.replace(stored.value, lapsed_sequence=self._journal.next_sequence)
        self._replace(stored, record, "incarnation_lapsed")
        return record

    def fence_remaining_s(self, incarnation: str) -> float:
        """Seconds until no lease of a fenced incarnation can be held any more, skew included."""
        last = self._lease_ends.get(incarnation, self._opened_at + self._lease_s)
        return max(0.0, last + LEASE_SKEW_S - self._journal.clock.monotonic_s())

    def get(self, incarnation: str) -> rec.MembershipRecord:
        """The membership. Raises: IncarnationUnknown."""
        return self._known(incarnation).value

    def all(self) -> list[rec.MembershipRecord]:
        """Every membership in order of registration. Raises: StoreTampered when one is missing."""
        keys = [rec.membership_key(name) for name in self._directory().names]
        found = self._journal.store.read_many(keys, rec.MembershipRecord)
        return [must_exist(key, stored).value for key, stored in zip(keys, found, strict=True)]

    def held_lease_since(self, sequence: int) -> list[rec.MembershipRecord]:
        """Exactly those that held a lease at some time after audit record ``sequence``."""
        return [
            entry
            for entry in self.all()
            if entry.leased_sequence is not None
            and (entry.ended_sequence is None or entry.ended_sequence > sequence)
            and (entry.lapsed_sequence is None or entry.lapsed_sequence > sequence)
        ]

    def _replace(
        self, stored: Stored[rec.MembershipRecord], record: rec.MembershipRecord, action: str
    ) -> None:
        incarnation = record.member.incarnation
        key = rec.membership_key(incarnation)
        self._journal.commit("authority", action, incarnation, {}, {key: record}, ((key, stored),))

    def _leasable(self, incarnation: str) -> Stored[rec.MembershipRecord]:
        stored = self._known(incarnation)
        if stored.value.ended_sequence is not None:
            raise IncarnationEnded(incarnation)
        if stored.value.fenced:
            raise IncarnationFenced(incarnation)
        return stored

    def _known(self, incarnation: str) -> Stored[rec.MembershipRecord]:
        self._journal.ensure_durable()
        stored = self._read(incarnation) if _INCARNATION.fullmatch(incarnation) else None
        if stored is None:
            raise IncarnationUnknown(incarnation)
        return stored

    def _read(self, incarnation: str) -> Stored[rec.MembershipRecord] | None:
        return self._journal.store.read(rec.membership_key(incarnation), rec.MembershipRecord)

    def _directory(self) -> rec.Directory:
        stored = self._journal.store.read(rec.INCARNATIONS_KEY, rec.Directory)
        return rec.Directory() if stored is None else stored.value


def _check(member: rec.IncarnationRecord) -> None:
    if _INCARNATION.fullmatch(member.incarnation) is None:
        raise IncarnationRefused(member.incarnation, "its name is malformed")
    if member.ranks < 1 or len(member.rank_public_keys) != member.ranks:
        detail = f"{len(member.rank_public_keys)} keys for {member.ranks} ranks"
        raise IncarnationRefused(member.incarnation, detail)
    if any(parse_hex(key, PUBLIC_KEY_BYTES) is None for key in member.rank_public_keys):
        raise IncarnationRefused(member.incarnation, "a rank's public key is not 64 hexadecimal digits")
