"""The junction: the longest boundary of a matched path that every cache group can serve.

Owns the descent from the indexed length. A group with a window serves boundary b when its blocks of rows
[max(0, b - window), b) are all resident; full attention serves every boundary of the path. Invariant: the candidate only
falls, and what was found resident is not looked at again, so each block of the path is seen at most once a group.
Source: LEDGER "Prefix tree over cache groups"; contracts K106 to K109.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .state import LedgerState
from .tree import TreeMatch


class Servable:
    """A descending search over one matched path; `at_most` may be asked for falling bounds."""

    def __init__(self, state: LedgerState, found: TreeMatch) -> None:
        self._tree, self._page = state.tree, state.alignment
        self._nodes = found.nodes
        self._starts = [int(self._tree.start.array[node]) for node in found.nodes]
        self._pools = [pool for pool in state.pools if pool.window]
        self._pages = found.pages
        # Blocks from here up to the candidate are known to be resident, by group.
        self._known = [found.pages * self._tree.per_page[pool.group] for pool in self._pools]

    def at_most(self, pages: int) -> int:
        """The longest boundary of at most `pages` pages, not above an earlier answer, that every group serves."""
        self._pages = min(self._pages, pages)
        while self._pages and self._lowered():
            pass
        return self._pages

    def _lowered(self) -> bool:
        """Whether some group lacks rows of the candidate's window; the candidate lies below the gap then."""
        for at, pool in enumerate(self._pools):
            size, end = pool.block_size, self._pages * self._page
            first = max(0, end - pool.window) // size
            known = min(self._known[at], end // size)
            if known <= first:
                continue
            gap = self._last_gap(pool.group, first, known)
            self._known[at] = gap + 1
            if gap >= first:
                self._pages = gap * size // self._page
                return True
        return False

    def _last_gap(self, group: int, first: int, end: int) -> int:
        """The last place in [first, end) where the tree holds no block of a group; first - 1 when there is none."""
        per_page, edges = self._tree.per_page[group], self._tree.edges[group]
        for node, start in zip(reversed(self._nodes), reversed(self._starts), strict=True):
            base = start * per_page
            if base >= end:
                continue
            low = max(first - base, 0)
            gaps = np.flatnonzero(edges[node][low : end - base] < 0)
            if len(gaps):
                return base + low + int(gaps[-1])
            if base <= first:
                break
        return first - 1


def servable_tokens(state: LedgerState, found: TreeMatch) -> Callable[[int], int]:
    """`Servable.at_most` in tokens."""
    servable, page = Servable(state, found), state.alignment
    return lambda tokens: servable.at_most(tokens // page) * page
