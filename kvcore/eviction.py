"""Eviction of whole leaf edges, named by handle: legality here, choice outside.

Invariant: nodes are judged in the order given, as if those before were gone, so a parent may follow its last
child; a leased node, a root, a stale handle or a node of the caller's own path is refused, and then nothing
is evicted.
Source: LEDGER "Determinism" (policies outside); contracts K045, K063, K119 to K122.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import numpy as np

from .commands import NodeHandle
from .errors import EvictLiveBlock, InternalNodeEvicted, LockedLeafEvicted, RootEvicted, StaleTreeVersion
from .receipts import EvictionFacts
from .state import LedgerState


class EvictionPlan(msgspec.Struct, frozen=True):
    """Nodes to remove in order, and the blocks that frees."""

    nodes: tuple[int, ...]
    num_blocks: int


def plan_evictions(
    state: LedgerState, handles: tuple[NodeHandle, ...], own_path: Collection[int] = ()
) -> EvictionPlan:
    """Checks every handle in order. Raises the refusal of the first illegal one; nothing changes."""
    if not handles:
        return EvictionPlan((), 0)
    tree = state.tree
    gone: dict[int, int] = {}
    nodes: list[int] = []
    num_blocks = 0
    for handle in handles:
        node = handle.node
        if node == 0:
            raise RootEvicted(node)
        if not 0 < node < len(tree.pages.array) or node in nodes:
            raise StaleTreeVersion(node, handle.generation)
        if tree.pages.array[node] == 0 or int(tree.generation.array[node]) != handle.generation:
            raise StaleTreeVersion(node, handle.generation)
        children = int(tree.num_children[node]) - gone.get(node, 0)
        if children:
            raise InternalNodeEvicted(node, children)
        if tree.lock(node):
            raise LockedLeafEvicted(node, tree.lock(node))
        if node in own_path:
            raise EvictLiveBlock(node)
        parent = int(tree.parent.array[node])
        gone[parent] = gone.get(parent, 0) + 1
        nodes.append(node)
        num_blocks += int(tree.pages.array[node])
    return EvictionPlan(tuple(nodes), num_blocks)


def commit_evictions(state: LedgerState, plan: EvictionPlan) -> EvictionFacts:
    """Unlists the edges, then frees their blocks."""
    for node in plan.nodes:
        blocks = state.tree.remove_leaf(node)
        scrub = state.pool.give_back(blocks, state.scopes.revoked)
        assert len(scrub) == 0, f"indexed blocks of a revoked scope: {np.sort(scrub).tolist()}"
    return EvictionFacts(len(plan.nodes), plan.num_blocks)
