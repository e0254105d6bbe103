"""Sliding windows: what a window group keeps for a request, what leaves, and which blocks of the tree go first.

Invariant: before every step a request holds the blocks of the last `window` rows, so whatever a later row may read is
there. A block leaves its request at the Complete of the step after the one that moved the window past it, or when it is
published: so that a prompt computed in one step can enter the index whole. What left is evictable where the tree holds
it, free otherwise. An edge's blocks that lie more than a window and one index page before its end are first in line: no
window that ends at a published boundary, or one page below it (where the logits cap puts a whole prompt), needs them.
Source: LEDGER "Prefix tree over cache groups"; contracts K106, K108, K110.
"""

from __future__ import annotations

import msgspec
import numpy as np

from . import loops
from .commands import BlockHandle
from .digest import Array
from .errors import WindowStateMissing
from .pool import BlockPool
from .receipts import LeftWindow
from .state import LedgerState


class WindowLine(msgspec.Struct, frozen=True):
    """Unreferenced blocks of one window group that the tree holds, those to give up first in front.

    The first `outside` of them lie outside every kept window. `places` say which block of its prefix each one is,
    `nodes` which edge holds it; int64 [n] all.
    """

    pool: str
    group: int
    outside: int
    blocks: Array
    generations: Array
    places: Array
    nodes: Array

    def handles(self, start: int, stop: int) -> tuple[BlockHandle, ...]:
        """Handles of [start, stop) of the line."""
        pairs = zip(self.blocks[start:stop].tolist(), self.generations[start:stop].tolist(), strict=True)
        return tuple([BlockHandle(self.pool, self.group, block, generation) for block, generation in pairs])


def first_kept(pool: BlockPool, rows: int) -> int:
    """The first block that holds one of the last `window` of rows [0, rows); 0 in full attention."""
    return max(0, rows - pool.window) // pool.block_size if pool.window else 0


def reserved_blocks(pool: BlockPool, rows: int, shared: int) -> int:
    """Cells of a table that an admission fills for a prompt of which `shared` rows are there.

    A window group gets one window beyond them; what a longer prompt needs is taken by its steps, as its window moves.
    """
    filled = min(rows, shared + pool.window) if pool.window else rows
    return -(-filled // pool.block_size)


def require_window(state: LedgerState, slot: int, valid: int) -> None:
    """The window before row `valid` is held. Raises: WindowStateMissing, nothing changed."""
    for pool in state.windowed:
        held_from = int(state.requests.firsts[pool.group].array[slot]) * pool.block_size
        if held_from > max(0, valid - pool.window):
            raise WindowStateMissing(slot, pool.group, max(0, valid - pool.window), held_from)


def leave_behind(
    state: LedgerState, slots: Array, ends: Array
) -> tuple[tuple[LeftWindow, ...], tuple[Array, ...]]:
    """Drops the blocks wholly before the windows that end at rows `ends` (int64 [slots], at most the valid rows and
    what a queued truncation keeps); what left, and blocks to scrub, by group."""
    requests, cells = state.requests, state.requests.records.cells
    left: list[LeftWindow] = []
    scrub: list[Array] = [slots[:0] for _ in state.pools]
    for pool in state.windowed:
        group, size, window = pool.group, pool.block_size, pool.window
        count = loops.leaving_blocks(slots, ends, cells, size, window, group)
        if count == 0:
            continue
        table, width = requests.cells[group].array, requests.widths[group]
        gone = np.empty(count, dtype=np.int64)
        loops.slide_windows(
            slots, ends, cells, table, width, size, window, group, gone, pool.spaces, state.sums.all
        )
        freed, evictable, scrub[group] = pool.drop(gone, state.scopes.revoked)
        left.append(LeftWindow(group, freed, evictable))
    return tuple(left), tuple(scrub)


def restore_windows(state: LedgerState, slot: int, nodes: list[int], end_page: int) -> int:
    """Gives the tree window blocks that it lacks on a path, from the request's own rows; how many.

    `nodes` are the edges from the root that agree with the request's rows up to `end_page`.
    """
    tree, requests = state.tree, state.requests
    restored = 0
    for pool in state.windowed:
        group, per_page = pool.group, state.tree.per_page[pool.group]
        first, end = int(requests.firsts[group].array[slot]), end_page * per_page
        for node in reversed(nodes):
            start, stop = int(tree.start.array[node]) * per_page, tree.end_page(node) * per_page
            low, high = max(first, start), min(end, stop)
            if stop <= first:
                break
            gaps = np.flatnonzero(tree.edges[group][node][low - start : max(high - start, 0)] < 0) + low
            own = requests.all_tables[group][slot, gaps].astype(np.int64)
            idle = pool.node.array[own] == 0
            if idle.any():
                _put_back(state, pool, node, gaps[idle], own[idle])
                restored += int(np.count_nonzero(idle))
    return restored


def _put_back(state: LedgerState, pool: BlockPool, node: int, places: Array, blocks: Array) -> None:
    tree = state.tree
    first = int(tree.start.array[node]) * state.alignment
    before = tree.end_sum[int(tree.parent.array[node])]
    scope_print = state.scopes.scope_print.array[int(tree.scope.array[node])]
    entries, _ = tree.prefix_entries(scope_print, tree.tokens[node], first, before, pool.block_size)
    pool.index(blocks, node, entries[places - first // pool.block_size])
    pool.place.write(blocks, places + 1)
    tree.mark(pool.group, node, places, blocks)


def window_lines(state: LedgerState) -> tuple[WindowLine, ...]:
    """The line of every window group."""
    return tuple([_line(state, pool) for pool in state.windowed])


def _line(state: LedgerState, pool: BlockPool) -> WindowLine:
    """Farthest before its edge's end first, then by block id, so that what stays of an edge is its newest part."""
    tree = state.tree
    blocks = np.flatnonzero((pool.node.array != 0) & (pool.ref.array == 0))
    nodes, places = pool.node.array[blocks], pool.place.array[blocks] - 1
    ends = (tree.start.array[nodes] + tree.pages.array[nodes]) * state.alignment
    behind = ends - (places + 1) * pool.block_size
    order = np.argsort(-behind, kind="stable")
    outside = int(np.count_nonzero(behind >= state.alignment + pool.window))
    parts = [part[order] for part in (blocks, pool.generation.array[blocks], places, nodes)]
    return WindowLine(state.genesis.incarnation, pool.group, outside, *parts)
