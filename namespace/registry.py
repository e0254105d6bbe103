"""Tenants, their namespaces and API keys, as the operator manages them.

Invariant: a namespace has exactly one principal (strict mode) and a generation that only rises; records that
another record names exist, or the store is damaged. Keeps the present floors in memory, rebuilt at start.
Contracts: K012, K185; source: docs/isolation.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from . import records as rec
from .audit_trail import TrailState
from .errors import (
    KeyUnknown,
    NameRefused,
    NamespaceUnknown,
    NameTaken,
    RightsRefused,
    StoreTampered,
    TenantUnknown,
)
from .floors import FIRST_GENERATION, Floors
from .grants import RIGHTS
from .journal import Journal, must_exist
from .keys import credential_digest, new_credential, spell_credential
from .secrets import Secrets, TokenSource
from .store import Stored

_R = TypeVar("_R")

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


class Registry:
    """Operator's acts on tenants, namespaces and keys; each is one audited commit."""

    def __init__(self, journal: Journal, secrets: Secrets, token_source: TokenSource):
        self._journal = journal
        self._secrets = secrets
        self._token_source = token_source
        self._floors = Floors()

    @property
    def floors(self) -> Floors:
        """Every generation above the first and everything disabled, at the present audit sequence."""
        return msgspec.structs.replace(self._floors, sequence=self._journal.position.sequence)

    def load(self, trail: TrailState) -> None:
        """Read everything once and compare it with what the trail says. Raises: StoreTampered."""
        generations: dict[str, int] = {}
        disabled_namespaces: set[str] = set()
        enabled_keys: set[str] = set()
        disabled_keys: set[str] = set()
        for tenant in self.list_tenants():
            for namespace in self.namespaces(tenant.namespaces):
                generations[namespace.name] = namespace.generation
                if namespace.disabled:
                    disabled_namespaces.add(namespace.name)
            for key in self.keys(tenant):
                (enabled_keys if key.enabled else disabled_keys).add(key.key_id)
        found = TrailState(generations, disabled_namespaces, enabled_keys)
        if found != trail:
            raise StoreTampered("namespaces and keys", "they differ from what the audit trail says")
        raised = {name: value for name, value in generations.items() if value > FIRST_GENERATION}
        self._floors = Floors(0, raised, frozenset(disabled_keys), frozenset(disabled_namespaces))

    def create_tenant(self, name: str, namespaces: Sequence[str] | None, actor: str) -> rec.TenantRecord:
        """Create a tenant with its namespaces. Raises: NameRefused, NameTaken; nothing was created."""
        names = tuple(namespaces) if namespaces is not None else (name,)
        for candidate in (name, *names):
            if _NAME.fullmatch(candidate) is None:
                raise NameRefused(candidate)
        if not names or len(set(names)) != len(names):
            raise NameTaken(names[0] if names else name)
        directory = self._directory()
        if name in directory.names or self._tenant(name) is not None:
            raise NameTaken(name)
        for candidate in names:
            if self.stored_namespace(candidate) is not None:
                raise NameTaken(candidate)
        journal = self._journal
        generation = journal.cluster.generation_base + FIRST_GENERATION
        now_s, sequence = journal.clock.now_s(), journal.next_sequence
        tenant = rec.TenantRecord(name, now_s, names[0], names)
        puts: dict[str, msgspec.Struct] = {
            rec.TENANTS_KEY: rec.Directory((*directory.names, name)),
            rec.tenant_key(name): tenant,
        }
        for candidate in names:
            record = rec.NamespaceRecord(candidate, name, generation, sequence, now_s)
            puts[rec.namespace_key(candidate)] = record
        detail = {"namespaces": list(names), "generation": generation}
        journal.commit(actor, "tenant_created", name, detail, puts)
        if generation > FIRST_GENERATION:
            for candidate in names:
                self.raise_floor(candidate, generation)
        return tenant

    def create_key(
        self, tenant: str, rights: tuple[str, ...], lifetime_s: float | None, actor: str
    ) -> tuple[str, rec.KeyRecord]:
        """Make a key; the credential is returned once, kept nowhere. Raises: TenantUnknown, RightsRefused."""
        if len(set(rights)) != len(rights) or not set(rights) <= set(RIGHTS):
            raise RightsRefused(rights)
        stored = self._known_tenant(tenant)
        credential = new_credential(self._token_source)
        version = self._secrets.pepper_version
        now_s = self._journal.clock.now_s()
        record = rec.KeyRecord(
            credential.key_id,
            tenant,
            credential_digest(self._secrets.pepper(version), credential),
            version,
            rights,
            now_s,
            None if lifetime_s is None else now_s + lifetime_s,
        )
        updated = msgspec.structs.replace(stored.value, key_ids=(*stored.value.key_ids, credential.key_id))
        puts: dict[str, msgspec.Struct] = {
            rec.api_key_key(credential.key_id): record,
            rec.tenant_key(tenant): updated,
        }
        absent = (rec.api_key_key(credential.key_id), None)
        detail = {"tenant": tenant, "rights": list(rights)}
        expect = (absent, (rec.tenant_key(tenant), stored))
        self._journal.commit(actor, "key_created", credential.key_id, detail, puts, expect)
        return spell_credential(credential), record

    def set_key_enabled(self, key_id: str, enabled: bool, actor: str) -> rec.KeyRecord:
        """Enable or disable a key; repeating it changes nothing. Raises: KeyUnknown."""
        self._journal.ensure_durable()
        stored = self.stored_key(key_id)
        if stored is None:
            raise KeyUnknown(key_id)
        if stored.value.enabled != enabled:
            record = msgspec.structs.replace(stored.value, enabled=enabled)
            key = rec.api_key_key(key_id)
            action = "key_enabled" if enabled else "key_disabled"
            self._journal.commit(actor, action, key_id, {}, {key: record}, ((key, stored),))
            stored = must_exist(key, self.stored_key(key_id))
        others = self._floors.disabled_keys - {key_id}
        disabled = others if enabled else others | {key_id}
        self._floors = msgspec.structs.replace(self._floors, disabled_keys=disabled)
        return stored.value

    def set_namespace_enabled(self, name: str, enabled: bool, actor: str) -> rec.NamespaceRecord:
        """Open or close a namespace to new work; repeating it changes nothing. Raises: NamespaceUnknown."""
        self._journal.ensure_durable()
        stored = self.known_namespace(name)
        if stored.value.disabled == enabled:
            record = msgspec.structs.replace(stored.value, disabled=not enabled)
            key = rec.namespace_key(name)
            action = "namespace_enabled" if enabled else "namespace_disabled"
            self._journal.commit(actor, action, name, {}, {key: record}, ((key, stored),))
            stored = self.known_namespace(name)
        others = self._floors.disabled_namespaces - {name}
        disabled = others if enabled else others | {name}
        self._floors = msgspec.structs.replace(self._floors, disabled_namespaces=disabled)
        return stored.value

    def raise_floor(self, namespace: str, generation: int) -> None:
        """Note in memory what a durable commit has raised."""
        self._floors = self._floors.raised(namespace, generation)

    def list_tenants(self) -> list[rec.TenantRecord]:
        """All tenants in order of creation. Raises: StoreTampered when a listed one is missing."""
        return self._all([rec.tenant_key(name) for name in self._directory().names], rec.TenantRecord)

    def namespaces(self, names: Sequence[str]) -> list[rec.NamespaceRecord]:
        """The namespaces of those names. Raises: StoreTampered when one is missing."""
        return self._all([rec.namespace_key(name) for name in names], rec.NamespaceRecord)

    def keys(self, tenant: rec.TenantRecord) -> list[rec.KeyRecord]:
        """The keys of a tenant. Raises: StoreTampered when one is missing."""
        return self._all([rec.api_key_key(key_id) for key_id in tenant.key_ids], rec.KeyRecord)

    def stored_key(self, key_id: str) -> Stored[rec.KeyRecord] | None:
        return self._journal.store.read(rec.api_key_key(key_id), rec.KeyRecord)

    def stored_namespace(self, name: str) -> Stored[rec.NamespaceRecord] | None:
        """The namespace, checked against the generation known in memory. Raises: StoreTampered."""
        key = rec.namespace_key(name)
        stored = self._journal.store.read(key, rec.NamespaceRecord)
        if stored is not None and stored.value.generation < self._floors.generation(name):
            raise StoreTampered(key, "its generation went back")
        return stored

    def known_namespace(self, name: str) -> Stored[rec.NamespaceRecord]:
        """The namespace, for an operator. Raises: NamespaceUnknown."""
        stored = self.stored_namespace(name) if _NAME.fullmatch(name) else None
        if stored is None:
            raise NamespaceUnknown(name)
        return stored

    def tenant(self, name: str) -> rec.TenantRecord:
        """The tenant. Raises: TenantUnknown."""
        return self._known_tenant(name).value

    def tenant_of(self, key: rec.KeyRecord) -> rec.TenantRecord:
        """The tenant a key belongs to. Raises: StoreTampered when it is missing."""
        return must_exist(rec.tenant_key(key.principal), self._tenant(key.principal)).value

    def _known_tenant(self, name: str) -> Stored[rec.TenantRecord]:
        stored = self._tenant(name) if _NAME.fullmatch(name) else None
        if stored is None:
            raise TenantUnknown(name)
        return stored

    def _tenant(self, name: str) -> Stored[rec.TenantRecord] | None:
        return self._journal.store.read(rec.tenant_key(name), rec.TenantRecord)

    def _directory(self) -> rec.Directory:
        stored = self._journal.store.read(rec.TENANTS_KEY, rec.Directory)
        return rec.Directory() if stored is None else stored.value

    def _all(self, keys: list[str], record_type: type[_R]) -> list[_R]:
        found = self._journal.store.read_many(keys, record_type)
        return [must_exist(key, stored).value for key, stored in zip(keys, found, strict=True)]
