"""Receipts: what one applied command did, counted in rows and blocks.

Invariant: a receipt is frozen, holds no policy and no bytes of K/V, and is equal on every rank.
`scrub` lists blocks whose stale bytes every rank zeroes before it writes anything that follows in the log.
Source: LEDGER; contracts K049, K092 to K095, K126, K187.
"""

from __future__ import annotations

import msgspec

from .commands import BlockHandle, NodeHandle, RequestHandle, Scope


class PrefixMatch(msgspec.Struct, frozen=True, array_like=True):
    """Lengths of one lookup in tokens. `limit` names the smallest one, `reason` says why it is not longer."""

    prompt: int
    semantic: int
    indexed: int
    cap: int
    alignment: int
    runtime: int
    limit: str
    reason: str


class EvictionFacts(msgspec.Struct, frozen=True, array_like=True):
    """Nodes evicted inside another command, and the blocks that freed."""

    nodes: int = 0
    freed_blocks: int = 0


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What every receipt carries: log index and digests before and after."""

    log_index: int
    committed_before: bytes
    committed_after: bytes
    machine_after: bytes


class GenesisReceipt(Receipt, frozen=True, kw_only=True, tag="genesis"):
    incarnation: str
    total_blocks: int


class AdmitReceipt(Receipt, frozen=True, kw_only=True, tag="admit"):
    """`path` is the leased path, root side first, after the splits this admission made."""

    request: RequestHandle
    match: PrefixMatch
    new_blocks: tuple[BlockHandle, ...]
    shared_blocks: tuple[BlockHandle, ...]
    path: tuple[NodeHandle, ...]
    scrub: tuple[int, ...]
    evicted: EvictionFacts


class DispatchReceipt(Receipt, frozen=True, kw_only=True, tag="dispatch"):
    step: int
    new_blocks: tuple[BlockHandle, ...]
    scrub: tuple[int, ...]
    evicted: EvictionFacts


class ReleaseFacts(msgspec.Struct, frozen=True, array_like=True):
    """One carried-out release."""

    request: RequestHandle
    reason: str
    freed_blocks: int
    evictable_blocks: int
    scrub: tuple[int, ...]


class CompleteReceipt(Receipt, frozen=True, kw_only=True, tag="complete"):
    """`sealed` counts, per row of the step, the blocks that became full; `scrub` joins those of `released`."""

    step: int
    sealed: tuple[int, ...]
    released: tuple[ReleaseFacts, ...]
    scrub: tuple[int, ...]


class PublishedPath(msgspec.Struct, frozen=True, array_like=True):
    """Indexed tokens along one request's path before and after. `path` is what the request leases now."""

    request: RequestHandle
    scope: Scope
    tokens_before: int
    tokens_after: int
    duplicate_blocks: int
    path: tuple[NodeHandle, ...]


class PublicationReceipt(Receipt, frozen=True, kw_only=True, tag="publish"):
    entries: tuple[PublishedPath, ...]


class ReleaseReceipt(Receipt, frozen=True, kw_only=True, tag="release"):
    """`deferred`: a step is in flight, the release takes effect (and is counted) in its CompleteReceipt."""

    request: RequestHandle
    reason: str
    deferred: bool
    freed_blocks: int
    evictable_blocks: int
    scrub: tuple[int, ...]


class EvictReceipt(Receipt, frozen=True, kw_only=True, tag="evict"):
    """Evicted blocks keep their bytes until another scope gets them, so `scrub` is empty."""

    nodes: int
    freed_blocks: int
    scrub: tuple[int, ...] = ()


class AdvanceReceipt(Receipt, frozen=True, kw_only=True, tag="advance"):
    """`draining_blocks`: blocks of the revoked generations that running requests still reference."""

    namespace: str
    generation: int
    roots_dropped: int
    freed_blocks: int
    draining_blocks: int
    scrub: tuple[int, ...]


class AbortReceipt(Receipt, frozen=True, kw_only=True, tag="abort"):
    transaction: int
    request: RequestHandle
    freed_blocks: int
    evictable_blocks: int
    scrub: tuple[int, ...]


AnyReceipt = (
    GenesisReceipt
    | AdmitReceipt
    | DispatchReceipt
    | CompleteReceipt
    | PublicationReceipt
    | ReleaseReceipt
    | EvictReceipt
    | AdvanceReceipt
    | AbortReceipt
)
