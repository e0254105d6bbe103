"""Receipts: what one applied command did, counted in rows and blocks.

Invariant: a receipt is frozen, holds no policy and no bytes of K/V, and is equal on every rank.
`scrub` lists blocks of cache group 0 whose stale bytes every rank zeroes before it writes anything that follows
in the log, `scrub_others` those of groups 1, 2, ...; both are empty where there is nothing to zero.
Source: LEDGER; contracts K049, K092 to K095, K126, K187.
"""

from __future__ import annotations

import msgspec

from .commands import NodeHandle, RequestHandle, Scope
from .handles import BlockHandles

OtherScrub = tuple[tuple[int, ...], ...]


class PrefixMatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Lengths of one lookup in tokens. `limit` names the smallest one, `reason` says why it is not longer.

    `junction` is the longest indexed boundary that every cache group can serve, whatever the cap; `recompute` is what
    is left of the prompt beside `runtime`. `tail` are the last rows of `runtime` that lie in a partial tail, 0 where it
    ends with a page.
    """

    prompt: int
    semantic: int
    indexed: int
    cap: int
    alignment: int
    runtime: int
    limit: str
    reason: str
    junction: int
    recompute: int
    tail: int = 0


class EvictionFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Edges and named tails evicted (`nodes`) and window blocks trimmed inside another command, and all blocks that freed.

    Tails that go with their edge count in `freed_blocks` only.
    """

    nodes: int = 0
    freed_blocks: int = 0
    trimmed_blocks: int = 0


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What every receipt carries: log index and digests before and after."""

    log_index: int
    committed_before: bytes
    committed_after: bytes
    machine_after: bytes


class GenesisReceipt(Receipt, frozen=True, kw_only=True, tag="genesis"):
    """`alignment`: tokens of one index page; hits are multiples of it, and shorter prompts are never cached."""

    incarnation: str
    total_blocks: int
    alignment: int


class AdmitReceipt(Receipt, frozen=True, kw_only=True, tag="admit"):
    """`path` is the leased path, root side first, after the splits this admission made."""

    request: RequestHandle
    match: PrefixMatch
    new_blocks: BlockHandles
    shared_blocks: BlockHandles
    path: tuple[NodeHandle, ...]
    scrub: tuple[int, ...]
    scrub_others: OtherScrub = ()
    evicted: EvictionFacts


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Rows [0, rows) of `target` are to become those of `source`, before the step writes (copy-on-write)."""

    group: int
    source: int
    target: int
    rows: int


class DispatchReceipt(Receipt, frozen=True, kw_only=True, tag="dispatch"):
    """`copies` follow `scrub` and come before the step's writes; their sources stay until its Complete."""

    step: int
    new_blocks: BlockHandles
    scrub: tuple[int, ...]
    scrub_others: OtherScrub = ()
    evicted: EvictionFacts
    copies: tuple[BlockCopy, ...] = ()


class ReleaseFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One carried-out release of a request of `scope`."""

    request: RequestHandle
    scope: Scope
    reason: str
    freed_blocks: int
    evictable_blocks: int
    scrub: tuple[int, ...]
    scrub_others: OtherScrub = ()


class TruncateFacts(msgspec.Struct, frozen=True, array_like=True):
    """One carried-out truncation of a request of `scope`."""

    request: RequestHandle
    scope: Scope
    num_tokens: int
    valid_rows: int
    freed_blocks: int
    evictable_blocks: int
    scrub: tuple[int, ...]
    scrub_others: OtherScrub = ()


class LeftWindow(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one cache group that requests of a command left behind: freed ones, and those the index keeps."""

    group: int
    freed_blocks: int
    evictable_blocks: int


class CompleteReceipt(Receipt, frozen=True, kw_only=True, tag="complete"):
    """`sealed` counts, per row of the step, the index pages that became full (blocks, with one cache group).

    `scrub` joins those of copied blocks that nobody holds any more, of blocks that left a window, of `truncated` and
    of `released`, in this order; `left_window` says how many left, by cache group.
    """

    step: int
    sealed: tuple[int, ...]
    released: tuple[ReleaseFacts, ...]
    scrub: tuple[int, ...]
    scrub_others: OtherScrub = ()
    truncated: tuple[TruncateFacts, ...] = ()
    left_window: tuple[LeftWindow, ...] = ()


