"""Least recently used eviction beside the scheduler.

Owns recency, nothing else: the ledger says which leaves may go, this policy says in which order, and every ledger
checks the decision again (K045, K122). Recency is kept per block, so that a split edge needs no bookkeeping; an edge
is as recent as its most recent block.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np

from copyhold.kvcore.commands import NodeHandle
from copyhold.kvcore.ledger import Ledger


class Victims(msgspec.Struct, frozen=True):
    """Edges to evict, children before parents, and the blocks that frees (at least what was asked, if possible)."""

    nodes: tuple[NodeHandle, ...] = ()
    freed_blocks: int = 0


class LruEviction:
    """Chooses unlocked leaf edges, oldest first; ties break by node number, so equal histories choose alike."""

    def __init__(self, num_blocks: int) -> None:
        self._tick = 0
        self._last_use = np.zeros(num_blocks, dtype=np.int64)

    def touch(self, block_ids: Iterable[int] | np.ndarray) -> None:
        """These blocks were just read or written by an admitted request."""
        self._tick += 1
        self._last_use[np.asarray(block_ids, dtype=np.int64)] = self._tick

    def choose(self, ledger: Ledger, needed_blocks: int, protected: frozenset[NodeHandle]) -> Victims:
        """Whole edges that free at least ``needed_blocks``; fewer when the pool has no more to give.

        ``protected`` edges (a path about to be leased) are never chosen.
        """
        candidates = [
            (self._recency(leaf.blocks), leaf.handle.node, leaf.handle, leaf.parent, len(leaf.blocks))
            for leaf in ledger.evictable_leaves()
            if leaf.handle not in protected
        ]
        heapq.heapify(candidates)
        nodes: list[NodeHandle] = []
        children_gone: Counter[int] = Counter()
        freed_blocks = 0
        while candidates and freed_blocks < needed_blocks:
            _, _, handle, parent, blocks = heapq.heappop(candidates)
            nodes.append(handle)
            freed_blocks += blocks
            if parent.node == 0:
                continue
            children_gone[parent.node] += 1
            view = ledger.node(parent)
            exposed = children_gone[parent.node] == view.num_children and view.leases == 0
            if exposed and parent not in protected:
                entry = (self._recency(view.blocks), parent.node, parent, view.parent, len(view.blocks))
                heapq.heappush(candidates, entry)
        return Victims(tuple(nodes), freed_blocks)

    def _recency(self, blocks: np.ndarray) -> int:
        return int(self._last_use[blocks].max())
