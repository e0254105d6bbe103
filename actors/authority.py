"""The namespace actor: a Ray shell around the authority, and the fleet a revocation acts on.

Owns the only process that reads private keys, root and pepper (0600 files under the state folder, never constructor
arguments). Refusals are returned as values, not raised: equal for equal kinds, without a traceback. The operator's
calls are audited by the authority itself. Invariant: a revocation runs alone per namespace, and what it is told by
replicas and gateways goes into its certificate unedited.
"""

from __future__ import annotations

import secrets as secrets_module
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from copyhold.namespace.audit_trail import encode_head
from copyhold.namespace.authority import Authority, Authorization, ClusterIdentity
from copyhold.namespace.clock import SystemClock
from copyhold.namespace.errors import NamespaceError
from copyhold.namespace.journal import JournalFiles
from copyhold.namespace.leases import LeaseRenewal
from copyhold.namespace.records import IncarnationRecord
from copyhold.namespace.revocation import Revoker
from copyhold.namespace.secrets import Secrets
from copyhold.namespace.sessions import SessionStore
from copyhold.namespace.store import Store
from copyhold.namespace.store_target import StoreTarget

from .errors import InvalidRequest
from .fleet import RayFleet

_T = TypeVar("_T")
_TRAIL_RECORDS_AT_ONCE = 1000


class AuthoritySpec(msgspec.Struct, frozen=True):
    """Where the authority finds its files and stores; holds no secret."""

    state_dir: str
    authority_store: StoreTarget
    sessions_store: StoreTarget
    accept_generation_loss: bool
    lease_s: float


Refusal = NamespaceError | InvalidRequest
"""A refusal as a value; tenants' refusals of one kind have no fields and are equal byte for byte."""


