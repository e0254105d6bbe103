"""Fork and Truncate: requests that share a past, and requests that lose their newest part.

Invariant: a fork moves no bytes: every block that holds valid rows gets one reference per child, and whoever
writes first into the shared tail is given a copy (see `stepping`). A truncation removes a suffix of one
request, with the row of its new last token, and leaves the rows of every sharer and of the index as they are; it is
refused where a window group has already left rows behind that the shorter request would have to read.
Source: LEDGER "Commands"; contracts K054, K057, K058, K207 to K210.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from . import loops
from .commands import Fork, RequestHandle, Truncate
from .digest import Array
from .errors import (
    DoubleRelease,
    ForkOfUnpublishedState,
    MalformedCommand,
    SlotsExhausted,
    TruncateBeyondLength,
)
from .receipts import TruncateFacts
from .requests import group_field
from .state import LedgerState, scrub_ids
from .windows import require_window

_INHERITED = (loops.ACTIVE, loops.SCOPE, loops.NUM_TOKENS, loops.TOKEN_PRINT, loops.VALID)
_INHERITED += (loops.TERMINAL, loops.SHARED)


class ForkPlan(msgspec.Struct, frozen=True):
    """The parent's slot and how many children it gets."""

    slot: int
    children: int


def plan_fork(state: LedgerState, command: Fork) -> ForkPlan:
    """Raises: MalformedCommand, StaleRequestGeneration, StaleNamespaceGeneration, ForkOfUnpublishedState,
    SlotsExhausted; nothing changes."""
    requests = state.requests
    if command.children < 1:
        raise MalformedCommand("children", str(command.children))
    slot = requests.slot_of(command.parent)
    state.scopes.require_current(state.scopes.scope(int(requests.scope.array[slot])))
    if requests.flight_step.array[slot]:
        raise ForkOfUnpublishedState(slot)
    if command.children > requests.free.count:
        raise SlotsExhausted(requests.max_requests)
    return ForkPlan(slot, command.children)


