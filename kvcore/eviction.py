"""Eviction of whole leaf edges and of single window blocks, named by handle: legality here, choice outside.

Invariant: nodes are judged in the order given, as if those before were gone, so a parent may follow its last
child; a leased node, a root, a stale handle or a node of the caller's own path is refused, and then nothing
is evicted. Blocks of a window group are trimmed before, one by one: indexed, referenced by nobody and not needed by
the caller's own hit. A reset drops everything one scope has indexed, or is refused while a request references it.
Source: LEDGER "Determinism" (policies outside); contracts K045, K063, K065, K119 to K122.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from .commands import BlockHandle, Evict, NodeHandle, Reset
from .digest import Array
from .errors import (
    EdgePartiallyEvicted,
    EvictLiveBlock,
    InternalNodeEvicted,
    LockedLeafEvicted,
    MalformedCommand,
    ResetWithLiveReferences,
    RootEvicted,
    StaleTreeVersion,
)
from .pool import BlockPool
from .receipts import EvictionFacts
from .state import LedgerState
from .tree import NOT_RESIDENT
from .windows import first_kept


class EvictionPlan(msgspec.Struct, frozen=True):
    """Nodes to remove in order, tails to remove before, window blocks to trim before (int64, by group; empty where none is)
    and the blocks that all of it frees in each group."""

    nodes: tuple[int, ...]
    trims: dict[int, Array]
    freed: tuple[int, ...]
    tails: tuple[int, ...] = ()


NO_EVICTIONS = EvictionFacts()


def plan_evictions(
    state: LedgerState,
    handles: tuple[NodeHandle, ...],
    trim: tuple[BlockHandle, ...] = (),
    own_path: Sequence[int] = (),
    own_rows: int = 0,
    own_tail: int = 0,
) -> EvictionPlan:
    """Checks every handle in order, those to trim first. Raises the refusal of the first illegal one; nothing changes.

    `own_path` and `own_rows` are the matched path of the caller's own hit and how much of it is used, `own_tail` its tail.
    """
    if not handles and not trim:
        return EvictionPlan((), {}, state.no_blocks)
    trims = _plan_trim(state, trim, own_path, own_rows) if trim else {}
    tails = _plan_tails(state, [handle for handle in handles if handle.node < 0], own_tail)
    nodes, pages = _plan_nodes(state, handles, own_path)
    if state.tree.tails.by_node:
        # Tails need one group, whose block is the page.
        pages += len(tails.union(*[state.tree.tails.at(node) for node in nodes]))
    freed = [
        _window_blocks_freed(state, group, nodes, trims.get(group)) if pool.window else pages * per_page
        for group, (pool, per_page) in enumerate(zip(state.pools, state.tree.per_page, strict=True))
    ]
    return EvictionPlan(tuple(nodes), trims, tuple(freed), tuple(sorted(tails)))


def _plan_tails(state: LedgerState, handles: list[NodeHandle], own_tail: int) -> set[int]:
    """Tails to remove. Raises the refusal of the first illegal handle; nothing changes."""
    named: set[int] = set()
    for handle in handles:
        tail = state.tree.tails.find(handle)
        if not tail or tail in named:
            raise StaleTreeVersion(handle.node, handle.generation)
        references = int(state.pool.ref.array[state.tree.tails.block_of(tail)])
        if references:
            raise LockedLeafEvicted(handle.node, references)
        if tail == own_tail:
            raise EvictLiveBlock(handle.node)
        named.add(tail)
    return named


def _plan_nodes(
    state: LedgerState, handles: tuple[NodeHandle, ...], own_path: Sequence[int]
) -> tuple[list[int], int]:
    """Nodes in order, and the index pages that frees in every group of full attention."""
    tree = state.tree
    present, generations, num_children = tree.pages.array, tree.generation.array, tree.num_children
    gone: dict[int, int] = {}
    nodes: dict[int, None] = {}
    pages = 0
    for handle in handles:
        node = handle.node
        if node < 0:
            continue
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
    return list(nodes), pages


def _plan_trim(
    state: LedgerState, trim: tuple[BlockHandle, ...], own_path: Sequence[int], own_rows: int
) -> dict[int, Array]:
    """Blocks to trim by group. Raises the refusal of the first illegal handle; nothing changes."""
    own = {pool.group: set(_own_window(state, pool, own_path, own_rows).tolist()) for pool in state.windowed}
    chosen: dict[int, dict[int, None]] = {}
    for handle in trim:
        block, pool = state.resolve_block(handle), state.pools[handle.group]
        if not pool.window:
            raise EdgePartiallyEvicted(handle.group, block)
        node, named = int(pool.node.array[block]), chosen.setdefault(handle.group, {})
        if pool.ref.array[block] or block in own[handle.group]:
            raise EvictLiveBlock(node)
        if node == 0 or block in named:
            why = f"block {block} of group {handle.group} is not in the index (any more)"
            raise MalformedCommand("trim", why)
        named[block] = None
    return {group: np.array([*named], dtype=np.int64) for group, named in chosen.items()}


def _own_window(state: LedgerState, pool: BlockPool, path: Sequence[int], rows: int) -> Array:
    """Window blocks that a hit of `rows` rows on a path reads."""
    blocks = state.tree.path_blocks(list(path), pool.group)
    return blocks[first_kept(pool, rows) : rows // pool.block_size]


def _window_blocks_freed(state: LedgerState, group: int, nodes: Sequence[int], trimmed: Array | None) -> int:
    """Window blocks that are free after trims and removals: those of the edges that nobody references."""
    pool = state.pools[group]
    blocks = state.tree.path_blocks(list(nodes), group)
    blocks = blocks[blocks != NOT_RESIDENT]
    blocks = blocks[pool.ref.array[blocks] == 0]
    if trimmed is None:
        return len(blocks)
    return len(np.union1d(blocks, trimmed))


def commit_evictions(state: LedgerState, plan: EvictionPlan) -> EvictionFacts:
    """Trims, then unlists the named tails and the edges and frees their blocks; tails at those edges go with them."""
    if not plan.nodes and not plan.trims and not plan.tails:
        return NO_EVICTIONS
    for group, blocks in plan.trims.items():
        _trim(state, state.pools[group], blocks)
    if plan.tails:
        state.pool.evict(state.tree.tails.remove(list(plan.tails)), state.scopes.revoked)
    if plan.nodes:
        _give_back(state, state.tree.remove_leaves(plan.nodes))
    trimmed = sum(len(blocks) for blocks in plan.trims.values())
    return EvictionFacts(len(plan.nodes) + len(plan.tails), sum(plan.freed), trimmed)


def _trim(state: LedgerState, pool: BlockPool, blocks: Array) -> None:
    """Takes window blocks out of their edges and frees them."""
    nodes, places = pool.node.array[blocks], pool.place.array[blocks] - 1
    for node in np.unique(nodes).tolist():
        state.tree.mark(pool.group, node, places[nodes == node], NOT_RESIDENT)
    pool.evict(blocks, state.scopes.revoked)


def plan_evict(state: LedgerState, command: Evict) -> EvictionPlan:
    """Raises the refusals of `plan_evictions`; nothing changes."""
    return plan_evictions(state, command.nodes, command.trim)


def commit_evict(state: LedgerState, plan: EvictionPlan) -> dict[str, Any]:
    """The receipt's fields."""
    facts = commit_evictions(state, plan)
    return {
        "nodes": facts.nodes,
        "freed_blocks": facts.freed_blocks,
        "trimmed_blocks": facts.trimmed_blocks,
    }


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
    return {"scope": command.scope, "freed_blocks": _give_back(state, dropped)}


def _give_back(state: LedgerState, parts: tuple[Array, ...]) -> int:
    """Unlists and frees blocks; how many became free. A request may still read a window block that it lent."""
    freed = 0
    for pool, blocks in zip(state.pools, parts, strict=True):
        if pool.window:
            lent = pool.ref.array[blocks] != 0
            pool.unindex(blocks[lent])
            blocks = blocks[~lent]
        pool.evict(blocks, state.scopes.revoked)
        freed += len(blocks)
    return freed
