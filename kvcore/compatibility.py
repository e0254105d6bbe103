"""The semantic gate: which rows a consumer may reuse from a producer, and for which reason no more.

Owns the equality-bearing facts of one reuse (`Compatibility`), the concrete key that narrows a search without
proving anything, the witness comparison, and the labels that are recorded and never compared (`Provenance`).
Invariant: a lookup yields `Candidate`s only; rows become usable through `reusable_rows`, which compares every
field in one fixed order.
Source: contracts K001, K006 to K010, K217, K239.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
import numpy as np

from .checked import Array, checked_array, checked_int
from .contract_errors import EmptyInput, LengthMismatch
from .manifest_errors import Fault, HashCollisionWitness, mismatch
from .manifests import canonical

Digest = Callable[[bytes], bytes]
_KEY_DOMAIN = b"copyhold.concrete-key.v1"


class SideInput(msgspec.Struct, frozen=True):
    """Content that enters hidden states without being a token id: it covers rows [start, start + rows)."""

    kind: str
    content: bytes
    start: int
    rows: int


class Provenance(msgspec.Struct, frozen=True):
    """Labels kept for audit and replay; equal rows with other labels are still equal rows (K007)."""

    tokenizer: str = ""
    chat_template: str = ""
    request_id: str = ""
    sampling: str = ""
    stop: tuple[str, ...] = ()


class Compatibility(msgspec.Struct, frozen=True):
    """Facts on which producer and consumer must agree. `tokens` are little-endian int32 bytes.

    `publication_generation` names a publication world (index epoch), not a publish event (K239).
    """

    cache_abi: bytes
    layout: bytes
    model_generation: int
    adapter: bytes
    weight_transform: str
    position_contract: str
    tokens: bytes
    side_inputs: tuple[SideInput, ...]
    namespace: str
    namespace_generation: int
    salt: bytes
    publication_generation: int


class Candidate(msgspec.Struct, frozen=True):
    """What a lookup found: a place where rows may be. It permits nothing by itself (K001)."""

    key: bytes
    group: int
    tokens: bytes
    facts: Compatibility


class ReusableRows(msgspec.Struct, frozen=True):
    """Rows that may be reused, those that fill blocks, and why there are no more ("" where all agree)."""

    rows: int
    full_block_rows: int
    faults: tuple[Fault, ...]

    @property
    def reason(self) -> str:
        return self.faults[0].reason if self.faults else ""


FIELD_REASONS: dict[str, str] = {
    "namespace": "namespace_mismatch",
    "namespace_generation": "namespace_generation_mismatch",
    "salt": "salt_mismatch",
    "publication_generation": "publication_generation_mismatch",
    "cache_abi": "cache_abi_mismatch",
    "layout": "layout_mismatch",
    "model_generation": "model_generation_mismatch",
    "adapter": "adapter_mismatch",
    "weight_transform": "weight_transform_mismatch",
    "position_contract": "position_contract_mismatch",
    "side_inputs": "side_input_mismatch",
    "tokens": "token_mismatch",
}
"""Reason of each field, in the order in which they are compared: the right to read comes first (K237)."""

_BOUNDED_BY_POSITION = ("side_inputs", "tokens")


def compatibility_faults(producer: Compatibility, consumer: Compatibility) -> tuple[Fault, ...]:
    """Every differing field in the order of `FIELD_REASONS`."""
    return tuple(
        Fault(field, reason, repr(getattr(producer, field)), repr(getattr(consumer, field)))
        for field, reason in FIELD_REASONS.items()
        if getattr(producer, field) != getattr(consumer, field)
    )


def require_compatible(producer: Compatibility, consumer: Compatibility) -> None:
    """Full equality over one covered interval. Raises: ManifestMismatch of the first differing field."""
    faults = compatibility_faults(producer, consumer)
    if faults:
        raise mismatch(faults)


def reusable_rows(producer: Compatibility, consumer: Compatibility, block_size: int) -> ReusableRows:
    """Leading rows of the producer that the consumer may use.

    Tokens bound them at the first difference, a side input at its first row; any other difference leaves none.
    """
    rows_per_block = checked_int("block_size", block_size, least=1)
    faults = compatibility_faults(producer, consumer)
    if any(fault.field not in _BOUNDED_BY_POSITION for fault in faults):
        rows = 0
    else:
        rows = _equal_rows(_tokens(producer.tokens), _tokens(consumer.tokens))
        changed = set(producer.side_inputs) ^ set(consumer.side_inputs)
        rows = min([rows, *(item.start for item in changed)])
    return ReusableRows(rows, rows // rows_per_block * rows_per_block, faults)


def concrete_key(
    parent: bytes,
    tokens: Array,
    extras: tuple[str | bytes | int, ...],
    group: int,
    digest: Digest | None = None,
) -> bytes:
    """The index key of one block: it narrows a search and proves nothing (K009).

    `digest` replaces SHA-256; tests force collisions with it. Raises: EmptyInput, WrongDtype, NegativeCount.
    """
    ids = checked_array("tokens", tokens, limit=2**31)
    if not len(ids):
        raise EmptyInput("tokens")
    content = (parent, ids.astype("<i4").tobytes(), extras, checked_int("group", group))
    return (digest or _sha256)(_KEY_DOMAIN + canonical(content))


def require_witness(candidate: Candidate, tokens: Array) -> None:
    """The candidate's tokens are these, whatever its key says (K010). Raises: HashCollisionWitness."""
    found = _tokens(candidate.tokens)
    asked = checked_array("tokens", tokens, limit=2**31)
    equal = _equal_rows(found, asked)
    if equal < max(len(found), len(asked)):
        shown = [int(ids[equal]) if equal < len(ids) else None for ids in (asked, found)]
        raise HashCollisionWitness(equal, *shown)


def validate(candidate: Candidate, consumer: Compatibility, tokens: Array) -> Candidate:
    """Witness, then every fact. Raises: HashCollisionWitness, ManifestMismatch."""
    require_witness(candidate, tokens)
    require_compatible(candidate.facts, consumer)
    return candidate


def side_input(kind: str, content: bytes, start: int, rows: int) -> SideInput:
    """A side input at a place in the prompt. Raises: EmptyInput, NegativeCount, WrongDtype."""
    if not content:
        raise EmptyInput(f"content of {kind}")
    return SideInput(kind, content, checked_int("start", start), checked_int("rows", rows, least=1))


def _tokens(content: bytes) -> Array:
    if len(content) % 4:
        raise LengthMismatch("token bytes", len(content) // 4 * 4, len(content))
    return np.frombuffer(content, dtype="<i4").astype(np.int64)


def _equal_rows(one: Array, other: Array) -> int:
    """Length of the common prefix."""
    shared = min(len(one), len(other))
    differing = np.flatnonzero(one[:shared] != other[:shared])
    return int(differing[0]) if len(differing) else shared


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
