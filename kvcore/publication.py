"""Publish: sealed blocks of running requests enter the index.

Invariant: only whole blocks whose every row is valid are entered, only beyond what the tree already has, and
a running request is never repointed: where the tree holds the same tokens through other blocks, the request
keeps its own and leases the tree's path besides, so that nothing under its entry can be evicted before it.
Source: LEDGER "Commands"; contracts K062, K064, K099, K115 to K118, K216, K227.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .commands import Publish
from .receipts import PublishedPath
from .state import LedgerState, node_handles


def plan_publish(state: LedgerState, command: Publish) -> list[int]:
    """Slots to publish. Raises: StaleRequestGeneration, StaleNamespaceGeneration; nothing changes."""
    slots = [state.requests.slot_of(handle) for handle in command.requests]
    for slot in slots:
        state.scopes.require_current(state.scopes.scope(int(state.requests.scope.array[slot])))
    return slots


def commit_publish(state: LedgerState, slots: list[int]) -> dict[str, Any]:
    """Publishes request by request, so that later ones see what earlier ones entered; the receipt's fields."""
    return {"entries": tuple([_publish_request(state, slot) for slot in slots])}


def _publish_request(state: LedgerState, slot: int) -> PublishedPath:
    requests, tree, page = state.requests, state.tree, state.block_size
    scope_id = int(requests.scope.array[slot])
    terminal = int(requests.terminal.array[slot])
    full = int(requests.valid_rows.array[slot]) // page
    tokens = requests.tokens[slot, : full * page]
    table = requests.table(slot)
    found = tree.match(scope_id, tokens, terminal)
    other = tree.path_blocks(found.nodes)[: found.pages - tree.end_page(terminal)]
    duplicates = int(np.count_nonzero(other != table[tree.end_page(terminal) : found.pages]))
    if found.pages < full:
        nodes = list(found.nodes)
        if nodes and found.last_pages < int(tree.pages.array[nodes[-1]]):
            nodes[-1] = tree.split(nodes[-1], found.last_pages)
        for node in nodes:
            state.pool.lease(tree.blocks[node])
        parent = nodes[-1] if nodes else terminal
        scope_print = int(state.scopes.scope_print.array[scope_id])
        entries = tree.prefix_entries(scope_print, tokens, found.pages)
        suffix, blocks = tokens[found.pages * page :], table[found.pages : full]
        if _own_leaf(state, slot, parent):
            tree.extend(parent, suffix, blocks, entries)
            terminal = parent
        else:
            terminal = tree.insert(scope_id, parent, suffix, blocks, entries)
        requests.terminal.put(slot, terminal)
    return PublishedPath(
        request=requests.handle(slot),
        scope=state.scopes.scope(scope_id),
        tokens_before=found.pages * page,
        tokens_after=max(found.pages, full) * page,
        duplicate_blocks=duplicates,
        path=node_handles(tree, tree.path(terminal)),
    )


def _own_leaf(state: LedgerState, slot: int, node: int) -> bool:
    """Whether the edge was entered by this request alone, so that it may grow instead of getting a child."""
    if not node or node != int(state.requests.terminal.array[slot]):
        return False
    tree = state.tree
    own = int(tree.start.array[node]) >= int(state.requests.shared.array[slot])
    return own and tree.num_children[node] == 0 and tree.lock(node) == 1
