"""The audit of the prefix tree: edges, boundaries, children, locks and entries, from the tree alone.

Invariant: reads only; one walk from each root, parents before children, carrying the fingerprint of the prefix.
Source: contracts K111 to K120.
"""

from __future__ import annotations

import numpy as np

from .audit_tails import tail_findings
from .digest import Array
from .pool import BlockPool
from .state import LedgerState
from .tree import NOT_RESIDENT


def tree_findings(state: LedgerState) -> list[str]:
    """Everything wrong with the index."""
    tree = state.tree
    findings: list[str] = []
    leases = _leases(state)
    seen: list[int] = []
    for scope_id, branch in tree.roots.items():
        if not branch.by_page:
            findings.append(f"slot_lost: the root of scope {scope_id} is kept although it is empty")
        if state.scopes.revoked[scope_id]:
            findings.append(f"stale_namespace_generation: scope {scope_id} still has a root")
        for node in tree.subtree(scope_id):
            seen.append(node)
            findings += _node_findings(state, scope_id, node)
            for group in range(len(state.pools)):
                findings += _edge_findings(state, scope_id, node, group, int(leases[node]))
    used = np.flatnonzero(tree.pages.array)
    if sorted(seen) != used.tolist() or len(used) + tree.free.count != len(tree.pages.array) - 1:
        findings.append(f"slot_lost: nodes reachable {sorted(seen)}, in use {used.tolist()}")
    findings += tail_findings(state)
    hung = [np.array([tree.tails.block_of(tail)]) for tail in sorted(tree.tails.tokens)]
    for group, pool in enumerate(state.pools):
        edges = [tree.edges[group][node] for node in seen]
        findings += _ownership_findings(pool, edges, [] if group else hung)
    return findings


def _leases(state: LedgerState) -> Array:
    """How many requests lease a path through each node, int64 [nodes]."""
    tree = state.tree
    counts = np.zeros(len(tree.pages.array), dtype=np.int64)
    for node in state.requests.terminal.array[state.requests.terminal.array != 0].tolist():
        counts[tree.path(node)] += 1
    return counts


def _ownership_findings(pool: BlockPool, edges: list[Array], tails: list[Array]) -> list[str]:
    findings: list[str] = []
    blocks = np.concatenate([*edges, np.zeros(0, dtype=np.int64)])
    if pool.window:
        blocks = blocks[blocks != NOT_RESIDENT]
    times = np.bincount(np.concatenate([blocks, *tails]), minlength=pool.num_blocks)
    if (times > 1).any():
        findings.append("slot_owned_twice: a block lies on two edges")
    if ((times > 0) != (pool.node.array != 0)).any():
        findings.append("slot_owned_twice: indexed blocks are not those of the edges")
    if (pool.rows.array[blocks] != pool.block_size).any():
        findings.append("identity_on_incomplete_block: an indexed block is not full")
    return findings


def _node_findings(state: LedgerState, scope_id: int, node: int) -> list[str]:
    tree, page = state.tree, state.alignment
    findings: list[str] = []
    tokens, parent = tree.tokens[node], int(tree.parent.array[node])
    pages = int(tree.pages.array[node])
    if len(tokens) != pages * page or pages == 0:
        findings.append(f"edge_length_mismatch: node {node}")
    if int(tree.start.array[node]) != tree.end_page(parent) or int(tree.scope.array[node]) != scope_id:
        findings.append(f"unaligned_boundary: node {node}")
    children = tree.children_of(node)
    if len(children) != tree.num_children[node]:
        findings.append(f"slot_lost: node {node} counts {tree.num_children[node]}, has {len(children)}")
    firsts = [tree.tokens[child][:page].tobytes() for child in children]
    if len(set(firsts)) != len(firsts) or any(int(tree.parent.array[child]) != node for child in children):
        findings.append(f"child_selector_mismatch: node {node}")
    return findings


def _edge_findings(state: LedgerState, scope_id: int, node: int, group: int, leases: int) -> list[str]:
    """One edge's blocks in one group: they are where they say, lead the counts, and are named by their prefix."""
    tree, pool = state.tree, state.pools[group]
    findings: list[str] = []
    blocks, parent = tree.edges[group][node], int(tree.parent.array[node])
    if len(blocks) != int(tree.pages.array[node]) * tree.per_page[group]:
        findings.append(f"edge_length_mismatch: node {node}, {len(blocks)} blocks in group {group}")
    places = np.flatnonzero(blocks != NOT_RESIDENT) if pool.window else np.arange(len(blocks))
    resident = blocks[places]
    if (pool.node.array[resident] != node).any():
        findings.append(f"path_slot_mismatch: node {node}")
    if pool.window:
        expected = places + int(tree.start.array[node]) * tree.per_page[group] + 1
        if (pool.place.array[resident] != expected).any():
            findings.append(f"path_slot_mismatch: node {node} holds window blocks at other places")
    else:
        held = pool.ref.array[blocks]
        if (held < leases).any() or (held[1:] > held[:-1]).any():
            findings.append(f"lock_mismatch: node {node} counts {held.tolist()}, leases {leases}")
        if tree.first_blocks[group][node] != blocks[0]:
            findings.append(f"path_slot_mismatch: node {node}")
    scope_print = state.scopes.scope_print.array[scope_id]
    first = int(tree.start.array[node]) * state.alignment
    before = tree.end_sum[parent]
    entries, end = tree.prefix_entries(scope_print, tree.tokens[node], first, before, pool.block_size)
    if not np.array_equal(entries[places], pool.entry.array[resident]) or end != tree.end_sum[node]:
        findings.append(f"identity_conflict: node {node} has entries of another prefix")
    return findings
