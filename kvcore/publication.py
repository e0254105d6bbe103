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
from .digest import Array
from .receipts import PublishedPath
from .state import LedgerState, node_handles
from .tree import TreeMatch


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
    requests, tree, page = state.requests, state.tree, state.alignment
    scope_id = int(requests.scope.array[slot])
    terminal = int(requests.terminal.array[slot])
    full = int(requests.valid_rows.array[slot]) // page
    tokens = requests.tokens[slot, : full * page]
    found = tree.match(scope_id, tokens, terminal, pages_only=True)
    duplicates = 0
    if found.nodes:
        duplicates = len(_foreign(state, slot, found.nodes, tree.end_page(terminal), found.pages, 0))
    if found.pages < full:
        terminal = _enter(state, slot, found, full)
        requests.terminal.put(slot, terminal)
    return PublishedPath(
        request=requests.handle(slot),
        scope=state.scopes.scope(scope_id),
        tokens_before=found.pages * page,
        tokens_after=max(found.pages, full) * page,
        duplicate_blocks=duplicates,
        path=node_handles(tree, tree.path(terminal)),
    )


def _enter(state: LedgerState, slot: int, found: TreeMatch, full: int) -> int:
    """Enters pages [found.pages, full) of a request below what the tree has; the node they lie on."""
    requests, tree, page = state.requests, state.tree, state.alignment
    scope_id = int(requests.scope.array[slot])
    terminal = int(requests.terminal.array[slot])
    nodes, first = list(found.nodes), tree.end_page(terminal)
    if nodes and found.last_pages < int(tree.pages.array[nodes[-1]]):
        nodes[-1] = tree.split(nodes[-1], found.last_pages)
    if nodes:
        for group, pool in enumerate(state.pools):
            pool.lease(_foreign(state, slot, nodes, first, found.pages, group))
    parent = nodes[-1] if nodes else terminal
    before = tree.end_sum[parent]
    suffix = requests.tokens[slot, found.pages * page : full * page]
    blocks = tuple(
        [
            requests.all_tables[group][slot, found.pages * per_page : full * per_page].astype(np.int64)
            for group, per_page in enumerate(tree.per_page)
        ]
    )
    if _own_leaf(state, slot, parent):
        tree.extend(parent, suffix, blocks)
        node = parent
    else:
        node = tree.insert(scope_id, parent, suffix, blocks)
    tree.index(node, suffix, blocks, state.scopes.scope_print.array[scope_id], before)
    return node


def _foreign(state: LedgerState, slot: int, nodes: list[int], first: int, end: int, group: int) -> Array:
    """Blocks of pages [first, end) on the tree's path that are not the request's own."""
    per_page = state.tree.per_page[group]
    path = state.tree.path_blocks(nodes, group)[: (end - first) * per_page]
    return path[path != state.requests.all_tables[group][slot, first * per_page : end * per_page]]


def _own_leaf(state: LedgerState, slot: int, node: int) -> bool:
    """Whether the edge was entered by this request alone, so that it may grow instead of getting a child."""
    if not node or node != int(state.requests.terminal.array[slot]):
        return False
    tree = state.tree
    own = int(tree.start.array[node]) >= int(state.requests.shared.array[slot])
    return own and tree.num_children[node] == 0 and tree.lock(node) == 1
