"""Every error this room raises, as typed values that survive pickling across actor borders.

Invariant: an error's constructor arguments are its fields, in order, so that ``pickle`` (and therefore Ray)
rebuilds it exactly. ``Unauthenticated`` and ``NotFound`` have no fields: two different causes must give the
same bytes (K180). Contracts: K013, K180, K181; ``reason`` is the stable name that logs and HTTP use.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, dataclass_transform


@dataclass_transform(eq_default=False)
class NamespaceError(Exception):
    """Base of the room's errors; nothing is changed unless a subclass says otherwise."""

    reason: ClassVar[str] = "namespace_error"
    template: ClassVar[str] = "namespace error"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(eq=False, repr=False)(cls)

    def __str__(self) -> str:
        return self.template.format(**self.__dict__)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return (type(self), tuple(getattr(self, field.name) for field in fields))


# --- secrets -----------------------------------------------------------------------------------------------


class SecretFileExposed(NamespaceError):
    """A secret file is open to its group or to others, is a link, or has another owner. Nothing was read."""

    reason = "secret_file_exposed"
    template = "secret file {path} is refused: {detail}"
    path: str
    detail: str


class SecretFileDamaged(NamespaceError):
    """A secret file does not hold exactly one key. Nothing was created or replaced."""

    reason = "secret_file_damaged"
    template = "secret file {path} is damaged: {detail}"
    path: str
    detail: str


class SecretsIncomplete(NamespaceError):
    """Some long-lived secrets are missing although others were in use. Nothing was created."""

    reason = "secrets_incomplete"
    template = "secret file {path} is missing while others are in use; restore it from its backup"
    path: str


class PublicKeyRefused(NamespaceError):
    """A public key is not 32 bytes in lower-case hexadecimal. Nothing was verified."""

    reason = "public_key_refused"
    template = "public key {source} is refused: {detail}"
    source: str
    detail: str


# --- store -------------------------------------------------------------------------------------------------


class StoreAddressRefused(NamespaceError):
    """A store's address is malformed. Nothing was connected to; the text never repeats the address."""

    reason = "store_address_refused"
    template = "the store address is refused: {detail}"
    detail: str


class StoreUnavailable(NamespaceError):
    """The store did not answer. A write may or may not have been applied; the next one reads again."""

    reason = "store_unavailable"
    template = "the store does not answer: {detail}"
    detail: str


class StoreNotDurable(NamespaceError):
    """The store's settings could lose a generation. Start is refused; nothing was written."""

    reason = "store_not_durable"
    template = "the store cannot hold generations: {detail}"
    detail: str


class CommitNotDurable(NamespaceError):
    """A write was applied but not confirmed on disk in time. It must not be acted on yet."""

    reason = "commit_not_durable"
    template = "the store applied a write but did not confirm it on disk: {detail}"
    detail: str


class StoreTampered(NamespaceError):
    """A record is not what the authority wrote under that key. Nothing was changed."""

    reason = "store_tampered"
    template = "store record {key} is not authentic: {detail}"
    key: str
    detail: str


class StoreConflict(NamespaceError):
    """A record changed between read and write. Nothing was written."""

    reason = "store_conflict"
    template = "store record {key} changed meanwhile"
    key: str


class TermSuperseded(NamespaceError):
    """A newer authority has taken over. Nothing was written; this one must stop."""

    reason = "term_superseded"
    template = "authority term {term} has been superseded"
    term: int


class StoreBehindHighWater(NamespaceError):
    """The store lacks history that was once durable. Start is refused; ``confirm_restore`` is the way on."""

    reason = "store_behind_high_water"
    template = (
        "the store ends at audit record {store_sequence}, the signed mark knows {mark_sequence}: {detail}"
    )
    mark_sequence: int
    store_sequence: int
    detail: str


class HighWaterRefused(NamespaceError):
    """The high-water mark is missing, unreadable or not signed by this cluster. Start is refused."""

    reason = "high_water_refused"
    template = "high-water mark {path} is refused: {detail}"
    path: str
    detail: str


# --- tenants, namespaces, keys (operator side) -------------------------------------------------------------


class NameRefused(NamespaceError):
    """A name does not match the naming rule. Nothing was created."""

    reason = "name_refused"
    template = "name {name!r} is refused: it must match [a-z0-9][a-z0-9-]{{0,62}}"
    name: str


class NameTaken(NamespaceError):
    """A tenant or namespace of that name exists. Nothing was created."""

    reason = "name_taken"
    template = "name {name!r} is taken"
    name: str


class RightsRefused(NamespaceError):
    """A right is unknown or listed twice. Nothing was created."""

    reason = "rights_refused"
    template = "rights {rights!r} are refused: choose from reuse, publish"
    rights: tuple[str, ...]


class TenantUnknown(NamespaceError):
    """No tenant of that name. Nothing was changed."""

    reason = "tenant_unknown"
    template = "no tenant {name!r}"
    name: str


class NamespaceUnknown(NamespaceError):
    """No namespace of that name. Nothing was changed."""

    reason = "namespace_unknown"
    template = "no namespace {name!r}"
    name: str


class KeyUnknown(NamespaceError):
    """No key of that id. Nothing was changed."""

    reason = "key_unknown"
    template = "no key {key_id!r}"
    key_id: str


# --- authorization (tenant side) ---------------------------------------------------------------------------


class Unauthenticated(NamespaceError):
    """The credential does not authenticate, for whatever cause. Nothing was looked up."""

    reason = "unauthenticated"
    template = "the credential is not valid"


class NotFound(NamespaceError):
    """The named thing does not exist for this caller, for whatever cause. No index was touched."""

    reason = "not_found"
    template = "not found"


