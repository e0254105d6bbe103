"""Publish: sealed blocks of running requests enter the index.

Invariant: only whole blocks whose every row is valid are entered, only beyond what the tree already has, and
a running request is never repointed: where the tree holds the same tokens through other blocks, the request
keeps its own and leases the tree's path besides, so that nothing under its entry can be evicted before it. Window
blocks that the tree lacks on the request's path are entered from the request; then its windows move on.
Source: LEDGER "Commands"; contracts K062, K064, K099, K115 to K118, K216, K227.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import loops
from .commands import Publish
from .errors import IndexFull
from .receipts import PublishedPath
from .state import LedgerState, node_handles
from .tree import NOT_RESIDENT, TreeMatch
from .windows import leave_behind, restore_windows


def plan_publish(state: LedgerState, command: Publish) -> list[int]:
    """Slots to publish. Raises: StaleRequestGeneration, StaleNamespaceGeneration, IndexFull; nothing changes."""
    slots = [state.requests.slot_of(handle) for handle in command.requests]
    for slot in slots:
        state.scopes.require_current(state.scopes.scope(int(state.requests.scope.array[slot])))
    if not state.tree.locking and state.tree.free.count < 2 * len(slots):
        raise IndexFull(len(slots), state.tree.free.count)
    return slots


def commit_publish(state: LedgerState, slots: list[int]) -> dict[str, Any]:
    """Publishes request by request, so that later ones see what earlier ones entered; the receipt's fields."""
    entries = tuple([publish_request(state, slot) for slot in slots])
    if not state.windowed:
        return {"entries": entries}
    published = np.array(sorted(set(slots)), dtype=np.int64)
    ends = state.requests.valid_rows.array[published] // state.alignment * state.alignment
    left, scrub = leave_behind(state, published, ends)
    assert not any(len(blocks) for blocks in scrub), "a revoked scope was published"
    return {"entries": entries, "left_window": left}


def publish_request(state: LedgerState, slot: int) -> PublishedPath:
    """Enters what the tree lacks of one request; what the request leases then."""
    requests, tree, page = state.requests, state.tree, state.alignment
    record = requests.records.cells[slot].tolist()
    scope_id, terminal = record[loops.SCOPE], record[loops.TERMINAL]
    full = record[loops.VALID] // page
    found = tree.match(scope_id, requests.tokens[slot, : full * page], terminal, pages_only=True)
    duplicates = restored = 0
    if found.nodes:
        lead = tree.locking[0] if tree.locking else 0
        foreign = state.foreign_blocks(slot, found.nodes, lead, tree.end_page(terminal), found.pages)
        duplicates = int(np.count_nonzero(foreign != NOT_RESIDENT))
    if state.windowed:
        restored = restore_windows(state, slot, tree.path(terminal) + found.nodes, found.pages)
    if found.pages < full:
        terminal = _enter(state, slot, found, full, record)
        requests.terminal.put(slot, terminal)
    return PublishedPath(
        requests.handle(slot),
        state.scopes.scope(scope_id),
        found.pages * page,
        max(found.pages, full) * page,
        duplicates,
        node_handles(tree, tree.path(terminal)),
        restored,
    )


def lease_path(state: LedgerState, slot: int, full: int) -> int:
    """Lets a request lease the tree's path of its first `full` pages, all of which are indexed; the node where they end."""
    requests, tree = state.requests, state.tree
    terminal = requests.terminal.array.item(slot)
    tokens = requests.tokens[slot, : full * state.alignment]
    found = tree.match(requests.scope.array.item(slot), tokens, terminal, pages_only=True)
    if found.nodes:
        terminal = _lease_found(state, slot, terminal, found)
        requests.terminal.put(slot, terminal)
    return terminal


def _lease_found(state: LedgerState, slot: int, terminal: int, found: TreeMatch) -> int:
    """Lets a request lease the nodes found below its `terminal`, the last one cut where the match ends; that one."""
    tree, nodes, first = state.tree, found.nodes, state.tree.end_page(terminal)
    if found.last_pages < tree.pages.array.item(nodes[-1]):
        nodes[-1] = tree.split(nodes[-1], found.last_pages)
    for group in tree.locking:
        state.pools[group].lease(state.foreign_blocks(slot, nodes, group, first, found.pages))
    return nodes[-1]


def _enter(state: LedgerState, slot: int, found: TreeMatch, full: int, record: list[int]) -> int:
    """Enters pages [found.pages, full) of a request below what the tree has; the node they lie on."""
    requests, tree, page = state.requests, state.tree, state.alignment
    scope_id, terminal = record[loops.SCOPE], record[loops.TERMINAL]
    parent = _lease_found(state, slot, terminal, found) if found.nodes else terminal
    before = tree.end_sum[parent]
    suffix = requests.tokens[slot, found.pages * page : full * page]
    blocks = tuple(
        [
            requests.pages(slot, found.pages * per_page, full * per_page, group)
            for group, per_page in enumerate(tree.per_page)
        ]
    )
    if parent and parent == terminal and _own_leaf(state, parent, record[loops.SHARED]):
        tree.extend(parent, suffix, blocks)
        node = parent
    else:
        node = tree.insert(scope_id, parent, suffix, blocks)
    tree.index(node, suffix, blocks, state.scopes.scope_print.array[scope_id], before)
    return node


def _own_leaf(state: LedgerState, node: int, shared: int) -> bool:
    """Whether a request's last edge was entered by it alone, so that it may grow instead of getting a child.

    `shared` are the pages that the request was given when it was admitted.
    """
    tree = state.tree
    own = tree.start.array.item(node) >= shared and node not in tree.tails.by_node
    return own and tree.num_children.item(node) == 0 and tree.lock(node) == 1
