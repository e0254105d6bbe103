"""What a start believes: the store only as far as the trail and the high-water mark agree with it.

Invariant: a store that lost history is refused until an operator confirms the restore; then a new store epoch
is drawn (grants and secrets of the old one are void), every generation goes above any that was ever given,
keys that may have changed since are suspended and every incarnation is fenced. Source: docs/isolation.md.
"""

from __future__ import annotations

from pathlib import Path
from secrets import token_bytes
from typing import TypeVar

import msgspec

from . import records as rec
from .audit_trail import AuditDetail, AuditPosition, TrailState, checked_step, replay
from .clock import Clock
from .errors import HighWaterRefused, StoreBehindHighWater, StoreTampered, TrailBroken
from .high_water import HighWaterFile, HighWaterMark
from .journal import KEY_ACTIONS, Journal, JournalFiles, must_exist
from .secrets import Secrets, TokenSource
from .store import Store

_R = TypeVar("_R")


class History(msgspec.Struct, frozen=True):
    """The trail, walked once."""

    state: TrailState
    position: AuditPosition
    key_change_sequence: int
    highest_generation: int
    digest_at_mark: str | None


class RestoreReceipt(msgspec.Struct, frozen=True):
    """What a confirmed restore changed."""

    store_epoch: str
    generations_added: int
    suspended_keys: tuple[str, ...]
    fenced_incarnations: tuple[str, ...]


def walk_trail(journal: Journal, mark: HighWaterMark | None) -> History:
    """Check the chain from the first record on. Raises: StoreTampered, naming the first bad record."""
    state, position = TrailState(), AuditPosition()
    key_change_sequence = 0
    digest_at_mark: str | None = None
    try:
        for record in journal.records():
            position = checked_step(position, record)
            replay(state, record)
            if record.action in KEY_ACTIONS:
                key_change_sequence = record.sequence
            if mark is not None and record.sequence == mark.sequence:
                digest_at_mark = record.digest
    except TrailBroken as error:
        raise StoreTampered(rec.audit_key(error.sequence), error.detail) from error
    if position != journal.position:
        raise StoreTampered(rec.AUDIT_POSITION_KEY, "it differs from the last audit record")
    highest_generation = max(state.generations.values(), default=0)
    return History(state, position, key_change_sequence, highest_generation, digest_at_mark)


def check_history(journal: Journal, mark: HighWaterMark | None, mark_path: Path) -> History:
    """Walk the trail and compare it with the mark.

    Raises: StoreBehindHighWater, HighWaterRefused, StoreTampered; nothing was written.
    """
    history = walk_trail(journal, mark)
    sequence = history.position.sequence
    if mark is None:
        if sequence > 1:
            raise HighWaterRefused(str(mark_path), "it is missing although the store has history")
        return history
    fault = mark_fault(journal.cluster, history, mark)
    if fault is not None:
        raise StoreBehindHighWater(mark.sequence, sequence, fault)
    return msgspec.structs.replace(
        history, highest_generation=max(history.highest_generation, mark.highest_generation)
    )


def mark_fault(cluster: rec.ClusterRecord, history: History, mark: HighWaterMark) -> str | None:
    """Why the store is not the one the mark remembers; None when it is."""
    if mark.cluster_id != cluster.cluster_id:
        return "the mark is of another cluster"
    if mark.store_epoch != cluster.store_epoch:
        return "the store is of another epoch"
    if history.position.sequence < mark.sequence:
        return "records are missing"
    if history.digest_at_mark != mark.digest:
        return "the store has another history"
    return None


