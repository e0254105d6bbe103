"""The block pool of one cache group: one slot table, of which free list, gauge and residue are views.

Invariant per block, exclusive: free (no reference, no tree node) | evictable (no reference, tree node) |
reserved (referenced, no valid row) | live (referenced, valid rows). A block's generation rises whenever it
becomes free, so no handle survives a change of owner. `owner` is the scope whose bytes the block may still
hold (0 = none: zeroed).
Source: LEDGER; contracts K041, K044, K060, K066, K070, K074, K182, K187.
"""

from __future__ import annotations

import msgspec
import numpy as np

from .digest import Array, Column, DigestSum, IdStack


class PoolGauge(msgspec.Struct, frozen=True):
    """Block counts of one snapshot; free + evictable + live + reserved = total."""

    free: int
    evictable: int
    live: int
    reserved: int
    total: int


class BlockPool:
    """Blocks [0, num_blocks) with references, generations, valid rows, index entries and last owners."""

    def __init__(self, num_blocks: int, block_size: int, committed: DigestSum, machine: DigestSum) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref = Column("block.ref", num_blocks, np.int32, committed)
        self.rows = Column("block.rows", num_blocks, np.int32, committed)
        self.entry = Column("block.entry", num_blocks, np.uint64, committed)
        self.node = Column("block.node", num_blocks, np.int32, machine)
        self.owner = Column("block.owner", num_blocks, np.int32, machine)
        self.generation = Column("block.generation", num_blocks, np.int64, machine)
        self.free = IdStack("block.free", num_blocks, 0, machine)

    def columns(self) -> dict[bool, list[Column]]:
        """Columns by digest: True for the committed one, False for those of the machine digest alone."""
        machine = [self.node, self.owner, self.generation, self.free.column]
        return {True: [self.ref, self.rows, self.entry], False: machine}

    def allocate(self, scopes: Array) -> tuple[Array, Array]:
        """Gives one free block to each scope id of `scopes` [n]; (blocks [n], blocks to scrub).

        A block that holds another scope's bytes is to be zeroed before its new owner writes.
        """
        blocks = self.free.take(len(scopes))
        held = self.owner.array[blocks]
        scrub = blocks[(held != 0) & (held != scopes)]
        self.ref.write(blocks, 1)
        self.owner.write(blocks, scopes)
        return blocks, scrub

    def lease(self, blocks: Array) -> None:
        """One more reference on distinct blocks."""
        self.ref.add(blocks, 1)

    def drop(self, blocks: Array, revoked: Array) -> tuple[int, int, Array]:
        """One reference less on distinct blocks; (freed, evictable, blocks to scrub)."""
        self.ref.add(blocks, -1)
        idle = blocks[self.ref.array[blocks] == 0]
        indexed = self.node.array[idle] != 0
        freed = idle[~indexed]
        return len(freed), int(indexed.sum()), self.give_back(freed, revoked)

    def give_back(self, blocks: Array, revoked: Array) -> Array:
        """Makes unreferenced, unindexed blocks free; returns those whose scope is revoked: they are zeroed
        now.

        `revoked` [scopes] tells for each scope id whether it is below its namespace's floor.
        """
        if len(blocks) == 0:
            return blocks
        self.generation.add(blocks, 1)
        self.rows.write(blocks, 0)
        self.free.push(blocks[::-1])
        return self.scrub_revoked(blocks, revoked)

    def scrub_revoked(self, blocks: Array, revoked: Array) -> Array:
        """Those of `blocks` whose owner is revoked; they have no owner afterwards."""
        scrub = blocks[revoked[self.owner.array[blocks]]]
        self.owner.write(scrub, 0)
        return scrub

    def index(self, blocks: Array, node: int, entries: Array) -> None:
        """Enters sealed blocks under a tree node with their prefix fingerprints (uint64 [n])."""
        self.node.write(blocks, node)
        self.entry.write(blocks, entries)

    def unindex(self, blocks: Array) -> None:
        """Takes blocks out of the index; the caller gives back those without a reference."""
        self.node.write(blocks, 0)
        self.entry.write(blocks, 0)

    def gauge(self) -> PoolGauge:
        used = self.ref.array > 0
        live = int(np.count_nonzero(used & (self.rows.array > 0)))
        evictable = int(np.count_nonzero(~used & (self.node.array != 0)))
        return PoolGauge(
            free=self.free.count,
            evictable=evictable,
            live=live,
            reserved=int(np.count_nonzero(used)) - live,
            total=self.num_blocks,
        )
