"""Admit and Abort: match a prompt, lease what it shares, reserve blocks for all of it; and undo that.

Invariant: an admission that is refused reserves, evicts and splits nothing; one that is aborted leaves the
committed digest as it was (apart from evictions it named) and every handle it issued fenced.
Source: LEDGER "Commands"; contracts K048, K051, K052, K061, K067 to K069, K092 to K095, K126.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np

from . import loops
from .commands import Abort, Admit, Scope
from .digest import Array
from .errors import (
    DuplicateTransactionId,
    MalformedCommand,
    OutOfMemory,
    RollbackAfterPublication,
    SlotsExhausted,
    UnknownTransaction,
)
from .eviction import EvictionPlan, commit_evictions, plan_evictions
from .junction import servable_tokens
from .lengths import every_boundary, prefix_lengths
from .pool import AdmittedBlocks
from .receipts import PrefixMatch
from .state import LedgerState, node_handles, require_counter, scrub_ids
from .tails import extend_by_tail, require_tails
from .tree import TreeMatch
from .windows import first_kept, reserved_blocks

_LITTLE = sys.byteorder == "little"


class Lookup(msgspec.Struct, frozen=True):
    """A capped match: nodes that cover its pages, how many of the last one are used, and the tail behind them (0: none)."""

    match: PrefixMatch
    nodes: tuple[int, ...]
    last_pages: int
    tail: int = 0


class AdmitPlan(msgspec.Struct, frozen=True):
    """Everything an admission will do."""

    command: Admit
    tokens: Array
    found: Lookup
    evictions: EvictionPlan
    needed_blocks: tuple[int, ...]


def look_up(
    state: LedgerState, scope_id: int, tokens: Array, lookup: bool, content: bytes = b"", tail_policy: int = 0
) -> Lookup:
    """Matches `tokens` under a scope's root, capped at prompt - 1 and cut to whole pages; a tail may follow. Reads only.

    `content` are their bytes, where at hand.
    """
    page = state.alignment
    found = (
        state.tree.match(scope_id, tokens, content=content)
        if lookup
        else TreeMatch([], 0, 0, 0, False, False)
    )
    servable = servable_tokens(state, found) if state.windowed else every_boundary
    match = prefix_lengths(
        len(tokens),
        found.semantic,
        found.pages * page,
        page,
        diverged=found.diverged,
        root_empty=found.root_empty,
        lookup=lookup,
        servable=servable,
    )
    pages, nodes, start = match.runtime // page, found.nodes, state.tree.start.array
    while nodes and start.item(nodes[-1]) >= pages:
        nodes.pop()
    last, tail = pages - start.item(nodes[-1]) if nodes else 0, 0
    if tail_policy and nodes:
        match, tail = extend_by_tail(state, match, nodes[-1], last, tokens, tail_policy)
    return Lookup(match, tuple(nodes), last, tail)


def read_and_look_up(
    state: LedgerState,
    scope: Scope,
    content: bytes,
    lookup: bool,
    transaction: int = -1,
    tail_policy: int = 0,
) -> tuple[Array, Lookup]:
    """Token ids of a prompt and its match. Raises the refusals of a prompt and of a revoked scope.

    The last one is remembered until the next command is planned, because a scheduler probes what it then admits.
    """
    asked = content, scope, lookup, tail_policy
    if state.looked_up is not None and state.looked_up[0] == asked:
        return state.looked_up[1]
    if tail_policy:
        require_tails(state, tail_policy)
    tokens = state.read_prompt(transaction, content)
    state.scopes.require_current(scope)
    scope_id, given = state.scopes.find(scope), content if _LITTLE else b""
    found = tokens, look_up(state, scope_id, tokens, lookup, given, tail_policy)
    state.looked_up = asked, found
    return found


def plan_admit(state: LedgerState, command: Admit) -> AdmitPlan:
    """Raises a refusal of errors.py; nothing changes."""
    scope = command.scope
    if not scope.namespace:
        raise MalformedCommand("namespace", "empty")
    require_counter("generation", scope.generation)
    require_counter("transaction", command.transaction)
    tokens, found = read_and_look_up(
        state, scope, command.tokens, command.lookup, command.transaction, command.tail_policy
    )
    if command.transaction <= state.last_transaction:
        raise DuplicateTransactionId(command.transaction, state.last_transaction)
    evictions = plan_evictions(
        state, command.evict, command.trim, found.nodes, found.match.runtime, found.tail
    )
    needed = plan_blocks(state, len(tokens), found.match.runtime, evictions)
    if state.requests.free.count == 0:
        raise SlotsExhausted(state.requests.max_requests)
    return AdmitPlan(command, tokens, found, evictions, needed)


def plan_blocks(state: LedgerState, rows: int, shared: int, evictions: EvictionPlan) -> tuple[int, ...]:
    """Blocks each group needs for rows [shared, rows), where a shared tail's block is there.

    Raises: OutOfMemory for the first group that lacks them.
    """
    needed = []
    for pool, named in zip(state.pools, evictions.freed, strict=True):
        blocks = reserved_blocks(pool, rows, shared) - -(-shared // pool.block_size)
        free = pool.free.count
        if blocks > free + named:
            raise OutOfMemory(blocks, free, named, pool.group)
        needed.append(blocks)
    return tuple(needed)


def commit_admit(state: LedgerState, plan: AdmitPlan) -> dict[str, Any]:
    """Evicts, splits at the match, leases the path, reserves the rest; the receipt's fields."""
    tree, requests = state.tree, state.requests
    evicted = commit_evictions(state, plan.evictions)
    nodes = list(plan.found.nodes)
    if nodes and plan.found.last_pages < int(tree.pages.array[nodes[-1]]):
        nodes[-1] = tree.split(nodes[-1], plan.found.last_pages)
    scope_id = state.scopes.intern(plan.command.scope)
    runtime = plan.found.match.runtime
    shared = [tree.path_blocks(nodes, group) for group in range(len(state.pools))]
    if plan.found.tail:
        shared[0] = np.append(shared[0], tree.tails.block_of(plan.found.tail))
    values = [
        1,
        scope_id,
        len(plan.tokens),
        0,
        runtime,
        0,
        nodes[-1] if nodes else 0,
        runtime // state.alignment,
        plan.command.transaction + 1,
    ]
    values += [len(blocks) + needed for blocks, needed in zip(shared, plan.needed_blocks, strict=True)]
    slot = requests.open(values, plan.tokens, state.weights)
    admitted: list[AdmittedBlocks] = []
    for group, pool in enumerate(state.pools):
        first = slot * requests.widths[group]
        cells, left = requests.cells[group], first_kept(pool, runtime)
        if left:
            cells.fill(first, np.full(left, loops.GONE, dtype=np.int64))
            requests.firsts[group].put(slot, left)
        held, needed = shared[group][left:], plan.needed_blocks[group]
        admitted.append(pool.admit(cells, first + left, held, needed, scope_id))
    state.transaction_counter.put(0, plan.command.transaction + 1)
    first_scrub, other_scrub = scrub_ids(tuple([blocks.scrub for blocks in admitted]))
    return {
        "request": requests.handle(slot),
        "match": plan.found.match,
        "new_blocks": state.handles(tuple([blocks.fresh for blocks in admitted])),
        "shared_blocks": state.handles(tuple([blocks.present for blocks in admitted])),
        "path": node_handles(tree, nodes),
        "scrub": first_scrub,
        "scrub_others": other_scrub,
        "evicted": evicted,
    }


def plan_abort(state: LedgerState, command: Abort) -> tuple[int, int]:
    """(transaction, slot). Raises: UnknownTransaction, RollbackAfterPublication; nothing changes."""
    slots = np.flatnonzero(state.requests.transaction.array == command.transaction + 1)
    if command.transaction < 0 or len(slots) == 0:
        raise UnknownTransaction(command.transaction)
    slot = int(slots[0])
    if state.requests.dispatched.array[slot]:
        raise RollbackAfterPublication(command.transaction, slot)
    return command.transaction, slot


def commit_abort(state: LedgerState, plan: tuple[int, int]) -> dict[str, Any]:
    """Gives everything back; generations of blocks and of the slot rise."""
    transaction, slot = plan
    requests = state.requests
    handle = requests.handle(slot)
    freed, evictable, scrub = state.drop_references(slot)
    requests.clear(slot)
    requests.generation.put(slot, handle.generation + 1)
    first_scrub, other_scrub = scrub_ids(scrub)
    return {
        "transaction": transaction,
        "request": handle,
        "freed_blocks": freed,
        "evictable_blocks": evictable,
        "scrub": first_scrub,
        "scrub_others": other_scrub,
    }