def confirm_restore(
    store: Store,
    secrets: Secrets,
    clock: Clock,
    files: JournalFiles,
    *,
    token_source: TokenSource = token_bytes,
) -> RestoreReceipt:
    """Accept the store as it is, under a new epoch, when an operator has restored a backup on purpose.

    Raises: StoreTampered when the store contradicts itself, HighWaterRefused for a forged mark.
    """
    mark = HighWaterFile(files.high_water, secrets.certificate_key).read()
    stored = store.read(rec.CLUSTER_KEY, rec.ClusterRecord)
    if stored is None:
        cluster_id = token_source(16).hex() if mark is None else mark.cluster_id
        cluster = rec.ClusterRecord(cluster_id, "", clock.now_s())
    else:
        cluster = stored.value
    history = walk_trail(Journal(store, clock, secrets.certificate_key, files, cluster), mark)
    highest = max(history.highest_generation, 0 if mark is None else mark.highest_generation)
    renewed = msgspec.structs.replace(
        cluster, store_epoch=token_source(16).hex(), generation_base=max(cluster.generation_base, highest)
    )
    journal = Journal(store, clock, secrets.certificate_key, files, renewed)
    keep_keys = mark is not None and _keys_unchanged(cluster, history, mark)
    puts: dict[str, msgspec.Struct] = {rec.CLUSTER_KEY: renewed}
    suspended, fenced = _restored_records(store, puts, highest, keep_keys)
    detail: AuditDetail = {
        "generations_added": highest,
        "keys": "kept" if keep_keys else "suspended",
        "incarnations_fenced": len(fenced),
    }
    top = 2 * highest
    journal.take_term(history.key_change_sequence, top, "restore_confirmed", detail, puts)
    return RestoreReceipt(renewed.store_epoch, highest, suspended, fenced)


def _keys_unchanged(cluster: rec.ClusterRecord, history: History, mark: HighWaterMark) -> bool:
    same_history = mark.store_epoch == cluster.store_epoch and (
        history.position.sequence < mark.sequence or history.digest_at_mark == mark.digest
    )
    return same_history and mark.key_change_sequence <= history.position.sequence


def _restored_records(
    store: Store, puts: dict[str, msgspec.Struct], generations_added: int, keep_keys: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Add every record that a restore changes to ``puts``; returns suspended keys and fenced incarnations."""
    suspended: list[str] = []
    for tenant_name in _names(store, rec.TENANTS_KEY):
        tenant = _existing(store, rec.tenant_key(tenant_name), rec.TenantRecord)
        for name in tenant.namespaces:
            namespace = _existing(store, rec.namespace_key(name), rec.NamespaceRecord)
            _restore_namespace(store, puts, namespace, generations_added)
        for key_id in () if keep_keys else tenant.key_ids:
            key = _existing(store, rec.api_key_key(key_id), rec.KeyRecord)
            if key.enabled:
                puts[rec.api_key_key(key_id)] = msgspec.structs.replace(key, enabled=False)
                suspended.append(key_id)
    fenced: list[str] = []
    for incarnation in _names(store, rec.INCARNATIONS_KEY):
        member = _existing(store, rec.membership_key(incarnation), rec.MembershipRecord)
        if not member.fenced and member.ended_sequence is None:
            puts[rec.membership_key(incarnation)] = msgspec.structs.replace(member, fenced=True)
            fenced.append(incarnation)
    return tuple(suspended), tuple(fenced)


def _restore_namespace(
    store: Store, puts: dict[str, msgspec.Struct], namespace: rec.NamespaceRecord, generations_added: int
) -> None:
    generation = namespace.generation + generations_added
    puts[rec.namespace_key(namespace.name)] = msgspec.structs.replace(namespace, generation=generation)
    if namespace.state == "revoking":
        key = rec.revocation_key(namespace.name)
        revocation = _existing(store, key, rec.RevocationRecord)
        if revocation.state == "stopped":
            puts[key] = msgspec.structs.replace(
                revocation, generation_from=generation, generation_to=generation + 1
            )


def _names(store: Store, key: str) -> tuple[str, ...]:
    stored = store.read(key, rec.Directory)
    return () if stored is None else stored.value.names


def _existing(store: Store, key: str, record_type: type[_R]) -> _R:
    return must_exist(key, store.read(key, record_type)).value
