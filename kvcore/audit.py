"""The audit: recomputes everything the ledger keeps incrementally and lists all that differs.

Invariant: reads only; derives counts, locks, rows and queues from tables and edges alone, and both digests
from the columns. Findings carry the contract's reason name first.
Source: contracts K066, K070 to K073, K111, K112, K119, K187, K188; LEDGER "Two digests".
"""

from __future__ import annotations

import numpy as np

from .digest import Array, digest_bytes
from .ledger import Ledger
from .state import LedgerState


class AuditViolation(AssertionError):
    """The ledger contradicts itself; `findings` lists every contradiction. Nothing was changed."""

    def __init__(self, findings: list[str]) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


def audit(ledger: Ledger) -> None:
    """Checks a ledger from scratch. Raises: AuditViolation with everything that is wrong."""
    state = ledger.state
    findings = [
        *_pool_findings(state, ledger),
        *_reference_findings(state),
        *_tree_findings(state),
        *_request_findings(state),
        *_owner_findings(state),
        *_digest_findings(state, ledger),
    ]
    if findings:
        raise AuditViolation(findings)


def _pool_findings(state: LedgerState, ledger: Ledger) -> list[str]:
    pool = state.pool
    findings: list[str] = []
    expected = np.flatnonzero((pool.ref.array == 0) & (pool.node.array == 0))
    listed = np.sort(pool.free.ids())
    if not np.array_equal(expected, listed):
        wrong = np.setxor1d(expected, listed)
        findings.append(f"free_queue_mismatch: blocks {wrong.tolist()}, {len(listed)} listed")
    for name, stack in (("block", pool.free), ("node", state.tree.free), ("request", state.requests.free)):
        cells = stack.column.array
        if (cells[: stack.count] <= 0).any() or cells[stack.count :].any():
            findings.append(f"free_queue_mismatch: {name} stack disagrees with its count {stack.count}")
        if len(np.unique(stack.ids())) != stack.count:
            findings.append(f"free_queue_mismatch: {name} stack names an id twice")
    gauge = ledger.gauge()
    counted = gauge.free + gauge.evictable + gauge.live + gauge.reserved
    if counted != gauge.total or gauge.free != len(expected):
        findings.append(f"pool_does_not_reconcile: {gauge}")
    idle_rows = np.flatnonzero((pool.rows.array != 0) & (pool.ref.array == 0) & (pool.node.array == 0))
    if len(idle_rows):
        findings.append(f"slot_lost: free blocks {idle_rows.tolist()} claim valid rows")
    entered = (pool.entry.array != 0) != (pool.node.array != 0)
    if entered.any():
        findings.append(f"identity_conflict: blocks {np.flatnonzero(entered).tolist()}")
    return findings


def _reference_findings(state: LedgerState) -> list[str]:
    """Counts = occurrences in tables + leases on tree paths that the table does not name."""
    pool, requests, tree = state.pool, state.requests, state.tree
    counts = np.zeros(pool.num_blocks, dtype=np.int64)
    locks = np.zeros(len(tree.pages.array), dtype=np.int64)
    findings: list[str] = []
    for slot in np.flatnonzero(requests.active.array):
        table = requests.tables[slot, : requests.num_blocks.array[slot]].astype(np.int64)
        np.add.at(counts, table, 1)
        node = int(requests.terminal.array[slot])
        page = tree.end_page(node)
        while node:
            locks[node] += 1
            edge = tree.blocks[node]
            page -= len(edge)
            np.add.at(counts, edge[edge != table[page : page + len(edge)]], 1)
            node = int(tree.parent.array[node])
    wrong = np.flatnonzero(counts != pool.ref.array)
    if len(wrong):
        held, reachable = pool.ref.array[wrong].tolist(), counts[wrong].tolist()
        findings.append(f"refcount_mismatch: blocks {wrong.tolist()} hold {held}, reachable {reachable}")
    for node in np.flatnonzero(tree.pages.array):
        held = pool.ref.array[tree.blocks[node]]
        if (held != locks[node]).any():
            findings.append(f"lock_mismatch: node {node} counts {held.tolist()}, leases {int(locks[node])}")
    return findings


def _tree_findings(state: LedgerState) -> list[str]:
    tree, pool, page = state.tree, state.pool, state.block_size
    findings: list[str] = []
    seen: list[int] = []
    owned: list[Array] = []
    for scope_id, branch in tree.roots.items():
        if not branch.by_page:
            findings.append(f"slot_lost: the root of scope {scope_id} is kept although it is empty")
        if state.scopes.revoked[scope_id]:
            findings.append(f"stale_namespace_generation: scope {scope_id} still has a root")
        for node in tree.subtree(scope_id):
            seen.append(node)
            owned.append(tree.blocks[node])
            findings += _node_findings(state, scope_id, node)
    used = np.flatnonzero(tree.pages.array)
    if sorted(seen) != used.tolist() or len(used) + tree.free.count != len(tree.pages.array) - 1:
        findings.append(f"slot_lost: nodes reachable {sorted(seen)}, in use {used.tolist()}")
    blocks = np.concatenate(owned) if owned else np.zeros(0, dtype=np.int64)
    if len(np.unique(blocks)) != len(blocks):
        findings.append("slot_owned_twice: a block lies on two edges")
    if not np.array_equal(np.sort(blocks), np.flatnonzero(pool.node.array)):
        findings.append("slot_owned_twice: indexed blocks are not those of the edges")
    if len(blocks) and (pool.rows.array[blocks] != page).any():
        findings.append("identity_on_incomplete_block: an indexed block is not full")
    return findings


