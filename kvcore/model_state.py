"""Snapshots and canonical names of tiny ledgers, for exhaustive exploration.

Owns `Arena`: a ledger whose arrays lie in one piece of memory, so that a snapshot is one copy, and `canonical_key`:
what two states have in common when they differ only in the names of blocks, nodes and slots, in the order of free ones,
in the owners of free blocks, in generations and in the numbers of steps and transactions. Free blocks are alike here: with
one namespace, their owner decides nothing; generations matter to handles alone, which are compared as current or stale;
of steps their order is kept. Invariant: restoring a snapshot restores digests, queues, tree and log index exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import loops
from .commands import Genesis
from .digest import Array
from .ledger import Ledger
from .requests import group_field
from .state import LedgerState
from .tree import Branch, PrefixTree

Snapshot = tuple[Any, ...]
_ALIGN_BYTES = 64
_REQUEST_FACTS = [loops.SCOPE, loops.VALID, loops.NUM_TOKENS, loops.SHARED, loops.FLIGHT_COUNT]
_REQUEST_FACTS += [loops.ENDING, loops.CUT]


class Arena:
    """One small ledger that can go back to any of its snapshots."""

    def __init__(self, genesis: Genesis) -> None:
        self.ledger = Ledger()
        self.ledger.apply(genesis)
        self.state: LedgerState = self.ledger.state
        self._memory = _gather(self.state)

    def take(self) -> Snapshot:
        """Everything the ledger is now."""
        state, ledger = self.state, self.ledger
        tree, scopes = state.tree, state.scopes
        return (
            self._memory.tobytes(),
            [pool.free.count for pool in state.pools],
            (
                tree.free.count,
                state.requests.free.count,
                ledger._log_index,
                ledger._committed,
                ledger._machine,
            ),
            list(tree.tokens),
            [list(edges) for edges in tree.edges],
            [None if branch is None else _copy(branch) for branch in tree._branches],
            {scope: _copy(branch) for scope, branch in tree.roots.items()},
            dict(tree.tails.tokens),
            dict(state.flights),
            (
                dict(scopes._namespaces),
                dict(scopes._ids),
                list(scopes._scopes),
                list(scopes._scope_namespace),
            ),
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Goes back; the snapshot may be restored again."""
        memory, free, numbers, tokens, edges, branches, roots, tails, flights, names = snapshot
        state, ledger = self.state, self.ledger
        tree, scopes = state.tree, state.scopes
        state.looked_up = None
        self._memory[:] = np.frombuffer(memory, dtype=np.uint8)
        for pool, count in zip(state.pools, free, strict=True):
            pool.free.count = count
        tree.free.count, state.requests.free.count = numbers[:2]
        ledger._log_index, ledger._committed, ledger._machine = numbers[2:]
        ledger._broken = ""
        tree.tokens[:] = tokens
        for held, saved in zip(tree.edges, edges, strict=True):
            held[:] = saved
        tree._branches[:] = [None if branch is None else _copy(branch) for branch in branches]
        tree.roots = {scope: _copy(branch) for scope, branch in roots.items()}
        tree.tails.adopt(tails)
        state.flights = dict(flights)
        scopes._namespaces, scopes._ids = dict(names[0]), dict(names[1])
        scopes._scopes, scopes._scope_namespace = list(names[2]), list(names[3])


def canonical_key(state: LedgerState) -> tuple[Any, ...]:
    """Equal for two states of one genesis that behave alike up to renaming."""
    nodes, tree_key = _name_nodes(state)
    requests = state.requests
    records = requests.records.cells.tolist()
    steps = sorted({record[loops.FLIGHT_STEP] for record in records} - {0})
    named: list[tuple[Any, ...]] = []
    for slot, record in enumerate(records):
        if record[loops.ACTIVE]:
            flight = steps.index(record[loops.FLIGHT_STEP]) + 1 if record[loops.FLIGHT_STEP] else 0
            tokens = requests.tokens[slot, : record[loops.NUM_TOKENS]].tobytes()
            facts = tuple([record[field] for field in _REQUEST_FACTS])
            open_ = record[loops.TRANSACTION] != 0 and not record[loops.DISPATCHED]
            row = record[loops.FLIGHT_ROW]
            named.append((tokens, facts, flight, row, open_, nodes.get(record[loops.TERMINAL], 0), slot))
    named.sort()
    order = [entry[-1] for entry in named]
    groups = [_name_blocks(state, group, order, records, nodes) for group in range(len(state.pools))]
    floors = state.scopes.floor.array[:4].tobytes()
    return tuple([entry[:-1] for entry in named]), tree_key, tuple(groups), floors


