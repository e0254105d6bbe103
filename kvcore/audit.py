"""The audit: recomputes everything the ledger keeps incrementally and lists all that differs.

Invariant: reads only; derives counts, locks, rows and queues from tables and edges alone, and both digests
from the columns, with numpy and not with the loops that keep them. Findings carry the contract's reason name
first.
Source: contracts K066, K070 to K073, K111, K112, K119, K187, K188; LEDGER "Two digests".
"""

from __future__ import annotations

import numpy as np

from . import loops
from .audit_tree import tree_findings
from .digest import Array, digest_bytes
from .ledger import Ledger
from .pool import BlockPool
from .state import LedgerState


class AuditViolation(AssertionError):
    """The ledger contradicts itself; `findings` lists every contradiction. Nothing was changed."""

    def __init__(self, findings: list[str]) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


def audit(ledger: Ledger) -> None:
    """Checks a ledger from scratch. Raises: AuditViolation with everything that is wrong."""
    state = ledger.state
    active = np.flatnonzero(state.requests.active.array)
    findings = _stack_findings(state)
    for group, pool in enumerate(state.pools):
        findings += _pool_findings(pool)
        findings += _window_findings(state, active, group)
        tables = _tables(state, active, group)
        if (tables < 0).any():
            continue  # Said already: nothing can be counted by marks that stand for no block.
        findings += _reference_findings(state, active, group, tables)
        findings += _table_findings(state, active, group, tables)
    findings += tree_findings(state)
    findings += _request_findings(state, active)
    findings += _owner_findings(state)
    findings += _digest_findings(state, ledger)
    if findings:
        raise AuditViolation(findings)


def _stack_findings(state: LedgerState) -> list[str]:
    findings: list[str] = []
    stacks = {f"block{pool.group}": pool.free for pool in state.pools}
    for name, stack in {**stacks, "node": state.tree.free, "request": state.requests.free}.items():
        cells = stack.column.array
        if (cells[: stack.count] <= 0).any() or cells[stack.count :].any():
            findings.append(f"free_queue_mismatch: {name} stack disagrees with its count {stack.count}")
        if stack.count and np.bincount(np.maximum(stack.ids(), 0)).max() > 1:
            findings.append(f"free_queue_mismatch: {name} stack names an id twice")
    return findings


def _pool_findings(pool: BlockPool) -> list[str]:
    findings: list[str] = []
    ref, rows, node = pool.ref.array, pool.rows.array, pool.node.array
    used, indexed = ref > 0, node != 0
    idle = ~used & ~indexed
    expected, listed = np.flatnonzero(idle), pool.free.ids()
    marked = np.zeros(pool.num_blocks, dtype=np.bool_)
    marked[listed[(listed >= 0) & (listed < pool.num_blocks)]] = True
    if len(listed) != len(expected) or (marked != idle).any():
        wrong = np.flatnonzero(marked != idle)
        findings.append(f"free_queue_mismatch: blocks {wrong.tolist()}, {len(listed)} listed")
    live = int(np.count_nonzero(used & (rows > 0)))
    counted = [
        int(np.count_nonzero(~used & indexed)),
        live,
        int(np.count_nonzero(used)) - live,
        len(expected),
    ]
    if counted != pool.tally.tolist():
        findings.append(f"pool_does_not_reconcile: tally {pool.tally.tolist()}, counted {counted}")
    lost = np.flatnonzero((rows != 0) & idle)
    if len(lost):
        findings.append(f"slot_lost: free blocks {lost.tolist()} claim valid rows")
    misplaced = (pool.place.array != 0) != (indexed & (pool.window > 0))
    if misplaced.any():
        findings.append(
            f"path_slot_mismatch: blocks {np.flatnonzero(misplaced).tolist()} have places of no edge"
        )
    entered = (pool.entry.array != 0) != indexed
    if entered.any():
        findings.append(f"identity_conflict: blocks {np.flatnonzero(entered).tolist()}")
    return findings


def _reference_findings(state: LedgerState, active: Array, group: int, tables: Array) -> list[str]:
    """Counts = occurrences in tables + leases on tree paths that the table does not name + copies in flight."""
    pool, requests = state.pools[group], state.requests
    leased = active[requests.terminal.array[active] != 0].tolist()
    parts = [tables, *[state.private_leases(slot, group) for slot in leased]]
    sources = requests.sources[group].array
    sources = sources[sources != 0] - 1
    counts = np.bincount(np.concatenate([*parts, sources]), minlength=pool.num_blocks)
    findings: list[str] = []
    wrong = np.flatnonzero(counts != pool.ref.array)
    if len(wrong):
        held, reachable = pool.ref.array[wrong].tolist(), counts[wrong].tolist()
        findings.append(f"refcount_mismatch: blocks {wrong.tolist()} hold {held}, reachable {reachable}")
    pins = np.bincount(sources, minlength=pool.num_blocks)
    if (pins != pool.pins.array).any():
        findings.append("source_released_during_copy: pins are not the copies in flight")
    return findings


