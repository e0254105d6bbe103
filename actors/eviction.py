"""Least recently used eviction beside the scheduler.

Owns recency, nothing else: the ledger says which leaves may go, this policy says in which order, and every ledger
checks the decision again (K045, K122). Recency is kept per block, so that a split edge needs no bookkeeping; an edge
is as recent as its most recent block.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from copyhold.kvcore.commands import NodeHandle
from copyhold.kvcore.ledger import Ledger


class LruEviction:
    """Chooses unlocked leaf edges, oldest first; ties break by node number, so equal histories choose alike."""

    def __init__(self, num_blocks: int) -> None:
        self._tick = 0
        self._last_use = np.zeros(num_blocks, dtype=np.int64)

    def touch(self, block_ids: Iterable[int] | np.ndarray) -> None:
        """These blocks were just read or written by an admitted request."""
        self._tick += 1
        self._last_use[np.asarray(block_ids, dtype=np.int64)] = self._tick

    def choose(
        self, ledger: Ledger, needed_blocks: int, protected: frozenset[NodeHandle]
    ) -> tuple[NodeHandle, ...]:
        """Whole edges, children before parents, that free at least ``needed_blocks`` if that many can go.

        Fewer are returned when the pool has no more to give; the caller then waits or preempts.
        """
        victims: list[NodeHandle] = []
        freed_blocks = 0
        chosen: set[NodeHandle] = set(protected)
        while freed_blocks < needed_blocks:
            leaves = [leaf for leaf in ledger.evictable_leaves(frozenset(victims)) if leaf.handle not in chosen]
            if not leaves:
                break
            leaves.sort(key=lambda leaf: (int(self._last_use[leaf.blocks].max()), leaf.handle.node))
            for leaf in leaves:
                if freed_blocks >= needed_blocks:
                    break
                victims.append(leaf.handle)
                chosen.add(leaf.handle)
                freed_blocks += len(leaf.blocks)
        return tuple(victims)
