"""A revocation's persisted states, one durable commit each.

Invariant: the states come in one order (stopped, advanced, floored, drained, evidenced, erased, certified), each durable
before anything acts on it; the set of members is fixed in the commit that raises the generation. Sync; revocation.py does
the acting. Contracts: K181; source: docs/isolation.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from . import records as rec
from .audit_trail import AuditDetail
from .authority import Authority
from .certificate import (
    GENERATION_LOSS,
    NOT_COVERED,
    RESIDUAL,
    SCHEMA_VERSION,
    Certificate,
    overall_outcome,
    parse_certificate,
)
from .errors import RevocationStalled, RevocationUnknown
from .journal import must_exist
from .store import Stored

_NONCE_BYTES = 32


class RevocationBook:
    """Reads and writes the revocation record of one authority's namespaces."""

    def __init__(self, authority: Authority):
        self._authority = authority
        self._journal = authority.journal

    def begin(self, namespace: str, deadline_s: float, actor: str) -> rec.RevocationRecord:
        """Stop admission; one already under way is returned as it stands. Raises: NamespaceUnknown."""
        stored = self._authority.registry.known_namespace(namespace)
        if stored.value.state == "revoking":
            self._journal.ensure_durable()
            return self.get(namespace)
        now_s = self._journal.clock.now_s()
        generation = stored.value.generation
        record = rec.RevocationRecord(
            namespace=namespace,
            generation_from=generation,
            generation_to=generation + 1,
            nonce=self._authority.token_source(_NONCE_BYTES).hex(),
            state="stopped",
            requested_at=now_s,
            deadline_at=now_s + deadline_s,
        )
        closed = msgspec.structs.replace(stored.value, state="revoking")
        self._write(record, actor, {rec.namespace_key(namespace): closed}, stored)
        return record

    def advance(self, record: rec.RevocationRecord) -> rec.RevocationRecord:
        """Raise the generation by compare-and-set and fix who held a lease during the old one."""
        name = record.namespace
        stored = self._authority.registry.known_namespace(name)
        if stored.value.generation != record.generation_from:
            detail = f"the namespace is at generation {stored.value.generation}"
            raise RevocationStalled(name, record.state, detail)
        held = self._authority.membership.held_lease_since(stored.value.generation_sequence)
        advanced = msgspec.structs.replace(
            record,
            state="advanced",
            members=tuple(entry.member for entry in held),
            outcomes=tuple(_first_outcome(entry) for entry in held),
        )
        raised = msgspec.structs.replace(
            stored.value, generation=record.generation_to, generation_sequence=self._journal.next_sequence
        )
        self._write(advanced, "authority", {rec.namespace_key(name): raised}, stored)
        self._authority.registry.raise_floor(name, record.generation_to)
        return advanced

    def enter(self, record: rec.RevocationRecord) -> rec.RevocationRecord:
        """Make ``record``'s state durable."""
        self._write(record, "authority", {}, None)
        return record

    def settle(self, record: rec.RevocationRecord, outcome: rec.MemberOutcome) -> rec.RevocationRecord:
        """Make one incarnation's outcome durable."""
        outcomes = tuple(
            outcome if entry.incarnation == outcome.incarnation else entry for entry in record.outcomes
        )
        settled = msgspec.structs.replace(record, outcomes=outcomes)
        self._write(settled, "authority", {}, None, settled=outcome)
        return settled

    def certify(self, record: rec.RevocationRecord) -> Certificate:
        """Issue the certificate and reopen the namespace under its new generation, in one commit."""
        name = record.namespace
        document = self._authority.sign_certificate(self._certificate(record))
        stored = self._authority.registry.known_namespace(name)
        puts: dict[str, msgspec.Struct] = {
            rec.namespace_key(name): msgspec.structs.replace(stored.value, state="active"),
            rec.certificate_key(name, record.generation_from): rec.CertificateRecord(
                name, record.generation_from, document
            ),
        }
        self._write(msgspec.structs.replace(record, state="certified"), "authority", puts, stored)
        return parse_certificate(document)

    def get(self, namespace: str) -> rec.RevocationRecord:
        """The record as persisted. Raises: RevocationUnknown."""
        stored = self._journal.store.read(rec.revocation_key(namespace), rec.RevocationRecord)
        if stored is None:
            raise RevocationUnknown(namespace)
        return stored.value

    def pending(self) -> list[rec.RevocationRecord]:
        """Every revocation under way, in order of the tenants' creation."""
        self._journal.ensure_durable()
        registry = self._authority.registry
        names = [name for tenant in registry.list_tenants() for name in tenant.namespaces]
        revoking = [entry.name for entry in registry.namespaces(names) if entry.state == "revoking"]
        return [self.get(name) for name in revoking]

    def _certificate(self, record: rec.RevocationRecord) -> Certificate:
        journal = self._journal
        if record.streams_closed_at is None:
            raise RevocationStalled(record.namespace, record.state, "no gateway has acknowledged")
        loss = (GENERATION_LOSS,) if journal.store.generation_loss_accepted else ()
        return Certificate(
            schema_version=SCHEMA_VERSION,
            cluster_id=journal.cluster.cluster_id,
            store_epoch=journal.cluster.store_epoch,
            namespace=record.namespace,
            generation_from=record.generation_from,
            generation_to=record.generation_to,
            nonce=record.nonce,
            audit_sequence=journal.position.sequence,
            audit_digest=journal.position.digest,
            term=journal.term,
            requested_at=record.requested_at,
            streams_closed_at=record.streams_closed_at,
            issued_at=max(journal.clock.now_s(), record.streams_closed_at),
            outcome=overall_outcome(record.outcomes),
            members=record.members,
            outcomes=record.outcomes,
            gateways=record.gateways,
            not_covered=(*NOT_COVERED, *loss),
            residual=RESIDUAL,
        )

    def _write(
        self,
        record: rec.RevocationRecord,
        actor: str,
        puts: dict[str, msgspec.Struct],
        namespace: Stored[rec.NamespaceRecord] | None,
        settled: rec.MemberOutcome | None = None,
    ) -> None:
        key = rec.revocation_key(record.namespace)
        before = self._journal.store.read(key, rec.RevocationRecord)
        if record.state != "stopped":
            must_exist(key, before)
        detail: AuditDetail = {
            "generation_from": record.generation_from,
            "generation_to": record.generation_to,
        }
        action = f"revocation_{record.state}"
        if settled is not None:
            action = "revocation_settled"
            detail |= {"incarnation": settled.incarnation, "outcome": settled.outcome}
        expect: list[tuple[str, Stored | None]] = [(key, before)]
        if namespace is not None:
            expect.append((rec.namespace_key(record.namespace), namespace))
        self._journal.commit(actor, action, record.namespace, detail, {key: record, **puts}, expect)


def _first_outcome(entry: rec.MembershipRecord) -> rec.MemberOutcome:
    incarnation = entry.member.incarnation
    if entry.ended_sequence is not None:
        return rec.MemberOutcome(incarnation, "ended", entry.ended_proof or "")
    return rec.MemberOutcome(incarnation, "pending")


def unsettled(record: rec.RevocationRecord) -> Sequence[rec.IncarnationRecord]:
    """Members whose outcome is still pending."""
    pending = {entry.incarnation for entry in record.outcomes if entry.outcome == "pending"}
    return [member for member in record.members if member.incarnation in pending]