def _name_nodes(state: LedgerState) -> tuple[dict[int, int], tuple[Any, ...]]:
    """Nodes numbered in the order of a walk, and the shape of the tree."""
    tree = state.tree
    names: dict[int, int] = {0: 0}
    shape: list[tuple[Any, ...]] = []
    for scope in sorted(tree.roots):
        for node in tree.subtree(scope):
            names[node] = len(names)
            parent = names[int(tree.parent.array[node])]
            shape.append((scope, parent, tree.tokens[node].tobytes(), _tails_in_order(tree, node)[0]))
    return names, tuple(shape)


def _name_blocks(
    state: LedgerState, group: int, order: list[int], records: list[list[int]], nodes: dict[int, int]
) -> tuple[Any, ...]:
    """Blocks numbered as tables, tree and free queue name them, with what each of them is."""
    pool, tree = state.pools[group], state.tree
    field = group_field(group)
    tables = state.requests.all_tables[group].tolist()
    names: dict[int, int] = {}
    seen: list[int] = []

    def name(block: int) -> int:
        if block < 0:
            return -1
        if block not in names:
            names[block] = len(names)
            seen.append(block)
        return names[block]

    told = tuple(
        [
            (
                tuple([name(block) for block in tables[slot][: records[slot][field]]]),
                name(records[slot][field + 1] - 1) if records[slot][field + 1] else -1,
            )
            for slot in order
        ]
    )
    edges = tuple(
        [tuple([name(block) for block in tree.edges[group][node].tolist()]) for node in nodes if node]
    )
    if not group:
        edges += tuple(
            [tuple([name(block) for block in _tails_in_order(tree, node)[1]]) for node in nodes if node]
        )
    cells = pool.records.cells.tolist()
    facts = tuple([(*_block_facts(cells[block]), cells[block][loops.OWNER]) for block in seen])
    # Free blocks are alike; one that is not quite free shows here.
    others = sorted([_block_facts(cells[block]) for block in range(pool.num_blocks) if block not in names])
    return told, edges, facts, tuple(others), pool.free.count


def _block_facts(cells: list[int]) -> tuple[int, ...]:
    return cells[loops.REF], cells[loops.ROWS], cells[loops.PINS], cells[loops.NODE] != 0


def _tails_in_order(tree: PrefixTree, node: int) -> tuple[tuple[tuple[int, bytes], ...], list[int]]:
    """Policies and tokens of the tails at a node, whatever their ids, and their blocks in the same order."""
    tails = tree.tails
    told = sorted(
        [(tails.policy.array.item(tail), tails.tokens[tail].tobytes(), tail) for tail in tails.at(node)]
    )
    return tuple([entry[:2] for entry in told]), [tails.block_of(entry[2]) for entry in told]


def _copy(branch: Branch) -> Branch:
    copied = Branch()
    copied.by_page = dict(branch.by_page)
    copied.ordered = list(branch.ordered)
    return copied


def _gather(state: LedgerState) -> Array:
    """Moves every array of a state into one uint8 array."""
    tree, requests, scopes = state.tree, state.requests, state.scopes
    records = [pool.records for pool in state.pools] + [tree.records, requests.records, state.counters]
    records.append(tree.tails.records)
    records += [scopes._namespace_records, scopes._scope_records]
    cells = [pool.free.column for pool in state.pools] + [*requests.cells, tree.free.column]
    cells.append(requests.free.column)
    owners: list[tuple[Any, str]] = [(part, "cells") for part in records]
    owners += [(part, "array") for part in cells]
    owners += [(pool, "tally") for pool in state.pools]
    owners += [(requests, "tokens"), (tree, "num_children"), (tree, "end_sum"), (scopes, "revoked")]
    places: list[tuple[Any, int, Array]] = [(owner, 0, getattr(owner, name)) for owner, name in owners]
    firsts = list(tree.first_blocks)
    arrays = [array for _, _, array in places] + firsts + [state.sums.all]
    starts = np.cumsum([0, *[-(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for array in arrays]])
    memory: Array = np.zeros(int(starts[-1]), dtype=np.uint8)
    views = []
    for start, array in zip(starts[:-1].tolist(), arrays, strict=True):
        view = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        views.append(view)
    for (owner, name), view in zip(owners, views[: len(owners)], strict=True):
        setattr(owner, name, view)
    tree.first_blocks[:] = views[len(owners) : len(owners) + len(firsts)]
    state.sums.adopt(views[-1])
    for part in records:
        for column in part.columns:
            column.attach()
    requests.adopt_tables()
    return memory