def commit_fork(state: LedgerState, plan: ForkPlan) -> dict[str, Any]:
    """Gives every child the parent's tokens, lease and blocks of valid rows; the receipt's fields."""
    requests, slot = state.requests, plan.slot
    valid = int(requests.valid_rows.array[slot])
    shared = [
        requests.pages(slot, 0, -(-valid // pool.block_size), group) for group, pool in enumerate(state.pools)
    ]
    left = sum(int(firsts.array[slot]) for firsts in requests.firsts)
    private = [state.private_leases(slot, group) for group in range(len(state.pools))]
    children = tuple([_make_child(state, slot, shared, private) for _ in range(plan.children)])
    return {
        "parent": requests.handle(slot),
        "children": children,
        "shared_blocks": sum(len(blocks) for blocks in shared) - left,
    }


def _make_child(state: LedgerState, parent: int, shared: list[Array], private: list[Array]) -> RequestHandle:
    requests = state.requests
    slot = requests.free.take_one()
    record = requests.records.cells[parent]
    known = int(record[loops.NUM_TOKENS])
    requests.tokens[slot, :known] = requests.tokens[parent, :known]
    fields = {field: int(record[field]) for field in _INHERITED}
    fields[loops.SLOT_GENERATION] = int(requests.generation.array[slot]) + 1
    fields[loops.BRANCH] = parent + 1
    for group, pool in enumerate(state.pools):
        left = int(requests.firsts[group].array[parent])
        pool.lease(shared[group][left:])
        pool.lease(private[group])
        requests.cells[group].fill(slot * requests.widths[group], shared[group])
        fields[group_field(group)] = len(shared[group])
        fields[group_field(group, loops.FIRST)] = left
    requests.put(slot, fields)
    return requests.handle(slot)


def plan_truncate(state: LedgerState, command: Truncate) -> tuple[int, int]:
    """(slot, tokens to keep). Raises: StaleRequestGeneration, MalformedCommand, TruncateBeyondLength, DoubleRelease
    (its release is queued), WindowStateMissing (a row before the new end left a window); nothing changes."""
    requests = state.requests
    slot = requests.slot_of(command.request)
    if command.num_tokens < 1:
        raise MalformedCommand("num_tokens", str(command.num_tokens))
    known = int(requests.num_tokens.array[slot])
    if command.num_tokens > known:
        raise TruncateBeyondLength(slot, command.num_tokens, known)
    if requests.ending.array[slot]:
        raise DoubleRelease(slot, command.request.generation)
    if state.windowed:
        require_window(state, slot, min(command.num_tokens - 1, int(requests.valid_rows.array[slot])))
    return slot, command.num_tokens


def commit_truncate(state: LedgerState, plan: tuple[int, int]) -> dict[str, Any]:
    """Truncates, or queues the truncation while a step is in flight; the receipt's fields."""
    slot, keep = plan
    requests = state.requests
    deferred = bool(requests.flight_step.array[slot])
    if deferred:
        queued = int(requests.cut.array[slot])
        requests.cut.put(slot, min(queued, keep + 1) if queued else keep + 1)
        facts = TruncateFacts(requests.handle(slot), _scope(state, slot), keep, 0, 0, 0, ())
    else:
        facts = truncate_now(state, slot, keep)
    return {
        "request": facts.request,
        "num_tokens": keep,
        "deferred": deferred,
        "freed_blocks": facts.freed_blocks,
        "evictable_blocks": facts.evictable_blocks,
        "scrub": facts.scrub,
        "scrub_others": facts.scrub_others,
    }


def truncate_now(state: LedgerState, slot: int, keep: int) -> TruncateFacts:
    """Forgets tokens from `keep` on and the row of the last one kept, drops the blocks and leases beyond.

    The last token is computed again, because the request can only go on from its logits.
    """
    requests, tree = state.requests, state.tree
    known, valid = int(requests.num_tokens.array[slot]), int(requests.valid_rows.array[slot])
    keep = min(keep, known)
    valid = min(keep - 1, valid)
    terminal = old_terminal = int(requests.terminal.array[slot])
    while tree.end_page(terminal) * state.alignment > valid:
        terminal = int(tree.parent.array[terminal])
    beyond = tree.path(old_terminal)[len(tree.path(terminal)) :]
    fields = {loops.NUM_TOKENS: keep, loops.VALID: valid, loops.TERMINAL: terminal, loops.CUT: 0}
    freed = evictable = 0
    scrub: list[Array] = []
    for group in range(len(state.pools)):
        more_freed, more_evictable, zeroed = _cut_group(state, slot, valid, terminal, beyond, group)
        freed, evictable = freed + more_freed, evictable + more_evictable
        scrub.append(zeroed)
        held = int(requests.blocks[group].array[slot])
        fields[group_field(group)] = min(held, -(-valid // state.pools[group].block_size))
    lost = state.fingerprint(requests.tokens[slot, keep:known], keep)
    requests.tokens[slot, keep:known] = 0
    requests.put(slot, fields)
    requests.token_print.put(slot, (int(requests.token_print.array[slot]) - lost) % (1 << 64))
    return TruncateFacts(
        requests.handle(slot), _scope(state, slot), keep, valid, freed, evictable, *scrub_ids(tuple(scrub))
    )


def _cut_group(
    state: LedgerState, slot: int, valid: int, terminal: int, beyond: list[int], group: int
) -> tuple[int, int, Array]:
    """Drops one group's blocks beyond the valid rows and the leases on edges `beyond`; what `pool.drop` says."""
    pool, requests = state.pools[group], state.requests
    table, width = requests.all_tables[group][slot], requests.widths[group]
    held = int(requests.blocks[group].array[slot])
    kept = min(held, -(-valid // pool.block_size))
    dropped = table[kept:held].astype(np.int64)
    if not pool.window:
        first = state.tree.end_page(terminal)
        dropped = np.concatenate([dropped, state.foreign_blocks(slot, beyond, group, first)])
    requests.cells[group].clear(slot * width + kept, slot * width + held)
    told = pool.drop(dropped, state.scopes.revoked)
    page, rows = divmod(valid, pool.block_size)
    if rows and int(pool.rows.array[table[page]]) > rows:
        block = int(table[page])
        if pool.ref.array[block] - pool.pins.array[block] == 1 and not pool.node.array[block]:
            pool.set_rows(block, rows)
    return told


def _scope(state: LedgerState, slot: int) -> Any:
    return state.scopes.scope(int(state.requests.scope.array[slot]))
