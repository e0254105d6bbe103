"""Eviction of whole leaf edges, named by handle: legality here, choice outside. Reset of a whole root.

Invariant: nodes are judged in the order given, as if those before were gone, so a parent may follow its last
child; a leased node, a root, a stale handle or a node of the caller's own path is refused, and then nothing
is evicted. A reset drops everything one scope has indexed, or is refused while a request references it.
Source: LEDGER "Determinism" (policies outside); contracts K045, K063, K065, K119 to K122.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from .commands import Evict, NodeHandle, Reset
from .digest import Array
from .errors import (
    EvictLiveBlock,
    InternalNodeEvicted,
    LockedLeafEvicted,
    ResetWithLiveReferences,
    RootEvicted,
    StaleTreeVersion,
)
from .receipts import EvictionFacts
from .state import LedgerState


class EvictionPlan(msgspec.Struct, frozen=True):
    """Nodes to remove in order, and the index pages (of `alignment` tokens) that frees in every group."""

    nodes: tuple[int, ...]
    pages: int


NOTHING = EvictionPlan((), 0)
NO_EVICTIONS = EvictionFacts()


def plan_evictions(
    state: LedgerState, handles: tuple[NodeHandle, ...], own_path: Collection[int] = ()
) -> EvictionPlan:
    """Checks every handle in order. Raises the refusal of the first illegal one; nothing changes."""
    if not handles:
        return NOTHING
    tree = state.tree
    present, generations, num_children = tree.pages.array, tree.generation.array, tree.num_children
    gone: dict[int, int] = {}
    nodes: dict[int, None] = {}
    pages = 0
    for handle in handles:
        node = handle.node
        if node == 0:
            raise RootEvicted(node)
        if not 0 < node < len(present) or node in nodes:
            raise StaleTreeVersion(node, handle.generation)
        held = present.item(node)
        if held == 0 or generations.item(node) != handle.generation:
            raise StaleTreeVersion(node, handle.generation)
        children = num_children.item(node) - gone.get(node, 0)
        if children:
            raise InternalNodeEvicted(node, children)
        locks = tree.lock(node)
        if locks:
            raise LockedLeafEvicted(node, locks)
        if node in own_path:
            raise EvictLiveBlock(node)
        parent = tree.parent.array.item(node)
        gone[parent] = gone.get(parent, 0) + 1
        nodes[node] = None
        pages += held
    return EvictionPlan(tuple(nodes), pages)


def commit_evictions(state: LedgerState, plan: EvictionPlan) -> EvictionFacts:
    """Unlists the edges, then frees their blocks."""
    if not plan.nodes:
        return NO_EVICTIONS
    _give_back(state, state.tree.remove_leaves(plan.nodes))
    return EvictionFacts(len(plan.nodes), plan.pages * sum(state.tree.per_page))


def plan_evict(state: LedgerState, command: Evict) -> EvictionPlan:
    """Raises the refusals of `plan_evictions`; nothing changes."""
    return plan_evictions(state, command.nodes)


def commit_evict(state: LedgerState, plan: EvictionPlan) -> dict[str, Any]:
    """The receipt's fields."""
    facts = commit_evictions(state, plan)
    return {"nodes": facts.nodes, "freed_blocks": facts.freed_blocks}


def plan_reset(state: LedgerState, command: Reset) -> Reset:
    """Raises: ResetWithLiveReferences while a request references an indexed block of the scope; nothing changes."""
    scope_id = state.scopes.find(command.scope)
    for node in state.tree.subtree(scope_id):
        if state.tree.lock(node):
            raise ResetWithLiveReferences(command.scope.namespace, node, state.tree.lock(node))
    return command


def commit_reset(state: LedgerState, command: Reset) -> dict[str, Any]:
    """Drops the root and frees its blocks; they keep their bytes until another scope gets them."""
    dropped = state.tree.drop_root(state.scopes.find(command.scope))
    _give_back(state, dropped)
    return {"scope": command.scope, "freed_blocks": sum(len(blocks) for blocks in dropped)}


def _give_back(state: LedgerState, parts: tuple[Array, ...]) -> None:
    for pool, blocks in zip(state.pools, parts, strict=True):
        pool.evict(blocks, state.scopes.revoked)