class GrantRefused(NamespaceError):
    """Base of all grant refusals. No lookup was made and the verifier's cache holds nothing new."""

    reason = "namespace_not_authorized"
    template = "the grant is refused"


class GrantForged(GrantRefused):
    """The signature is not the authority's over these fields. Nothing was cached."""

    reason = "grant_forged"
    template = "the grant's signature does not verify"


class GrantExpired(GrantRefused):
    """The grant's time has passed. Nothing was looked up."""

    reason = "grant_expired"
    template = "the grant expired at {expires_at}"
    expires_at: float


class GrantNotYetValid(GrantRefused):
    """The grant was issued later than this clock allows. Nothing was looked up."""

    reason = "grant_not_yet_valid"
    template = "the grant was issued at {issued_at}, beyond the allowed skew"
    issued_at: float


class GrantWrongAudience(GrantRefused):
    """The grant is for another audience. Nothing was looked up."""

    reason = "grant_wrong_audience"
    template = "the grant is for audience {audience!r}"
    audience: str


class GrantWrongCluster(GrantRefused):
    """The grant is of another cluster. Nothing was looked up."""

    reason = "grant_wrong_cluster"
    template = "the grant is of another cluster"


class GrantWrongEpoch(GrantRefused):
    """The grant is of another store epoch. Nothing was looked up."""

    reason = "grant_wrong_epoch"
    template = "the grant is of another store epoch"


class GrantBelowFloor(GrantRefused):
    """The grant names a revoked generation. Nothing was looked up."""

    reason = "namespace_generation_mismatch"
    template = "the grant names generation {generation} of {namespace!r}, below the floor {floor}"
    namespace: str
    generation: int
    floor: int


class GrantKeyDisabled(GrantRefused):
    """The key behind the grant has been disabled. Nothing was looked up."""

    reason = "grant_key_disabled"
    template = "the key behind the grant is disabled"


class GrantNamespaceDisabled(GrantRefused):
    """The namespace has been disabled. Nothing was looked up."""

    reason = "grant_namespace_disabled"
    template = "the namespace of the grant is disabled"


# --- leases ------------------------------------------------------------------------------------------------


class IncarnationRefused(NamespaceError):
    """A membership record is malformed or its name was used before. Nothing was registered."""

    reason = "incarnation_refused"
    template = "incarnation {incarnation!r} is refused: {detail}"
    incarnation: str
    detail: str


class IncarnationUnknown(NamespaceError):
    """No such incarnation is registered. No lease was given."""

    reason = "incarnation_unknown"
    template = "no incarnation {incarnation!r}"
    incarnation: str


class IncarnationEnded(NamespaceError):
    """The incarnation was proven gone. No lease was given; a successor registers anew."""

    reason = "incarnation_ended"
    template = "incarnation {incarnation!r} has ended"
    incarnation: str


class IncarnationFenced(NamespaceError):
    """The incarnation was fenced by a revocation. No lease; it drops its pools and registers anew."""

    reason = "incarnation_fenced"
    template = "incarnation {incarnation!r} is fenced"
    incarnation: str


class RenewalUnexpected(NamespaceError):
    """A renewal answers no request of this holder. The lease is what it was before."""

    reason = "renewal_unexpected"
    template = "renewal {sequence} answers no outstanding request"
    sequence: int


# --- revocation and certificates ---------------------------------------------------------------------------


class FleetUnreachable(NamespaceError):
    """A replica or gateway did not answer. The revocation keeps its persisted state."""

    reason = "fleet_unreachable"
    template = "{member} does not answer: {detail}"
    member: str
    detail: str


class RevocationStalled(NamespaceError):
    """A step could not be finished. The namespace stays closed; the same call or a restart resumes it."""

    reason = "purge_incomplete"
    template = "revocation of {namespace!r} stands at {state}: {detail}"
    namespace: str
    state: str
    detail: str


class RevocationUnknown(NamespaceError):
    """No revocation of that namespace is under way. Nothing was changed."""

    reason = "revocation_unknown"
    template = "no revocation of {namespace!r} is under way"
    namespace: str


class CertificateUnknown(NamespaceError):
    """No certificate for that namespace and generation. Nothing was changed."""

    reason = "certificate_unknown"
    template = "no certificate for generation {generation} of {namespace!r}"
    namespace: str
    generation: int


class TrailBroken(NamespaceError):
    """The audit trail was edited, rewritten or cut. Nothing was changed."""

    reason = "trail_broken"
    template = "audit record {sequence}: {detail}"
    sequence: int
    detail: str


# --- sessions ----------------------------------------------------------------------------------------------


class SessionBelowFloor(NamespaceError):
    """A session record names a revoked generation. Nothing was stored."""

    reason = "stale_namespace_generation"
    template = "generation {generation} of {namespace!r} is below the session store's floor {floor}"
    namespace: str
    generation: int
    floor: int


class SessionTampered(NamespaceError):
    """A session record is not what was written under that name. It is treated as absent by callers."""

    reason = "session_tampered"
    template = "session record {record!r} is not authentic"
    record: str


class RecordNameRefused(NamespaceError):
    """A session record's kind or id is malformed. Nothing was stored."""

    reason = "record_name_refused"
    template = "session record {kind!r} {record_id!r} is refused: its name is malformed"
    kind: str
    record_id: str


class TokenIdsRefused(NamespaceError):
    """A session record would carry a list of integers. Nothing was stored."""

    reason = "token_ids_refused"
    template = "field {field!r} holds a list of integers; token ids do not belong in the session store"
    field: str
