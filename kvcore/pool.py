"""The block pool of one cache group: one slot table, of which free list, gauge and residue are views.

Invariant per block, exclusive: free (no reference, no tree node) | evictable (no reference, tree node) |
reserved (referenced, no valid row) | live (referenced, valid rows). A block's generation rises whenever it
becomes free, so no handle survives a change of owner. `owner` is the scope whose bytes the block may still
hold (0 = none: zeroed). `pins` counts copies of a dispatched step that still read the block. `place` is used where
`window` is set: 1 + which block of its prefix an indexed block is, so that it can leave the index alone.
Source: LEDGER; contracts K041, K044, K060, K066, K070, K074, K182, K187.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import msgspec
import numpy as np

from . import loops
from .columns import Cells, Digested, DigestSum, IdStack, Records
from .digest import MASK, U64, Array

_TWO_WORDS = Struct("<QQ").pack


class PoolGauge(msgspec.Struct, frozen=True):
    """Block counts of one snapshot; free + evictable + live + reserved = total."""

    free: int
    evictable: int
    live: int
    reserved: int
    total: int


class Sums:
    """Both digests of one ledger in one array: uint64 [4], committed lanes first."""

    __slots__ = ("all", "committed", "machine")

    def __init__(self) -> None:
        self.all: Array = np.zeros(4, dtype=U64)
        self.committed = DigestSum(self.all[:2])
        self.machine = DigestSum(self.all[2:])

    def adopt(self, lanes: Array) -> None:
        """Goes on in another array that holds the same sums."""
        self.all = lanes
        self.committed.sums, self.machine.sums = lanes[:2], lanes[2:]

    def digests(self) -> tuple[bytes, bytes]:
        """(committed, machine) as 16 bytes each, little-endian; the machine digest covers the committed cells too."""
        first, second, third, fourth = self.all.tolist()
        committed = _TWO_WORDS(first, second)
        return committed, _TWO_WORDS((first + third) & MASK, (second + fourth) & MASK)


class AdmittedBlocks(NamedTuple):
    """(block, generation) int64 [n, 2] of what was leased and of what was taken; blocks to scrub."""

    present: Array
    fresh: Array
    scrub: Array


class BlockPool:
    """Blocks [0, num_blocks) with references, valid rows, index entries, last owners and generations."""

    def __init__(self, group: int, num_blocks: int, block_size: int, sums: Sums, window: int = 0) -> None:
        self.group = group
        self.window = window
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sums = sums
        records = Records(f"block{group}", num_blocks, loops.BLOCK_FIELDS)
        self.records = records
        self.ref = records.column(loops.REF, "ref", sums.committed)
        self.rows = records.column(loops.ROWS, "rows", sums.committed)
        self.entry = records.column(loops.ENTRY, "entry", sums.committed, unsigned=True)
        self.node = records.column(loops.NODE, "node", sums.machine)
        self.owner = records.column(loops.OWNER, "owner", sums.machine)
        self.generation = records.column(loops.GENERATION, "generation", sums.machine)
        self.pins = records.column(loops.PINS, "pins", sums.machine)
        self.place = records.column(loops.PLACE, "place", sums.machine)
        self.free = IdStack(f"block{group}.free", num_blocks, 0, sums.machine)
        self.tally: Array = np.array([0, 0, 0, num_blocks], dtype=np.int64)
        self.spaces: Array = np.array([records.space, self.free.column.space, 0, 0], dtype=U64)
        self.copied: Array = np.zeros(num_blocks, dtype=np.int32)

    def parts(self) -> list[Digested]:
        """Every array that has a share in a digest."""
        return [self.records, self.free.column]

    @property
    def most_rows(self) -> int:
        """Rows of the longest request that has the pool for itself, a row at a time; with a window it may be boundless."""
        if self.window and self.num_blocks > -(-(self.window + 1) // self.block_size):
            return 1 << 62
        return self.num_blocks * self.block_size

    def attach(self, table: Cells, requests: Records) -> None:
        """The table and the request records whose cells loops write together with this pool's."""
        self.spaces[2:] = table.space, requests.space

    def admit(self, table: Cells, first: int, shared: Array, count: int, scope: int) -> AdmittedBlocks:
        """Leases `shared` and gives `count` free blocks to a scope, all into a table's row from cell `first` on.

        A block that holds another scope's bytes is to be zeroed before its new owner writes.
        """
        named = np.empty((len(shared) + count, 2), dtype=np.int64)
        present, fresh = named[: len(shared)], named[len(shared) :]
        scrub = np.empty(count, dtype=np.int64)
        scrubbed = loops.admit_blocks(
            self.records.cells,
            table.array,
            first,
            shared,
            self.free.column.array,
            self.free.count,
            scope,
            present,
            fresh,
            scrub,
            self.spaces,
            self.sums.all,
            self.tally,
        )
        self.free.count -= count
        return AdmittedBlocks(present, fresh, scrub[:scrubbed])

    def release(
        self, table: Cells, first: int, held: int, path: Array, revoked: Array
    ) -> tuple[int, int, Array]:
        """Drops a table's row of `held` blocks and the blocks of the leased `path` that are not in it; as `drop`."""
        scrub = np.empty(held + len(path), dtype=np.int64)
        num_freed, evictable, scrubbed = loops.release_blocks(
            self.records.cells,
            table.array,
            first,
            held,
            path,
            self.free.column.array,
            self.free.count,
            revoked,
            scrub,
            self.spaces,
            self.sums.all,
            self.tally,
        )
        self.free.count += num_freed
        return num_freed, evictable, scrub[:scrubbed]

    def lease(self, blocks: Array) -> None:
        """One more reference on each block."""
        loops.lease_blocks(self.records.cells, blocks, self.spaces, self.sums.all, self.tally)

    def drop(self, blocks: Array, revoked: Array) -> tuple[int, int, Array]:
        """One reference less on each block; (freed, evictable, blocks to scrub)."""
        freed = np.empty(len(blocks), dtype=np.int64)
        num_freed, evictable = loops.drop_blocks(
            self.records.cells, blocks, freed, self.spaces, self.sums.all, self.tally
        )
        freed = freed[:num_freed]
        self.free.push(freed)
        return num_freed, evictable, self.scrub_revoked(freed, revoked)

    def give_back(self, blocks: Array, revoked: Array) -> Array:
        """Makes unreferenced, unindexed blocks free; returns those whose scope is revoked: they are zeroed
        now.

        `revoked` [scopes] tells for each scope id whether it is below its namespace's floor.
        """
        loops.free_unlisted(self.records.cells, blocks, self.spaces, self.sums.all)
        self.free.push(blocks)
        return self.scrub_revoked(blocks, revoked)

    def scrub_revoked(self, blocks: Array, revoked: Array) -> Array:
        """Those of `blocks` whose owner is revoked; they have no owner afterwards."""
        found = np.empty(len(blocks), dtype=np.int64)
        count = loops.disown_revoked(self.records.cells, blocks, revoked, found, self.spaces, self.sums.all)
        return found[:count]

    def evict(self, blocks: Array, revoked: Array) -> None:
        """Unlists and frees indexed blocks without a reference."""
        strange = loops.evict_blocks(
            self.records.cells,
            blocks,
            self.free.column.array,
            self.free.count,
            revoked,
            self.spaces,
            self.sums.all,
            self.tally,
        )
        self.free.count += len(blocks)
        assert strange == 0, f"{strange} indexed blocks of a revoked scope"

    def index(self, blocks: Array, node: int, entries: Array) -> None:
        """Enters sealed blocks under a tree node with their prefix fingerprints (uint64 [n])."""
        words = entries.view(np.int64)
        loops.index_blocks(self.records.cells, blocks, node, words, self.spaces, self.sums.all, self.tally)

    def index_places(self, blocks: Array, node: int, entries: Array, first: int) -> None:
        """Enters those of consecutive blocks that are resident, with their places from `first` on."""
        resident = np.flatnonzero(blocks >= 0)
        self.index(blocks[resident], node, entries[resident])
        self.place.write(blocks[resident], resident + first + 1)

    def move(self, blocks: Array, node: int) -> None:
        """Puts indexed blocks under another node; their entries stay."""
        self.index(blocks, node, self.records.cells[blocks, loops.ENTRY])

    def unindex(self, blocks: Array) -> None:
        """Takes blocks out of the index; the caller gives back those without a reference."""
        self.index(blocks, 0, np.zeros(len(blocks), dtype=np.int64))
        if self.window:
            self.place.write(blocks, 0)

    def set_rows(self, block: int, rows: int) -> None:
        """Valid rows of one block."""
        loops.set_rows(self.records.cells, block, rows, self.spaces, self.sums.all, self.tally)

    def gauge(self) -> PoolGauge:
        evictable, live, reserved, free = self.tally.tolist()
        return PoolGauge(free, evictable, live, reserved, self.num_blocks)