def _node_findings(state: LedgerState, scope_id: int, node: int) -> list[str]:
    tree, pool, page = state.tree, state.pool, state.block_size
    findings: list[str] = []
    tokens, blocks, parent = tree.tokens[node], tree.blocks[node], int(tree.parent.array[node])
    if len(tokens) != len(blocks) * page or len(blocks) != tree.pages.array[node] or len(blocks) == 0:
        findings.append(f"edge_length_mismatch: node {node}")
    if (pool.node.array[blocks] != node).any() or tree.first_block[node] != blocks[0]:
        findings.append(f"path_slot_mismatch: node {node}")
    if int(tree.start.array[node]) != tree.end_page(parent) or int(tree.scope.array[node]) != scope_id:
        findings.append(f"unaligned_boundary: node {node}")
    children = tree.children_of(node)
    if len(children) != tree.num_children[node]:
        findings.append(f"slot_lost: node {node} counts {tree.num_children[node]}, has {len(children)}")
    firsts = [tree.tokens[child][:page].tobytes() for child in children]
    if len(set(firsts)) != len(firsts) or any(int(tree.parent.array[child]) != node for child in children):
        findings.append(f"child_selector_mismatch: node {node}")
    if parent and int(pool.ref.array[tree.first_block[parent]]) < int(pool.ref.array[blocks[0]]):
        findings.append(f"lock_mismatch: node {node} is leased more often than its parent {parent}")
    prefix = np.concatenate([tree.tokens[ancestor] for ancestor in tree.path(node)])
    scope_print = int(state.scopes.scope_print.array[scope_id])
    entries = tree.prefix_entries(scope_print, prefix, int(tree.start.array[node]))
    if not np.array_equal(entries, pool.entry.array[blocks]):
        findings.append(f"identity_conflict: node {node} has entries of another prefix")
    return findings


def _request_findings(state: LedgerState) -> list[str]:
    requests = state.requests
    findings: list[str] = []
    active = np.flatnonzero(requests.active.array)
    if len(active) + requests.free.count != requests.max_requests:
        findings.append("slot_lost: running requests and free slots do not add up")
    for slot in active:
        findings += _slot_findings(state, int(slot))
    inactive = requests.active.array == 0
    for column in (requests.num_blocks, requests.flight_step, requests.terminal, requests.ending):
        if column.array[inactive].any():
            findings.append(f"slot_lost: {column.name} of a free slot is set")
    return findings


def _slot_findings(state: LedgerState, slot: int) -> list[str]:
    requests, pool, page = state.requests, state.pool, state.block_size
    findings: list[str] = []
    valid, known = int(requests.valid_rows.array[slot]), int(requests.num_tokens.array[slot])
    table = requests.tables[slot, : requests.num_blocks.array[slot]]
    if valid > known or valid > len(table) * page or len(np.unique(table)) != len(table):
        findings.append(f"table_length_drift: slot {slot} valid {valid}, known {known}, blocks {len(table)}")
    rows = np.clip(valid - np.arange(len(table)) * page, 0, page)
    if not np.array_equal(pool.rows.array[table], rows):
        findings.append(f"row_not_materialised: slot {slot}")
    tokens = requests.tokens[slot]
    token_print = int(requests.token_print.array[slot])
    if state.fingerprint(tokens[:known], 0) != token_print or tokens[known:].any():
        findings.append(f"token_mismatch: slot {slot}")
    path = [state.tree.tokens[node] for node in state.tree.path(int(requests.terminal.array[slot]))]
    leased = np.concatenate(path) if path else tokens[:0]
    if not np.array_equal(leased, tokens[: len(leased)]) or len(leased) > valid:
        findings.append(f"path_slot_mismatch: slot {slot} leases another path")
    return findings


def _owner_findings(state: LedgerState) -> list[str]:
    """No free block holds bytes of a revoked scope; a block in use is owned by its request's scope."""
    pool, requests = state.pool, state.requests
    findings: list[str] = []
    stale = np.flatnonzero(state.scopes.revoked[pool.owner.array] & (pool.ref.array == 0))
    if len(stale):
        findings.append(f"purge_incomplete: unreferenced blocks {stale.tolist()} of a revoked scope")
    for slot in np.flatnonzero(requests.active.array):
        table = requests.tables[slot, : requests.num_blocks.array[slot]]
        if (pool.owner.array[table] != requests.scope.array[slot]).any():
            findings.append(f"namespace_mismatch: slot {slot} holds blocks another scope wrote")
    for scope_id, scope in state.scopes.all_scopes():
        below = scope.generation < state.scopes.floor_of(scope.namespace)
        if bool(state.scopes.revoked[scope_id]) != below:
            findings.append(f"stale_namespace_generation: scope {scope_id} is marked wrongly")
    return findings


def _digest_findings(state: LedgerState, ledger: Ledger) -> list[str]:
    columns = state.columns()
    committed = [column.recomputed_pair() for column in columns[True]]
    machine = [column.recomputed_pair() for column in columns[False]]
    findings: list[str] = []
    if digest_bytes(*committed) != ledger.committed_digest:
        findings.append("rejected_operation_changed_state: committed digest is not that of the columns")
    if digest_bytes(*committed, *machine) != ledger.machine_digest:
        findings.append("rejected_operation_changed_state: machine digest is not that of the columns")
    return findings
