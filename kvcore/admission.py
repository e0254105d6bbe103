"""Admit and Abort: match a prompt, lease what it shares, reserve blocks for all of it; and undo that.

Invariant: an admission that is refused reserves, evicts and splits nothing; one that is aborted leaves the
committed digest as it was (apart from evictions it named) and every handle it issued fenced.
Source: LEDGER "Commands"; contracts K048, K051, K052, K061, K067 to K069, K092 to K095, K126.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from .commands import Abort, Admit
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
from .lengths import prefix_lengths
from .receipts import PrefixMatch
from .state import LedgerState, block_ids, node_handles, require_counter
from .tree import TreeMatch


class Lookup(msgspec.Struct, frozen=True):
    """A capped match: the nodes that cover `match.runtime` tokens, and the pages used of the last one."""

    match: PrefixMatch
    nodes: tuple[int, ...]
    last_pages: int


class AdmitPlan(msgspec.Struct, frozen=True):
    """Everything an admission will do."""

    command: Admit
    tokens: Array
    found: Lookup
    evictions: EvictionPlan
    shared_blocks: int
    needed_blocks: int


def look_up(state: LedgerState, scope_id: int, tokens: Array, lookup: bool) -> Lookup:
    """Matches `tokens` under a scope's root, capped at prompt - 1 and cut to whole pages; reads only."""
    page = state.block_size
    found = state.tree.match(scope_id, tokens) if lookup else TreeMatch([], 0, 0, 0, False, False)
    match = prefix_lengths(
        len(tokens),
        found.semantic,
        found.pages * page,
        page,
        diverged=found.diverged,
        root_empty=found.root_empty,
        lookup=lookup,
    )
    left = match.runtime // page
    nodes: list[int] = []
    last_pages = 0
    for node in found.nodes:
        if left == 0:
            break
        last_pages = min(left, int(state.tree.pages.array[node]))
        nodes.append(node)
        left -= last_pages
    return Lookup(match, tuple(nodes), last_pages)


def plan_admit(state: LedgerState, command: Admit) -> AdmitPlan:
    """Raises a refusal of errors.py; nothing changes."""
    scope = command.scope
    if not scope.namespace:
        raise MalformedCommand("namespace", "empty")
    require_counter("generation", scope.generation)
    require_counter("transaction", command.transaction)
    tokens = state.read_prompt(command.transaction, command.tokens)
    state.scopes.require_current(scope)
    if command.transaction <= state.last_transaction:
        raise DuplicateTransactionId(command.transaction, state.last_transaction)
    found = look_up(state, state.scopes.find(scope), tokens, command.lookup)
    evictions = plan_evictions(state, command.evict, found.nodes)
    shared = found.match.runtime // state.block_size
    needed = -(-len(tokens) // state.block_size) - shared
    free = state.pool.free.count
    if needed > free + evictions.num_blocks:
        raise OutOfMemory(needed, free, evictions.num_blocks)
    if state.requests.free.count == 0:
        raise SlotsExhausted(state.requests.max_requests)
    return AdmitPlan(command, tokens, found, evictions, shared, needed)


def commit_admit(state: LedgerState, plan: AdmitPlan) -> dict[str, Any]:
    """Evicts, splits at the match, leases the path, reserves the rest; the receipt's fields."""
    pool, tree, requests = state.pool, state.tree, state.requests
    evicted = commit_evictions(state, plan.evictions)
    nodes = list(plan.found.nodes)
    if nodes and plan.found.last_pages < int(tree.pages.array[nodes[-1]]):
        nodes[-1] = tree.split(nodes[-1], plan.found.last_pages)
    shared = tree.path_blocks(nodes)
    pool.lease(shared)
    scope_id = state.scopes.intern(plan.command.scope)
    fresh, scrub = pool.allocate(np.full(plan.needed_blocks, scope_id, dtype=np.int32))
    slot = requests.free.take_one()
    total = len(shared) + len(fresh)
    requests.write_table(np.full(total, slot), np.arange(total), np.concatenate([shared, fresh]))
    requests.tokens[slot, : len(plan.tokens)] = plan.tokens
    requests.generation.put(slot, int(requests.generation.array[slot]) + 1)
    requests.active.put(slot, 1)
    requests.scope.put(slot, scope_id)
    requests.num_tokens.put(slot, len(plan.tokens))
    requests.token_print.put(slot, state.fingerprint(plan.tokens, 0))
    requests.valid_rows.put(slot, plan.found.match.runtime)
    requests.num_blocks.put(slot, total)
    requests.terminal.put(slot, nodes[-1] if nodes else 0)
    requests.shared.put(slot, len(shared))
    requests.transaction.put(slot, plan.command.transaction + 1)
    state.counters.put(1, plan.command.transaction + 1)
    return {
        "request": requests.handle(slot),
        "match": plan.found.match,
        "new_blocks": state.block_handles(fresh),
        "shared_blocks": state.block_handles(shared),
        "path": node_handles(tree, nodes),
        "scrub": block_ids(scrub),
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
    return {
        "transaction": transaction,
        "request": handle,
        "freed_blocks": freed,
        "evictable_blocks": evictable,
        "scrub": block_ids(scrub),
    }