class NamespaceActor:
    """Created as a Ray actor named ``authority``."""

    def __init__(self, spec: AuthoritySpec) -> None:
        state = Path(spec.state_dir)
        secrets = Secrets.load_or_create(state / "secrets")
        store = Store.connect(
            spec.authority_store,
            secrets.store_mac_key,
            accept_generation_loss=spec.accept_generation_loss,
        )
        files = JournalFiles(audit_head=state / "audit-head.json", high_water=state / "high-water.json")
        self._authority = Authority.open(store, secrets, SystemClock(), files, lease_s=spec.lease_s)
        self._sessions = SessionStore.connect(spec.sessions_store)
        self._public_key_path = state / "secrets" / "certificate.pub"
        self._fleet = RayFleet(self._members, self._sessions)
        self._revoker = Revoker(self._authority, self._fleet)
        self._boot_id = secrets_module.token_hex(8)
        self._known_members: list[IncarnationRecord] = []
        self._revocations: Counter[str] = Counter()
        self._recoveries = 0
        self._draining = False

    # -- start-up -----------------------------------------------------------------------------------------------

    async def identity(self) -> ClusterIdentity:
        """What verifiers of grants and certificates need; public."""
        return self._authority.identity

    async def boot_id(self) -> str:
        """Changes with every start of this process: whoever watches it knows of a restart."""
        return self._boot_id

    async def store_up(self) -> bool:
        """Whether the store answers, so that an incarnation could register now."""
        try:
            self._authority.journal.check_term()
        except NamespaceError:
            return False
        return True

    async def note_recoveries(self, recoveries: int) -> None:
        """How many replicas the keeper has replaced so far."""
        self._recoveries = recoveries

    async def draining(self) -> bool:
        """Whether an operator has drained the server: a restarted gateway must not open again."""
        return self._draining

    async def resume(self) -> int:
        """Finish the revocations that a crash left under way; returns how many."""
        return len(await self._revoker.resume_revocations())

    async def end_previous(self, proof: str) -> list[str]:
        """Record every incarnation known so far as ended by ``proof``; returns their names.

        For a server that owns its state folder alone: whatever served from it before is proven gone.
        """
        ended = [member.incarnation for member in self._members()]
        for incarnation in ended:
            self._authority.end_incarnation(incarnation, proof)
        return ended

    async def end_incarnation(self, incarnation: str, proof: str) -> None:
        """Record that an incarnation's processes are gone; one that never registered is left alone."""
        if incarnation in {member.incarnation for member in self._members()}:
            self._authority.end_incarnation(incarnation, proof)

    async def register_incarnation(self, record: IncarnationRecord) -> None:
        """Make a replica's membership durable before its first lease."""
        self._authority.register_incarnation(record)
        self._members()

    async def renew_lease(self, incarnation: str, sequence: int) -> LeaseRenewal:
        """Give or extend a serving lease; raises the namespace room's lease errors."""
        return self._authority.renew_lease(incarnation, sequence)

    # -- tenants ------------------------------------------------------------------------------------------------

    async def authorize(
        self, credential: str, namespace: str | None, request_id: str
    ) -> Authorization | Refusal:
        """A grant for a credential; the same refusal for every cause of one kind."""
        return self._refusing(lambda: self._authority.authorize(credential, namespace, request_id))

    async def serving(self) -> bool:
        """Whether the store answers and some replica holds its lease and admits."""
        if not await self.store_up():
            return False
        return any(status.get("serving") for status in await self._fleet.replica_status())

    # -- operator -----------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any] | Refusal:
        """Cluster identity, tenants' namespaces and generations, replicas, index."""
        identity = self._authority.identity
        try:
            return {
                "cluster_id": identity.cluster_id,
                "term": identity.term,
                "draining": self._draining,
                "replicas": await self._fleet.replica_status(),
                "coordinator": await self._fleet.coordinator_status(),
                "namespaces": {
                    name: {"generation": record.generation, "state": record.state}
                    for tenant in self._authority.list_tenants()
                    for name, record in self._namespaces(tenant.namespaces)
                },
            }
        except NamespaceError as error:
            return error

    async def metrics(self) -> dict[str, Any]:
        """Figures of the server as a whole, of replicas and ranks; no name of a tenant. Answers without the store."""
        store_up = True
        try:
            self._authority.journal.check_term()
            self._members()
        except NamespaceError:
            store_up = False
        return {
            "store_up": store_up,
            "replicas": await self._fleet.metrics(self._known_members),
            "revocations": dict(self._revocations),
            "recoveries": self._recoveries,
        }

    async def create_tenant(self, name: str, namespaces: list[str] | None) -> dict[str, Any] | Refusal:
        """A tenant and its first key, which is shown this once."""
        return self._refusing(lambda: self._create_tenant(name, namespaces))

    async def list_tenants(self) -> list[dict[str, Any]] | Refusal:
        """Tenants, their namespaces and how many keys they have."""
        return self._refusing(self._list_tenants)

    def _list_tenants(self) -> list[dict[str, Any]]:
        return [
            {
                "tenant": record.name,
                "namespaces": list(record.namespaces),
                "keys": len(record.key_ids),
                "key_ids": list(record.key_ids),
                "created_at": record.created_at,
            }
            for record in self._authority.list_tenants()
        ]

    async def create_key(self, tenant: str) -> dict[str, Any] | Refusal:
        """One more key for a tenant."""
        return self._refusing(lambda: {"key": self._authority.create_key(tenant)})

    async def set_key_enabled(self, key_id: str, enabled: bool) -> dict[str, Any] | Refusal:
        """Accept or refuse a key; requests that run under a refused one end before this returns."""
        change = self._authority.enable_key if enabled else self._authority.disable_key
        answer = self._refusing(lambda: {"key_id": change(key_id).key_id, "enabled": enabled})
        await self._fleet.refresh()
        return answer

    async def set_namespace_enabled(self, namespace: str, enabled: bool) -> dict[str, Any] | Refusal:
        """Open or close a namespace; its requests end, its cached state stays (revocation is another act)."""
        change = self._authority.enable_namespace if enabled else self._authority.disable_namespace
        answer = self._refusing(lambda: {"namespace": change(namespace).name, "enabled": enabled})
        await self._fleet.refresh()
        return answer

    async def revoke(self, namespace: str, deadline_s: float) -> bytes | Refusal:
        """Revoke the namespace's current generation; the certificate's bytes."""
        try:
            certificate = await self._revoker.revoke(namespace, deadline_s)
            self._revocations[certificate.outcome] += 1
            return self._authority.certificate(namespace, certificate.generation_from)
        except NamespaceError as error:
            self._revocations["refused"] += 1
            return error

    async def certificate(self, certificate_id: str) -> bytes | Refusal:
        """A certificate as issued; the id is ``NAMESPACE:GENERATION`` (the revoked one)."""
        namespace, _, generation = certificate_id.rpartition(":")
        if not namespace or not generation.isdecimal():
            return InvalidRequest("a certificate id is NAMESPACE:GENERATION")
        return self._refusing(lambda: self._authority.certificate(namespace, int(generation)))

    async def public_key(self) -> bytes:
        """The certificate key's public half, hexadecimal with a line end."""
        return self._public_key_path.read_bytes()

    async def audit_kv(self, namespace: str, samples: int) -> dict[str, Any] | Refusal:
        """Sampled K/V rows of every rank against a cold recompute."""
        if samples < 1:
            return InvalidRequest("samples must be at least 1")
        self._authority.record_call("operator", "audit_kv", namespace, {"samples": samples})
        try:
            return {"namespace": namespace, "ranks": await self._fleet.audit_kv(namespace, samples)}
        except NamespaceError as error:
            return error

    async def audit_head(self) -> bytes | Refusal:
        """A head of the audit trail signed now, written out too; the reading itself is its last record."""
        return self._refusing(self._audit_head)

    async def audit_records(self, first: int) -> list[dict[str, Any]] | Refusal:
        """Up to a thousand records of the audit trail."""
        records = self._authority.journal.records(first)
        return self._refusing(
            lambda: [msgspec.to_builtins(record) for record in islice(records, _TRAIL_RECORDS_AT_ONCE)]
        )

    async def pool(self) -> dict[str, Any] | Refusal:
        """Every replica's pool gauge and blocks by namespace."""
        try:
            return {"replicas": await self._fleet.pools()}
        except NamespaceError as error:
            return error

    async def ranks(self) -> dict[str, Any]:
        """Agreement of the ledgers and the position of every rank."""
        return {
            "replicas": await self._fleet.replica_status(),
            "ranks": await self._fleet.worker_status(),
        }

    async def audit_ledgers(self) -> dict[str, Any] | Refusal:
        """Every ledger recomputed from scratch, on the scheduler's side and on every rank."""
        self._authority.record_call("operator", "audit_ledgers", "cluster", {})
        try:
            return {"findings": await self._fleet.audit_ledgers()}
        except NamespaceError as error:
            return error

    async def drain(self) -> dict[str, Any] | Refusal:
        """Admit nothing more on any replica."""
        try:
            self._authority.record_call("operator", "drain", "cluster", {})
            self._draining = True
            return {"replicas": await self._fleet.drain()}
        except NamespaceError as error:
            return error

    # -- inside -------------------------------------------------------------------------------------------------

    def _members(self) -> list[IncarnationRecord]:
        """Incarnations that have not ended, as the store knows them."""
        entries = self._authority.membership.all()
        self._known_members = [entry.member for entry in entries if entry.ended_sequence is None]
        return self._known_members

    def _create_tenant(self, name: str, namespaces: list[str] | None) -> dict[str, Any]:
        record = self._authority.create_tenant(name, namespaces)
        return {
            "tenant": record.name,
            "namespaces": list(record.namespaces),
            "key": self._authority.create_key(record.name),
        }

    def _audit_head(self) -> bytes:
        self._authority.record_call("operator", "audit_head", "cluster", {})
        return encode_head(self._authority.journal.write_head())

    def _namespaces(self, names: tuple[str, ...]) -> list[tuple[str, Any]]:
        stored = [(name, self._authority.registry.stored_namespace(name)) for name in names]
        return [(name, found.value) for name, found in stored if found is not None]

    def _refusing(self, call: Callable[[], _T]) -> _T | Refusal:
        try:
            return call()
        except NamespaceError as error:
            return error
