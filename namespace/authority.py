"""The authority: who may do what in which namespace, and the only holder of private keys.

Invariant: a grant is signed only after the credential, the namespace and the term were read from the store in
this call; every refusal of a credential is the same ``Unauthenticated`` and every refusal of a namespace the
same ``NotFound``; no index is reachable from here. Sync, without Ray. Contracts: K013, K180, K181, K185.
"""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_bytes

import msgspec

from . import records as rec
from .audit_trail import AuditDetail, AuditRecord
from .certificate import Certificate, issue_certificate
from .clock import Clock
from .errors import CertificateUnknown, NotFound, StoreBehindHighWater, Unauthenticated
from .floors import Floors
from .grants import GRANT_LIFETIME_S, RIGHTS, Grant, GrantVerifier, sign_grant
from .high_water import HighWaterFile
from .journal import Journal, JournalFiles
from .keys import ParsedCredential, credential_digest, digests_equal, parse_credential
from .leases import LEASE_S, LeaseRenewal, Membership
from .recovery import check_history
from .registry import Registry
from .secrets import Secrets, TokenSource
from .store import Store

DEFAULT_AUDIENCE = "replica"
_ABSENT = "-"


class ClusterIdentity(msgspec.Struct, frozen=True):
    """What verifiers need to know; holds no secret."""

    cluster_id: str
    store_epoch: str
    term: int
    audience: str
    grant_public_key: bytes
    certificate_public_key: bytes

    def verifier(self) -> GrantVerifier:
        """A verifier of this authority's grants."""
        return GrantVerifier(self.grant_public_key, self.cluster_id, self.store_epoch, self.audience)


class Authorization(msgspec.Struct, frozen=True):
    """A grant and the secret K(ns, g) that goes with it for the grant's life."""

    grant: Grant
    secret: bytes
    request_id: str

    def __repr__(self) -> str:
        return f"Authorization(grant_id={self.grant.grant_id!r}, request_id={self.request_id!r})"