class PublishedPath(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Indexed tokens along one request's path before and after. `path` is what the request leases now.

    `restored_blocks` counts window blocks that the tree had given up and has again, from this request.
    """

    request: RequestHandle
    scope: Scope
    tokens_before: int
    tokens_after: int
    duplicate_blocks: int
    path: tuple[NodeHandle, ...]
    restored_blocks: int = 0


class PublicationReceipt(Receipt, frozen=True, kw_only=True, tag="publish"):
    """`left_window` says what requests left behind by cache group: once published, nothing waits for it."""

    entries: tuple[PublishedPath, ...]
    left_window: tuple[LeftWindow, ...] = ()


class TailReceipt(Receipt, frozen=True, kw_only=True, tag="publish_tail"):
    """`entry` are the whole pages, `rows` those after them. `tail` names the record with just these rows, if there is one.

    `outcome`: `entered`; `present` (it was there); or why not: `no_rows`, `no_whole_page` (nothing to hang at),
    `node_full` (four tails hang there: evict one), `block_has_a_tail` (another length of it was entered).
    """

    entry: PublishedPath
    rows: int
    outcome: str
    tail: tuple[NodeHandle, ...]


class ReleaseReceipt(Receipt, frozen=True, kw_only=True, tag="release"):
    """`deferred`: a step is in flight, the release takes effect (and is counted) in its CompleteReceipt."""

    request: RequestHandle
    reason: str
    deferred: bool
    freed_blocks: int
    evictable_blocks: int
    scrub: tuple[int, ...]
    scrub_others: OtherScrub = ()


class ForkReceipt(Receipt, frozen=True, kw_only=True, tag="fork"):
    """`children` share `shared_blocks` blocks of each cache group's valid rows, summed over the groups.

    Blocks that left a window are shared by nobody.
    """

    parent: RequestHandle
    children: tuple[RequestHandle, ...]
    shared_blocks: int


class TruncateReceipt(Receipt, frozen=True, kw_only=True, tag="truncate"):
    """`deferred`: a step is in flight, the truncation takes effect (and is counted) in its CompleteReceipt."""

    request: RequestHandle
    num_tokens: int
    deferred: bool
    freed_blocks: int
    evictable_blocks: int
    scrub: tuple[int, ...]
    scrub_others: OtherScrub = ()


class ResetReceipt(Receipt, frozen=True, kw_only=True, tag="reset"):
    """Dropped blocks keep their bytes until another scope gets them, so nothing is scrubbed."""

    scope: Scope
    freed_blocks: int


class EvictReceipt(Receipt, frozen=True, kw_only=True, tag="evict"):
    """`nodes` counts edges and named tails; tails that go with their edge count in `freed_blocks` only.

    Evicted blocks keep their bytes until another scope gets them, so `scrub` is empty.
    """

    nodes: int
    freed_blocks: int
    scrub: tuple[int, ...] = ()
    trimmed_blocks: int = 0


class AdvanceReceipt(Receipt, frozen=True, kw_only=True, tag="advance"):
    """`draining_blocks`: blocks of the revoked generations that running requests still reference."""

    namespace: str
    generation: int
    roots_dropped: int
    freed_blocks: int
    draining_blocks: int
    scrub: tuple[int, ...]
    scrub_others: OtherScrub = ()


class AbortReceipt(Receipt, frozen=True, kw_only=True, tag="abort"):
    transaction: int
    request: RequestHandle
    freed_blocks: int
    evictable_blocks: int
    scrub: tuple[int, ...]
    scrub_others: OtherScrub = ()


AnyReceipt = (
    GenesisReceipt
    | AdmitReceipt
    | DispatchReceipt
    | CompleteReceipt
    | PublicationReceipt
    | TailReceipt
    | ReleaseReceipt
    | ForkReceipt
    | TruncateReceipt
    | EvictReceipt
    | ResetReceipt
    | AdvanceReceipt
    | AbortReceipt
)