def _table_findings(state: LedgerState, active: Array, group: int, tables: Array) -> list[str]:
    """Tables hold enough blocks, each once, whose rows are what the request may read; owners agree."""
    pool, requests, size = state.pools[group], state.requests, state.pools[group].block_size
    findings: list[str] = []
    valid, cells = requests.valid_rows.array[active], requests.blocks[group].array[active]
    behind = requests.firsts[group].array[active]
    held = cells - behind
    slots = np.repeat(active, held)
    first = np.cumsum(held) - held
    short = active[valid > cells * size]
    shared = np.bincount(tables, minlength=pool.num_blocks)[tables] > 1
    pairs = slots[shared] * pool.num_blocks + tables[shared]
    used = np.count_nonzero(tables) + int(behind.sum())
    beyond = np.count_nonzero(requests.cells[group].array) != used
    if len(short) or len(np.unique(pairs)) != len(pairs) or beyond:
        findings.append(f"table_length_drift: group {group}, slots {short.tolist()} or cells beyond tables")
    left = np.repeat(valid, held) - (np.arange(len(tables)) - np.repeat(first - behind, held)) * size
    rows, claimed = np.clip(left, 0, size), pool.rows.array[tables]
    # A partly valid block may hold more rows than this request may read: a sharer's, or what it has cut off.
    wrong = np.where((left > 0) & (left < size), claimed < rows, claimed != rows)
    if wrong.any():
        findings.append(f"row_not_materialised: slots {np.unique(slots[wrong]).tolist()} group {group}")
    foreign = pool.owner.array[tables] != np.repeat(requests.scope.array[active], held)
    if foreign.any():
        slots = np.unique(slots[foreign]).tolist()
        findings.append(f"namespace_mismatch: slots {slots} hold blocks another scope wrote")
    return findings


def _window_findings(state: LedgerState, active: Array, group: int) -> list[str]:
    """What left is marked and nothing else is; the window before the next row, or before a queued cut, is held."""
    pool, requests = state.pools[group], state.requests
    firsts, table = requests.firsts[group].array[active], requests.all_tables[group][active]
    findings: list[str] = []
    marked = np.arange(table.shape[1]) < firsts[:, None]
    if ((table == loops.GONE) != marked).any() or (firsts < 0).any():
        findings.append(f"table_length_drift: group {group} marks other blocks than those that left")
    cut, valid = requests.cut.array[active], requests.valid_rows.array[active]
    ends = np.where(cut > 0, np.minimum(cut - 2, valid), valid)
    lost = (
        active[firsts * pool.block_size > np.maximum(ends - pool.window, 0)]
        if pool.window
        else active[firsts > 0]
    )
    if len(lost):
        findings.append(f"window_state_missing: slots {lost.tolist()} group {group}")
    return findings


def _tables(state: LedgerState, active: Array, group: int) -> Array:
    """Blocks of all tables of one group, slot by slot, int64, without those that left a window."""
    parts = [state.requests.table(slot, group) for slot in active.tolist()]
    return np.concatenate([*parts, np.zeros(0, dtype=np.int64)])


def _request_findings(state: LedgerState, active: Array) -> list[str]:
    requests = state.requests
    findings: list[str] = []
    if len(active) + requests.free.count != requests.max_requests:
        findings.append("slot_lost: running requests and free slots do not add up")
    for slot in active.tolist():
        findings += _slot_findings(state, slot)
    inactive = requests.active.array == 0
    for column in (
        *requests.blocks,
        *requests.firsts,
        requests.flight_step,
        requests.terminal,
        requests.ending,
    ):
        if column.array[inactive].any():
            findings.append(f"slot_lost: {column.name} of a free slot is set")
    flying = {step: sorted(slots.tolist()) for step, slots in state.flights.items()}
    steps = requests.flight_step.array
    found = {int(step) - 1: np.flatnonzero(steps == step).tolist() for step in np.unique(steps[steps != 0])}
    if flying != found:
        findings.append(f"pin_mismatch: steps in flight {found}, remembered {flying}")
    return findings


def _slot_findings(state: LedgerState, slot: int) -> list[str]:
    requests = state.requests
    findings: list[str] = []
    valid, known = int(requests.valid_rows.array[slot]), int(requests.num_tokens.array[slot])
    tokens = requests.tokens[slot]
    if valid > known:
        findings.append(f"table_length_drift: slot {slot} valid {valid}, known {known}")
    token_print = int(requests.token_print.array[slot])
    if state.fingerprint(tokens[:known], 0) != token_print or tokens[known:].any():
        findings.append(f"token_mismatch: slot {slot}")
    path = [state.tree.tokens[node] for node in state.tree.path(int(requests.terminal.array[slot]))]
    leased = np.concatenate(path) if path else tokens[:0]
    if not np.array_equal(leased, tokens[: len(leased)]) or len(leased) > valid:
        findings.append(f"path_slot_mismatch: slot {slot} leases another path")
    return findings


def _owner_findings(state: LedgerState) -> list[str]:
    """No free block holds bytes of a revoked scope."""
    findings: list[str] = []
    for pool in state.pools:
        stale = np.flatnonzero(state.scopes.revoked[pool.owner.array] & (pool.ref.array == 0))
        if len(stale):
            findings.append(f"purge_incomplete: unreferenced blocks {stale.tolist()} of a revoked scope")
    for scope_id, scope in state.scopes.all_scopes():
        below = scope.generation < state.scopes.floor_of(scope.namespace)
        if bool(state.scopes.revoked[scope_id]) != below:
            findings.append(f"stale_namespace_generation: scope {scope_id} is marked wrongly")
    return findings


def _digest_findings(state: LedgerState, ledger: Ledger) -> list[str]:
    parts = state.parts()
    committed = [part.recomputed(state.sums.committed) for part in parts]
    machine = [part.recomputed(state.sums.machine) for part in parts]
    findings: list[str] = []
    if digest_bytes(*committed) != ledger.committed_digest:
        findings.append("rejected_operation_changed_state: committed digest is not that of the columns")
    if digest_bytes(*committed, *machine) != ledger.machine_digest:
        findings.append("rejected_operation_changed_state: machine digest is not that of the columns")
    return findings