class Authority:
    """One term of office over one store."""

    def __init__(
        self,
        journal: Journal,
        secrets: Secrets,
        audience: str,
        token_source: TokenSource,
        lease_s: float,
    ):
        self.journal = journal
        self.audience = audience
        self.registry = Registry(journal, secrets, token_source)
        self.membership = Membership(journal, lease_s)
        self.token_source = token_source
        self._secrets = secrets

    @classmethod
    def open(
        cls,
        store: Store,
        secrets: Secrets,
        clock: Clock,
        files: JournalFiles,
        *,
        audience: str = DEFAULT_AUDIENCE,
        token_source: TokenSource = token_bytes,
        lease_s: float = LEASE_S,
    ) -> Authority:
        """Check the store against the high-water mark and its own trail, then take a new term.

        Raises: StoreBehindHighWater, HighWaterRefused, StoreTampered, StoreUnavailable; no term was taken.
        """
        mark = HighWaterFile(files.high_water, secrets.certificate_key).read()
        stored = store.read(rec.CLUSTER_KEY, rec.ClusterRecord)
        puts: dict[str, msgspec.Struct] = {}
        if stored is not None:
            cluster = stored.value
        else:
            if mark is not None:
                raise StoreBehindHighWater(mark.sequence, 0, "the store is empty")
            cluster = rec.ClusterRecord(token_source(16).hex(), token_source(16).hex(), clock.now_s())
            puts[rec.CLUSTER_KEY] = cluster
        journal = Journal(store, clock, secrets.certificate_key, files, cluster)
        authority = cls(journal, secrets, audience, token_source, lease_s)
        history = check_history(journal, mark, files.high_water)
        authority.registry.load(history.state)
        journal.take_term(
            history.key_change_sequence, history.highest_generation, "authority_opened", {}, puts
        )
        return authority

    @property
    def identity(self) -> ClusterIdentity:
        cluster = self.journal.cluster
        return ClusterIdentity(
            cluster.cluster_id,
            cluster.store_epoch,
            self.journal.term,
            self.audience,
            self._secrets.grant_public_key,
            self._secrets.certificate_public_key,
        )

    @property
    def floors(self) -> Floors:
        """The floors in force, for gateways and new replicas."""
        return self.registry.floors

    # --- operator ---------------------------------------------------------------------------------------

    def create_tenant(
        self, name: str, namespaces: Sequence[str] | None = None, *, actor: str = "operator"
    ) -> rec.TenantRecord:
        """Create a tenant, by default with one namespace of its name. Raises: NameRefused, NameTaken."""
        return self.registry.create_tenant(name, namespaces, actor)

    def create_key(
        self,
        tenant: str,
        *,
        rights: tuple[str, ...] = RIGHTS,
        lifetime_s: float | None = None,
        actor: str = "operator",
    ) -> str:
        """Make an API key; its credential is kept nowhere else. Raises: TenantUnknown, RightsRefused."""
        return self.registry.create_key(tenant, rights, lifetime_s, actor)[0]

    def list_tenants(self) -> list[rec.TenantRecord]:
        """All tenants in order of creation."""
        return self.registry.list_tenants()

    def disable_key(self, key_id: str, *, actor: str = "operator") -> rec.KeyRecord:
        """Refuse the key from now on; its running requests end with the next floors. Raises: KeyUnknown."""
        return self.registry.set_key_enabled(key_id, False, actor)

    def enable_key(self, key_id: str, *, actor: str = "operator") -> rec.KeyRecord:
        """Accept the key again. Raises: KeyUnknown."""
        return self.registry.set_key_enabled(key_id, True, actor)

    def disable_namespace(self, name: str, *, actor: str = "operator") -> rec.NamespaceRecord:
        """Close the namespace to new work; its bytes stay. Raises: NamespaceUnknown."""
        return self.registry.set_namespace_enabled(name, False, actor)

    def enable_namespace(self, name: str, *, actor: str = "operator") -> rec.NamespaceRecord:
        """Open the namespace again. Raises: NamespaceUnknown."""
        return self.registry.set_namespace_enabled(name, True, actor)

    def certificate(self, namespace: str, generation_from: int) -> bytes:
        """The certificate as issued. Raises: CertificateUnknown."""
        key = rec.certificate_key(namespace, generation_from)
        stored = self.journal.store.read(key, rec.CertificateRecord)
        if stored is None:
            raise CertificateUnknown(namespace, generation_from)
        return stored.value.document

    def close(self) -> None:
        """Write the audit head and let go of the store; the term stays until another authority opens."""
        self.journal.write_head()
        self.journal.store.close()

    def record_call(self, actor: str, call: str, subject: str, detail: AuditDetail) -> int:
        """Audit an operator's call that changes nothing here; returns its sequence."""
        return self.journal.commit(actor, f"call:{call}", subject, detail, {})

    def audit_records(self, first: int = 1) -> list[AuditRecord]:
        """The trail from ``first`` on."""
        return list(self.journal.records(first))

    # --- replicas ---------------------------------------------------------------------------------------

    def register_incarnation(self, member: rec.IncarnationRecord) -> rec.MembershipRecord:
        """Make an incarnation's membership durable, before its first lease. Raises: IncarnationRefused."""
        return self.membership.register(member)

    def renew_lease(self, incarnation: str, sequence: int, seen_floor_sequence: int = 0) -> LeaseRenewal:
        """Give or extend a lease with the floors in force. Raises: as Membership.renew."""
        self.journal.write_head_if_due()
        self.membership.begin_lease(incarnation, seen_floor_sequence)
        return self.membership.renew(incarnation, sequence, self.floors)

    def end_incarnation(self, incarnation: str, proof: str) -> rec.MembershipRecord:
        """Record that an incarnation's processes are proven gone. Raises: IncarnationUnknown."""
        return self.membership.end(incarnation, proof)

    # --- tenants ----------------------------------------------------------------------------------------

    def authorize(self, credential: str, namespace: str | None, request_id: str) -> Authorization:
        """Exchange a credential for a grant and K(ns, g).

        Raises: Unauthenticated, NotFound (each identical for all its causes); StoreUnavailable,
        StoreTampered, TermSuperseded: no grant was made.
        """
        self.journal.check_term()
        parsed = parse_credential(credential)
        stored_key = self.registry.stored_key(parsed.key_id)
        key = self._authenticated(parsed, None if stored_key is None else stored_key.value)
        tenant = self.registry.tenant_of(key)
        name = tenant.default_namespace if namespace is None else namespace
        listed = name in tenant.namespaces
        stored = self.registry.stored_namespace(name if listed else _ABSENT)
        if stored is None or stored.value.principal != key.principal:
            raise NotFound()
        record = stored.value
        if not listed or record.state != "active" or record.disabled:
            raise NotFound()
        return self._granted(key, record, request_id)

    def _authenticated(self, parsed: ParsedCredential, key: rec.KeyRecord | None) -> rec.KeyRecord:
        version = self._secrets.pepper_version if key is None else key.pepper_version
        digest = credential_digest(self._secrets.pepper(version), parsed)
        matches = digests_equal(digest, bytes(32) if key is None else key.digest)
        if key is None or not (matches and parsed.well_formed and key.enabled):
            raise Unauthenticated()
        if key.expires_at is not None and self.journal.clock.now_s() >= key.expires_at:
            raise Unauthenticated()
        return key

    def _granted(self, key: rec.KeyRecord, namespace: rec.NamespaceRecord, request_id: str) -> Authorization:
        cluster, now_s = self.journal.cluster, self.journal.clock.now_s()
        grant = Grant(
            grant_id=self.token_source(16).hex(),
            key_id=key.key_id,
            principal=key.principal,
            namespace=namespace.name,
            generation=namespace.generation,
            rights=key.rights,
            cluster_id=cluster.cluster_id,
            store_epoch=cluster.store_epoch,
            audience=self.audience,
            term=self.journal.term,
            issued_at=now_s,
            expires_at=now_s + GRANT_LIFETIME_S,
        )
        secret = self.namespace_secret(namespace.name, namespace.generation)
        return Authorization(sign_grant(self._secrets.grant_key, grant), secret, request_id)

    def namespace_secret(self, namespace: str, generation: int) -> bytes:
        """K(ns, g)."""
        cluster = self.journal.cluster
        return self._secrets.namespace_secret(cluster.cluster_id, cluster.store_epoch, namespace, generation)

    def sign_certificate(self, certificate: Certificate) -> bytes:
        """The document of a certificate, signed."""
        return issue_certificate(self._secrets.certificate_key, certificate)
